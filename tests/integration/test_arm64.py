"""`hello` for arm64 on another machine, under QEMU: built, tested and run as a SIF, and its OCI archive."""

from __future__ import annotations

import json
import subprocess
import tarfile

import pytest

from ekiben.core.emulation import emulation_problem
from ekiben.formats.sif import read_sif
from workspaces import ME, Cli, Workspace, need

pytestmark = pytest.mark.slow


def test_hello_is_built_tested_and_run_under_emulation(workspace: Workspace, cli: Cli) -> None:
    need("apptainer", "mmdebstrap")
    if problem := emulation_problem("arm64"):
        pytest.skip(f"{problem[0]} (tests/services.sh install emulation)")
    folder, store = workspace.folder("arm64"), workspace.store(ME, "arm64")
    result = cli.image(store, "hello", "--arch", "arm64", "--engine", "apptainer", "--format", "sif", "--format", "oci",
                     cwd=folder, timeout=1800)  # fmt: skip
    assert result["name"] == "hello-arm64"
    assert [check["runtime"] for check in result["checks"]] == ["apptainer"]
    sif, archive = folder / "hello-arm64.sif", folder / "hello-arm64.tar"
    assert sorted(path.name for path in folder.iterdir()) == [sif.name, archive.name]
    assert read_sif(sif).arch == "arm64"
    with tarfile.open(archive) as tar:

        def read_json(path: str) -> dict[str, object]:
            stream = tar.extractfile(path)
            assert stream is not None
            content = json.load(stream)
            assert isinstance(content, dict)
            return content

        config = read_json(f"blobs/sha256/{result['image'][7:]}")
    assert (config["os"], config["architecture"]) == ("linux", "arm64")
    machine = subprocess.run(["apptainer", "exec", sif, "uname", "-m"], capture_output=True, text=True, check=True)
    assert machine.stdout == "aarch64\n"
    run = cli.run("--store", store, "run", "hello", "--cpu", "--sif", sif, "hello", cwd=folder)
    assert "the image is for arm64, this machine is amd64: it is emulated" in run.stderr
    assert "Python 3.11" in run.stdout
