"""The frame of every task: what it refuses before it begins."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

ENTRYPOINTS = Path(__file__).resolve().parents[4] / "entrypoints"
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ENTRYPOINTS.parent)) / "entrypoints"))

from ekiben_tasks.task import command

TASK = """
from ekiben_tasks.task.command import run
def main():
    print("ran")
    return 0
run(main)
"""


def start(folder: Path, task: str = TASK, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(task)
    settings = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ENTRYPOINTS), **environment}
    return subprocess.run(
        [sys.executable, folder / "train.py"], env=settings, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("size", "rank"),
    [
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_SIZE", "PMI_RANK"),
    ],
)
def test_copies_started_by_srun_or_mpirun_are_refused(tmp_path: Path, size: str, rank: str) -> None:
    first, second = (start(tmp_path, **{size: "2", rank: number}) for number in "01")
    assert (first.returncode, first.stdout, second.returncode, second.stdout) == (2, "", 2, "")
    assert first.stderr.startswith("error: srun or mpirun started train 2 times, as separate runs")
    assert second.stderr == ""
    for allowed in (
        {size: "1"},
        {size: "2", "WORLD_SIZE": "2"},
        {size: "2", "EKIBEN_INDEPENDENT": "1"},
        {"SLURM_NTASKS": "2"},
    ):
        assert start(tmp_path, **allowed).stdout == "ran\n"


def test_warnings_that_no_user_can_mend_are_left_out(tmp_path: Path) -> None:
    messages = [
        "Argument aux_data (position 17) cannot be converted to a JitArgument for function 'forward'",
        "mend this",
    ]
    warn = f"import warnings\n    [warnings.warn(text, stacklevel=2) for text in {messages}]\n    print"
    done = start(tmp_path, TASK.replace("print", warn))
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "UserWarning: mend this" in done.stderr
    assert done.stderr.count("UserWarning") == 1


def test_full_disk_is_one_sentence(tmp_path: Path) -> None:
    done = start(tmp_path, TASK.replace('print("ran")', 'open("/dev/full", "w").write("x" * 10_000)'))
    assert done.returncode == 1
    assert (
        done.stderr
        == "error: a file cannot be written (No space left on device); make room and give the same command again: it"
        " resumes from the completed part\n"
    )


@pytest.mark.parametrize(
    ("raised", "code"),
    [('raise SettingError("set it")', 2), ('open("/dev/full", "w").write("x" * 10_000)', 1)],
    ids=["error of a task", "error of a disk"],
)
def test_frames_stand_above_the_message_where_they_are_requested(tmp_path: Path, raised: str, code: int) -> None:
    task = "from ekiben_tasks.task.errors import SettingError\n" + TASK.replace('print("ran")', raised)
    plain = start(tmp_path, task)
    assert (plain.returncode, plain.stderr.count("\n"), plain.stderr[:7]) == (code, 1, "error: ")
    assert start(tmp_path, task, EKIBEN_TRACEBACK="0").stderr == plain.stderr
    done = start(tmp_path, task, EKIBEN_TRACEBACK="1")
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert "train.py" in done.stderr
    assert done.stderr.endswith(plain.stderr)


@pytest.mark.parametrize("folder", [None, "failures"])
def test_frames_of_one_of_several_processes(tmp_path: Path, folder: str | None) -> None:
    """The launcher prints the message of the first that fails; each process prints its own frames."""
    task = (
        "from ekiben_tasks.distributed.failures import run\nfrom ekiben_tasks.task.errors import TaskError\n"
        'def main():\n    raise TaskError("it fails")\nrun(main)\n'
    )
    several = {"WORLD_SIZE": "2", "RANK": "0"}
    if folder:
        (tmp_path / folder).mkdir()
        several["EKIBEN_FAILURE_DIR"] = str(tmp_path / folder)
    message = "" if folder else "error: it fails\n"
    assert start(tmp_path, task, **several).stderr == message
    done = start(tmp_path, task, **several, EKIBEN_TRACEBACK="1")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith(f"TaskError: it fails\n{message}")


def test_copies_that_mpirun_started_on_another_node_of_a_slurm_job_are_refused(tmp_path: Path) -> None:
    """mpirun reaches it by an srun of one process, whose variables its own processes have, too."""
    by_srun = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    for rank, printed in (("0", True), ("1", False)):
        done = start(tmp_path, **by_srun, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK=rank)
        assert (done.returncode, done.stdout) == (2, "") and ("started train 2 times" in done.stderr) is printed


@pytest.mark.parametrize(("argv", "expected"), [([], False), (["--overwrite"], True), (["--fresh"], True)])
def test_former_name_of_a_flag_is_understood_with_a_warning(
    argv: list[str], expected: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    command.add_flag(parser, "--overwrite", former="--fresh", help="start again")
    assert vars(parser.parse_args(argv)) == {"overwrite": expected}
    assert ("--fresh is now --overwrite" in capsys.readouterr().err) == (argv == ["--fresh"])
    assert "--fresh" not in parser.format_help()
