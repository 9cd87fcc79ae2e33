"""What starts jobs on a cluster. A scheduler is a module that fits one Protocol; the dict below names them all."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from builder.errors import EngineError, UsageError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a job asks for. ``words``: the options that ask for nodes and GPUs, one directive each.

    ``seconds``: walltime, ``notice``: how long before its end the job is told; ``jobs``: of an array, 0: it is none.
    ``log`` is where the scheduler's own words go.
    """

    name: str
    nodes: int
    words: Sequence[str]
    seconds: int | None
    notice: int
    jobs: int
    log: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What differs in a job script from scheduler to scheduler, as bash.

    ``job``, ``index``: the job's id and its index in an array (from 1; 0: it is in none). ``nodes``: prints their names, the
    first one first. ``start``: starts `bash "$script" node NUMBER "$nodes" "$port" "$name"` on all nodes at once; else
    ``other`` does so on one that is not the first. ``again``: puts this very job back into the queue. ``before``: first lines.
    ``tells_itself``: nobody tells the job that its time is running out. ``wait_again``: puts a job back whose turn has not come.
    """

    job: str
    index: str
    nodes: str
    again: str
    start: str = ""
    other: str = ""
    before: str = ""
    tells_itself: bool = False
    wait_again: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one queue allows; None: not known. ``where`` names it."""

    where: str
    gpus: int | None = None
    nodes: int | None = None
    seconds: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A job in the queue: ``queued``, ``running``, or ``held``. ``detail``: nodes, or why it waits."""

    state: str
    detail: str = ""


class Scheduler(Protocol):
    """As per PEP 544, ``self`` is ignored when the protocol is applied to a module."""

    PARTS: Parts
    PREFIX: str  # begins a line of the script that holds an option

    def unavailable(self) -> str | None:
        """Why nothing can be submitted from here, or None."""

    def words(self, nodes: int, gpus: int, cpus: int | None) -> Sequence[str]:
        """Options for nodes and what each has, where no site says it. Errors: UsageError."""

    def directives(self, request: Request) -> list[str]:
        """The options of a job script."""

    def limits(self, words: Sequence[str]) -> Limits:
        """What the queue that ``words`` ask for allows."""

    def submit(self, script: Path, words: Sequence[str], after: str | None) -> str:
        """The id of the job, which waits for job ``after``. Errors: SchedulerError, in the scheduler's own words."""

    def jobs(self, ids: Sequence[str]) -> Mapping[tuple[str, int], Job]:
        """(id, index in the array or 0) → those that are in the queue. Errors: SchedulerError."""

    def cancel(self, ids: Sequence[str]) -> None:
        """Errors: SchedulerError."""


SCHEDULERS = {name: f"builder.schedulers.{name}" for name in ("slurm", "sge", "pbs")}


def load(name: str) -> Scheduler:
    if name not in SCHEDULERS:
        raise UsageError(f"--scheduler: no scheduler '{name}'." + nearest(name, SCHEDULERS))
    return cast(Scheduler, import_module(SCHEDULERS[name]))


def choose() -> str:
    """The scheduler that is here. Errors: EngineError with each one's reason."""
    reasons = {name: load(name).unavailable() for name in SCHEDULERS}
    found = next((name for name, reason in reasons.items() if reason is None), None)
    if found is None:
        raise EngineError("no scheduler can be used here:\n" + "\n".join(f"  {name}: {why}" for name, why in reasons.items()),
                          hint="submit on a login node of the cluster; `--scheduler NAME --dry-run` writes a script anywhere")  # fmt: skip
    return found


_TIMES = re.compile(r"(?:(?P<d>\d+)-)?(?P<h>\d+):(?P<m>[0-5]?\d)(?::(?P<s>[0-5]?\d))?")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_of(text: str) -> int:
    """``2:00:00``, ``1-12:00:00``, ``90m``, ``2h``, ``3d`` → seconds. Errors: UsageError."""
    if found := re.fullmatch(r"(\d+)([smhd])", text):
        seconds = int(found[1]) * _UNITS[found[2]]
    elif found := _TIMES.fullmatch(text):
        days, hours, minutes, rest = (int(found[name] or 0) for name in "dhms")
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
        if found["d"] is None and found["s"] is None:
            raise UsageError(f"--time {text}: hours and minutes, or minutes and seconds, as Slurm has it? Write "
                             f"{hours}:{minutes:02}:00, or {hours}m")  # fmt: skip
    else:
        seconds = 0
    if not seconds:
        raise UsageError(f"--time {text}: expected H:MM:SS, D-HH:MM:SS, or a number with m, h or d: 1:30:00, 90m")
    return seconds


def clock(seconds: int) -> str:
    """H:MM:SS, which all three schedulers read; hours may be more than 24."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
