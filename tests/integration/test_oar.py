"""Jobs on a real OAR of two nodes (tests/services.sh)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.run.schedulers import oar as scheduler
from jobs import Submitter, check_no_second_start, check_scripts_by_hand, of_run, wait_for
from workspaces import USER, Cli, Workspace, as_user, give, need

pytestmark = pytest.mark.covers("ekiben/run", "entrypoints/launch_node.py", "entrypoints/launch_alone.py")


@pytest.fixture
def oar(job_recipe: Path, workspace: Workspace, user_cli: Cli) -> Iterator[Submitter]:
    need("oarsub", "oarstat")
    assert scheduler.unavailable() is None, "tests/services.sh start oar"
    yield Submitter(user_cli, workspace.folder("jobs", USER), job_recipe, "oar")
    subprocess.run(
        ["oardel", "--sql", f"job_user = '{USER}' AND state IN ('Waiting', 'Hold', 'Launching', 'Running')"],
        capture_output=True,
        check=False,
    )
    wait_for(lambda: not of_run(workspace.path, "launch_node.py"), "the end of all processes")


@pytest.mark.guard
def test_hello_runs_and_its_log_is_read(oar: Submitter, hello: Path, workspace: Workspace) -> None:
    options = ("--scheduler", "oar", "--sif", workspace.path / "hello.sif", "--time", "10m", "--wait")
    done = oar.cli.run("submit", *options, "hello", "hello", cwd=oar.folder)
    assert "1-hello: done" in done.stderr
    assert "ended " in oar.cli.run("logs", cwd=oar.folder).stdout


def test_job_is_signalled_before_the_walltime_and_requeued(oar: Submitter) -> None:
    run = oar.submit("fake", "--time", "40s", "--grace-period", "25s", "--", "--until", "2")
    first = oar.status(run)["1-fake"]["id"]
    row = oar.wait(run)["1-fake"]
    assert (row["state"], row["resubmitted"]) == ("done", 1), oar.log(run)
    assert row["id"] != first
    assert (oar.folder / "fake/saved-1-0").read_text() == "SIGUSR1"
    assert "again       saved, not finished: back into the queue" in oar.log(run)


def test_a_running_job_is_shown_with_its_node_and_cancelled(oar: Submitter) -> None:
    run = oar.submit("fake", "--time", "10m", "--", "--until", "9")
    oar.wait_for_start(1)
    row = oar.status(run)["1-fake"]
    assert (row["state"], row["detail"]) in (("running", "oar1"), ("running", "oar2"))
    assert f"cancelled {row['id']}" in oar.cli.run("cancel", run, cwd=oar.folder).stdout
    wait_for(lambda: not of_run(oar.folder, "launch_node.py"), "the end of all processes")
    wait_for(lambda: oar.status(run)["1-fake"]["state"] in ("cancelled", "failed"), "the end of the job")
    assert not (oar.folder / "fake/start-2-0").exists()


def test_array_job_for_each_seed_and_a_dependent_job(oar: Submitter) -> None:
    argv = ("fake", "--folder", "run-{seed}", "+", "look", "--folder", "last")
    run = oar.submit("--time", "10m", "--seeds", "5,70", "--", *argv)
    rows = oar.wait(run)
    assert {job: row["state"] for job, row in rows.items()} == {
        "1-fake.1": "done",
        "1-fake.2": "done",
        "2-look": "done",
    }, oar.log(run, "2-look")
    assert oar.wait_for_start(1, folder="run-70")["argv"] == ["--folder", "run-70"]
    ends = [(oar.folder / name / "start-1-0").stat().st_mtime for name in ("run-5", "run-70", "last")]
    assert ends[2] == max(ends)


def test_dependents_of_a_failed_job_are_not_started(oar: Submitter) -> None:
    run = oar.submit("--time", "10m", "--", "fake", "--fail-rank", "0", "+", "look", "--folder", "last")
    rows = oar.wait(run)
    assert (rows["1-fake"]["state"], rows["1-fake"]["exit_code"], rows["2-look"]["state"]) == ("failed", 3, "failed")
    assert "error: 2-look is not started, for 1-fake ended with exit code 3" in oar.log(run, "2-look")
    assert not (oar.folder / "last").exists()


def test_job_on_two_nodes(oar: Submitter) -> None:
    run = oar.submit("fake", "--nodes", "2", "--processes-per-node", "1", "--time", "10m")
    row = oar.wait(run)["1-fake"]
    assert row["state"] == "done", oar.log(run)
    assert [oar.wait_for_start(1, rank)["NODE_RANK"] for rank in range(2)] == ["0", "1"]


def test_refusals_of_oar_are_shown(oar: Submitter) -> None:
    stderr = oar.submit("fake", "--time", "10m", "--scheduler-arg", "-q nothing", code=11)
    assert "nothing" in stderr
    subprocess.run(["oarstat"], check=True, capture_output=True, **as_user(USER))


def test_ended_job_shows_reason_node_and_start(oar: Submitter) -> None:
    killed, deleted = (oar.submit("fake", "--", "--until", "9", "--folder", folder) for folder in "ab")
    for run in (killed, deleted):
        wait_for(lambda run=run: of_run(oar.folder / "ekiben-runs" / run, "launch_node.py"), "the start of both")
    for pid in of_run(oar.folder / "ekiben-runs" / killed, "1-fake.sh"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    subprocess.run(["oardel", oar.status(deleted)["1-fake"]["id"]], capture_output=True, check=True)
    for run, state in ((killed, "failed"), (deleted, "cancelled")):
        job = wait_for(lambda run=run, state=state: (job := oar.status(run)["1-fake"])["state"] == state and job, run)
        assert job["detail"].endswith(("oar1", "oar2")), job
        assert job["started"].startswith("20")


def test_a_folder_with_special_characters(oar: Submitter) -> None:
    """oarsub reads the script by a shell's `cat`, so the records of the run go to another folder."""
    folder = oar.folder / "a b'c%j:d,e;touch pwned"
    folder.mkdir()
    give(folder, USER)
    sif = oar.recipe.parent / "fake.sif"
    argv, task = ("submit", "--scheduler", "oar", "--sif", sif, "--time", "10m"), (oar.recipe, "fake")
    done = oar.cli.run(*argv, *task, cwd=folder, code=2)
    assert "oarsub takes no script in" in done.stderr
    assert not list(oar.folder.rglob("pwned"))
    done = oar.cli.run(*argv, "--runs", oar.folder / "runs", "--wait", *task, cwd=folder)
    assert "1-fake: done" in done.stderr
    assert (folder / "fake/start-1-0").exists()


def test_scripts_are_submitted_by_hand_and_again(oar: Submitter) -> None:
    check_scripts_by_hand(oar)


def test_a_running_job_is_not_started_twice(oar: Submitter) -> None:
    check_no_second_start(oar)
