"""The training loop: steps, evaluation, checkpoints, progress. What learns, and on how many GPUs, is parallel.py's."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import checkpoint
import flops
import models
import packing
import record
from learner import find_blocks
from parallel import Trained
from prompt import Example
from settings import TaskError
from world import REQUEUE, Stop, World


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will do, decided before its first step."""

    epochs: int
    max_steps: int
    batch_size: int
    max_rows: int
    max_tokens: int
    checkpointed: int  # blocks whose activations are computed twice
    compile: bool
    learning_rate: float
    schedule: Literal["linear", "cosine", "constant"]
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float
    eval_every: int
    save_minutes: float
    log_seconds: float
    seed: int

    def steps(self, rows: int) -> int:
        total = self.epochs * self.steps_per_epoch(rows)
        return min(total, self.max_steps) if self.max_steps > 0 else total

    def steps_per_epoch(self, rows: int) -> int:
        return math.ceil(rows / self.batch_size)

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of ``step``: up linearly over the warm-up, then as the schedule says, to nothing or constant."""
        warmup = min(self.warmup_steps, steps // 10)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        left = (steps - step) / max(steps - warmup, 1)
        shares = {"linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2, "constant": 1.0}
        return self.learning_rate * shares[self.schedule]


class Meter:
    """Tokens and FLOPs per second of the steps alone: evaluation, saving and each start's first step are left out."""

    def __init__(self, tokens: int = 0, flops: float = 0.0, seconds: float = 0.0) -> None:
        self.tokens, self.flops, self.seconds = tokens, flops, seconds
        self.lap()

    def lap(self) -> None:
        self._tokens, self._flops, self._since = 0, 0.0, time.monotonic()

    def count(self, tokens: int, flops: float) -> None:
        self._tokens += tokens
        self._flops += flops

    def keep(self) -> None:
        """Add what was counted since the last lap. Call it when the device has finished that work."""
        self.tokens += self._tokens
        self.flops += self._flops
        self.seconds += time.monotonic() - self._since
        self.lap()

    def state(self) -> dict[str, float]:
        return {"tokens": self.tokens, "flops": self.flops, "seconds": self.seconds}


@dataclass(slots=True)
class _Pending:
    """A step whose loss is still on the GPU."""

    step: int
    loss: torch.Tensor
    grad_norm: torch.Tensor
    learnt: int
    rate: float


class Watch:
    """What a run tells while it goes on. A benchmark's log is one of these; this one lets everything pass."""

    def starts(self, run: Run) -> None:
        """Before the first step of this start; ``run.first_step`` is above 0 where it goes on from a checkpoint."""

    def tests(self, run: Run) -> None:
        """Before the test rows are read at ``run.step``."""

    def tested(self, run: Run) -> bool:
        """After them, with ``run.last_test_loss``. True: the run has what it was for and ends here."""
        return False


class Run:
    def __init__(
        self,
        *,
        trained: Trained,
        base: str,
        device: models.Device,
        train: Sequence[Example],
        test: Sequence[Example],
        plan: Plan,
        output: Path,
        fingerprint: dict[str, Any],
        world: World,
        stop: Stop,
        costs: flops.Costs,
        watch: Watch | None = None,
    ) -> None:
        self.watch = watch or Watch()
        self.trained, self.base, self.device, self.plan, self.output = trained, base, device, plan, output
        self.train, self.test, self.world, self.stop, self.fingerprint = train, test, world, stop, fingerprint
        self.learner, self.costs = trained.learner, costs
        self.steps = plan.steps(len(train))
        self.step, self.first_step, self.max_tokens = 0, 0, plan.max_tokens
        self.meter, self.started, self.wall_before = Meter(), time.monotonic(), 0.0
        self.checkpointed = plan.checkpointed
        self.pending: list[_Pending] = []
        self.order: tuple[int, torch.Tensor] | None = None  # of the rows, in an epoch
        self.last_loss, self.last_test_loss = math.nan, math.nan
        self.peak = flops.peak_flops(device.name)

    # ------------------------------------------------------------------ the story

    def fit(self) -> int | None:
        """Train to the end, or until a signal: then the exit code to leave with."""
        self._prepare()
        self.stop.saves = True
        self.learner.train()
        self.started = saved = reported = time.monotonic()
        self.meter.lap()
        self.watch.starts(self)
        reached = False
        while self.step < self.steps and not reached:
            if not self._step():
                return self._leave()
            now = time.monotonic()
            epoch_ends = self.step % self.plan.steps_per_epoch(len(self.train)) == 0
            saves = self.step == self.steps or epoch_ends or now - saved > 60 * self.plan.save_minutes
            evaluates = self.step == self.steps or (self.plan.eval_every > 0 and self.step % self.plan.eval_every == 0)
            first = self.step == self.first_step + 1
            if saves or evaluates or first or now - reported > self.plan.log_seconds:
                self._flush()
                self.meter.lap() if first else self.meter.keep()
                self._say()
                reported = time.monotonic()
            if evaluates:
                reached = self._evaluate()
            if saves or reached:
                self._save()
                saved = time.monotonic()
            if saves or evaluates:
                self.meter.lap()
        return None

    @property
    def wall(self) -> float:
        """Seconds of training so far, earlier starts included."""
        return self.wall_before + time.monotonic() - self.started

    def speed(self) -> tuple[float, float | None]:
        """(tokens per second, MFU or None) of all GPUs together."""
        if not self.meter.tokens:
            return 0.0, None
        meter = self.meter
        mfu = flops.utilisation(meter.flops, meter.seconds, self.world.size, self.peak) if self.peak else None
        return meter.tokens / meter.seconds, mfu

    # ------------------------------------------------------------------ one step

    def _step(self) -> bool:
        """One step of the optimizer; False when a signal came: then nothing has changed since the last step."""
        rows = self._rows_of(self.step)
        # Each step seeds itself, so that a resumed run drops out the same units without keeping a generator's state.
        torch.manual_seed((self.plan.seed * 1_000_003 + self.step) * 1021 + self.world.rank)
        learnt = sum(row.learnt for row in rows)
        total = self._gradients(rows, learnt)
        if total is None:
            return False
        if self.world.size > 1:
            votes = torch.stack([total, total.new_full((), self.stop.exit_code or 0)])
            self.world.sum(votes)
            total = votes[0]
            if votes[1].item() > 0:
                self.stop.exit_code = self.stop.exit_code or REQUEUE
                self.trained.forget()
                return False
        rate = self.plan.rate(self.step, self.steps)
        norm = self.trained.step(rate)
        self.step += 1
        self._count(rows, learnt)
        self.pending.append(_Pending(self.step, total, norm, learnt, rate))
        return True

    def _gradients(self, rows: Sequence[Example], learnt: int) -> torch.Tensor | None:
        """The summed loss over this process's share of ``rows``, gradients gathered; None when a signal came.

        Out of memory: smaller packs, then checkpointing; the packs done so far are done again.
        """
        while True:
            try:
                return self._packs(self._share(rows, self.plan.max_rows, self.max_tokens), learnt)
            except torch.OutOfMemoryError:
                self._make_room(max(len(row.ids) for row in rows))

    def _share(self, rows: Sequence[Example], max_rows: int, max_tokens: int) -> list[list[Example]]:
        """This process's packs of ``rows``; where all have to run the model equally often, empty ones at the end."""
        ordered = sorted(rows, key=lambda row: len(row.ids), reverse=True)

        def packs(rank: int) -> list[list[Example]]:
            return packing.cut(ordered[rank :: self.world.size], max_rows, max_tokens, self.learner.layout)

        own = packs(self.world.rank)
        if self.trained.collective:
            most = max(len(packs(rank)) for rank in range(self.world.size))
            own += [[] for _ in range(most - len(own))]
        return own

    def _pack(self, rows: Sequence[Example]) -> packing.Pack:
        """An empty pack is played by the shortest row; its loss does not count."""
        played = rows or [self._shortest]
        return packing.pack(played, self.learner.layout).to(self.device.place)

    def _packs(self, packs: list[list[Example]], learnt: int) -> torch.Tensor | None:
        total = torch.zeros((), device=self.device.place)
        for index, rows in enumerate(packs):
            if self.stop.exit_code is not None and self.world.size == 1:
                self.trained.forget()
                return None
            part = self.trained.loss(self._pack(rows))
            self.trained.backward(part, 1.0 / max(learnt, 1) if rows else 0.0, last=index == len(packs) - 1)
            if rows:
                total += part.detach()
        return total

    def _make_room(self, longest: int) -> None:
        self.trained.forget()
        torch.cuda.empty_cache()
        layers = len(find_blocks(self.learner.body))
        if not self.trained.collective and self.max_tokens > 2 * longest:
            self.max_tokens = min(self.max_tokens, self.plan.batch_size * longest) // 2
            print(f"out of GPU memory: going on with packs of at most {self.max_tokens:,} tokens", flush=True)
        elif not self.trained.collective and self.checkpointed < layers:
            self.checkpointed = layers
            self.learner.checkpoint_activations(layers)
            print("out of GPU memory: going on with gradient checkpointing", flush=True)
        else:
            # Processes that wait for each other cannot change their plans one by one.
            raise TaskError(
                f"out of GPU memory with packs of {self.max_tokens:,} tokens, the longest row {longest:,}, "
                f"{self.checkpointed} of {layers} blocks checkpointed, on {self.device.name}; try "
                f"--set gradient_checkpointing=true --set micro_batch=1, --set max_length={longest // 2}, "
                "more GPUs, or GPUs nobody else is using"
            )

    @functools.cached_property
    def _shortest(self) -> Example:
        return min(self.train, key=lambda row: len(row.ids))

    def _rows_of(self, step: int) -> list[Example]:
        epoch, place = divmod(step, self.plan.steps_per_epoch(len(self.train)))
        if self.order is None or self.order[0] != epoch:  # drawn once: of millions of rows it takes as long as a step
            generator = torch.Generator().manual_seed(self.plan.seed + epoch)
            self.order = (epoch, torch.randperm(len(self.train), generator=generator))
        chosen = self.order[1][place * self.plan.batch_size : (place + 1) * self.plan.batch_size]
        return [self.train[index] for index in chosen.tolist()]

    def _count(self, rows: Sequence[Example], learnt: int) -> None:
        lengths = [len(row.ids) for row in rows]
        self.meter.count(sum(lengths), self.costs.of_rows(lengths, learnt))

    # ------------------------------------------------------------------ around the steps

    def _prepare(self) -> None:
        self._resume()
        self.first_step = self.step
        if self.world.leads:
            self.metrics = record.Metrics(self.output / "metrics.jsonl", self.step)

    def _resume(self) -> None:
        path = checkpoint.latest(self.output / "checkpoints")
        if path is None:
            return
        state = checkpoint.load(path)
        changed = [
            f"{name} was {state['fingerprint'].get(name)!r} and is {value!r}"
            for name, value in self.fingerprint.items()
            if state["fingerprint"].get(name) != value
        ]
        if changed:
            raise TaskError(
                f"{path.parent}: belongs to another run ({'; '.join(changed)}); give another --output, "
                "or start again in this one with --fresh"
            )
        self.trained.load(path, state)
        self.step, self.meter, self.wall_before = state["step"], Meter(**state["meter"]), state["wall"]
        self.last_loss, self.last_test_loss = state["last_loss"], state["last_test_loss"]
        if self.world.leads:
            print(f"resumed     {path} (step {self.step} of {self.steps})", flush=True)

    def _save(self) -> None:
        state = {
            "step": self.step,
            "meter": self.meter.state(),
            "wall": self.wall,
            "last_loss": self.last_loss,
            "last_test_loss": self.last_test_loss,
            "fingerprint": self.fingerprint,
        }
        checkpoint.save(self.output / "checkpoints", self.step, state, self.trained.save, self.world)
        if hasattr(self.learner.model, "peft_config"):
            weights = self.trained.weights()
            if self.world.leads:
                models.save_adapter(self.learner.model, self.output / "adapter", weights, self.base)

    def _leave(self) -> int:
        self._flush()
        if self.step > 0:
            self._save()
            if self.world.leads:
                print(f"saved step {self.step} of {self.steps}; the same command goes on from here", flush=True)
        assert self.stop.exit_code is not None
        return self.stop.exit_code

    def _evaluate(self) -> bool:
        """Whether the run has what it was for, as its watch sees it."""
        if not self.test:
            return False
        self.watch.tests(self)
        total = torch.zeros((), device=self.device.place)
        self.learner.eval()
        # Compiled code for evaluation would take longer to make than it saves.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for rows in self._share(self.test, len(self.test), self.plan.max_tokens):
                part = self.trained.loss(self._pack(rows))
                total += part if rows else 0.0
        self.learner.train()
        self.world.sum(total)
        self.last_test_loss = total.item() / sum(row.learnt for row in self.test)
        if self.world.leads:
            self.metrics.add([{"step": self.step, "test_loss": self.last_test_loss}])
            ppl = math.exp(min(self.last_test_loss, 100))
            print(
                f"step {self.step}/{self.steps}  test loss {self.last_test_loss:.4f}  perplexity {ppl:.2f}", flush=True
            )
        return self.watch.tested(self)

    def _flush(self) -> None:
        """Fetch the losses of the steps since the last time, all at once. Errors: TaskError for a loss that is no number."""
        if not self.pending:
            return
        values = torch.stack([torch.stack([item.loss, item.grad_norm]) for item in self.pending]).tolist()
        lines = []
        for item, (summed, norm) in zip(self.pending, values, strict=True):
            mean = summed / max(item.learnt, 1)
            if not math.isfinite(mean):
                raise TaskError(
                    f"the loss is {mean} at step {item.step}: try --set learning_rate={self.plan.learning_rate / 3:.2g}, "
                    f"and look at the data for rows of noise; the checkpoint before it is kept in {self.output}"
                )
            self.last_loss = mean
            lines.append(
                {
                    "step": item.step,
                    "loss": mean,
                    "lr": item.rate,
                    "grad_norm": norm if math.isfinite(norm) else None,
                    "learnt": item.learnt,
                }
            )
        self.pending.clear()
        if self.world.leads:
            self.metrics.add(lines)

    def _say(self) -> None:
        if not self.world.leads:
            return
        speed, mfu = self.speed()
        done = self.step - self.first_step
        left = (time.monotonic() - self.started) / done * (self.steps - self.step)
        epoch = self.step / self.plan.steps_per_epoch(len(self.train))
        parts = [
            f"step {self.step}/{self.steps}",
            f"epoch {epoch:.2f}",
            f"loss {self.last_loss:.4f}",
            f"lr {self.plan.rate(self.step - 1, self.steps):.2e}",
            f"{speed:,.0f} tokens/s" if speed else "",
            f"MFU {mfu:.0%}" if mfu else "",
            f"{_duration(left)} left",
        ]
        print("  ".join(part for part in parts if part), flush=True)


@contextlib.contextmanager
def peak_memory(device: models.Device) -> Iterator[dict[str, int]]:
    """Fills ``bytes`` with the most memory this process held: on the GPU, or resident on the CPU."""
    found: dict[str, int] = {}
    if device.is_gpu:
        torch.cuda.reset_peak_memory_stats(device.place)
    try:
        yield found
    finally:
        if device.is_gpu:
            found["bytes"] = torch.cuda.max_memory_reserved(device.place)
        else:
            import resource

            found["bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
