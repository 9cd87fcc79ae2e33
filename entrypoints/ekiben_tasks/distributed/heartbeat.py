"""Report the position of this process in a run, to detect a hanging process.

A process that waits for a file system that does not answer neither fails nor ends, and all others wait for it in a
collective. Each writes where it is into a file in the folder of failures.py, which the launcher reads; under another
launcher, the processes watch each other (watch.py).
"""

from __future__ import annotations

import enum
import json
import math
import os
from pathlib import Path
from typing import TypedDict

from ekiben_tasks.distributed.failures import FAILURE_DIR

LONGEST = 3600.0  # seconds that loading, compiling and saving may take, and each wait for another process
_SIZE = 256  # bytes of the record: written as one block, so that a reader never sees a partial one


class Phase(enum.Enum):
    """Name the phases of a step in the order in which every process goes through them: (position, label)."""

    LOAD = (0, "loading")
    READ = (1, "reading its data")
    COMPUTE = (2, "forward and backward pass")
    WAIT = (3, "waiting for the other processes")
    UPDATE = (4, "updating the weights")
    EVALUATE = (5, "evaluation")
    SAVE = (6, "saving")
    ANSWER = (2, "answering")
    WRITE = (6, "writing its answers")


class Position(TypedDict):
    """Describe where a process is: ``limit`` seconds that it may stay there, and ``at`` as numbers that grow on its
    way.
    """

    limit: float
    at: list[int]
    where: str
    lockstep: bool


_current: Position | None = None


def current() -> Position | None:
    """Return the last position of this process, or None before the first one."""
    return _current


def is_watched_by_launcher() -> bool:
    """Return whether the launcher reads the positions."""
    folder = os.environ.get(FAILURE_DIR, "")
    return bool(folder) and Path(folder).is_dir()


class Heartbeat:
    """Write where this process is.

    hang_minutes: how long this process may stay at one position before the run is ended; 0: an hour.
    step: what the processes count. lockstep: whether all go through the same positions, so that the one which has come
    least far is the one that hangs; else each has its own, and a wait for the others has no limit.
    """

    def __init__(self, hang_minutes: float, *, step: str = "step", lockstep: bool = True) -> None:
        self.name, self.lockstep = step, lockstep
        self.limit, self.longest = 60 * hang_minutes or LONGEST, longest_wait(hang_minutes)
        self.file: int | None = None
        if is_watched_by_launcher():
            path = Path(os.environ[FAILURE_DIR]) / f"beat-{os.environ.get('RANK', '0')}"
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def beat(self, phase: Phase, step: int = 0, *, micro_batch: int = 0, long: bool = False) -> None:
        """Record that this process begins ``phase`` of ``step``, which is 0 before the first one.

        micro_batch: its number in the step, or that of the answers' next token. long: it may take as long as loading:
        it compiles, reads or writes a model.
        """
        global _current
        order, label = phase.value
        where = f"at {self.name} {step} ({label})" if step else f"before the first {self.name} ({label})"
        limit = self.longest if long else self.limit
        if phase is Phase.WAIT and not self.lockstep:
            limit = math.inf
        _current = {"limit": limit, "at": [step, order, micro_batch], "where": where, "lockstep": self.lockstep}
        if self.file is not None:
            os.pwrite(self.file, json.dumps(_current).encode().ljust(_SIZE), 0)


def longest_wait(hang_minutes: float) -> float:
    """Return the seconds that a long phase may take."""
    return max(LONGEST, 60 * hang_minutes if math.isfinite(hang_minutes) else 0)
