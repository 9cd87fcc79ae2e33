"""End a run in which a process hangs, where the launcher does not: under torchrun, accelerate launch or srun.

A thread of each process writes the process's position (heartbeat.py) into the store through which the processes have
met. One whose process has not moved for longer than it may reads all positions, prints which process is behind, and has
all end.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ekiben_tasks.distributed import heartbeat
from ekiben_tasks.distributed.heartbeat import Position

PAUSE = 5.0  # seconds between checks
TAKE_OVER = 30.0  # seconds after which another process reports a hang, if the first did not
_END, _REPORTER = "end", "reporter"  # keys of the store


@dataclass(frozen=True, slots=True)
class Sign:
    """Hold the last record of a process: ``looks`` grows every ``pause`` seconds while its watch
    runs.
    """

    position: Position
    host: str
    waits_for_disk: bool
    pause: float
    looks: int


class Watch:
    """Watch this process, and end it when one of the run hangs.

    store: a connection to torch's store that nothing else uses: a wait of another thread would block it.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ekiben-watch", daemon=True)

    def start(self) -> None:
        """Start the thread. It ends before the interpreter does."""
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the watch of this process, also for the other processes."""
        atexit.unregister(self.stop)
        self._stopped.set()
        self._thread.join(PAUSE)
        with contextlib.suppress(RuntimeError):
            self.store.delete_key(f"at-{self.rank}")

    def _run(self) -> None:
        position: Position | None = None
        silent = 0.0  # seconds, counted by checks, which stop while the job is suspended
        pause, looks = 0.0, 0  # check immediately
        while not self._stopped.wait(pause):
            before, position = position, heartbeat.current()
            silent = silent + pause if position and position == before else 0.0
            pause, looks = _pause(position), looks + 1
            with contextlib.suppress(RuntimeError):  # the process with the store may have died
                if self.store.check([_END]):
                    self.store.add("ended", 1)
                    os._exit(1)
                if position:
                    sign = Sign(position, socket.gethostname(), _waits_for_disk(), pause, looks)
                    self.store.set(f"at-{self.rank}", json.dumps(dataclasses.astuple(sign)))
            if position and silent >= position["limit"]:
                silent += self._report(position, silent, pause)

    def _report(self, position: Position, silent: float, pause: float) -> float:
        """Print which process hangs and end the run, unless another process reports it or this one has continued.

        Returns:
            the seconds that it took
        """
        mine = Sign(position, socket.gethostname(), False, pause, 0)
        sentence = describe_hang({self.rank: mine}, silent)
        with contextlib.suppress(RuntimeError):  # without the store, use this process's own position
            if self.store.add(_REPORTER, 1) > 1 and silent < position["limit"] + TAKE_OVER:
                return 0.0
            if position["lockstep"]:
                before = self._read_signs()
                seconds = 2 * max(
                    (sign.pause for sign in before.values()), default=pause
                )  # let all processes check once more
                if self._stopped.wait(seconds) or heartbeat.current() != position:
                    self.store.set(_REPORTER, "0")
                    return seconds
                signs = self._read_signs()
                # Meanwhile this thread does not record its own position.
                dead = {rank: sign for rank, sign in signs.items() if sign == before.get(rank) and rank != self.rank}
                sentence = describe_dead(dead) if dead else describe_hang(signs, silent + seconds)
        os.write(2, f"error: {sentence}\n".encode())
        return self._end_all(3 * pause + 1)

    def _read_signs(self) -> dict[int, Sign]:
        keys = {rank: f"at-{rank}" for rank in range(self.size)}
        return {rank: Sign(*json.loads(self.store.get(key))) for rank, key in keys.items() if self.store.check([key])}

    def _end_all(self, seconds: float) -> NoReturn:
        """Have the other processes end, wait for them for at most ``seconds``, and end this one: it may have the
        store.
        """
        with contextlib.suppress(RuntimeError):
            self.store.set(_END, "1")
            deadline = time.monotonic() + seconds
            while self.store.add("ended", 0) < self.size - 1 and time.monotonic() < deadline:
                time.sleep(0.1)
        os._exit(1)


def describe_hang(signs: Mapping[int, Sign], seconds: float) -> str:
    """Return the sentence that names the ranks which hang for ``seconds``, as the launcher has it.

    In lockstep it is the one that has come least far, and of several the one in the kernel's uninterruptible wait.
    """
    keys = {rank: [*sign.position["at"], not sign.waits_for_disk] for rank, sign in signs.items()}
    lowest = {rank: sign for rank, sign in signs.items() if keys[rank] == min(keys.values())}
    position = next(iter(lowest.values())).position
    duration = f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"
    ending = ", and the others wait" if position["lockstep"] else ""
    return f"{_names(lowest)}: no progress for {duration} {position['where']}{ending} (setting hang_minutes)"


def describe_dead(signs: Mapping[int, Sign]) -> str:
    """Return the sentence that names the ranks in which not even the watch runs."""
    where = min(signs.values(), key=lambda sign: sign.position["at"]).position["where"]
    return (
        f"{_names(signs)}: no sign of life (stopped, in a call that does not return, or the node is gone), last seen"
        f" {where}, and the others wait (setting hang_minutes)"
    )


def _names(signs: Mapping[int, Sign]) -> str:
    hosts: dict[str, list[str]] = {}
    for rank in sorted(signs):
        hosts.setdefault(signs[rank].host, []).append(str(rank))
    return " and ".join(f"rank{'s' * (len(each) > 1)} {', '.join(each)} on {host}" for host, each in hosts.items())


def _pause(position: Position | None) -> float:
    return min(PAUSE, position["limit"] / 4) if position else PAUSE


def _waits_for_disk() -> bool:
    """Return whether the main thread is in the kernel's uninterruptible wait (D in proc(5))."""
    with contextlib.suppress(OSError, IndexError):
        return Path("/proc/self/stat").read_text().rpartition(")")[2].split()[0] == "D"
    return False
