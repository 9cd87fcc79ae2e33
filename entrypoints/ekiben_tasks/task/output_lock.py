"""One run at a time writes to an output folder, or a file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.files import ensure_output_dir

NAME = ".lock"


@contextlib.contextmanager
def claim_output(folder: Path) -> Iterator[None]:
    """Create ``folder`` and hold it for this run, as lock_output() does.

    A run that fails before it has written anything leaves no folder that it created.

    Raises:
        TaskError: it cannot be written, or another run writes there.
    """
    is_new = not folder.exists()
    ensure_output_dir(folder)
    with lock_output(folder):
        try:
            yield
        except BaseException:
            if is_new and [file.name for file in folder.iterdir()] == [NAME]:
                (folder / NAME).unlink()
                with contextlib.suppress(OSError):  # another process of the run is writing
                    folder.rmdir()
            raise


@contextlib.contextmanager
def lock_output(output: Path) -> Iterator[None]:
    """Hold a folder, or a file that is to be written, for this run; the kernel lets go of it when the process ends,
    however it ends.

    The main process alone holds it. A file system without locks is used without one.

    Raises:
        TaskError: another run writes there.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    lock = output / NAME if output.is_dir() else output.with_name(f".{output.name}{NAME}")
    with lock.open("a+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not lock.exists() or not os.path.samestat(lock.stat(), os.fstat(file.fileno())):
                raise BlockingIOError(errno.EWOULDBLOCK, "removed by the run that held it")
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                file.seek(0)
                holder = file.read(1000).decode(errors="replace").strip() or "unknown process"
                raise TaskError(
                    f"{output.absolute()}: another run writes there ({holder}); wait for it, end it, or give another"
                    " --output"
                ) from None
        with contextlib.suppress(OSError):  # a full disk has no room for the name, and still a lock
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        try:
            yield
        finally:
            if (
                lock.parent != output
            ):  # remove the lock beside a file; a process that has opened it meanwhile is refused
                lock.unlink(missing_ok=True)
