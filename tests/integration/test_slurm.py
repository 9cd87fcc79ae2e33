"""Jobs on a real Slurm of two nodes with four GPUs each (tests/services.sh), submitted by an ordinary user, run by
Apptainer.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import Submitter, check_no_second_start, check_scripts_by_hand, check_shell_on_a_node, of_run, wait_for
from workspaces import USER, Cli, Workspace, as_user, give, need

pytestmark = pytest.mark.covers("ekiben/run", "entrypoints/launch_node.py", "entrypoints/launch_alone.py")


@pytest.fixture
def slurm(job_recipe: Path, workspace: Workspace, user_cli: Cli) -> Iterator[Submitter]:
    need("sbatch")
    assert subprocess.run(["sinfo"], capture_output=True, check=False).returncode == 0, "tests/services.sh start slurm"
    folder = workspace.folder("jobs", USER)
    yield Submitter(user_cli, folder, job_recipe, "slurm")
    subprocess.run(["scancel", "--user", USER, "--full"], check=False)
    wait_for(lambda: not of_run(folder, "launch_node.py"), "the end of all processes")


def as_submitter(slurm: Submitter, *args: str) -> str:
    return subprocess.run(args, cwd=slurm.folder, capture_output=True, text=True, check=True, **as_user(USER)).stdout


@pytest.mark.guard
def test_two_nodes_two_processes_each(slurm: Submitter, workspace: Workspace) -> None:
    token = {"HF_TOKEN": "hf_secret", "PYTHONPATH": "/nowhere", "HF_HOME": str(slurm.folder / "models")}
    run = slurm.submit("fake", "--nodes", "2", "--gpus-per-node", "2", "--time", "5m", env={**token})
    assert slurm.wait(run)["1-fake"]["state"] == "done", slurm.log(run)
    about = [slurm.wait_for_start(1, rank) for rank in range(4)]
    assert [one["SLURM_NODEID"] for one in about] == ["0", "0", "1", "1"]
    assert {(one["WORLD_SIZE"], one["CUDA_VISIBLE_DEVICES"]) for one in about} == {("4", "0,1")}
    assert {(one["PYTHONPATH"], one["HF_HOME"], one["HF_TOKEN"]) for one in about} == {
        (None, token["HF_HOME"], "hf_secret")
    }
    assert "on c1,c2, start 1" in slurm.log(run)
    kept = slurm.folder / "ekiben-runs" / run
    files = [path for path in kept.rglob("*") if path.is_file()]
    assert [path.name for path in files if b"hf_secret" in path.read_bytes()] == []  # removed with the last job's end
    stdout = slurm.cli.run("logs", "-f", run, cwd=slurm.folder).stdout
    assert stdout == slurm.log(run)
    for rank in range(4):
        line = f"this is rank {rank} of 4, start 1\n"
        assert slurm.cli.run("logs", run, "--rank", str(rank), cwd=slurm.folder).stdout == line
        assert line in stdout
    id = slurm.status(run)["1-fake"]["id"]
    assert run in slurm.cli.run("status", id, cwd=slurm.folder).stdout
    assert "nothing to cancel" in slurm.cli.run("cancel", id, cwd=slurm.folder).stdout


def test_job_is_signalled_before_the_walltime_and_requeued(slurm: Submitter) -> None:
    run = slurm.submit("fake", "--nodes", "2", "--time", "1m", "--grace-period", "30s", "--", "--until", "2")
    row = slurm.wait(run)["1-fake"]
    assert (row["state"], row["resubmitted"]) == ("done", 1), slurm.log(run)
    assert (slurm.folder / "fake/saved-1-1").read_text() == "SIGUSR1"
    assert "back into the queue, 1 of at most 20 times" in slurm.log(run)
    assert "start 2" in slurm.log(run)
    assert not (slurm.folder / "fake/saved-2-0").exists()


def test_preempted_job_saves_and_is_requeued(slurm: Submitter) -> None:
    run = slurm.submit(
        "fake", "--gpus-per-node", "4", "--nodes", "2", "--processes-per-node", "1", "--", "--until", "2"
    )
    slurm.wait_for_start(1, 1)
    urgent = slurm.submit(
        "look", "--gpus-per-node", "4", "--scheduler-arg", "--partition=urgent", "--", "--folder", "urgent"
    )
    assert slurm.wait(urgent)["1-look"]["state"] == "done"
    row = slurm.wait(run)["1-fake"]
    assert row["state"] == "done", slurm.log(run)
    assert {(slurm.folder / f"fake/saved-1-{rank}").read_text() for rank in (0, 1)} <= {"SIGTERM", "SIGUSR1"}
    assert slurm.wait_for_start(2)["WORLD_SIZE"] == "2"


def test_max_resubmits_limits_requeues(slurm: Submitter) -> None:
    run = slurm.submit("fake", "--max-resubmits", "0", "--", "--until", "9")
    slurm.wait_for_start(1)
    id = slurm.status(run)["1-fake"]["id"]
    as_submitter(slurm, "scancel", "--batch", "--signal=USR1", id)
    row = slurm.wait(run)["1-fake"]
    assert (row["state"], row["exit_code"]) == ("failed", 75)
    assert "that is --max-resubmits" in slurm.log(run)


@pytest.mark.parametrize("how", ["cancel", "scancel"])
def test_cancelled_job_is_not_requeued(how: str, slurm: Submitter) -> None:
    run = slurm.submit("fake", "--nodes", "2", "--", "--until", "9")
    slurm.wait_for_start(1, 1)
    id = slurm.status(run)["1-fake"]["id"]
    if how == "cancel":
        assert f"cancelled {id}" in slurm.cli.run("cancel", run, cwd=slurm.folder).stdout
    else:
        as_submitter(slurm, "scancel", id)
    wait_for(lambda: not as_submitter(slurm, "squeue", "--noheader", "--jobs", id), f"the end of job {id}")
    wait_for(lambda: not of_run(slurm.folder, "launch_node.py"), "the end of all processes")
    assert slurm.status(run)["1-fake"]["state"] == "cancelled"
    assert not (slurm.folder / "fake/start-2-0").exists()


def test_array_job_for_each_seed_and_a_dependent_job(slurm: Submitter) -> None:
    run = slurm.submit("--seeds", "5,70", "--", "fake", "--folder", "run-{seed}", "+", "look", "--folder", "last")
    rows = slurm.wait(run)
    assert {job: row["state"] for job, row in rows.items()} == {
        "1-fake.1": "done",
        "1-fake.2": "done",
        "2-look": "done",
    }
    assert slurm.wait_for_start(1, folder="run-5")["argv"] == ["--folder", "run-5"]
    assert slurm.wait_for_start(1, folder="run-70")["argv"] == ["--folder", "run-70"]
    ends = [(slurm.folder / name / "start-1-0").stat().st_mtime for name in ("run-5", "run-70", "last")]
    assert ends[2] == max(ends)


def test_failing_rank_is_named_and_dependents_are_not_started(slurm: Submitter) -> None:
    run = slurm.submit(
        "--nodes", "2", "--processes-per-node", "2", "--", "fake", "--fail-rank", "3", "+", "look", "--folder", "last"
    )
    rows = slurm.wait(run)
    assert (rows["1-fake"]["state"], rows["1-fake"]["exit_code"], rows["2-look"]["state"]) == ("failed", 3, "skipped")
    assert "error: rank 3 on c2 ended with exit code 3" in slurm.log(run)
    assert not (slurm.folder / "last").exists()


def test_dying_node_ends_the_job_and_is_named(slurm: Submitter) -> None:
    run = slurm.submit("fake", "--nodes", "2", "--", "--until", "9")
    slurm.wait_for_start(1, 1)
    for pid in of_run(slurm.folder, "launch_node.py --node 1"):
        os.kill(pid, signal.SIGKILL)
    row = slurm.wait(run)["1-fake"]
    assert row["state"] == "failed", slurm.log(run)
    assert "error: node c2 (rank 1): " in slurm.log(run)


def test_impossible_requests_are_refused(slurm: Submitter) -> None:
    assert "--gpus-per-node 5: partition gpu has nodes with at most 4" in slurm.submit(
        "fake", "--gpus-per-node", "5", code=2
    )
    assert "--time 48:00:00: partition gpu allows 24:00:00" in slurm.submit("fake", "--time", "2d", code=2)
    assert "--nodes 3: partition gpu has 2" in slurm.submit("fake", "--nodes", "3", code=2)
    stderr = slurm.submit("fake", "--scheduler-arg", "--partition=nope", code=11)
    assert "sbatch: error: invalid partition specified: nope" in stderr
    assert "unrecognized option '--frob'" in slurm.submit("fake", "--scheduler-arg", "--frob", code=11)
    assert not list((slurm.folder / "ekiben-runs").iterdir())


def test_sif_is_copied_once_to_each_nodes_disk(slurm: Submitter) -> None:
    local = slurm.folder / "local"
    local.mkdir()
    give(local, USER)
    runs = [
        slurm.submit("fake", "--copy-local", "--nodes", "2", "--", "--folder", name, env={"TMPDIR": str(local)})
        for name in "ab"
    ]
    for run in runs:
        assert slurm.wait(run)["1-fake"]["state"] == "done", slurm.log(run)
    staged = [path.name for path in local.glob("ekiben-*/*.sif")]
    assert len(staged) == 1
    assert staged[0].startswith("fake-")


HOSTILE = "first\n#SBATCH --time=0:00:01\n#$ -l h_rt=1\n'single' \"double\" $(touch pwned) `touch pwned` \\ end"


def test_arguments_and_folders_with_special_characters(slurm: Submitter, workspace: Workspace) -> None:
    folder = slurm.folder / "a b'c%j:d,e"
    folder.mkdir()
    give(folder, USER)
    there = replace(slurm, folder=folder)
    run = there.submit("fake", "--nodes", "2", "--", "--set", HOSTILE)
    row = there.wait(run)["1-fake"]
    assert row["state"] == "done", there.log(run)
    assert there.wait_for_start(1)["argv"] == ["--set", HOSTILE]
    assert there.wait_for_start(1, 1)["argv"] == ["--set", HOSTILE]
    assert "start 1" in there.log(run)
    assert not list(slurm.folder.rglob("pwned"))


def test_gpus_of_a_slurm_option_set_the_number_of_processes(slurm: Submitter) -> None:
    run = slurm.submit("fake", "--scheduler-arg=--gres=gpu:2")
    assert slurm.wait(run)["1-fake"]["state"] == "done", slurm.log(run)
    assert {slurm.wait_for_start(1, rank)["WORLD_SIZE"] for rank in (0, 1)} == {"2"}


def test_image_changed_while_queued_is_not_run(slurm: Submitter) -> None:
    image, current = slurm.folder / "mine.sif", slurm.folder / "current"
    image.write_bytes((slurm.recipe.parent / "fake.sif").read_bytes())
    current.symlink_to("mine.sif")
    run = slurm.submit("fake", "--sif", "current", "--scheduler-arg=--begin=now+6")
    image.write_bytes(b"another image")
    row = slurm.wait(run)["1-fake"]
    assert (row["state"], row["exit_code"]) == ("failed", 1)
    assert f"error: {image} is not what it was when the job was submitted" in slurm.log(run)


def test_one_job_of_an_array_is_cancelled_alone(slurm: Submitter) -> None:
    run = slurm.submit("fake", "--seeds", "5,70", "--", "--folder", "run-{seed}", "--until", "2")
    for folder in ("run-5", "run-70"):
        slurm.wait_for_start(1, folder=folder)
    ids = {job: row["id"] for job, row in slurm.status(run).items()}
    array = ids["1-fake.1"].removesuffix("_1")
    assert ids == {"1-fake.1": f"{array}_1", "1-fake.2": f"{array}_2"}
    assert f"cancelled {array}_2\n" in slurm.cli.run("cancel", f"{array}_2", cwd=slurm.folder).stdout
    wait_for(lambda: slurm.status(run)["1-fake.2"]["state"] == "cancelled", "the end of one job")
    assert slurm.status(run)["1-fake.1"]["state"] == "running"
    as_submitter(slurm, "scancel", "--batch", "--signal=USR1", f"{array}_1")
    assert slurm.wait(run)["1-fake.1"]["state"] == "done", slurm.log(run, "1-fake.1")


def test_a_job_that_slurm_ended_shows_why_where_and_since_when(slurm: Submitter) -> None:
    run = slurm.submit("fake", "--", "--until", "9")
    slurm.wait_for_start(1)
    row = slurm.status(run)["1-fake"]
    assert row["started"].startswith("20")
    for pid in of_run(slurm.folder, "1-fake.sh"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # Slurm's record is there once the job is no longer COMPLETING.
    row = wait_for(lambda: (row := slurm.status(run)["1-fake"])["detail"].endswith(("c1", "c2")) and row, "its record")
    assert row["state"] in ("failed", "cancelled"), row
    assert row["started"].startswith("20")


def test_cpus_and_memory_follow_the_gpus(slurm: Submitter) -> None:
    run = slurm.submit("fake", "--gpus-per-node", "2", "--", "--until", "9")
    slurm.wait_for_start(1)
    shown = as_submitter(slurm, "scontrol", "show", "job", slurm.status(run)["1-fake"]["id"])
    assert "NumCPUs=4 " in shown
    assert "mem=4000M" in shown
    slurm.cli.run("cancel", run, cwd=slurm.folder)


def test_a_job_that_saves_nothing_is_started_twice_only(slurm: Submitter) -> None:
    run = slurm.submit("fake", "--", "--output", "empty", "--until", "9")
    for start in (1, 2):
        slurm.wait_for_start(start)
        id = slurm.status(run)["1-fake"]["id"]
        as_submitter(slurm, "scancel", "--batch", "--signal=USR1", id)
    row = slurm.wait(run)["1-fake"]
    assert (row["state"], row["exit_code"], row["resubmitted"]) == ("failed", 75, 1)
    assert "error: 2 starts in a row saved nothing: not back into the queue" in slurm.log(run)


def test_scripts_are_submitted_by_hand_and_again(slurm: Submitter) -> None:
    check_scripts_by_hand(slurm)


def test_a_running_job_is_not_started_twice(slurm: Submitter) -> None:
    check_no_second_start(slurm)


def test_live_scripts_are_those_of_the_moment_of_submission(slurm: Submitter) -> None:
    recipe = slurm.folder / "edited"
    shutil.copytree(slurm.recipe, recipe)
    script = recipe / "entrypoints/fake_task.py"
    text = script.read_text()
    script.write_text(text.replace("this is rank", "edited: this is rank"))
    (recipe / "entrypoints/more").mkdir()
    (recipe / "entrypoints/more/one.py").write_text("")
    give(recipe, USER)
    run = replace(slurm, recipe=recipe, sif=slurm.recipe.parent / "fake.sif").submit("--live", "fake")
    script.write_text("raise SystemExit('edited too late')\n")
    assert slurm.wait(run)["1-fake"]["state"] == "done", slurm.log(run)
    assert "edited: this is rank 0 of 1" in slurm.log(run)
    kept = slurm.folder / "ekiben-runs" / run
    assert (kept / "live/entrypoints/more/one.py").is_file()
    assert json.loads((kept / "run.json").read_text())["live"] == str(recipe)


def test_shell_on_a_node(slurm: Submitter) -> None:
    check_shell_on_a_node(slurm, "--cpus-per-node", "1")
