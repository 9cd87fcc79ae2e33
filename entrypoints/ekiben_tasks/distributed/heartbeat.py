"""Tell the launcher where this process of a run is, so that it can end a run in which one of them hangs.

A process that waits for a file system that does not answer neither fails nor ends, and all others wait for it in a
collective. Each writes where it is into a file in the folder of failures.py; the launcher reads these files.
"""

from __future__ import annotations

import enum
import json
import math
import os
from pathlib import Path

from ekiben_tasks.distributed.failures import FAILURE_DIR

LONGEST = 3600.0  # seconds that loading, compiling and saving may take, and each wait for another process
_SIZE = 256  # bytes of the record: written as one block, so that no reader finds half of two


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


class Heartbeat:
    """Write where this process is. Does nothing without a launcher that asks for it.

    hang_minutes: how long this process may stay at one position before the launcher ends the run; 0: an hour.
    step: what the processes count. lockstep: whether all go through the same positions, so that the one which has come
    least far is the one that hangs; else each has its own, and a wait for the others has no limit.
    """

    def __init__(self, hang_minutes: float, *, step: str = "step", lockstep: bool = True) -> None:
        self.name, self.lockstep = step, lockstep
        self.limit, self.longest = 60 * hang_minutes or LONGEST, longest_wait(hang_minutes)
        folder = os.environ.get(FAILURE_DIR, "")
        self.file: int | None = None
        if Path(folder).is_dir() and folder:
            path = Path(folder) / f"beat-{os.environ.get('RANK', '0')}"
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def beat(self, phase: Phase, step: int = 0, *, micro_batch: int = 0, long: bool = False) -> None:
        """Record that this process begins ``phase`` of ``step``, which is 0 before the first one.

        micro_batch: its number in the step, or that of the answers' next token. long: it may take as long as loading: it compiles, reads or writes a model.
        """
        if self.file is None:
            return
        order, label = phase.value
        where = f"at {self.name} {step} ({label})" if step else f"before the first {self.name} ({label})"
        limit = self.longest if long else self.limit
        if phase is Phase.WAIT and not self.lockstep:
            limit = math.inf
        record = {"limit": limit, "at": [step, order, micro_batch], "where": where, "lockstep": self.lockstep}
        os.pwrite(self.file, json.dumps(record).encode().ljust(_SIZE), 0)


def longest_wait(hang_minutes: float) -> float:
    """Return the seconds that a long phase may take."""
    return max(LONGEST, 60 * hang_minutes if math.isfinite(hang_minutes) else 0)
