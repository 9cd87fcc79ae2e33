"""A stack on another Debian and another Python, by its files alone."""

from __future__ import annotations

import subprocess

import pytest

from workspaces import Cli, Workspace, need

pytestmark = pytest.mark.covers("images/stacks/debian13", "images/base.def", "images/python.def")


def test_hello_is_built_and_runs_on_debian_13(workspace: Workspace, cli: Cli) -> None:
    need("apptainer", "mmdebstrap")
    folder = workspace.folder("debian13")
    image = cli.image(folder / "store", "hello", "--stack", "debian13", "--format", "sif", cwd=folder)
    assert [layer["name"] for layer in image["layers"]] == ["base", "python", "hello"]
    sif = folder / "hello-debian13.sif"
    script = ". /etc/os-release; echo $VERSION_CODENAME; python -c 'import sys; print(*sys.version_info[:2])'; hello"
    done = subprocess.run(
        ["apptainer", "-q", "exec", "--cleanenv", sif, "sh", "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[:2] == ["trixie", "3 13"]
    assert "Debian GNU/Linux 13" in done.stdout
