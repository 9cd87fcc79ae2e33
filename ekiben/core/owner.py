"""Temporary paths that name their process: those of killed processes are removed, those in use are kept.

A process id is valid within one PID namespace only: of two containers with one host name, each would take the other's
processes for dead. So the process locks a file beside each temporary path. The lock is visible in every namespace of a
machine, and on other machines where the file system has locks. Without locks, the process id decides.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

from ekiben.core.folder import Folder
from ekiben.core.inner_path import InnerPath

_LOCK = "lock"


class Owner:
    """Temporary paths of this process in ``folder``: HOST__PID-TOKEN__…, or HOST__PID__… without locks."""

    def __init__(self, folder: InnerPath) -> None:
        self.folder = folder
        self._token = secrets.token_hex(4)
        self._guard = threading.Lock()
        self._count, self._process, self._handle = 0, 0, -1

    @contextlib.contextmanager
    def active(self) -> Iterator[str]:
        """Yield a prefix of names; until the block ends, paths with it are in use."""
        with self._guard:
            if self._process != os.getpid():  # a forked child is a different owner
                self._process, self._count, self._handle = os.getpid(), 0, -1
                self._token = secrets.token_hex(4)
            if self._count == 0:
                self._handle = _hold(self.folder, f"{self._locked_prefix}{_LOCK}")
            self._count += 1
            prefix = self._locked_prefix if self._handle >= 0 else _unlocked_prefix()
        try:
            yield prefix
        finally:
            with self._guard:
                self._count -= 1
                if self._count == 0 and self._handle >= 0:
                    with contextlib.suppress(OSError):
                        (self.folder / f"{self._locked_prefix}{_LOCK}").remove()
                    os.close(self._handle)
                    self._handle = -1

    def has_prefix(self, name: str) -> bool:
        """Return whether ``name`` begins with one of the prefixes."""
        return name.startswith((self._locked_prefix, _unlocked_prefix()))

    @property
    def _locked_prefix(self) -> str:
        return f"{os.uname().nodename}__{os.getpid()}-{self._token}__"


def is_abandoned(folder: Folder, name: str) -> bool:
    """Return whether the process of this host that created ``name``, as an Owner names entries, has ended."""
    host, process, *_ = [*name.split("__"), ""]
    pid, _, token = process.partition("-")
    if host != os.uname().nodename or not pid.isdigit():
        return False
    if token:
        with contextlib.suppress(OSError):
            return not _is_held(folder, f"{host}__{process}__{_LOCK}")
    return not Path("/proc", pid).exists()


def remove_lock(folder: Folder, name: str) -> bool:
    """Remove an abandoned owner's lock file; False when ``name`` is none. Raises OSError."""
    if not name.endswith(f"__{_LOCK}"):
        return False
    with folder.open_file(name) as stream:
        # Only while locked: otherwise a new owner would keep a lock on a file without a name.
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(stream.fileno()), folder.status(name)):
            folder.remove(name)
    return True


def _hold(staging: InnerPath, name: str) -> int:
    """Return the handle of a lock on the file ``name``, or -1 where there is none."""
    with contextlib.suppress(OSError), staging.open_folder() as folder:
        for _ in range(9):
            handle = folder.open_lock(name)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                if _is_same(handle, folder, name):  # else another process thought it abandoned, and removed it
                    return handle
            except OSError:  # this file system has no locks
                os.close(handle)
                folder.remove(name)
                return -1
            os.close(handle)
    return -1


def _is_held(folder: Folder, name: str) -> bool:
    try:
        with folder.open_file(name) as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _is_same(handle: int, folder: Folder, name: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), folder.status(name))
    return False


def _unlocked_prefix() -> str:
    return f"{os.uname().nodename}__{os.getpid()}__"
