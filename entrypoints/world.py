"""The processes of a run: one, or several under torchrun, each with its GPU; and the signals that end it."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from types import FrameType

import torch

REQUEUE = 75  # EX_TEMPFAIL: saved, not finished; schedulers requeue on it


@dataclass(frozen=True, slots=True)
class World:
    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def leads(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> None:
        """Add up ``tensor`` over the processes, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)

    def wait(self) -> None:
        if self.size > 1:
            torch.distributed.barrier()

    def leave(self) -> None:
        if self.size > 1:
            torch.distributed.destroy_process_group()


def join(device: str) -> World:
    """This process's place, as torchrun wrote it into the environment."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(local)
    torch.distributed.init_process_group("gloo" if device == "cpu" else "nccl")
    return World(int(os.environ["RANK"]), size, local)


class Stop:
    """Turns SIGTERM, SIGUSR1 (requeue) and the first ^C into a request; a second ^C ends at once.

    Until ``saves`` is set there is nothing to lose, and a signal ends the process there and then.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.saves = False

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.exit_code = 130 if number == signal.SIGINT else REQUEUE
        # os.write, not print: a signal may come in the middle of a print.
        what = "saving and stopping" if self.saves else "stopping; there is nothing to save yet"
        os.write(2, f"{signal.Signals(number).name}: {what}\n".encode())
        if not self.saves:
            os._exit(self.exit_code)
