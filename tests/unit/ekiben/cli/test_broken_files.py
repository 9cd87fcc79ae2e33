"""A file that no runtime can start is refused before a runtime or a scheduler is called, in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from ekiben.artifacts.exporters.sif import make_sif
from ekiben.store import Store
from support.programs import write_program
from support.sample_recipe import RunCli, SampleRecipe, image_of
from support.small_sifs import broken_sifs, small_sif

COMMANDS = {
    "run": ("run", "--cpu", "FILE", "greet"),
    "run, shown": ("run", "--cpu", "--dry-run", "FILE", "greet"),
    "exec": ("exec", "--cpu", "FILE", "true"),
    "shell": ("shell", "--cpu", "FILE"),
    "shell on a node": ("shell", "--partition", "gpu", "FILE"),
    "notebook": ("notebook", "--cpu", "FILE"),
    "submit": ("submit", "--scheduler", "slurm", "FILE", "greet"),
    "submit, written": ("submit", "--scheduler", "slurm", "--dry-run", "--output", "new", "FILE", "greet"),
    "doctor": ("doctor", "FILE"),
    "inspect": ("inspect", "FILE"),
    "publish": ("publish", "FILE", "--to", "lab"),
    "push": ("push", "FILE", "127.0.0.1:1/x:1", "--format", "sif"),
}


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    for name in ("apptainer", "srun", "sbatch", "scontrol"):
        write_program(tmp_path / "bin" / name, f"#!/bin/sh\n[ $1 = --version ] && echo {name} 1.4.0 || touch started\n")
    return {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_that_cannot_run_is_refused(name: str, run_cli: RunCli, tools: dict[str, str], tmp_path: Path) -> None:
    for file, message in broken_sifs(tmp_path).items():
        if name == "inspect" and file in ("zeros.sif", "data.sif"):
            continue  # a SIF all the same
        argv = [f"./{file}" if word == "FILE" else word for word in COMMANDS[name]]
        stderr = run_cli(*argv, env=tools, code=6).stderr
        assert f"error: {file}: {message}" in stderr.replace("./", ""), (file, stderr)
        assert not (tmp_path / "started").exists()
    assert not (tmp_path / "new").exists()


def test_a_recipes_broken_file_is_refused_and_built_anew(
    run_cli: RunCli, files_only: SampleRecipe, store: Store, tools: dict[str, str], tmp_path: Path
) -> None:
    files_only.recipe(name="pilot")
    recipe, sif = str(files_only.path), tmp_path / "pilot.sif"
    make_sif(image_of(files_only, store), store, sif, squash=False)
    good = sif.read_bytes()
    sif.write_bytes(good[:-100])
    at_store = ("--store", str(store.root))
    for argv in (
        ("run", "--cpu", recipe, "greet"),
        ("run", "--cpu", "--sif", "pilot.sif", recipe, "greet"),
        ("shell", "--partition", "gpu", recipe),
        ("submit", "--scheduler", "slurm", recipe, "greet"),
    ):
        refused = run_cli(*at_store, *argv, env=tools, code=6).stderr
        assert "error: pilot.sif: truncated: data object" in refused
        assert f"build {recipe} writes it again" in refused
        assert not (tmp_path / "started").exists()
    shown = run_cli(*at_store, "run", "--cpu", "--dry-run", "--force", recipe, "greet", env=tools).stdout
    assert " pilot.sif greet" in shown
    run_cli(*at_store, "run", "--cpu", "--build", recipe, "greet", env=tools)
    assert sif.read_bytes() == good


def test_a_squashfs_that_only_kernels_read_is_run(run_cli: RunCli, tools: dict[str, str], tmp_path: Path) -> None:
    data = bytearray(small_sif(tmp_path / "xz.sif").read_bytes())
    at = data.index(b"hsqs") + 20
    data[at : at + 2] = (4).to_bytes(2, "little")
    (tmp_path / "xz.sif").write_bytes(data)
    run_cli("run", "--cpu", "./xz.sif", "true", env=tools)
    assert (tmp_path / "started").exists()
