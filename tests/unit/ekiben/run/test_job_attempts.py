"""Which start of a job's script is a new attempt, and which is refused, with stand-ins of a scheduler's programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ekiben.run.jobs.plan import JobPlan
from support.job_nodes import Node, make_node
from support.programs import write_program

SGE = """<job_info><queue_info><job_list state="running">
      <JB_job_number>9</JB_job_number>
    </job_list>
    <job_list state="running">
      <JB_job_number>7</JB_job_number>
      <tasks>2</tasks>
    </job_list></queue_info></job_info>
"""
OAR = """Job_Id: 7
    job_array_id = 7
    job_array_index = 1
    state = Terminated
    initial_request = oarsub -S x; #OAR --array 2

Job_Id: 8
    job_array_id = 7
    job_array_index = 2
    state = Running
    initial_request = oarsub -S x; #OAR --array 2
"""
OAR_ALONE = """Job_Id: 9
    job_array_id = 9
    job_array_index = 1
    state = Running
    initial_request = oarsub -S x
"""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    node = make_node(tmp_path)
    monkeypatch.chdir(node.work)
    return node


def answer(node: Node, program: str, known: str, text: str) -> None:
    """Have ``program`` print ``text`` when its arguments end with ``known``."""
    write_program(
        node.folder / "bin" / program, f"#!/bin/bash\n[[ $* = *'{known}' ]] || exit 1\ncat <<'END'\n{text}END\n"
    )


def known_as(job: JobPlan, id: str, name: str = "1-train") -> JobPlan:
    (job.folder / f"{name}.job").write_text(f"{id}\n")
    return job


def test_a_script_is_refused_while_a_job_of_it_is_in_the_queue(node: Node) -> None:
    job = known_as(node.write(node.plan("train")), "7")
    answer(node, "squeue", "--jobs 7", "RUNNING\n")
    before = {path.name: path.read_bytes() for path in job.folder.iterdir() if path.is_file()}
    refused = node.run(job, code=1, SLURM_JOB_ID="8")
    assert refused == (
        "error: 1-train is not started, for job 7 of this run has not ended: wait for its end or cancel it, then submit"
        " this script again\n"
    )
    assert {path.name: path.read_bytes() for path in job.folder.iterdir() if path.is_file()} == before
    assert not (node.folder / "argv").exists()


def test_a_job_that_its_scheduler_starts_again_keeps_its_id_and_starts(node: Node) -> None:
    job = known_as(node.write(node.plan("train")), "7")
    answer(node, "squeue", "--jobs 7", "RUNNING\n")
    assert "attempt" not in node.run(job, SLURM_JOB_ID="7")


@pytest.mark.parametrize("squeue", ["exit 1", "exit 0", "kill -9 $$"])
def test_a_script_starts_where_the_scheduler_knows_no_job_or_does_not_answer(node: Node, squeue: str) -> None:
    job = known_as(node.write(node.plan("train")), "7")
    write_program(node.folder / "bin/squeue", f"#!/bin/bash\n{squeue}\n")
    assert "attempt     2, after one that did not end" in node.run(job, SLURM_JOB_ID="8")
    assert (job.folder / "1-train.job").read_text() == "8\n"


def test_a_job_that_waits_to_be_started_again_is_not_passed(node: Node) -> None:
    job = known_as(node.write(node.plan("train")), "7")
    (job.folder / "1-train.requeued").touch()
    answer(node, "squeue", "--jobs 7", "PENDING\n")
    assert "job 7 of this run has not ended" in node.run(job, code=1, SLURM_JOB_ID="8")
    assert (job.folder / "1-train.requeued").exists()
    assert "attempt" not in node.run(job, SLURM_JOB_ID="7")


def test_two_first_starts_at_the_same_moment_are_one(node: Node) -> None:
    """Each of them saw no other job's id."""
    job = node.write(replace(node.plan("train"), by_hand=True))
    (job.folder / "1-train.claim.1").write_text("7\n")
    answer(node, "squeue", "--jobs 7", "RUNNING\n")
    assert "job 7 of this run has not ended" in node.run(job, code=1, SLURM_JOB_ID="8")
    answer(node, "squeue", "--jobs 7", "")
    node.run(job, SLURM_JOB_ID="8")


def test_two_further_attempts_at_the_same_moment_are_one(node: Node) -> None:
    job = known_as(node.write(node.plan("train")), "6")
    (job.folder / "1-train.exit").write_text("1\n")
    (job.folder / "1-train.claim.2").write_text("7\n")
    answer(node, "squeue", "--jobs 7", "RUNNING\n")
    assert "job 7 of this run has not ended" in node.run(job, code=1, SLURM_JOB_ID="8")


ARRAY = {"slurm": ("squeue", "7_2", "RUNNING\n"), "sge": ("qstat", "*", SGE), "oar": ("oarstat", "7", OAR)}


@pytest.mark.parametrize("scheduler", ARRAY)
@pytest.mark.parametrize(("index", "is_refused"), [("1", False), ("2", True)])
def test_of_an_array_the_same_job_is_asked_for(node: Node, scheduler: str, index: str, is_refused: bool) -> None:
    program, known, text = ARRAY[scheduler]
    job = node.write(replace(node.plan("train", "{seed}", seeds=("5", "6")), scheduler=scheduler))
    known_as(job, "7", f"1-train.{index}")
    answer(node, program, known, text)
    ids = {"SLURM_ARRAY_TASK_ID": index, "SGE_TASK_ID": index, "OAR_ARRAY_INDEX": index}
    (node.folder / "hosts").write_text("h1\n")
    ids |= {"OAR_NODEFILE": str(node.folder / "hosts"), "OAR_JOB_ID": "20", "JOB_ID": "20"}
    written = node.run(job, code=int(is_refused), **ids, SLURM_JOB_ID="20")
    log = job.folder / f"1-train.{index}.log"
    written += log.read_text() if log.exists() else ""
    assert ("job 7 of this run has not ended" in written) == is_refused, written
    assert ("attempt     2" in written) != is_refused


ALONE = {"sge": ("qstat", "*", SGE), "oar": ("oarstat", "9", OAR_ALONE), "pbs": ("qstat", "9", "    job_state = Q\n")}


@pytest.mark.parametrize("scheduler", ALONE)
def test_a_job_that_came_back_from_an_array_is_asked_for(node: Node, scheduler: str) -> None:
    program, known, text = ALONE[scheduler]
    job = node.write(replace(node.plan("train", "{seed}", seeds=("5", "6")), scheduler=scheduler))
    known_as(job, "9", "1-train.2")
    answer(node, program, known, text)
    ids = {"SGE_TASK_ID": "2", "OAR_ARRAY_INDEX": "2", "PBS_ARRAY_INDEX": "2", "PBS_O_WORKDIR": str(node.work)}
    node.run(job, code=1, **ids, OAR_JOB_ID="20", JOB_ID="20", PBS_JOBID="20[2].server")
    assert "job 9 of this run has not ended" in (job.folder / "1-train.2.log").read_text()


def test_a_job_that_came_back_under_a_new_id_starts_before_that_is_written(node: Node) -> None:
    """The one that submitted it is in the queue still."""
    job = known_as(node.write(replace(node.plan("train"), scheduler="pbs")), "7.server")
    (job.folder / "1-train.requeued").touch()
    (node.folder / "hosts").write_text("h1\n")
    answer(node, "qstat", "7.server", "    job_state = E\n")
    ids = {"PBS_NODEFILE": str(node.folder / "hosts"), "PBS_O_WORKDIR": str(node.work), "PBS_JOBID": "8.server"}
    node.run(job, **ids, EKIBEN_INDEX="0")
    assert "attempt" not in (job.folder / "1-train.log").read_text()
