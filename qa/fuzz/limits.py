"""What a parser may take while it reads foreign bytes: 2 s of processor time, 200 MB, and no file or program of
others.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECONDS, BYTES = 2.0, 200 << 20
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# event → where its paths are among its arguments, and where the folder that a path is relative to
_CHANGES: dict[str, tuple[tuple[int, ...], int]] = {
    "os.mkdir": ((0,), 2),
    "os.rename": ((0, 1), 2),
    "os.remove": ((0,), 1),
    "os.rmdir": ((0,), 1),
    "os.symlink": ((1,), 2),
    "os.link": ((1,), 3),
    "os.chmod": ((0,), 2),
    "os.chown": ((0,), 3),
    "os.truncate": ((0,), -1),
}
_STARTS = {"subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.fork"}
_allowed: Path | None = None  # the folder that may be written, while a parser runs
_forbidden: list[str] = []


class TooLong(BaseException):
    """No ``except Exception`` of a parser takes it for a broken file."""


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _allowed is None:
        return
    if event in _STARTS:
        _forbidden.append(f"{event}: {arguments!r:.200}")
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
        paths, folder = _CHANGES["os.truncate"]
    elif event in _CHANGES:
        paths, folder = _CHANGES[event]
    else:
        return
    base = arguments[folder] if folder >= 0 else _folder_of_open() if event == "open" else -1
    for path in (arguments[number] for number in paths):
        if isinstance(path, str | bytes | os.PathLike) and not _is_allowed(os.fsdecode(path), base):
            _forbidden.append(f"{event}: {path!r}")


def _folder_of_open() -> int:
    """Return the descriptor that the name of an "open" is relative to, of which the event says nothing; -1 for none."""
    names = sys._getframe(2).f_locals
    return int(getattr(names.get("self", names.get("folder")), "handle", -1))


def _is_allowed(path: str, base: int) -> bool:
    assert _allowed is not None
    folder = Path.cwd() if base < 0 else Path(f"/proc/self/fd/{base}").readlink()
    absolute = Path(os.path.normpath(folder / path))
    return absolute.is_relative_to(_allowed) or absolute.is_relative_to("/dev") or absolute.suffix == ".pyc"


sys.addaudithook(_watch)  # one for good: Python has no way to take it away


@contextlib.contextmanager
def limited(folder: Path) -> Iterator[None]:
    """Fail with TooLong, MemoryError or AssertionError when the block takes too much, or writes outside ``folder``."""
    global _allowed
    before, handler = resource.getrlimit(resource.RLIMIT_DATA), signal.signal(signal.SIGPROF, _too_long)
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    _forbidden.clear()
    resource.setrlimit(resource.RLIMIT_DATA, (pages * resource.getpagesize() + BYTES, before[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    _allowed = folder.absolute()
    try:
        yield
    finally:
        _allowed = None
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, before)
        signal.signal(signal.SIGPROF, handler)
    assert not _forbidden, _forbidden


def _too_long(signum: int, frame: object) -> None:
    raise TooLong(f"more than {SECONDS} s of processor time")
