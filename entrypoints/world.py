"""The processes of a run: one, or several that a launcher started, each with its GPU; and the signals that end it."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch

from settings import TaskError

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
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def join(device: str, *, alone: bool = True) -> World:
    """This process's place, as the launcher wrote it into the environment. Errors: TaskError.

    alone: a single process needs no group; DeepSpeed wants one all the same.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 and alone:
        return World()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(_free_port()))
    world = World(int(os.environ["RANK"]), size, int(os.environ["LOCAL_RANK"]))
    if device != "cpu" and torch.cuda.is_available():
        found = torch.cuda.device_count()
        if world.local_rank >= found:
            raise TaskError(
                f"process {world.local_rank + 1} of this node has no GPU: {found} visible here; start as many processes "
                f"as there are GPUs (train --gpus {found}), or ask the scheduler for more"
            )
        torch.cuda.set_device(world.local_rank)
    try:
        # While the first process reads a large model from a slow disk, the others wait in a broadcast.
        torch.distributed.init_process_group("gloo" if device == "cpu" else "nccl", timeout=timedelta(hours=1))
    except (RuntimeError, ValueError) as error:
        meeting = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise TaskError(
            f"the {size} processes of this run cannot meet at {meeting}: {' '.join(str(error).split())[:300]}; where the port is "
            "in use, choose another (MASTER_PORT; torchrun --master-port); where nothing answers, look at MASTER_ADDR and the "
            "firewall"
        ) from error
    return world


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


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
