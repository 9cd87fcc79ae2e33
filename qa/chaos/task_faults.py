"""Faults of a parallel task, made inside one of its processes: at the n-th entry of a phase, and a random moment
later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import random
import resource
import signal
import subprocess
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASES = ("loading", "first step", "later step", "evaluation", "saving", "finishing")
KINDS = ("kill", "stop", "hang", "pause", "signal", "clock", "disk", "gradient", "memory", "out of memory")


@dataclass(frozen=True)
class Fault:
    """What happens to which process. rank: -1 is the launcher. number: of a signal. value: as the kind needs it."""

    kind: str
    rank: int = 0
    phase: str = "loading"
    entry: int = 1  # the how manieth time that the process enters the phase
    delay: float = 0.0
    number: int = 0
    value: float = 0.0

    def __str__(self) -> str:
        who = "the launcher" if self.rank < 0 else f"rank {self.rank}"
        what = signal.Signals(self.number).name if self.number else self.kind
        return f"{what} of {who}, {self.phase} {self.entry}, after {self.delay:.3f} s, value {self.value:g}"


NOTHING = Fault("nothing")


def draw(kind: str, processes: int, *, has_steps: bool, saves: bool, memory: int, dice: random.Random) -> Fault:
    """Return a random fault of ``kind``.

    has_steps: of a task that trains. saves: one that writes checkpoints. memory: bytes that it expects to take.
    """
    phases = [phase for phase in PHASES if (has_steps or phase != "evaluation") and (saves or phase != "saving")]
    entries = {"later step": 4, "evaluation": 2, "saving": 3}
    rank = dice.randrange(processes)
    phase = dice.choice(phases)
    if kind == "disk":
        phase = dice.choice([*(["saving"] * 4 if saves else ["later step"]), "later step", "finishing"])
        # The main process writes most of the files; a limit of this process alone stands for the disk without root.
        rank = dice.choice([0, 0, rank])
    if kind == "hang":
        phase = "later step"  # the first one may compile, and has an hour, as loading and saving
    if kind in ("gradient", "out of memory"):
        phase = dice.choice(["first step", "later step", "later step"])
    entry = dice.randint(1, entries.get(phase, 1))
    delay = dice.uniform(0, 1.5) if phase == "loading" else dice.choice([0.0, dice.uniform(0, 0.08)])
    fault = Fault(kind, rank, phase, entry, delay)
    match kind:
        case "kill":
            return dataclasses.replace(fault, number=signal.SIGKILL, rank=dice.choice([rank, rank, rank, -1]))
        case "stop" | "pause":
            return dataclasses.replace(fault, number=signal.SIGSTOP, value=dice.uniform(0.5, 1.5))
        case "signal":
            number = dice.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
            return dataclasses.replace(fault, number=number, rank=dice.choice([rank, -1]))
        case "clock":
            return dataclasses.replace(fault, phase="loading", entry=1, value=dice.choice([1e6, 1e-3, 3.0]))
        case "disk":
            return dataclasses.replace(fault, delay=0.0, value=dice.choice([0.0, dice.uniform(0, 300_000)]))
        case "gradient":
            return dataclasses.replace(fault, value=dice.choice([float("nan"), float("inf")]))
        case "memory":
            return dataclasses.replace(fault, phase="loading", entry=1, value=memory * dice.uniform(0.6, 1.2))
    return fault


class Injector:
    """Make one fault in this process, if it is the one.

    mark: a file that gets the time of the fault. disk: what may be filled; is_mount: it is a file system of its own.
    """

    def __init__(self, fault: Fault, rank: int, mark: Path, disk: Path, *, is_mount: bool) -> None:
        self.fault, self.rank, self.mark, self.disk, self.is_mount = fault, rank, mark, disk, is_mount
        # What is done to the launcher is done from the first process.
        self.is_here = rank == max(fault.rank, 0) and fault.kind != "nothing"
        self.entries: dict[str, int] = {}
        self.breaks = False  # the gradient of this step, or its memory

    def install(self, module: str) -> None:
        """Watch the phases of the task whose module this is, and enter the first one."""
        if self.fault.kind == "clock":
            self._skew(module)
        elif self.fault.kind == "memory":
            self._lessen_memory(module)
        if not self.is_here:
            return
        watch = {"generate": self._watch_generate, "pretrain": self._watch_pretrain}.get(module, self._watch_train)
        watch()
        self.enter("loading")

    def enter(self, phase: str) -> None:
        """Make the fault if this is its moment."""
        self.entries[phase] = self.entries.get(phase, 0) + 1
        fault = self.fault
        if (phase, self.entries[phase]) != (fault.phase, fault.entry):
            self.breaks = False
            return
        if fault.number:
            if fault.delay:
                threading.Thread(target=self._signal_later, daemon=True).start()
            else:
                self._signal()
        elif fault.kind == "hang":
            self._note()
            time.sleep(1e6)
        elif fault.kind == "disk":
            self._note()
            self._fill()
        elif fault.kind in ("gradient", "out of memory"):
            self.breaks = True

    # ------------------------------------------------------------------ what is done

    def _note(self) -> None:
        if not self.mark.exists():
            self.mark.write_text(str(time.time()))

    def _signal_later(self) -> None:
        time.sleep(self.fault.delay)
        self._signal()

    def _signal(self) -> None:
        self._note()
        target = os.getppid() if self.fault.rank < 0 else os.getpid()
        if self.fault.kind == "pause":
            wake = f"sleep {self.fault.value}; kill -CONT {target}"
            subprocess.Popen(["sh", "-c", wake], start_new_session=True)
        os.kill(target, self.fault.number)

    def _fill(self) -> None:
        """Leave ``value`` bytes.

        Where there is no small disk, a limit on the size of this process's files stands for it.
        """
        left = int(self.fault.value)
        if not self.is_mount:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            left = max(left, 30_000)  # for what the process prints goes to a file, too
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (left, hard))
            return
        with (self.disk / "filler").open("ab") as filler, contextlib.suppress(OSError):
            free = os.statvfs(self.disk)
            os.posix_fallocate(filler.fileno(), 0, max(free.f_bavail * free.f_frsize - left, 1))

    def _run_out(self) -> None:
        """Raise what torch raises without memory, if this is the moment."""
        if self.breaks and self.fault.kind == "out of memory":
            self.breaks = False
            self._note()
            error: Exception = importlib.import_module("torch").OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB"
            )
            raise error

    def _skew(self, module: str) -> None:
        """Let the clock of this process run faster or slower than those of the others."""
        factor = self.fault.value if self.rank == self.fault.rank else 1 / self.fault.value
        clock = types.SimpleNamespace(
            monotonic=lambda: factor * time.monotonic(),
            time=lambda: time.time() + 3600 * self.rank,
            sleep=time.sleep,
            strftime=time.strftime,
            gmtime=time.gmtime,
        )
        names = {"generate": ["ekiben_tasks.generation.batch"], "pretrain": ["steps", "background_save"]}
        for name in names.get(module, ["ekiben_tasks.training.loop", "ekiben_tasks.training.run"]):
            importlib.import_module(name).time = clock  # type: ignore[attr-defined]
        self._note()

    def _lessen_memory(self, module: str) -> None:
        """Let each process find another amount of free memory: the one ``value`` bytes, the others some times as
        much.
        """
        devices = importlib.import_module("ekiben_tasks.models.device")
        choose = devices.choose_device

        def choose_less(*args: Any) -> Any:
            device = choose(*args)
            self._note()
            share = 1.0 if self.rank == self.fault.rank else 2.0 + self.rank
            return dataclasses.replace(device, memory=int(share * self.fault.value))

        owners = {"generate": ["ekiben_tasks.generation.batch"], "pretrain": ["ekiben_tasks.models.device"]}
        for name in owners.get(module, ["ekiben_tasks.training.run"]):
            importlib.import_module(name).choose_device = choose_less  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ when

    def _before(self, owner: Any, name: str, phase: str | Callable[[Any], str]) -> None:
        """Enter a phase whenever the function ``name`` of ``owner`` is called."""
        call = getattr(owner, name)

        def entering(*args: Any, **kwargs: Any) -> Any:
            self.enter(phase if isinstance(phase, str) else phase(args[0]))
            return call(*args, **kwargs)

        setattr(owner, name, entering)

    def _watch_train(self) -> None:
        loop, run = (importlib.import_module(f"ekiben_tasks.training.{name}") for name in ("loop", "run"))
        self._before(loop.Run, "_step", _step_of)
        self._before(loop.Run, "_evaluate", "evaluation")
        self._before(loop.Run, "_save", "saving")
        self._before(run, "_record", "finishing")
        gradients = loop.Run._gradients

        def break_gradients(training: Any, *args: Any) -> Any:
            if not self.breaks:
                return gradients(training, *args)
            strategy, factor = training.strategy, self.fault.value
            loss, backward = strategy.loss, strategy.backward

            def run_out(batch: Any) -> Any:
                self._run_out()
                return loss(batch)

            if self.fault.kind == "gradient":
                self.breaks = False
                self._note()
                strategy.backward = lambda loss, scale, **named: backward(loss, scale * factor, **named)
            strategy.loss = run_out
            try:
                return gradients(training, *args)
            finally:
                strategy.loss, strategy.backward = loss, backward

        loop.Run._gradients = break_gradients

    def _watch_pretrain(self) -> None:
        pretraining, steps, saver = (
            importlib.import_module(name) for name in ("pretraining", "steps", "background_save")
        )
        self._before(steps.Run, "_step", _step_of)
        self._before(steps.Run, "_evaluate", "evaluation")
        self._before(steps.Run, "_save", "saving")
        self._before(saver.Saver, "_write", "saving")
        self._before(pretraining, "_result", "finishing")
        forward = steps.Run._forward

        def break_forward(training: Any, *args: Any, **kwargs: Any) -> Any:
            losses = forward(training, *args, **kwargs)
            self._run_out()
            if self.breaks:
                self.breaks = False
                self._note()
                training.model.buffers[0].grad_data[0] = self.fault.value
            return losses

        steps.Run._forward = break_forward

    def _watch_generate(self) -> None:
        batch: Any = importlib.import_module("ekiben_tasks.generation.batch")
        writer = importlib.import_module("ekiben_tasks.generation.resumable_jsonl")
        self._before(
            batch, "answer_batch", lambda _: "first step" if "first step" not in self.entries else "later step"
        )
        self._before(writer.ResumableJsonlWriter, "add", "saving")
        self._before(writer.ResumableJsonlWriter, "finish", "finishing")
        draw_answers = batch.sample

        def run_out(*args: Any, **kwargs: Any) -> Any:
            self._run_out()
            return draw_answers(*args, **kwargs)

        batch.sample = run_out


def _step_of(run: Any) -> str:
    return "first step" if run.step == run.first_step else "later step"
