"""End a failing process of a run immediately, with one sentence that names it, without waiting for the others.

The launcher prints the sentence of the first process that fails and ends the others. A process that fails only because
another one is gone reports nothing for a while: the launcher knows the cause.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ekiben_tasks.task import command
from ekiben_tasks.task.errors import TaskError, explain_disk, print_frames

FAILURE_DIR = "EKIBEN_FAILURE_DIR"  # folder of the processes' messages for the launcher: rank-N
PATIENCE = 5.0  # seconds that a process without a cause of its own waits for the first failed one
# Messages of CUDA's libraries when an allocation outside PyTorch fails.
_OUT_OF_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
)
_PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "recvValue failed",
    "got 0 bytes",
    "remote process exited",
    "NCCL communicator was aborted",
    "Timed out waiting",
)


def run(main: Callable[[], int]) -> NoReturn:
    """Run a task's main() as command.run does, and exit; one of several processes that fails ends without clean-up.

    Destructors of process groups wait for the other processes, which wait for this one.

    Raises:
        SystemExit: with main()'s code, unless it failed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        try:
            command.run(main)
        finally:
            _destroy_single_group()
    command.silence_libraries()
    try:
        code = main()
    except SystemExit:
        raise
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:
        code = report(error)
    else:
        raise SystemExit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _destroy_single_group() -> None:
    """Destroy the process group of a run of one process: after an error NCCL's would warn that nobody has, below the
    message.
    """
    distributed = sys.modules.get("torch.distributed")  # a task without one has not imported torch
    if distributed and distributed.is_available() and distributed.is_initialized():
        with contextlib.suppress(RuntimeError):
            distributed.destroy_process_group()


def report(error: BaseException) -> int:
    """Report why this process fails, to the launcher or, where there is none, to the user; return its exit code."""
    lost = is_peer_lost(error)
    if lost or (not _has_started() and os.environ.get("RANK", "0") != "0" and FAILURE_DIR not in os.environ):
        # All processes report the same wrong setting; a process that lost another one knows no cause.
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        time.sleep(PATIENCE)
    is_explained = True
    if isinstance(error, TaskError):
        sentence, code = str(error), error.exit_code
    elif lost:
        sentence, code = f"{name_process()}: another process of the run is gone ({_one_line(error)})", 1
    elif is_out_of_memory(error):
        sentence = (
            f"{name_process()}: out of GPU memory ({_one_line(error)}); use smaller micro-batches, "
            "more GPUs, or GPUs nobody else is using"
        )
        code = 1
    elif message := explain_disk(error):
        sentence, code = f"{name_process()}: {message}", 1
    else:
        traceback.print_exception(error)
        is_explained = False
        sentence, code = f"{name_process()}: {type(error).__name__}: {_one_line(error)}", 1
    if is_explained:
        print_frames(error)
    folder = os.environ.get(FAILURE_DIR)
    try:
        if not folder:
            raise OSError
        file = Path(folder) / f"rank-{os.environ['RANK']}"
        file.with_suffix(".part").write_text(sentence, encoding="utf-8")
        file.with_suffix(".part").rename(file)
    except OSError:
        print(f"error: {sentence}", file=sys.stderr, flush=True)
    return code


def name_process() -> str:
    """Return this process's rank, host and, where it has one, GPU, for messages."""
    torch = sys.modules.get("torch")
    gpu = ""
    if torch is not None and torch.cuda.is_initialized():
        index = torch.cuda.current_device()
        gpu = f" (GPU {index}, {torch.cuda.get_device_name(index)})"
    return f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()}{gpu}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means that a GPU is out of memory, for allocations of any library."""
    if type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)


def is_retryable(error: RuntimeError) -> bool:
    """Return whether the same work can be tried again in smaller parts: not where a communicator is broken."""
    return is_out_of_memory(error) and type(error).__name__ != "DistBackendError"


def is_peer_lost(error: BaseException) -> bool:
    """Return whether ``error`` says that communication failed because another process is gone."""
    return (
        isinstance(error, RuntimeError)
        and not is_out_of_memory(error)
        and any(sign in str(error) for sign in _PEER_LOST)
    )


def _has_started() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.distributed.is_initialized())


def _one_line(error: BaseException) -> str:
    """Return the first line: below it PyTorch appends C++ frames."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
