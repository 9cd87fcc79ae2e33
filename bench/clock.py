"""Time a command: wall time, the peak memory of the process itself, and the command line as it was run."""

from __future__ import annotations

import os
import shlex
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command line, its folder and its own environment variables.

    ``synced``: the clock stops when all that was written is on the disk.
    """

    argv: Sequence[str]
    cwd: Path
    env: Mapping[str, str] = field(default_factory=dict)
    synced: bool = False

    def __str__(self) -> str:
        argv = [*(f"{name}={shlex.quote(value)}" for name, value in self.env.items()), shlex.join(self.argv)]
        return " ".join(argv) + (" && sync" if self.synced else "")


class About(TypedDict, total=False):
    """``base``: seconds of the base layer that a peer was given.

    ``load``: the machine's load average before the first run.
    """

    base: float
    load: float
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One way to do one case.

    ``seconds`` has every single run; ``peak_kib`` is of the first process without its children.
    """

    case: str
    who: str
    commands: list[str]
    seconds: list[float]
    peak_kib: int = 0
    about: About = field(default_factory=About)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Failed(Exception):
    """A command failed; the message has the command line and the last lines of its log."""


def run(command: Command, log: Path) -> tuple[float, int, str]:
    """Run ``command`` and append its output to ``log``.

    Earlier writes are flushed to the disk first, outside the timing.

    Returns: seconds, the peak KiB of the process itself, its stdout.
    Raises: Failed when it ends with another exit code than 0, or when this process was stopped meanwhile.
    """
    os.sync()
    with log.open("ab") as errors:
        errors.write(f"\n+ {command}\n".encode())
        errors.flush()
        began = time.monotonic()
        child = subprocess.Popen(
            list(command.argv),
            cwd=command.cwd,
            env=environment() | dict(command.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        watched = _Watch(child.pid)
        try:
            out, _ = child.communicate()
            if command.synced:
                os.sync()
            seconds = time.monotonic() - began
        finally:
            child.terminate()  # after Ctrl-C it removes what it has begun; a process that has ended gets no signal
            child.wait()
            peak = watched.stop()
        errors.write(out)
    if child.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        raise Failed(f"exit code {child.returncode}: {command}\n{tail}\nthe whole log: {log}")
    if watched.stopped:
        raise Failed(f"the clock stood still for {watched.stopped:.0f} s, so this timing is worth nothing: {command}")
    return seconds, peak, out.decode(errors="replace")


def environment() -> dict[str, str]:
    """Return an ordinary user's environment: Python may write .pyc files; no setting of Ekiben or a runtime is
    inherited.
    """
    dropped = ("PYTHONDONTWRITEBYTECODE", "EKIBEN", "APPTAINER", "SINGULARITY", "DOCKER", "BUILDAH")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


class _Watch:
    """Read VmHWM, which only grows, until the process has ended: rusage would include the children."""

    def __init__(self, pid: int) -> None:
        self._status, self._peak, self._end = Path(f"/proc/{pid}/status"), 0, threading.Event()
        self.stopped = 0.0  # seconds in which this process did not run (SIGSTOP, a suspended machine)
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        last = time.monotonic()
        while not self._end.wait(0.02):
            now = time.monotonic()
            self.stopped, last = self.stopped + (now - last if now - last > 2 else 0), now
            try:
                lines = self._status.read_text().splitlines()
            except OSError:
                return
            self._peak = max([self._peak, *(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))])

    def stop(self) -> int:
        self._end.set()
        self._thread.join()
        return self._peak


def measure(
    case: str,
    who: str,
    commands: Sequence[Command],
    log: Path,
    *,
    runs: int = 1,
    before: Callable[[], object] = lambda: None,
) -> tuple[Timing, str]:
    """Time ``commands`` one after the other, ``runs`` times; ``before`` is called before each run and is not timed.

    Returns: the timing, and the stdout of the last command.
    """
    seconds, peak, out = list[float](), 0, ""
    for _ in range(runs):
        before()
        total = 0.0
        for number, command in enumerate(commands):
            took, most, out = run(command, log)
            total, peak = total + took, max(peak, most) if number == 0 else peak
        seconds.append(round(total, 3))
    return Timing(case=case, who=who, commands=[str(item) for item in commands], seconds=seconds, peak_kib=peak), out
