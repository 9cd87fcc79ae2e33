"""The runner of a published image's commands, with a runtime that only notes how it was called."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ekiben.run.contract import COMPILED_CODE
from ekiben.run.modulefile import command_files
from support.programs import write_program

Call = Callable[..., tuple[list[str], dict[str, str]]]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """Run the command `greet` with arguments and variables: (binds, what is passed on)."""
    for name in ("bin", "mine-1.bin", "local", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine-1.sif").touch()
    write_program(tmp_path / "bin/apptainer", '#!/bin/sh\nfor word in "$@"; do echo "$word"; done\necho --- && env\n')
    for name, text in command_files("mine", "mine-1", ["greet"]).items():
        write_program(tmp_path / "mine-1.bin" / name, text)

    def run(*args: str, **environment: str) -> tuple[list[str], dict[str, str]]:
        settings = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "TMPDIR": str(tmp_path / "local"), **environment}
        done = subprocess.run(
            [tmp_path / "mine-1.bin/greet", *args],
            cwd=tmp_path / "here",
            env=settings,
            capture_output=True,
            text=True,
            check=True,
        )
        argv, _, variables = done.stdout.partition("---\n")
        assert {"APPTAINER_NO_EVAL=1", "SINGULARITY_NO_EVAL=1"} <= {*variables.splitlines()}
        lines = argv.splitlines()
        pairs = [line.split("=", 1) for line in variables.splitlines() if line.startswith("APPTAINERENV_")]
        binds = [lines[at + 1] for at, word in enumerate(lines) if word == "--bind"]
        return sorted(binds), {name.removeprefix("APPTAINERENV_"): value for name, value in pairs}

    return run


def test_commands_hold_no_text_of_a_recipe() -> None:
    assert command_files("mine", "mine-1", ["greet"])["greet"] == '#!/bin/sh\nexec "${0%/*}/ekiben-mine" greet "$@"\n'


def test_targets_of_links_are_bind_mounted(call: Call, tmp_path: Path) -> None:
    for name in ("deep", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "deep/talk.jsonl").touch()
    (tmp_path / "data/talk.jsonl").symlink_to("../deep/talk.jsonl")
    (tmp_path / "here/link.jsonl").symlink_to(tmp_path / "data/talk.jsonl")
    (tmp_path / "here/loop").symlink_to("loop")
    for arguments in (("--data", "./link.jsonl", "--more=./loop"), ("link.jsonl",), ("--set", "data=link.jsonl")):
        binds, _ = call(*arguments)
        assert binds == [str(tmp_path / name) for name in ("data", "deep", "here", "local")], arguments
    (tmp_path / "here/linked").mkdir()
    (tmp_path / "here/linked/talk.jsonl").symlink_to(tmp_path / "deep/talk.jsonl")
    for arguments in (("--data", "linked"), ("--data=./linked",), ("--set", "data=../here/linked/")):
        assert call(*arguments)[0] == [str(tmp_path / name) for name in ("deep", "here", "local")], arguments


@pytest.mark.parametrize("mode", [0o777, 0o770, None])
def test_compiled_code_is_never_in_a_folder_that_others_can_write(call: Call, tmp_path: Path, mode: int | None) -> None:
    _, passed = call()
    assert not passed.keys() & set(COMPILED_CODE)
    folder = tmp_path / f"local/ekiben-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    if mode is None:
        folder.rmdir()
        folder.symlink_to(tmp_path)
    else:
        folder.chmod(mode)
    private, shared = tmp_path / "own", tmp_path / "shared"
    private.mkdir(mode=0o755)
    shared.mkdir()
    shared.chmod(0o777)
    _, passed = call(TRITON_CACHE_DIR=str(private), CUDA_CACHE_PATH=str(shared))
    assert passed["TRITON_CACHE_DIR"] == str(private)
    for name in ("CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR"):
        assert Path(passed[name]).parent.parent == tmp_path / "local"
        assert Path(passed[name]).parent.stat().st_mode & 0o777 == 0o700


SEVERAL: list[dict[str, str]] = [
    {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "{rank}"},
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "{rank}"},
    {"PMI_SIZE": "2", "PMI_RANK": "{rank}"},
    # mpirun in a job of Slurm reaches each further node by an srun of its own, whose variables its processes have, too.
    {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "{rank}"},
]


@pytest.mark.parametrize("variables", SEVERAL, ids=["srun", "Open MPI", "MPICH", "Open MPI by srun"])
def test_a_task_started_several_times_at_once_is_refused(call: Call, tmp_path: Path, variables: dict[str, str]) -> None:
    settings = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    for rank, message in ((0, "ekiben-mine: srun or mpirun started greet 2 times"), (1, "")):
        rank_env = {name: value.format(rank=rank) for name, value in variables.items()}
        done = subprocess.run(
            [tmp_path / "mine-1.bin/greet"], env=settings | rank_env, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(message)
        for allowed in ({"WORLD_SIZE": "2"}, {"EKIBEN_INDEPENDENT": "1"}):
            call(**rank_env, **allowed)
    # A job of several tasks whose script starts one; and a program that is none of the image's tasks.
    call(SLURM_NTASKS="2", SLURM_PROCID="0")
    command = [tmp_path / "mine-1.bin/ekiben-mine", "bash"]
    subprocess.run(command, env=settings | variables, capture_output=True, check=True)
