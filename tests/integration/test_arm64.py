"""An image for arm64 on another machine, under QEMU: built, tested and run as a SIF, and its OCI archive.

A bare Debian: `hello` takes three times as long, for Python and certificates.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile

import pytest

from ekiben.core.emulation import emulation_problem
from ekiben.formats.sif import read_sif
from workspaces import ME, Cli, RecipeFolder, Workspace

pytestmark = pytest.mark.covers("ekiben/builder", "ekiben/resolve", "ekiben/artifacts", "images/base.def")


def test_arm64_image_is_built_and_run_emulated(workspace: Workspace, cli: Cli, recipe_folder: RecipeFolder) -> None:
    if problem := emulation_problem("arm64"):
        pytest.skip(f"{problem[0]} (tests/services.sh install emulation)")
    bare = "Bootstrap: debootstrap\nOSVersion: bookworm\n\n%post\n    uname -m >/machine\n"
    (recipe_folder.path / "images/bare.def").write_text(bare)
    recipe_folder.top(
        "bare",
        test='test "$(cat /machine) $(uname -m)" = "aarch64 aarch64"\ntest "$(dpkg --print-architecture)" = arm64\n',
    )
    folder, store = workspace.folder("arm64"), workspace.store(ME, "arm64")
    result = cli.image(
        store,
        recipe_folder.path,
        "--arch",
        "arm64",
        "--engine",
        "apptainer",
        "--format",
        "sif",
        "--format",
        "oci",
        cwd=folder,
        timeout=1200,
    )
    assert result["name"] == "own-arm64"
    assert [check["runtime"] for check in result["checks"]] == ["apptainer"]
    sif, archive = folder / "own-arm64.sif", folder / "own-arm64.tar"
    assert sorted(path.name for path in folder.iterdir()) == [sif.name, archive.name]
    assert read_sif(sif).arch == "arm64"
    with tarfile.open(archive) as tar:
        stream = tar.extractfile(f"blobs/sha256/{result['image'][7:]}")
        assert stream is not None
        config = json.load(stream)
    assert (config["os"], config["architecture"]) == ("linux", "arm64")
    machine = subprocess.run(["apptainer", "exec", sif, "uname", "-m"], capture_output=True, text=True, check=True)
    assert machine.stdout == "aarch64\n"
    run = cli.run("--store", store, "run", recipe_folder.path, "--cpu", "--sif", sif, cwd=folder)
    assert "the image is for arm64, this machine is amd64: it is emulated" in run.stderr
    shutil.rmtree(store)
