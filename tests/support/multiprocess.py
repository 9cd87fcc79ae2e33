"""What tests of tasks share: several processes of one run, as torchrun would start them, as forks of this one (so that
not each imports torch again), and an environment that is afterwards as it was."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from support import forkserver
from support.ports import free_port


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """The tasks set cache folders for the libraries they start; each test of a module that imports this starts from
    what was there.
    """
    saved = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(saved)


def launcher(name: str, size: int, patience: float, *nodes: str) -> list[str]:
    """Return the command line before a program, of which ``size`` processes are started. nodes: more options of
    torchrun.
    """
    if name == "torchrun":
        where = nodes or ("--master-port", str(free_port()))
        return [
            forkserver.python(),
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(size),
            *where,
            "--no-python",
        ]
    script = Path(__file__).resolve().parents[2] / "entrypoints" / "launch_node.py"
    return [forkserver.python(), str(script), "--processes", str(size), "--patience", str(patience), "--"]


def start(
    size: int, log: Path, work: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None, **kwargs: Any
) -> list[Any]:
    """``work(*args)`` in ``size`` processes that find each other; what each prints is in ``log``-RANK."""
    port = free_port()
    processes = []
    context = multiprocessing.get_context("fork")
    for rank in range(size):
        # One thread each: after a fork the other threads of OpenMP and of the tokenizers are gone, and nobody tells
        # them.
        rank_env = {
            "OMP_NUM_THREADS": 1,
            "TOKENIZERS_PARALLELISM": "false",
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        variables = {**{name: str(value) for name, value in rank_env.items()}, **(env or {})}
        output = Path(f"{log}-{rank}")
        processes.append(context.Process(target=_run, args=(variables, output, work, args, kwargs)))
        processes[-1].start()
    return processes


def wait(processes: list[Any], seconds: float = 120) -> list[int]:
    """Exit codes. Processes that have not ended after ``seconds`` are killed, and count as None."""
    codes = []
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
        codes.append(process.exitcode)
    for process in processes:  # only now: the others would fail for its connection
        if process.exitcode is None:
            process.kill()
    return codes


def read_logs(log: Path, size: int = 2) -> str:
    """Return what all processes printed, for the message of a test that fails."""
    return "\n----\n".join(Path(f"{log}-{rank}").read_text(encoding="utf-8") for rank in range(size))


def run(size: int, log: Path, work: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """All of it; what the first process printed. Fails where one of them did."""
    codes = wait(start(size, log, work, *args, **kwargs))
    assert codes == [0] * size, f"exit codes {codes}\n{read_logs(log, size)}"
    return Path(f"{log}-0").read_text(encoding="utf-8")


def times_of(word: str, output: str) -> list[float]:
    """Return the times that processes wrote after ``word``, wherever they stand between what others print.

    An image sets PYTHONUNBUFFERED: print() writes each of its words and the end of the line on its own.
    """
    return [float(seconds) for seconds in re.findall(rf"{word} (\d+\.\d+)", output)]


def group_timeouts() -> set[str]:
    """How long the collectives of this process's groups wait, also of those that libraries have made."""
    import torch
    from torch.distributed import distributed_c10d

    backends = [group._get_backend(torch.device("cpu")) for group in distributed_c10d._world.pg_map]
    return {str(backend.options._timeout) for backend in backends}


def _run(
    variables: dict[str, str], output: Path, work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    import torch

    os.environ.update(variables)
    torch.set_num_threads(1)
    with output.open("w", encoding="utf-8", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            try:
                code = work(*args, **kwargs)
            except Exception:  # into this process's log: a failed test shows which one failed first, and why
                traceback.print_exc()
                print(f"failed {time.time():f}", flush=True)
                raise
    sys.exit(code or 0)
