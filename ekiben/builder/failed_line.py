"""Find the line of a %post that failed, without changing what the script does.

dash and busybox, the /bin/sh of most bases, cannot say it: they have no ERR trap, and often no $LINENO. They read a
script that is a pipe as far as the next complete command, and then run it: so the script is passed to them line by
line, and the last line that was read ends the command that failed. The file is still there, as ``$0``. bash reads a
script as a whole; its ERR trap writes the line. The exit code, the options and the output of the script stay as they
are.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shlex
import struct
import termios
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ekiben.core.checked import read_regular
from ekiben.core.paths import BUILD_MOUNT
from ekiben.core.process import run
from ekiben.executors import FEED, SOURCED, FailedCommand, JobFailed
from ekiben.formats.placement import real_path

if TYPE_CHECKING:
    from ekiben.formats.changeset import Lower

_TRAP, _FAILED = "trap.sh", "failed"
_LINE_BY_LINE = ("dash", "busybox", "ash")  # programs of /bin/sh that read a pipe as they run it
_PAGE = 4096  # bytes of the smallest pipe: it is writable when the shell has read the last line
_WAIT_MS = 100
_OPEN_SECONDS = 0.005  # between looks whether the shell has opened the pipe
_MOST, _MOST_SCRIPT = 1 << 16, 1 << 30  # bytes of a report, and of a script
_TRIES = 400  # lines back to the beginning of a command


def shell_of(below: Lower) -> str:
    """Return the name of the program that is /bin/sh in the layers below: its links are followed."""
    return real_path("bin/sh", below, follow_last=True).rpartition("/")[2]


class ScriptWatch:
    """A context in which a script of ``mount`` runs by ``command``: a JobFailed that leaves it has the command that
    failed, where it is known.

    ``shell`` is what /bin/sh is there; ``has_bash_env``: the script has a BASH_ENV of its own.
    """

    def __init__(self, mount: Path, shell: str, command: str, *, has_bash_env: bool = False) -> None:
        self._mount, self._count, self._stop = mount, 0, threading.Event()
        self._lines: list[bytes] = []
        self._is_cut = False  # the shell cannot have the last line that was passed to it as a whole
        self._handle = -1
        self._thread: threading.Thread | None = None
        program = Path(command.split()[0]).name if command else ""
        self.is_fed = command == SOURCED and shell in _LINE_BY_LINE
        self.is_trapped = not has_bash_env and (program == "bash" or (command == SOURCED and shell == "bash"))
        self.command = command
        if self.is_fed:
            feed = f"/{BUILD_MOUNT}/{FEED}"
            self.command = f"if [ -p {feed} ]; then . {feed}; else {SOURCED}; fi"
        elif self.is_trapped and command == SOURCED:
            self.command = f". /{BUILD_MOUNT}/{_TRAP}; {SOURCED}"
        elif self.is_trapped:
            self.command = f"BASH_ENV=/{BUILD_MOUNT}/{_TRAP} {command}"

    def __enter__(self) -> Self:
        self._lines = read_regular(self._mount / "post.sh", max_size=_MOST_SCRIPT).splitlines(keepends=True)
        if self.is_trapped:
            (self._mount / _TRAP).write_text(_trap_for(b"".join(self._lines)), encoding="utf-8")
        if self.is_fed and self._lines:
            with contextlib.suppress(OSError):  # a file system without pipes: the script is read as a file
                self._open()
        return self

    def _open(self) -> None:
        os.mkfifo(self._mount / FEED, 0o600)
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self._thread.start()

    def _connect(self) -> bool:
        """Open the pipe when the shell does, and remove its name: a command that reads all files would wait for ever
        on it, or take lines of the script. Return False when the script has ended.
        """
        writer = -1
        while writer < 0 and not self._stop.wait(_OPEN_SECONDS):
            with contextlib.suppress(OSError):  # nobody reads it yet
                writer = os.open(self._mount / FEED, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        if writer >= 0:
            # For reading, too: so it stays a pipe when the shell has ended.
            self._handle = os.open(self._mount / FEED, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            os.close(writer)
            fcntl.fcntl(self._handle, fcntl.F_SETPIPE_SZ, _PAGE)
        with contextlib.suppress(OSError):
            (self._mount / FEED).unlink()
        return writer >= 0

    def _feed(self) -> None:
        """Write each line when the shell has read the one before."""
        if not self._connect():
            return
        for line in self._lines:
            if not self._wait_until_read():
                return
            self._count, self._is_cut = self._count + 1, True
            rest = memoryview(line)
            while rest:
                if not self._wait_until_read():
                    return
                rest = rest[os.write(self._handle, rest[:_PAGE]) :]
            self._is_cut = False
        if self._wait_until_read():
            self._close()

    def _wait_until_read(self) -> bool:
        """Wait until the pipe is empty. Return False when the script has ended."""
        poll = select.poll()
        poll.register(self._handle, select.POLLOUT)
        while not self._stop.is_set():
            if poll.poll(_WAIT_MS):
                return True
        return False

    def _close(self) -> None:
        if (handle := self._handle) >= 0:
            self._handle = -1
            os.close(handle)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = self.failed() if isinstance(error, JobFailed) else None
        self._end()
        if isinstance(error, JobFailed) and error.command is None:
            error.command = failed

    def _end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._close()

    def failed(self) -> FailedCommand | None:
        """Return the command that failed, once the script has ended; None where it is not known."""
        if self.is_trapped:
            return self._reported()
        if self._thread is None:
            return None
        self._stop.set()
        self._thread.join()
        pending = 0
        if self._handle >= 0:
            pending = struct.unpack("i", fcntl.ioctl(self._handle, termios.FIONREAD, bytes(4)))[0]
        last = self._count - (1 if pending or self._is_cut else 0)
        lines = [line.decode("utf-8", "replace") for line in self._lines[:last]]
        if not lines:
            return None
        first = _first_of(lines)
        return FailedCommand(first + 1, "".join(lines[first:]).strip("\n"))

    def _reported(self) -> FailedCommand | None:
        try:
            report = read_regular(self._mount / _FAILED, max_size=_MOST).decode("utf-8", "replace")
        except (OSError, ValueError):
            return None
        number, _, rest = report.partition("\n")
        source, _, rest = rest.partition("\n")
        if source != f"/{BUILD_MOUNT}/post.sh" or not number.isdecimal() or int(number) > len(self._lines):
            return None
        return FailedCommand(int(number), rest.strip("\n"), is_last_failure=True)


def _trap_for(text: bytes) -> str:
    """Return the commands that set the trap. Its last argument is $_: so the trap leaves it as it was.

    Functions and subshells have it only by -E, which a trap or a look at $- of the script's own would notice.
    """
    fields = '"$LINENO" "${BASH_SOURCE[0]-}" "$BASH_COMMAND" "$_"'
    report = f'{{ builtin printf "%s\\n%s\\n%s\\n%.0s" {fields} >|/{BUILD_MOUNT}/{_FAILED}; }} 2>/dev/null'
    inherited = "" if b"trap" in text or b"$-" in text or b"errtrace" in text else "set -E\n"
    return f"unset BASH_ENV\n{inherited}trap {shlex.quote(report)} ERR\n"


def _first_of(lines: Sequence[str]) -> int:
    """Return the index of the first line of the command that the last one ends, without remarks above it.

    The shell of this machine reads the lines above, and runs nothing of them.
    """
    first = 0
    for end in range(len(lines) - 1, max(0, len(lines) - _TRIES), -1):
        if _is_complete("".join(lines[:end])):
            first = end
            break
    while first < len(lines) - 1 and (not lines[first].strip() or lines[first].lstrip().startswith("#")):
        first += 1
    return first


def _is_complete(text: str) -> bool:
    """Return whether a new command would begin after ``text``: it can be read, and nothing continues it."""
    if run(["/bin/sh", "-n"], input=text, check=False).returncode:
        return False
    return run(["/bin/sh", "-n"], input=f"{text}&& :\n", check=False).returncode != 0
