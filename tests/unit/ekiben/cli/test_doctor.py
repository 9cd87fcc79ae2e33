"""What `doctor` says is what `run` does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ekiben.artifacts.exporters.sif import make_sif
from ekiben.cli.commands.doctor import DoctorResult
from ekiben.doctor.consult import Subject, consult
from ekiben.doctor.findings import Finding, Section
from ekiben.images import ImageOptions, find_image
from ekiben.resolve.resolve import resolve
from ekiben.run.launch import choose_target
from ekiben.store import Store
from support.programs import write_program
from support.sample_recipe import RunCli, SampleRecipe, image_of


def test_doctor_and_run_agree_where_no_runtime_is(
    run_cli: RunCli, files_only: SampleRecipe, store: Store, tmp_path: Path
) -> None:
    make_sif(image_of(files_only, store), store, tmp_path / "x.sif", squash=False)
    write_program(tmp_path / "bin/docker", "#!/bin/sh\necho 24.0.1\n")  # which runs no SIF file
    env = {"PATH": f"{tmp_path}/bin"}
    output = run_cli("doctor", "x.sif", env=env, code=10).stdout
    assert "→ will fail because no runtime is here that runs it: neither apptainer nor singularity is on PATH" in output
    assert "building on" not in output
    assert "neither apptainer nor singularity is on PATH" in run_cli("run", "x.sif", env=env, code=4).stderr


@pytest.mark.parametrize("is_here", [False, True])
def test_what_cannot_be_built_here_fails_only_where_the_image_is_not_here(
    is_here: bool, files_only: SampleRecipe, store: Store, tmp_path: Path
) -> None:
    sif = tmp_path / "x.sif"
    make_sif(image_of(files_only, store), store, sif if is_here else tmp_path / "y.sif", squash=False)
    image = find_image(str(files_only.path), ImageOptions(sif=sif))
    sections = consult(
        store, Subject(image, image.name, resolve, lambda: choose_target(image, {})), None, tmp_path, lambda line: None
    )
    assert [section.check for section in sections] == ["run", "build"]
    full = replace(sections[1], findings=[Finding("error", "store", "is full")])
    assert DoctorResult([Section("run", "", []), full]).will_fail == (not is_here)


def test_doctor_checks_the_file_that_run_starts(
    run_cli: RunCli, files_only: SampleRecipe, store: Store, tmp_path: Path
) -> None:
    files_only.recipe(name="pilot")
    make_sif(image_of(files_only, store), store, tmp_path / "pilot.sif", squash=False)
    write_program(tmp_path / "bin/apptainer", "#!/bin/sh\necho apptainer version 1.4.0\n")
    config, recipe, at_store = tmp_path / "config/ekiben", str(files_only.path), ("--store", str(store.root))
    config.mkdir(parents=True)
    (config / "config.yaml").write_text(f"require_signature: [{'A' * 40}]\n")
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    with_policy = {**env, "XDG_CONFIG_HOME": str(tmp_path / "config")}
    for command in ("doctor", "run"):
        done = run_cli(*at_store, command, recipe, env=with_policy, code=10 if command == "doctor" else 8)
        assert "pilot.sif is not signed" in (done.stdout + done.stderr), command
    (tmp_path / "pilot.sif").write_bytes((tmp_path / "pilot.sif").read_bytes()[:-100])
    shown = run_cli(*at_store, "doctor", recipe, env=env, code=10).stdout
    assert "will fail because pilot.sif: truncated: " in shown
    assert f"build {recipe} writes it again" in shown
    (tmp_path / "pilot.sif").unlink()
    run_cli(*at_store, "doctor", recipe, env=env)


def test_doctor_of_a_task_reports_a_missing_runtime(run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli("doctor", "hello", "hello", env={"PATH": f"{tmp_path}/bin"}, code=10)
    assert "→ will fail because no runtime is here that runs it" in done.stdout
    assert "hello --dry-run cannot be asked: hello cannot be run here: " in done.stdout
