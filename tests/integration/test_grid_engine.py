"""Jobs on a real Grid Engine of two hosts (tests/services.sh), which knows parts of a node by ABCI's names."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import Submitter, of_run, wait_for
from rooms import USER, Cli, Room, as_user, need

pytestmark = pytest.mark.slow

SITE = """\
name: lab
description: a Grid Engine with ABCI's resource types
node:
  gpus: [{model: NVIDIA H200, capability: "9.0", memory_gib: 140, count: 4}]
scheduler:
  kind: sge
  resources:
    rt_F: {request: ["-pe nodes {nodes}", "-l rt_F=1"], gpus: 4, max_nodes: 2, max_hours: 24, exclusive: true}
    rt_G.small: {request: ["-l rt_G.small=1"], gpus: 1, max_nodes: 1, max_hours: 24}
"""


@pytest.fixture
def grid(drill: Path, room: Room, user_cli: Cli) -> Iterator[Submitter]:
    need("qsub", "qconf")
    assert subprocess.run(["qconf", "-sss"], capture_output=True, check=False).returncode == 0, (
        "tests/services.sh start gridengine"
    )
    folder = room.folder("jobs", USER)
    (folder / "lab.yaml").write_text(SITE)
    yield Submitter(user_cli, folder, drill, "sge")
    subprocess.run(["qdel", "-u", USER], capture_output=True, check=False)
    wait_for(lambda: not of_run(folder, "launch_node.py"), "the end of all processes")


def submit(grid: Submitter, *words: str) -> str:
    return grid.submit("--site", "./lab.yaml", "--force", *words)


def test_two_hosts_told_before_the_walltime_until_it_is_done(grid: Submitter) -> None:
    run = submit(grid, "drill", "--resource", "rt_F", "--nodes", "2", "--processes-per-node", "2", "--time", "40s", "--notice", "25s", "--", "--until", "2")  # fmt: skip
    row = grid.wait(run)["1-drill"]
    assert (row["state"], row["resubmitted"]) == ("done", 1), grid.log(run)
    assert [grid.begun(2, rank)["NODE_RANK"] for rank in range(4)] == ["0", "0", "1", "1"]
    assert {(grid.folder / f"drill/saved-1-{rank}").read_text() for rank in range(4)} == {"SIGUSR1"}
    log = grid.log(run)
    assert "on ge1,ge2, start 2" in log or "on ge2,ge1, start 2" in log
    # Two hosts with a network between them: each found its own end.
    assert "network     ge1: hsn1 is the way to ge2" in log
    assert "network     ge2: hsn2 is the way to ge1" in log
    assert row["id"] == grid.status(run)["1-drill"]["id"]


def test_a_job_for_each_seed_and_one_after_them(grid: Submitter) -> None:
    run = submit(grid, "--gpus-per-node", "1", "--seeds", "5,70", "--", "drill", "--folder", "run-{seed}", "+", "look", "--folder", "last")  # fmt: skip
    rows = grid.wait(run)
    assert {job: row["state"] for job, row in rows.items()} == {
        "1-drill.1": "done",
        "1-drill.2": "done",
        "2-look": "done",
    }
    assert grid.begun(1, folder="run-70")["words"] == ["--folder", "run-70"]
    ends = [(grid.folder / name / "start-1-0").stat().st_mtime for name in ("run-5", "run-70", "last")]
    assert ends[2] == max(ends)


def test_a_rank_that_fails_is_named_and_what_comes_after_is_not_started(grid: Submitter) -> None:
    run = submit(grid, "--resource", "rt_F", "--nodes", "2", "--processes-per-node", "1", "--", "drill", "--fail-rank", "1", "+", "look", "--folder", "last")  # fmt: skip
    rows = grid.wait(run)
    assert (rows["1-drill"]["state"], rows["1-drill"]["exit_code"], rows["2-look"]["state"]) == ("failed", 3, "failed")
    assert "error: rank 1 on ge" in grid.log(run)
    assert "error: 2-look is not started, for 1-drill ended with exit code 3" in grid.log(run, "2-look")
    assert not (grid.folder / "last").exists()


@pytest.mark.parametrize("how", ["cancel", "qdel"])
def test_what_is_cancelled_does_not_come_back(how: str, grid: Submitter) -> None:
    run = submit(grid, "drill", "--resource", "rt_F", "--nodes", "2", "--processes-per-node", "1", "--", "--until", "9")
    grid.begun(1, 1)
    id = grid.status(run)["1-drill"]["id"]
    if how == "cancel":
        assert f"cancelled {id}" in grid.cli.run("cancel", run, cwd=grid.folder).stdout
    else:
        subprocess.run(["qdel", id], check=True, capture_output=True, **as_user(USER))
    wait_for(lambda: not of_run(grid.folder, "launch_node.py"), "the end of all processes")
    wait_for(lambda: grid.status(run)["1-drill"]["state"] in ("cancelled", "lost", "failed"), "the end of the job")
    assert not (grid.folder / "drill/start-2-0").exists()


def test_a_host_that_dies_ends_the_job_and_is_named(grid: Submitter) -> None:
    run = submit(grid, "drill", "--resource", "rt_F", "--nodes", "2", "--processes-per-node", "1", "--", "--until", "9")
    grid.begun(1, 1)
    for pid in of_run(grid.folder, "launch_node.py --node 1"):
        os.kill(pid, signal.SIGKILL)
    assert grid.wait(run)["1-drill"]["state"] == "failed"
    assert "error: node ge" in grid.log(run)


def test_what_can_never_run_is_refused(grid: Submitter) -> None:
    site = ("--site", "./lab.yaml", "--force", "drill")
    assert "--gpus-per-node 5: a node of rt_F has 4" in grid.submit(*site, "--gpus-per-node", "5", code=2)
    assert "--time 25:00:00: rt_F allows 24:00:00" in grid.submit(*site, "--time", "25h", code=2)
    said = grid.submit("drill", "--option", "-l rt_G.small=9", code=11)
    assert "Unable to run job" in said
    assert "no suitable queues" in said
    assert "unknown resource" in grid.submit("drill", "--option", "-l rt_X=1", code=11)
    assert "-frob" in grid.submit("drill", "--option", "-frob", code=11)
