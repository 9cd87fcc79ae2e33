"""Join the processes of a run (one, or several that a launcher started), and handle the signals that end it."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed import distributed_c10d

from ekiben_tasks.distributed.heartbeat import is_watched_by_launcher, longest_wait
from ekiben_tasks.distributed.watch import Watch
from ekiben_tasks.task.errors import TaskError

MEET_SECONDS = 900.0  # that a process waits until all of the run have started
LEAVE_SECONDS = 60.0  # timeout of a finished process that waits for the others
REQUEUE = 75  # EX_TEMPFAIL: saved, not finished; schedulers requeue on it


@dataclass(frozen=True, slots=True)
class DistributedContext:
    """Identify this process among those of the run, and offer collectives among them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main_process(self) -> bool:
        """Return whether this process prints and writes."""
        return self.rank == 0

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor``, of any shape, over the processes, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)

    def barrier(self) -> None:
        """Wait until all processes have called this."""
        if self.size > 1:
            torch.distributed.barrier()

    def broadcast(self, value: Any) -> Any:
        """Return the main process's ``value``, which holds plain values only, in every process."""
        if self.size == 1:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0)
        return values[0]

    def minimum(self, value: int, device: torch.device) -> int:
        """Return the smallest ``value`` of all processes. device: where their collectives run."""
        if self.size == 1 or not torch.distributed.is_initialized():
            return value
        shared = torch.tensor(value, device=device, dtype=torch.int64)
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MIN)
        return int(shared)

    def destroy(self) -> None:
        """Destroy the process group after all processes have called this."""
        leave_group()


def init_distributed(device: str, *, alone: bool = True, hang_minutes: float = 0) -> DistributedContext:
    """Join the process group that the launcher's variables describe, and return this process's context.

    device: "cpu", or anything else for GPUs. alone: a single process needs no group; DeepSpeed wants one all the same.
    hang_minutes: the setting, which may let a process wait longer than an hour for another one.

    Raises:
        TaskError: this process has no GPU, or the processes cannot connect to each other.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 and alone:
        return DistributedContext()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(_free_port()))
    world = DistributedContext(int(os.environ["RANK"]), size, int(os.environ["LOCAL_RANK"]))
    if torch.distributed.is_initialized():
        return world
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        gpu_count = torch.cuda.device_count()
        if world.local_rank >= gpu_count:
            raise TaskError(
                f"process {world.local_rank + 1} of this node has no GPU: {gpu_count} visible here; start as many"
                f" processes as there are GPUs (train --gpus {gpu_count}), or ask the scheduler for more"
            )
        torch.cuda.set_device(world.local_rank)
    timeout = process_group_timeout(hang_minutes)
    # Groups that libraries make without one (DeepSpeed's, a checkpoint's): torch's own are 10 and 30 minutes.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    try:
        store = _meet(size, timeout)
        # The others wait in a broadcast while the first process reads a large model from a slow disk.
        # Without a GPU, gloo: the error that there is none comes from choose_device(), not from NCCL.
        torch.distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            timeout=timeout,
            store=store,
            rank=world.rank,
            world_size=size,
            # With a device, NCCL need not guess one at the first barrier.
            device_id=torch.device("cuda", world.local_rank) if on_gpu else None,
        )
    except (RuntimeError, ValueError) as error:
        if size == 1:
            raise TaskError(
                "no process group can be created, which this run needs with one process, too:"
                f" {' '.join(str(error).split())[:300]}; gloo needs a network interface that is up, be it the loopback"
                " alone"
            ) from error
        meeting = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise TaskError(
            f"the {size} processes of this run cannot connect at {meeting}: {' '.join(str(error).split())[:300]}; where"
            " the port is in use, choose another (MASTER_PORT; torchrun --master-port); where nothing answers, look at"
            " MASTER_ADDR and the firewall"
        ) from error
    _watch_each_other(world)
    return world


def _meet(size: int, timeout: timedelta) -> torch.distributed.Store:
    """Return the store through which the ``size`` processes of the run create their groups; its operations wait for
    ``timeout``.

    It is a server in the first process, which the launcher's variables name. One process needs no network for it, and
    may have none, not even to itself. A server that nobody can reach is not waited for as long as a collective.

    Raises:
        RuntimeError, ValueError: the variables are wrong, or not all processes came within MEET_SECONDS.
    """
    if size == 1:
        return torch.distributed.HashStore()
    store, _, _ = next(torch.distributed.rendezvous("env://", timeout=timedelta(seconds=MEET_SECONDS)))
    store.set_timeout(timeout)
    return store


_watch: Watch | None = None
_groups = 0  # that this process has joined: each has keys of its own in the store, which may outlive it
_finished = 0  # the last of them that it has left


def _watch_each_other(world: DistributedContext) -> None:
    """Have the processes end a run that hangs, unless the launcher does."""
    global _groups, _watch
    _groups += 1
    # Before torch 2.8 a store is one connection: another thread's wait would block the watch.
    if world.size > 1 and not is_watched_by_launcher() and hasattr(torch.distributed.Store, "clone"):
        _watch = Watch(_store().clone(), world.rank, world.size)
        _watch.start()


def _store() -> Any:
    """Return this group's part of the store through which the processes have met."""
    return torch.distributed.PrefixStore(f"ekiben-{_groups}", distributed_c10d._get_default_store())


def leave_group() -> None:
    """Destroy the process group, if there is one, after all its processes have called this."""
    if torch.distributed.is_initialized():
        wait_for_peers()
        torch.distributed.destroy_process_group()


def wait_for_peers() -> None:
    """Wait until all processes have finished their last collective. A second call does nothing.

    One that left right after a collective would close its connections, and perhaps the store, while another one is
    still in it: "Connection closed by peer", and a run that has succeeded fails.
    """
    global _finished, _watch
    if not torch.distributed.is_initialized() or _finished == _groups:
        return
    if _watch:
        _watch.stop()
        _watch = None
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if size > 1:
        with contextlib.suppress(RuntimeError):  # a process has died: the others need not wait for it
            store, deadline = _store(), time.monotonic() + LEAVE_SECONDS
            store.set(f"done-{rank}", "1")
            _wait_for(store, [f"done-{peer}" for peer in range(size)], deadline)
            if rank:
                store.set(f"left-{rank}", "1")
            else:  # it may host the store, so it is the last one
                _wait_for(store, [f"left-{peer}" for peer in range(1, size)], deadline)
    _finished = _groups


def _wait_for(store: Any, keys: list[str], deadline: float) -> None:
    """Wait in short turns, so that signals are handled."""
    pause = 0.001
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


def process_group_timeout(hang_minutes: float) -> timedelta:
    """Return how long a collective waits: longer than the launcher, whose sentence names the process that all wait
    for.
    """
    return timedelta(seconds=longest_wait(hang_minutes) + 300)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def shared_scratch(world: DistributedContext, output: Path | None) -> Iterator[Path]:
    """Yield a temporary folder that all processes of the run see; the main process creates and removes it.

    output: on several nodes it lies beside this folder, for /tmp is each node's own.
    """
    parent = None
    if int(os.environ.get("LOCAL_WORLD_SIZE", world.size)) < world.size:
        parent = (output or Path("result")).absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
    temporary = tempfile.mkdtemp(prefix="ekiben-smoke-", dir=parent) if world.is_main_process else None
    scratch = Path(world.broadcast(temporary))
    try:
        yield scratch
    finally:
        if world.is_main_process:
            shutil.rmtree(scratch, ignore_errors=True)


def continue_alone() -> None:
    """Continue as a run of one process, also in programs started from here: for checks after a run of several."""
    leave_group()
    # Not removed: where srun has started several, a task without WORLD_SIZE is refused.
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


def check_grace_period(seconds: float) -> str | None:
    """Return a note where the job's grace period is too short to save, else None. seconds: that saving may take."""
    grace = os.environ.get("EKIBEN_GRACE_SECONDS", "")  # of the job script
    if not grace.isdigit() or seconds <= int(grace):
        return None
    return (
        f"note        saving takes up to {math.ceil(seconds)} s, and the grace period of this job is {grace} s: steps"
        f" since the checkpoint before may be lost; submit it with --grace-period {math.ceil(1.5 * seconds / 60)}m"
    )


class Stop:
    """Turn SIGTERM, SIGUSR1 (requeue) and the first ^C into ``exit_code``; a second ^C ends the process immediately.

    Until ``saves`` is set there is nothing to save, and any of these signals ends the process immediately. unsaved: the
    message for that case.
    """

    def __init__(self, unsaved: str = "stopping; there is nothing to save yet") -> None:
        self.exit_code: int | None = None
        self.saves, self.unsaved = False, unsaved

    def listen(self) -> None:
        """Install the signal handlers."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.exit_code = 130 if number == signal.SIGINT else REQUEUE
        # os.write, not print: a signal may interrupt a print.
        what = "saving and stopping" if self.saves else self.unsaved
        os.write(2, f"{signal.Signals(number).name}: {what}\n".encode())
        if not self.saves:
            os._exit(self.exit_code)
