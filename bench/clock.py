"""How a command is timed: wall time, peak memory of the process itself, and its words kept as they were run."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """``synced``: the clock stops when all that was written is on the disk."""

    argv: Sequence[str]
    cwd: Path
    env: Mapping[str, str] = field(default_factory=dict)
    synced: bool = False

    def __str__(self) -> str:
        words = [*(f"{name}={shlex.quote(value)}" for name, value in self.env.items()), shlex.join(self.argv)]
        return " ".join(words) + (" && sync" if self.synced else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One way to do one case. ``seconds`` has every single run; ``peak_kib`` is of the first process, children apart."""

    case: str
    who: str
    commands: list[str]
    seconds: list[float]
    peak_kib: int = 0
    about: dict[str, object] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Failed(Exception):
    """A command failed; the message has its words and its last lines."""


def run(command: Command, log: Path) -> tuple[float, int, str]:
    """Seconds, peak KiB of the process itself, and its stdout. What was written before is first brought to the disk."""
    os.sync()
    with log.open("ab") as errors:
        errors.write(f"\n+ {command}\n".encode())
        errors.flush()
        began = time.monotonic()
        child = subprocess.Popen(list(command.argv), cwd=command.cwd, env=environment() | dict(command.env),
                                 stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)  # fmt: skip
        watched = _Watch(child.pid)
        out, _ = child.communicate()
        if command.synced:
            os.sync()
        seconds = time.monotonic() - began
        errors.write(out)
    if child.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        raise Failed(f"exit code {child.returncode}: {command}\n{tail}\nthe whole log: {log}")
    peak = watched.stop()
    if watched.stopped:
        raise Failed(f"the clock stood still for {watched.stopped:.0f} s, so this timing is worth nothing: {command}")
    return seconds, peak, out.decode(errors="replace")


def environment() -> dict[str, str]:
    """As an ordinary user has it: Python may write its .pyc files, and no setting of Ekiben or a runtime is inherited."""
    ours = ("PYTHONDONTWRITEBYTECODE", "EKIBEN", "APPTAINER", "SINGULARITY", "DOCKER", "BUILDAH")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


class _Watch:
    """Reads VmHWM, which only grows, until the process is gone: rusage would count the children in."""

    def __init__(self, pid: int) -> None:
        self._status, self._peak, self._end = Path(f"/proc/{pid}/status"), 0, threading.Event()
        self.stopped = 0.0  # seconds in which we ourselves stood still (SIGSTOP, a suspended machine)
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
    case: str, who: str, commands: Sequence[Command], log: Path, *,
    runs: int = 1, before: Callable[[], object] = lambda: None,
) -> tuple[Timing, str]:  # fmt: skip
    """The commands one after the other, ``runs`` times; ``before`` each time, untimed. Also returns the last stdout."""
    seconds, peak, out = list[float](), 0, ""
    for _ in range(runs):
        before()
        total = 0.0
        for number, command in enumerate(commands):
            took, most, out = run(command, log)
            total, peak = total + took, max(peak, most) if number == 0 else peak
        seconds.append(round(total, 3))
    return Timing(case=case, who=who, commands=[str(item) for item in commands], seconds=seconds, peak_kib=peak), out
