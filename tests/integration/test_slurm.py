"""Jobs on a real Slurm of two nodes with four GPUs each (tests/services.sh), submitted by an ordinary user, run by Apptainer."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import Submitter, of_run, wait_for
from rooms import USER, Cli, Room, as_user, give, need

pytestmark = pytest.mark.slow


@pytest.fixture
def slurm(drill: Path, room: Room, user_cli: Cli) -> Iterator[Submitter]:
    need("sbatch")
    assert subprocess.run(["sinfo"], capture_output=True, check=False).returncode == 0, "tests/services.sh start slurm"
    folder = room.folder("jobs", USER)
    yield Submitter(user_cli, folder, drill, "slurm")
    subprocess.run(["scancel", "--user", USER, "--full"], check=False)
    wait_for(lambda: not of_run(folder, "launch_node.py"), "the end of all processes")


def as_submitter(slurm: Submitter, *words: str) -> str:
    return subprocess.run(words, cwd=slurm.folder, capture_output=True, text=True, check=True, **as_user(USER)).stdout


def test_two_nodes_two_processes_each(slurm: Submitter, room: Room) -> None:
    token = {"HF_TOKEN": "hf_secret", "PYTHONPATH": "/nowhere", "HF_HOME": str(slurm.folder / "models")}
    run = slurm.submit("drill", "--nodes", "2", "--gpus-per-node", "2", "--time", "5m", env={**token})
    assert slurm.wait(run)["1-drill"]["state"] == "done", slurm.log(run)
    about = [slurm.begun(1, rank) for rank in range(4)]
    assert [one["SLURM_NODEID"] for one in about] == ["0", "0", "1", "1"]
    assert {(one["WORLD_SIZE"], one["CUDA_VISIBLE_DEVICES"]) for one in about} == {("4", "0,1")}
    assert {(one["PYTHONPATH"], one["HF_HOME"], one["HF_TOKEN"]) for one in about} == {
        (None, token["HF_HOME"], "hf_secret")
    }
    assert "on c1,c2, start 1" in slurm.log(run)
    kept = slurm.folder / "ekiben-runs" / run
    assert [path.name for path in kept.iterdir() if b"hf_secret" in path.read_bytes()] == ["environment"]
    assert (kept / "environment").stat().st_mode & 0o077 == 0
    said = slurm.cli.run("logs", "-f", run, cwd=slurm.folder).stdout
    assert said == slurm.log(run)
    id = slurm.status(run)["1-drill"]["id"]
    assert run in slurm.cli.run("status", id, cwd=slurm.folder).stdout
    assert "nothing to cancel" in slurm.cli.run("cancel", id, cwd=slurm.folder).stdout


def test_told_before_the_walltime_it_saves_and_goes_on_until_it_is_done(slurm: Submitter) -> None:
    run = slurm.submit("drill", "--nodes", "2", "--time", "1m", "--notice", "30s", "--", "--until", "2")
    row = slurm.wait(run)["1-drill"]
    assert (row["state"], row["resubmitted"]) == ("done", 1), slurm.log(run)
    assert (slurm.folder / "drill/saved-1-1").read_text() == "SIGUSR1"
    assert "back into the queue, 1 of at most 20 times" in slurm.log(run)
    assert "start 2" in slurm.log(run)
    assert not (slurm.folder / "drill/saved-2-0").exists()


def test_a_preempted_job_saves_and_comes_back(slurm: Submitter) -> None:
    run = slurm.submit(
        "drill", "--gpus-per-node", "4", "--nodes", "2", "--processes-per-node", "1", "--", "--until", "2"
    )
    slurm.begun(1, 1)
    urgent = slurm.submit("look", "--gpus-per-node", "4", "--option", "--partition=urgent", "--", "--folder", "urgent")
    assert slurm.wait(urgent)["1-look"]["state"] == "done"
    row = slurm.wait(run)["1-drill"]
    assert row["state"] == "done", slurm.log(run)
    assert {(slurm.folder / f"drill/saved-1-{rank}").read_text() for rank in (0, 1)} <= {"SIGTERM", "SIGUSR1"}
    assert slurm.begun(2)["WORLD_SIZE"] == "2"


def test_it_goes_back_only_so_often(slurm: Submitter) -> None:
    run = slurm.submit("drill", "--max-resubmits", "0", "--", "--until", "9")
    slurm.begun(1)
    id = slurm.status(run)["1-drill"]["id"]
    as_submitter(slurm, "scancel", "--batch", "--signal=USR1", id)
    row = slurm.wait(run)["1-drill"]
    assert (row["state"], row["exit_code"]) == ("failed", 75)
    assert "that is --max-resubmits" in slurm.log(run)


@pytest.mark.parametrize("how", ["cancel", "scancel"])
def test_what_is_cancelled_does_not_come_back(how: str, slurm: Submitter) -> None:
    run = slurm.submit("drill", "--nodes", "2", "--", "--until", "9")
    slurm.begun(1, 1)
    id = slurm.status(run)["1-drill"]["id"]
    if how == "cancel":
        assert f"cancelled {id}" in slurm.cli.run("cancel", run, cwd=slurm.folder).stdout
    else:
        as_submitter(slurm, "scancel", id)
    wait_for(lambda: not as_submitter(slurm, "squeue", "--noheader", "--jobs", id), f"the end of job {id}")
    wait_for(lambda: not of_run(slurm.folder, "launch_node.py"), "the end of all processes")
    assert slurm.status(run)["1-drill"]["state"] in ("cancelled", "failed")
    assert not (slurm.folder / "drill/start-2-0").exists()


def test_a_job_for_each_seed_and_one_after_them(slurm: Submitter) -> None:
    run = slurm.submit("--seeds", "5,70", "--", "drill", "--folder", "run-{seed}", "+", "look", "--folder", "last")
    rows = slurm.wait(run)
    assert {job: row["state"] for job, row in rows.items()} == {
        "1-drill.1": "done",
        "1-drill.2": "done",
        "2-look": "done",
    }
    assert slurm.begun(1, folder="run-5")["words"] == ["--folder", "run-5"]
    assert slurm.begun(1, folder="run-70")["words"] == ["--folder", "run-70"]
    ends = [(slurm.folder / name / "start-1-0").stat().st_mtime for name in ("run-5", "run-70", "last")]
    assert ends[2] == max(ends)


def test_a_rank_that_fails_is_named_and_what_comes_after_is_not_started(slurm: Submitter) -> None:
    run = slurm.submit("--nodes", "2", "--processes-per-node", "2", "--", "drill", "--fail-rank", "3", "+", "look", "--folder", "last")  # fmt: skip
    rows = slurm.wait(run)
    assert (rows["1-drill"]["state"], rows["1-drill"]["exit_code"], rows["2-look"]["state"]) == ("failed", 3, "skipped")
    assert "error: rank 3 on c2 ended with exit code 3" in slurm.log(run)
    assert not (slurm.folder / "last").exists()


def test_a_node_that_dies_ends_the_job_and_is_named(slurm: Submitter) -> None:
    run = slurm.submit("drill", "--nodes", "2", "--", "--until", "9")
    slurm.begun(1, 1)
    for pid in of_run(slurm.folder, "launch_node.py --node 1"):
        os.kill(pid, signal.SIGKILL)
    row = slurm.wait(run)["1-drill"]
    assert row["state"] == "failed", slurm.log(run)
    assert "error: node c2 (rank 1): " in slurm.log(run)


def test_what_can_never_run_is_refused(slurm: Submitter) -> None:
    assert "--gpus-per-node 5: partition gpu has nodes with at most 4" in slurm.submit(
        "drill", "--gpus-per-node", "5", code=2
    )
    assert "--time 48:00:00: partition gpu allows 24:00:00" in slurm.submit("drill", "--time", "2d", code=2)
    assert "--nodes 3: partition gpu has 2" in slurm.submit("drill", "--nodes", "3", code=2)
    said = slurm.submit("drill", "--option", "--partition=nope", code=11)
    assert "sbatch: error: invalid partition specified: nope" in said
    assert "unrecognized option '--frob'" in slurm.submit("drill", "--option", "--frob", code=11)
    assert not list((slurm.folder / "ekiben-runs").iterdir())


def test_staged_to_the_nodes_own_disk_once(slurm: Submitter) -> None:
    local = slurm.folder / "local"
    local.mkdir()
    give(local, USER)
    runs = [
        slurm.submit("drill", "--stage", "--nodes", "2", "--", "--folder", name, env={"TMPDIR": str(local)})
        for name in "ab"
    ]
    for run in runs:
        assert slurm.wait(run)["1-drill"]["state"] == "done", slurm.log(run)
    staged = [path.name for path in local.glob("ekiben-*/*") if not path.name.endswith(".lock")]
    assert len(staged) == 1
    assert staged[0].startswith("drill-")
