"""The training loop: steps, evaluation, checkpoints, progress. One GPU, or several under torchrun."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import checkpoint
import loss as losses
import models
import packing
import record
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
    checkpointing: bool
    compile: bool
    learning_rate: float
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
        """Learning rate of ``step``: up linearly over the warm-up, then down linearly to nothing."""
        warmup = min(self.warmup_steps, steps // 10)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        return self.learning_rate * (steps - step) / max(steps - warmup, 1)


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


class AdapterWeights:
    """fp32 copies of the trainable weights, as one vector: one optimizer call, one reduction, one norm for all."""

    def __init__(self, model: Any) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters: list[torch.Tensor] = [parameter for _, parameter in named]
        self.vector = torch.cat([parameter.detach().float().flatten() for parameter in self.parameters])
        self.vector.grad = torch.zeros_like(self.vector)
        sizes = [parameter.numel() for parameter in self.parameters]
        self.views = [
            part.view_as(parameter) for part, parameter in zip(self.vector.split(sizes), self.parameters, strict=True)
        ]

    def gather(self) -> None:
        """Add the parameters' gradients to the vector's, in fp32, and clear them."""
        assert self.vector.grad is not None
        self.vector.grad += torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None])
        self.clear()

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def spread(self) -> None:
        """Copy the vector back into the model."""
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.views)

    def named(self) -> dict[str, torch.Tensor]:
        return {name: view.detach().clone() for name, view in zip(self.names, self.views, strict=True)}


class Run:
    def __init__(
        self,
        *,
        model: Any,
        base: str,
        device: models.Device,
        train: Sequence[Example],
        test: Sequence[Example],
        plan: Plan,
        output: Path,
        fingerprint: dict[str, Any],
        world: World,
        stop: Stop,
        watch: Watch | None = None,
    ) -> None:
        self.watch = watch or Watch()
        self.model, self.base, self.device, self.plan, self.output = model, base, device, plan, output
        self.train, self.test, self.world, self.stop, self.fingerprint = train, test, world, stop, fingerprint
        self.body, self.head = models.body_and_head(model)
        self.weights = AdapterWeights(model)
        self.optimizer = torch.optim.AdamW(
            [self.weights.vector], lr=plan.learning_rate, weight_decay=plan.weight_decay, fused=device.is_gpu
        )
        # fp16 gradients underflow without it; a no-op elsewhere.
        self.scaler = torch.GradScaler(device.place.type, enabled=device.dtype == torch.float16)
        self.steps = plan.steps(len(train))
        self.step, self.first_step, self.max_tokens = 0, 0, plan.max_tokens
        self.meter, self.started, self.wall_before = Meter(), time.monotonic(), 0.0
        self.checkpointing = False
        self.pending: list[_Pending] = []
        self.last_loss, self.last_test_loss = math.nan, math.nan
        self.chunk_loss = losses.softmax_loss
        self.shape = models.shape(model)
        self.peak = record.peak_flops(device.name)

    # ------------------------------------------------------------------ the story

    def fit(self) -> int | None:
        """Train to the end, or until a signal: then the exit code to leave with."""
        self._prepare()
        self.stop.saves = True
        self.model.train()
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
        flops = self.meter.flops / self.meter.seconds
        mfu = flops / (self.peak * self.world.size) if self.peak else None
        return self.meter.tokens / self.meter.seconds, mfu

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
        vector = self.weights.vector
        assert vector.grad is not None
        if self.world.size > 1:
            self.world.sum(vector.grad)
            votes = torch.stack([total, torch.tensor(float(self.stop.exit_code or 0), device=total.device)])
            self.world.sum(votes)
            total = votes[0]
            if votes[1].item() > 0:
                self.stop.exit_code = self.stop.exit_code or REQUEUE
                return False
        self.scaler.unscale_(self.optimizer)
        norm = vector.grad.norm()
        vector.grad.mul_((self.plan.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        rate = self.plan.rate(self.step, self.steps)
        self.optimizer.param_groups[0]["lr"] = rate
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.weights.spread()
        vector.grad.zero_()
        self.step += 1
        self._count(rows, learnt)
        self.pending.append(_Pending(self.step, total, norm, learnt, rate))
        return True

    def _gradients(self, rows: Sequence[Example], learnt: int) -> torch.Tensor | None:
        """The summed loss over this process's share of ``rows``, gradients gathered; None when a signal came.

        Out of memory: smaller packs, then checkpointing; the packs done so far are done again.
        """
        share = sorted(rows, key=lambda row: len(row.ids), reverse=True)[self.world.rank :: self.world.size]
        while True:
            try:
                return self._packs(packing.cut(share, self.plan.max_rows, self.max_tokens), learnt)
            except torch.OutOfMemoryError:
                self._make_room(max((len(row.ids) for row in share), default=0))

    def _packs(self, packs: list[list[Example]], learnt: int) -> torch.Tensor | None:
        total = torch.zeros((), device=self.device.place)
        factor = self.scaler.scale(torch.tensor(1.0 / max(learnt, 1), device=self.device.place))
        for rows in packs:
            if self.stop.exit_code is not None and self.world.size == 1:
                self._forget_gradients()
                return None
            pack = packing.pack(rows).to(self.device.place)
            hidden = packing.forward(self.body, pack).index_select(0, pack.sources)
            with torch.no_grad():
                part, slope = losses.head_loss(hidden, self.head, pack.targets, factor, self.chunk_loss)
            hidden.backward(slope)
            self.weights.gather()
            total += part
        return total

    def _make_room(self, longest: int) -> None:
        self._forget_gradients()
        torch.cuda.empty_cache()
        if self.max_tokens > 2 * longest:
            self.max_tokens = min(self.max_tokens, self.plan.batch_size * longest) // 2
            print(f"out of GPU memory: going on with packs of at most {self.max_tokens:,} tokens", flush=True)
        elif not self.checkpointing:
            self._checkpoint_activations()
            print("out of GPU memory: going on with gradient checkpointing", flush=True)
        else:
            raise TaskError(
                f"out of GPU memory with one row of {longest} tokens and gradient checkpointing on {self.device.name}; "
                f"try --set max_length={longest // 2}, a smaller model, or a GPU nobody else is using"
            )

    def _checkpoint_activations(self) -> None:
        causal = self.model.get_base_model()
        # Later versions of transformers 5 renamed it. Not reentrant: the only leaves that want gradients are inside the blocks.
        enable = getattr(causal, "activation_checkpointing_enable", None) or causal.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        self.checkpointing = True

    def _forget_gradients(self) -> None:
        self.weights.clear()
        assert self.weights.vector.grad is not None
        self.weights.vector.grad.zero_()

    def _rows_of(self, step: int) -> list[Example]:
        per_epoch = self.plan.steps_per_epoch(len(self.train))
        epoch, place = divmod(step, per_epoch)
        generator = torch.Generator().manual_seed(self.plan.seed + epoch)
        order = torch.randperm(len(self.train), generator=generator)
        chosen = order[place * self.plan.batch_size : (place + 1) * self.plan.batch_size]
        return [self.train[index] for index in chosen.tolist()]

    def _count(self, rows: Sequence[Example], learnt: int) -> None:
        tokens = sum(len(row.ids) for row in rows)
        squares = float(sum(len(row.ids) ** 2 for row in rows))
        self.meter.count(tokens, record.training_flops(**self.shape, tokens=tokens, learnt=learnt, squares=squares))

    # ------------------------------------------------------------------ around the steps

    def _prepare(self) -> None:
        if self.plan.checkpointing:
            self._checkpoint_activations()
        if self.plan.compile:
            compile_blocks(self.body)
            self.chunk_loss = torch.compile(losses.softmax_loss, dynamic=True)
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
        with torch.no_grad():
            self.weights.vector.copy_(state["weights"])
        self.weights.spread()
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.step, self.meter, self.wall_before = state["step"], Meter(**state["meter"]), state["wall"]
        self.last_loss, self.last_test_loss = state["last_loss"], state["last_test_loss"]
        if self.world.leads:
            print(f"resumed     {path} (step {self.step} of {self.steps})", flush=True)

    def _save(self) -> None:
        if not self.world.leads:
            return
        state = {
            "step": self.step,
            "weights": self.weights.vector.detach().cpu(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "meter": self.meter.state(),
            "wall": self.wall,
            "last_loss": self.last_loss,
            "last_test_loss": self.last_test_loss,
            "fingerprint": self.fingerprint,
        }
        checkpoint.save(self.output / "checkpoints", self.step, state)
        models.save_adapter(self.model, self.output / "adapter", self.weights.named(), self.base)

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
        self.model.eval()
        # Compiled code for evaluation would take longer to make than it saves.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for rows in packing.cut(
                self.test[self.world.rank :: self.world.size], len(self.test), self.plan.max_tokens
            ):
                pack = packing.pack(rows).to(self.device.place)
                hidden = packing.forward(self.body, pack).index_select(0, pack.sources)
                total += losses.summed_loss(hidden, self.head, pack.targets)
        self.model.train()
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


def compile_blocks(body: Any) -> None:
    """Compile each block of the decoder in place: alike blocks share one compilation, where a whole model takes minutes."""
    for block in find_blocks(body):
        block.compile(dynamic=True)


def find_blocks(body: Any) -> list[Any]:
    """The repeated blocks of a decoder: its longest ModuleList."""
    lists = [list(part) for part in body.modules() if isinstance(part, torch.nn.ModuleList)]
    return max(lists, key=len)


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
