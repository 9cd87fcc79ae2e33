"""Jobs on a real Grid Engine of two hosts (tests/services.sh), which knows parts of a node by ABCI's names."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import Submitter, check_no_second_start, check_scripts_by_hand, check_shell_on_a_node, of_run, wait_for
from workspaces import USER, Cli, Workspace, as_user, give, need

pytestmark = pytest.mark.covers("ekiben/run", "entrypoints/launch_node.py", "entrypoints/launch_alone.py", "sites")

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
def grid(job_recipe: Path, workspace: Workspace, user_cli: Cli) -> Iterator[Submitter]:
    need("qsub", "qconf")
    assert subprocess.run(["qconf", "-sss"], capture_output=True, check=False).returncode == 0, (
        "tests/services.sh start gridengine"
    )
    folder = workspace.folder("jobs", USER)
    (folder / "lab.yaml").write_text(SITE)
    yield Submitter(user_cli, folder, job_recipe, "sge")
    subprocess.run(["qdel", "-u", USER], capture_output=True, check=False)
    wait_for(lambda: not of_run(folder, "launch_node.py"), "the end of all processes")


def submit(grid: Submitter, *args: str) -> str:
    return grid.submit("--site", "./lab.yaml", "--force", *args)


def test_two_hosts_are_signalled_before_the_walltime_and_requeued(grid: Submitter) -> None:
    run = submit(
        grid,
        "fake",
        "--partition",
        "rt_F",
        "--nodes",
        "2",
        "--processes-per-node",
        "2",
        "--time",
        "40s",
        "--grace-period",
        "25s",
        "--",
        "--until",
        "2",
    )
    row = grid.wait(run)["1-fake"]
    assert (row["state"], row["resubmitted"]) == ("done", 1), grid.log(run)
    assert [grid.wait_for_start(2, rank)["NODE_RANK"] for rank in range(4)] == ["0", "0", "1", "1"]
    assert {(grid.folder / f"fake/saved-1-{rank}").read_text() for rank in range(4)} == {"SIGUSR1"}
    log = grid.log(run)
    assert "on ge1,ge2, start 2" in log or "on ge2,ge1, start 2" in log
    # Two hosts with a network between them: each found its own end.
    assert "network     ge1: hsn1 is the way to ge2" in log
    assert "network     ge2: hsn2 is the way to ge1" in log
    assert row["id"] == grid.status(run)["1-fake"]["id"]


@pytest.mark.guard
def test_array_job_for_each_seed_and_a_dependent_job(grid: Submitter) -> None:
    run = submit(
        grid,
        "--gpus-per-node",
        "1",
        "--seeds",
        "5,70",
        "--",
        "fake",
        "--folder",
        "run-{seed}",
        "+",
        "look",
        "--folder",
        "last",
    )
    rows = grid.wait(run)
    assert {job: row["state"] for job, row in rows.items()} == {
        "1-fake.1": "done",
        "1-fake.2": "done",
        "2-look": "done",
    }
    assert grid.wait_for_start(1, folder="run-70")["argv"] == ["--folder", "run-70"]
    ends = [(grid.folder / name / "start-1-0").stat().st_mtime for name in ("run-5", "run-70", "last")]
    assert ends[2] == max(ends)


def test_failing_rank_is_named_and_dependents_are_not_started(grid: Submitter) -> None:
    run = submit(
        grid,
        "--partition",
        "rt_F",
        "--nodes",
        "2",
        "--processes-per-node",
        "1",
        "--",
        "fake",
        "--fail-rank",
        "1",
        "+",
        "look",
        "--folder",
        "last",
    )
    rows = grid.wait(run)
    assert (rows["1-fake"]["state"], rows["1-fake"]["exit_code"], rows["2-look"]["state"]) == ("failed", 3, "failed")
    assert "error: rank 1 on ge" in grid.log(run)
    assert "error: 2-look is not started, for 1-fake ended with exit code 3" in grid.log(run, "2-look")
    assert not (grid.folder / "last").exists()


@pytest.mark.parametrize("how", ["cancel", "qdel"])
def test_cancelled_job_is_not_requeued(how: str, grid: Submitter) -> None:
    run = submit(grid, "fake", "--partition", "rt_F", "--nodes", "2", "--processes-per-node", "1", "--", "--until", "9")
    grid.wait_for_start(1, 1)
    id = grid.status(run)["1-fake"]["id"]
    if how == "cancel":
        assert f"cancelled {id}" in grid.cli.run("cancel", run, cwd=grid.folder).stdout
    else:
        subprocess.run(["qdel", id], check=True, capture_output=True, **as_user(USER))
    wait_for(lambda: not of_run(grid.folder, "launch_node.py"), "the end of all processes")
    wait_for(lambda: grid.status(run)["1-fake"]["state"] in ("cancelled", "lost", "failed"), "the end of the job")
    assert not (grid.folder / "fake/start-2-0").exists()


def test_dying_host_ends_the_job_and_is_named(grid: Submitter) -> None:
    run = submit(grid, "fake", "--partition", "rt_F", "--nodes", "2", "--processes-per-node", "1", "--", "--until", "9")
    grid.wait_for_start(1, 1)
    for pid in of_run(grid.folder, "launch_node.py --node 1"):
        os.kill(pid, signal.SIGKILL)
    assert grid.wait(run)["1-fake"]["state"] == "failed"
    assert "error: node ge" in grid.log(run)


def test_impossible_requests_are_refused(grid: Submitter) -> None:
    site = ("--site", "./lab.yaml", "--force", "fake")
    assert "--gpus-per-node 5: a node of rt_F has 4" in grid.submit(*site, "--gpus-per-node", "5", code=2)
    assert "--time 25:00:00: rt_F allows 24:00:00" in grid.submit(*site, "--time", "25h", code=2)
    stderr = grid.submit("fake", "--scheduler-arg", "-l rt_G.small=9", code=11)
    assert "Unable to run job" in stderr
    assert "no suitable queues" in stderr
    assert "unknown resource" in grid.submit("fake", "--scheduler-arg", "-l rt_X=1", code=11)
    assert "-frob" in grid.submit("fake", "--scheduler-arg", "-frob", code=11)


HOSTILE = "first\n#SBATCH --time=0:00:01\n#$ -l h_rt=1\n'single' \"double\" $(touch pwned) `touch pwned` \\ end"


def test_arguments_and_folders_with_special_characters(grid: Submitter, workspace: Workspace) -> None:
    folder = grid.folder / "a b'c%j:d,e"
    folder.mkdir()
    give(folder, USER)
    there = replace(grid, folder=folder)
    run = there.submit(
        "--site",
        "../lab.yaml",
        "--force",
        "fake",
        "--partition",
        "rt_F",
        "--nodes",
        "2",
        "--processes-per-node",
        "1",
        "--",
        "--set",
        HOSTILE,
    )
    row = there.wait(run)["1-fake"]
    assert row["state"] == "done", there.log(run)
    assert there.wait_for_start(1)["argv"] == ["--set", HOSTILE]
    assert there.wait_for_start(1, 1)["argv"] == ["--set", HOSTILE]
    assert "start 1" in there.log(run)
    assert not list(grid.folder.rglob("pwned"))


def test_one_job_of_an_array_is_cancelled_alone(grid: Submitter) -> None:
    run = submit(
        grid, "--gpus-per-node", "1", "--seeds", "5,70", "--", "fake", "--folder", "run-{seed}", "--until", "9"
    )
    for folder in ("run-5", "run-70"):
        grid.wait_for_start(1, folder=folder)
    array = grid.status(run)["1-fake.1"]["id"].removesuffix(".1")
    assert f"cancelled {array}.2\n" in grid.cli.run("cancel", f"{array}.2", cwd=grid.folder).stdout
    wait_for(lambda: grid.status(run)["1-fake.2"]["state"] == "cancelled", "the end of one job")
    assert grid.status(run)["1-fake.1"]["state"] == "running"
    assert grid.status(run)["1-fake.1"]["started"].startswith("20")


def test_a_job_that_grid_engine_ended_shows_where_and_since_when(grid: Submitter) -> None:
    run = submit(grid, "fake", "--gpus-per-node", "1", "--", "--until", "9")
    grid.wait_for_start(1)
    subprocess.run(["qdel", grid.status(run)["1-fake"]["id"]], check=True, capture_output=True, **as_user(USER))
    row = wait_for(lambda: (row := grid.wait(run)["1-fake"]) and row["started"] and row, "its accounting")
    assert row["state"] in ("failed", "cancelled")
    assert "ge" in row["detail"]


def test_scripts_are_submitted_by_hand_and_again(grid: Submitter) -> None:
    check_scripts_by_hand(grid)


def test_a_running_job_is_not_started_twice(grid: Submitter) -> None:
    check_no_second_start(grid)


def test_shell_on_a_node(grid: Submitter) -> None:
    check_shell_on_a_node(grid)
