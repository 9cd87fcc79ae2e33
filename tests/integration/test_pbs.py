"""Job scripts for PBS, on a stand-in for it (tests/pbs_standin.py): PBS itself is in no package archive."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import Submitter, of_run, wait_for
from rooms import ROOT, USER, Cli, Room, give

pytestmark = pytest.mark.slow


@pytest.fixture
def pbs(drill: Path, room: Room, user_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[Submitter]:
    folder = room.folder("jobs", USER)
    bin, state = folder / "bin", folder / "state"
    bin.mkdir()
    shutil.copy(ROOT / "tests/pbs_standin.py", bin)
    for name in ("qsub", "qstat", "qdel", "pbsnodes", "pbs_tmrsh"):
        (bin / name).write_text(f'#!/bin/sh\nexec python3 "{bin}/pbs_standin.py" {name} "$@"\n')
        (bin / name).chmod(0o755)
    state.mkdir()
    give(state, USER)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    monkeypatch.setenv("PBS_STANDIN", str(state))
    yield Submitter(user_cli, folder, drill, "pbs")
    for place in state.glob("*/errors"):
        assert place.read_text() == ""
    wait_for(lambda: not of_run(folder, "launch_node.py"), "the end of all processes")


def test_two_nodes_told_before_the_walltime_until_it_is_done(pbs: Submitter) -> None:
    run = pbs.submit(
        "drill", "--nodes", "2", "--gpus-per-node", "2", "--time", "30s", "--notice", "15s", "--", "--until", "2"
    )
    first = pbs.status(run)["1-drill"]["id"]
    row = pbs.wait(run)["1-drill"]
    assert (row["state"], row["resubmitted"]) == ("done", 1), pbs.log(run)
    assert row["id"] != first
    assert [pbs.begun(2, rank)["NODE_RANK"] for rank in range(4)] == ["0", "0", "1", "1"]
    assert "on localhost,127.0.0.1, start 2" in pbs.log(run)
    assert (pbs.folder / f"ekiben-runs/{run}/1-drill.pbs.log").exists()


def test_a_job_for_each_seed_comes_back_alone_and_what_follows_waits_for_it(pbs: Submitter) -> None:
    run = pbs.submit("--seeds", "5,70", "--time", "30s", "--notice", "15s", "--", "drill", "--folder", "run-{seed}", "--until", "2",
                     "+", "look", "--folder", "last")  # fmt: skip
    rows = pbs.wait(run)
    assert {job: (row["state"], row["resubmitted"]) for job, row in rows.items()} == {
        "1-drill.1": ("done", 1), "1-drill.2": ("done", 1), "2-look": ("done", 0),
    }  # fmt: skip
    ends = [(pbs.folder / name).stat().st_mtime for name in ("run-5/start-2-0", "run-70/start-2-0", "last/start-1-0")]
    assert ends[2] == max(ends)


def test_cancelled(pbs: Submitter) -> None:
    run = pbs.submit("drill", "--nodes", "2", "--", "--until", "9")
    pbs.begun(1, 1)
    assert "cancelled" in pbs.cli.run("cancel", run, cwd=pbs.folder).stdout
    wait_for(lambda: pbs.status(run)["1-drill"]["state"] in ("cancelled", "failed"), "the end of the job")
    assert not (pbs.folder / "drill/start-2-0").exists()


def test_refusals_in_its_own_words(pbs: Submitter) -> None:
    assert "Job violates queue and/or server resource limits" in pbs.submit("drill", "--nodes", "3", code=11)
    assert "invalid option -- 'z'" in pbs.submit("drill", "--option", "-z", code=11)
    assert "Unknown queue" in pbs.submit("drill", "--option", "-q rt_XX", code=11)


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
