"""Job scripts for PBS, on a stand-in for it (tests/support/pbs_standin.py): PBS itself is in no package archive."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import Submitter, check_no_second_start, check_scripts_by_hand, of_run, wait_for
from workspaces import ROOT, USER, Cli, Workspace, give

pytestmark = pytest.mark.covers("ekiben/run")


@pytest.fixture
def pbs(job_recipe: Path, workspace: Workspace, user_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[Submitter]:
    folder = workspace.folder("jobs", USER)
    bin, state = folder / "bin", folder / "state"
    bin.mkdir()
    shutil.copy(ROOT / "tests/support/pbs_standin.py", bin)
    for name in ("qsub", "qstat", "qdel", "pbsnodes", "pbs_tmrsh"):
        (bin / name).write_text(f'#!/bin/sh\nexec python3 "{bin}/pbs_standin.py" {name} "$@"\n')
        (bin / name).chmod(0o755)
    state.mkdir()
    give(state, USER)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    monkeypatch.setenv("PBS_STANDIN", str(state))
    yield Submitter(user_cli, folder, job_recipe, "pbs")
    for error_file in state.glob("*/errors"):
        assert error_file.read_text() == ""
    wait_for(lambda: not of_run(folder, "launch_node.py"), "the end of all processes")


def test_two_nodes_are_signalled_before_the_walltime_and_requeued(pbs: Submitter) -> None:
    run = pbs.submit(
        "fake", "--nodes", "2", "--gpus-per-node", "2", "--time", "30s", "--grace-period", "15s", "--", "--until", "2"
    )
    first = pbs.status(run)["1-fake"]["id"]
    row = pbs.wait(run)["1-fake"]
    assert (row["state"], row["resubmitted"]) == ("done", 1), pbs.log(run)
    assert row["id"] != first
    assert [pbs.wait_for_start(2, rank)["NODE_RANK"] for rank in range(4)] == ["0", "0", "1", "1"]
    assert "on localhost,127.0.0.1, start 2" in pbs.log(run)
    assert (pbs.folder / f"ekiben-runs/{run}/1-fake.pbs.log").exists()


def test_array_jobs_are_requeued_alone_and_dependents_wait(pbs: Submitter) -> None:
    run = pbs.submit(
        "--seeds",
        "5,70",
        "--time",
        "30s",
        "--grace-period",
        "15s",
        "--",
        "fake",
        "--folder",
        "run-{seed}",
        "--until",
        "2",
        "+",
        "look",
        "--folder",
        "last",
    )
    rows = pbs.wait(run)
    assert {job: (row["state"], row["resubmitted"]) for job, row in rows.items()} == {
        "1-fake.1": ("done", 1),
        "1-fake.2": ("done", 1),
        "2-look": ("done", 0),
    }
    ends = [(pbs.folder / name).stat().st_mtime for name in ("run-5/start-2-0", "run-70/start-2-0", "last/start-1-0")]
    assert ends[2] == max(ends)


def test_cancelled_job_is_not_requeued(pbs: Submitter) -> None:
    run = pbs.submit("fake", "--nodes", "2", "--", "--until", "9")
    pbs.wait_for_start(1, 1)
    assert "cancelled" in pbs.cli.run("cancel", run, cwd=pbs.folder).stdout
    wait_for(lambda: pbs.status(run)["1-fake"]["state"] in ("cancelled", "failed"), "the end of the job")
    assert not (pbs.folder / "fake/start-2-0").exists()


def test_refusals_of_pbs_are_shown(pbs: Submitter) -> None:
    assert "Job violates queue and/or server resource limits" in pbs.submit("fake", "--nodes", "3", code=11)
    assert "invalid option -- 'z'" in pbs.submit("fake", "--scheduler-arg", "-z", code=11)
    assert "Unknown queue" in pbs.submit("fake", "--scheduler-arg", "-q rt_XX", code=11)


@pytest.mark.guard
def test_the_stand_in_is_strict(pbs: Submitter) -> None:
    for line in (
        "#PBS -l select=2:gpus=1",
        "#PBS -l walltime=90",
        "#PBS -J 1-1",
        "#PBS -N a-name-that-is-too-long",
        "#PBS --nodes=2",
    ):
        done = subprocess.run(["qsub"], input=f"{line}\ntrue\n", capture_output=True, text=True, check=False)
        assert done.returncode != 0, line


def test_scripts_are_submitted_by_hand_and_again(pbs: Submitter) -> None:
    check_scripts_by_hand(pbs)


def test_a_running_job_is_not_started_twice(pbs: Submitter) -> None:
    check_no_second_start(pbs)
