"""Stop a command at each system call that names files (ptrace, Linux 5.3, x86-64), and say which path the kernel would
look up.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_LIBC.ptrace.restype = ctypes.c_long
_TRACEME, _SYSCALL, _SETOPTIONS, _GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E
_OPTIONS = 0x1 | 0x2 | 0x4 | 0x8 | 0x10 | 0x100000  # TRACESYSGOOD, FORK, VFORK, CLONE, EXEC, EXITKILL
_ENTRY, _EXIT = 1, 2
_INFO = struct.Struct("=BxxxIQQQ6Q")  # op, arch, instruction pointer, stack pointer, number, arguments
_RESULT = struct.Struct("=BxxxIQQqB")
_AT_FDCWD = -100
_LONGEST = 4096  # bytes of a path

# System call → (argument with a descriptor, or none; argument with a path) of each path that it takes.
_PATHS: dict[int, tuple[tuple[int | None, int], ...]] = {
    **dict.fromkeys((257, 258, 259, 260, 261, 262, 263, 267, 268, 269, 280, 332, 437, 439, 452), ((0, 1),)),
    **dict.fromkeys(
        (2, 4, 6, 21, 76, 80, 83, 84, 85, 87, 89, 90, 92, 94, 132, 133, 137, 188, 189, 191, 192, 235), ((None, 0),)
    ),
    **dict.fromkeys((82, 86), ((None, 0), (None, 1))),  # rename, link
    **dict.fromkeys((264, 265, 316), ((0, 1), (2, 3))),  # renameat, linkat, renameat2
    88: ((None, 1),),  # symlink
    266: ((1, 2),),  # symlinkat
}
OPENS = frozenset({2, 85, 257, 437})


@dataclass(frozen=True)
class Call:
    """A system call of the process ``pid``; ``paths``: absolute, links in them not followed."""

    pid: int
    number: int
    paths: tuple[Path, ...]


def trace_me() -> None:
    """Let the parent of this process trace it, and stop until it does."""
    assert _LIBC.ptrace(_TRACEME, 0, None, None) == 0
    os.kill(os.getpid(), signal.SIGSTOP)


def trace(pid: int, before: Callable[[Call], None], after: Callable[[Call, int], None]) -> int:
    """Run a process that called trace_me() to its end, with all that it starts, and return its exit code.

    ``before`` is called where a system call that names files begins, ``after`` with its result where it ends.
    """
    os.waitpid(pid, 0)
    _ptrace(_SETOPTIONS, pid, _OPTIONS)
    _ptrace(_SYSCALL, pid)
    running: dict[int, Call] = {}
    while True:
        stopped, status = os.waitpid(-1, 0x40000000)  # __WALL: threads, too
        if not os.WIFSTOPPED(status):
            if stopped == pid:
                return os.waitstatus_to_exitcode(status)
            continue
        number = os.WSTOPSIG(status)
        if number == signal.SIGTRAP | 0x80:
            _at_call(stopped, running, before, after)
        is_ours = number in (signal.SIGTRAP | 0x80, signal.SIGTRAP, signal.SIGSTOP)
        with contextlib.suppress(ProcessLookupError):
            _ptrace(_SYSCALL, stopped, 0 if is_ours else number)


def _at_call(
    pid: int, running: dict[int, Call], before: Callable[[Call], None], after: Callable[[Call, int], None]
) -> None:
    buffer = ctypes.create_string_buffer(_INFO.size)
    if _LIBC.ptrace(_GET_SYSCALL_INFO, pid, _INFO.size, ctypes.addressof(buffer)) < 0:
        return
    if buffer.raw[0] == _ENTRY:
        number, *arguments = _INFO.unpack(buffer.raw)[4:]
        if number in _PATHS:
            running[pid] = Call(pid, number, tuple(_paths(pid, number, arguments)))
            before(running[pid])
    elif buffer.raw[0] == _EXIT and (call := running.pop(pid, None)):
        after(call, _RESULT.unpack(buffer.raw[: _RESULT.size])[4])


def _paths(pid: int, number: int, arguments: list[int]) -> Iterator[Path]:
    for folder, path in _PATHS[number]:
        with contextlib.suppress(OSError, ValueError):
            text = _text(pid, arguments[path])
            handle = _AT_FDCWD if folder is None else ctypes.c_int(arguments[folder]).value
            base = Path(f"/proc/{pid}/cwd" if handle == _AT_FDCWD else f"/proc/{pid}/fd/{handle}").readlink()
            yield Path(os.path.normpath(os.path.join(base, text)))  # noqa: PTH118  # an absolute path replaces the base


def _text(pid: int, address: int) -> str:
    """Return the string at an address of another process. Raises OSError, ValueError where there is none."""
    if not address:
        raise ValueError("no path")
    with Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        memory.seek(address)
        data = memory.read(_LONGEST - address % _LONGEST)  # to the end of the page
        if b"\0" not in data:
            data += memory.read(_LONGEST)
    return os.fsdecode(data[: data.index(b"\0")])


def _ptrace(request: int, pid: int, data: int = 0) -> None:
    if _LIBC.ptrace(request, pid, None, data) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
