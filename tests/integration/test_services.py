"""tests/services.sh: what it says and refuses. That it works, every test shows that talks to what it started."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.covers("tests/services.sh")

SCRIPT = Path(__file__).parents[1] / "services.sh"


def run(*arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, "bash", SCRIPT, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_env_lists_one_line_for_each_program() -> None:
    lines = run("env").stdout.splitlines()
    programs = {line.split()[0] for line in lines}
    assert {"system", "docker", "apptainer", "buildah", "mmdebstrap", "registry", "fuse", "user"} <= programs
    assert len(programs) == len(lines)


def test_env_marks_missing_programs() -> None:
    buildah = next(line for line in run("env").stdout.splitlines() if line.startswith("buildah"))
    assert ("version" in buildah) == (shutil.which("buildah") is not None)


@pytest.mark.parametrize("arguments", [("install", "dcoker"), ("start", "dcoker")])
def test_an_unknown_name_is_refused_with_the_known_ones(arguments: tuple[str, str]) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, as the script does")
    refused = run(*arguments)
    assert refused.returncode == 2
    assert "dcoker" in refused.stderr
    assert "docker" in refused.stderr.split("known:")[1]


@pytest.mark.parametrize("command", ["install", "start"])
def test_an_ordinary_user_is_told_to_use_sudo(command: str) -> None:
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups") if os.getuid() == 0 else ()
    refused = run(command, "docker", prefix=nobody)
    assert refused.returncode == 4
    assert f"sudo tests/services.sh {command} docker" in refused.stderr


def test_without_a_command_it_prints_usage() -> None:
    shown = run()
    assert shown.returncode == 2
    assert "tests/services.sh install" in shown.stderr
