"""submit says what is wrong with a request before it submits, and with --dry-run, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from ekiben.artifacts.exporters.sif import make_sif
from ekiben.store import Store
from support.programs import write_program
from support.sample_recipe import RunCli, SampleRecipe, image_of

DRY = ("submit", "--scheduler", "slurm", "--dry-run")
TASK = ("lora-opencalm", "train")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("1X=2", "a variable's name has letters"),
        ("=x", "a variable's name has letters"),
        ("A B=1", "a variable's name has letters"),
        ("NOT_SET_ANYWHERE", "is not set here"),
    ],
)
def test_a_variable_that_cannot_be_set_is_refused(run_cli: RunCli, word: str, message: str) -> None:
    assert message in run_cli(*DRY, "--env", word, *TASK, code=2).stderr


@pytest.mark.parametrize(
    ("seeds", "message"), [(",", "a seed is missing"), ("1,,2", "a seed is missing"), ("1,1", "1 is listed twice")]
)
def test_seeds_are_complete_and_unique(run_cli: RunCli, seeds: str, message: str) -> None:
    assert message in run_cli(*DRY, "--seeds", seeds, *TASK, code=2).stderr


def test_a_file_is_no_folder_of_runs(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for runs in ("file", "file/below"):
        assert f"{tmp_path}/file is not a folder" in run_cli(*DRY, "--runs", runs, *TASK, code=2).stderr


def test_a_file_that_is_no_sif_is_refused(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "junk.sif").write_bytes(b"junk" * 100)
    assert "junk.sif: not a SIF file" in run_cli(*DRY, "--sif", "junk.sif", *TASK, code=6).stderr


@pytest.mark.parametrize("name", ["EKIBEN_STORE", "XDG_CONFIG_HOME"])
def test_the_home_of_nobody_is_refused(run_cli: RunCli, name: str) -> None:
    stderr = run_cli("submit", "--site", "no-such-site", *TASK, code=2, env={name: "~nobody99/x"}).stderr
    assert "~nobody99/x begins with a home folder that this machine does not know" in stderr


def test_a_site_in_the_home_of_nobody_is_refused(run_cli: RunCli) -> None:
    stderr = run_cli("submit", "--site", "~nobody99/x.yaml", *TASK, code=2).stderr
    assert "--site: ~nobody99/x.yaml begins with a home folder" in stderr


def image_here(sample: SampleRecipe, store: Store, folder: Path) -> list[str]:
    """The SIF of a recipe in ``folder``; the arguments that name the recipe and a task."""
    sample.recipe(name="pilot")
    make_sif(image_of(sample, store), store, folder / "pilot.sif", squash=False)
    return [str(sample.path), "greet"]


def test_a_run_is_written_for_people_to_submit(
    run_cli: RunCli, files_only: SampleRecipe, store: Store, tmp_path: Path
) -> None:
    argv = image_here(files_only, store, tmp_path)
    submit = ("submit", "--scheduler", "slurm", "--force")
    written = run_cli(*submit, "--dry-run", "--output", "kept", *argv, "+", "greet").stdout
    for step in ("1-greet", "2-greet"):
        assert f"submit  sbatch {tmp_path}/kept/{step}.sh\n" in written
        assert f"--output={tmp_path}/kept/{step}.log" in (tmp_path / f"kept/{step}.sh").read_text()
    assert "each when the one before has ended" in written
    names = {path.name for path in (tmp_path / "kept").iterdir()}
    assert names >= {"run.json", "job.sh", "key", "environment", "launch_node.py"}
    assert f"{tmp_path}/kept exists already" in run_cli(*submit, "--dry-run", "-o", "kept", *argv, code=2).stderr
    assert "--output names the folder that --dry-run writes" in run_cli(*submit, "-o", "new", *argv, code=2).stderr
    assert not (tmp_path / "new").exists()
    shown = run_cli(*submit, "--dry-run", *argv, "--output", "result").stdout  # the task's own
    assert "kept" not in shown


def test_live_scripts_are_copied_when_a_job_is_submitted(
    run_cli: RunCli, files_only: SampleRecipe, store: Store, tmp_path: Path
) -> None:
    argv = image_here(files_only, store, tmp_path)
    files_only.write("entrypoints/greet.py", "print('edited')\n")
    files_only.write("entrypoints/more/tool.sh", "#!/bin/sh\n", 0o755)
    submit = ("submit", "--scheduler", "slurm", "--force", "--dry-run", "--output")
    done = run_cli(*submit, "kept", "--live", *argv)
    assert "built before" not in done.stderr
    live = tmp_path / "kept/live"
    assert (live / "entrypoints/greet.py").read_text() == "print('edited')\n"
    assert (live / "entrypoints/more/tool.sh").stat().st_mode & 0o777 == 0o755
    assert {path.name for path in live.iterdir()} == {"recipe.yaml", "entrypoints", "configs"}
    script = (tmp_path / "kept/1-greet.sh").read_text()
    assert f"--bind {live}:/opt/ekiben/recipe:ro" in script
    assert f"\nlive={files_only.path}\n" in script
    assert "pilot.sif was built before an edit of entrypoints/" in run_cli(*submit, "other", *argv).stderr
    assert "\nlive=\n" in (tmp_path / "other/1-greet.sh").read_text()
    refused = run_cli(*submit, "third", "--live", "./pilot.sif", "greet", code=2).stderr
    assert "--live is for a recipe's image, and pilot.sif is a file" in refused
    assert not (tmp_path / "third").exists()


def test_a_shell_on_a_node_is_the_schedulers(
    run_cli: RunCli, files_only: SampleRecipe, store: Store, tmp_path: Path
) -> None:
    write_program(tmp_path / "bin/sbatch", "#!/bin/sh\n")
    write_program(tmp_path / "bin/sinfo", "#!/bin/sh\n")
    write_program(tmp_path / "bin/apptainer", "#!/bin/sh\n")
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    shell = ("shell", "--dry-run", "--partition", "gpu", "--gpus-per-node", "1", "--time", "1:00:00")
    refused = run_cli(*shell, str(files_only.path), env=env, code=4).stderr
    assert "own cannot be run on a node: own.sif is not there" in refused
    recipe, _ = image_here(files_only, store, tmp_path)
    shown = run_cli(*shell, recipe, "nvidia-smi", env=env).stdout
    assert shown.startswith("+ srun --ntasks=1 ")
    for option in ("--partition=gpu", "--gpus-per-node=1", "--time=1:00:00"):
        assert f" {option} " in shown
    assert shown.endswith(f" {' '.join(shell)} {recipe} nvidia-smi\n")
    assert run_cli("shell", "--dry-run", recipe, env=env).stdout.startswith(f"+ {tmp_path}/bin/apptainer exec ")
