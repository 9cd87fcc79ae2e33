"""Print and record a run's progress: losses, speed, metrics.jsonl."""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ekiben_tasks.distributed.context import DistributedContext
from ekiben_tasks.models import flops
from ekiben_tasks.models.device import Device
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.run_metadata import Metrics
from ekiben_tasks.training import checkpoint
from ekiben_tasks.training.plan import Plan


class Meter:
    """Measure tokens and FLOPs per second of the steps alone: not of evaluation, saving and each start's first step."""

    def __init__(self, tokens: int = 0, flops: float = 0.0, seconds: float = 0.0) -> None:
        self.tokens, self.flops, self.seconds = tokens, flops, seconds
        self.lap()

    def lap(self) -> None:
        """Start a new interval, and drop the counts since the last keep()."""
        self._tokens, self._flops, self._since = 0, 0.0, time.monotonic()

    def count(self, tokens: int, flops: float) -> None:
        """Count the tokens and FLOPs of a step."""
        self._tokens += tokens
        self._flops += flops

    def keep(self) -> None:
        """Add the counts since the last lap. Call it when the device has finished that work."""
        self.tokens += self._tokens
        self.flops += self._flops
        self.seconds += time.monotonic() - self._since
        self.lap()

    def speed(self, gpus: int, peak: float | None) -> tuple[float, float | None]:
        """Return (tokens per second, MFU or None) of ``gpus`` together. peak: FLOP/s of one; None: not known."""
        if not self.tokens:
            return 0.0, None
        mfu = flops.utilisation(self.flops, self.seconds, gpus, peak) if peak else None
        return self.tokens / self.seconds, mfu

    def state(self) -> dict[str, float]:
        """Return the arguments that make an equal Meter, for a checkpoint."""
        return {"tokens": self.tokens, "flops": self.flops, "seconds": self.seconds}


def add_length(lengths: list[dict[str, int]], step: int, **now: int) -> list[dict[str, int]]:
    """Return a run's lengths with ``now`` (``steps`` and more), which counts from ``step`` on; as they are, if it is
    the last one.

    The learning rate of a step is that of a run with the length that counted then.
    """
    if lengths and all(lengths[-1].get(name, value) == value for name, value in now.items()):
        return lengths
    return [*(length for length in lengths if length["from_step"] < step), {"from_step": step, **now}]


def is_due(step: int, every: int) -> bool:
    """Return whether an action with the period ``every`` is due after ``step``. every: in steps; 0: never."""
    return every > 0 and step % every == 0


class RunState:
    """Count a run's steps and measure their speed: what every training loop keeps in its checkpoints.

    peak: FLOP/s of one GPU; None: not known.
    """

    def __init__(self, steps: int, world: DistributedContext, peak: float | None) -> None:
        self.steps, self.world, self.peak = steps, world, peak
        self.step, self.first_step = 0, 0  # first_step: done when this process started
        self.lengths: list[dict[str, int]] = []
        self.meter, self.started, self.wall_before = Meter(), time.monotonic(), 0.0
        self.last_loss, self.last_eval_loss = math.nan, math.nan
        self.last_scores: dict[str, float] = {}  # of a classifier's last evaluation

    @property
    def wall(self) -> float:
        """Return the seconds of training so far, earlier starts included."""
        return self.wall_before + time.monotonic() - self.started

    def speed(self) -> tuple[float, float | None]:
        """Return (tokens per second, MFU or None) of all GPUs."""
        return self.meter.speed(self.world.size, self.peak)

    def measurements(self) -> dict[str, float | None]:
        """Return the speed and losses for run.json."""
        speed, mfu = self.speed()
        losses = (self.last_loss, self.last_eval_loss, math.exp(min(self.last_eval_loss, 100)))
        names = ("final_loss", "final_eval_loss", "final_eval_perplexity")
        return {
            "time_to_train_s": round(self.wall, 1),
            "tokens_per_s": round(speed, 1),
            "mfu": None if mfu is None else round(mfu, 4),
            **{name: round(loss, 6) if math.isfinite(loss) else None for name, loss in zip(names, losses, strict=True)},
            **{f"final_eval_{name}": round(score, 6) for name, score in self.last_scores.items()},
        }

    def print_line(self, rate: float, *, epoch: float | None = None) -> None:
        """Print steps, losses, speed and time left, in the main process. rate: the last step's learning rate."""
        if not self.world.is_main_process:
            return
        speed, mfu = self.speed()
        left = (time.monotonic() - self.started) / (self.step - self.first_step) * (self.steps - self.step)
        fields = [
            f"step {self.step}/{self.steps}",
            "" if epoch is None else f"epoch {epoch:.2f}",
            f"loss {self.last_loss:.4f}",
            f"lr {rate:.2e}",
            f"{speed:,.0f} tokens/s" if speed else "",
            f"MFU {mfu:.0%}" if mfu else "",
            f"{_duration(left)} left",
        ]
        print("  ".join(field for field in fields if field), flush=True)

    def print_evaluation(self) -> None:
        """Print the loss of the last evaluation."""
        scores = [f"{name} {score:.4f}" for name, score in self.last_scores.items()]
        scores = scores or [f"perplexity {math.exp(min(self.last_eval_loss, 100)):.2f}"]
        print(f"step {self.step}/{self.steps}  eval loss {self.last_eval_loss:.4f}  {'  '.join(scores)}", flush=True)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: plain values."""
        return {
            "step": self.step,
            "steps": self.steps,
            "meter": self.meter.state(),
            "wall": self.wall,
            "last_loss": self.last_loss,
            "last_eval_loss": self.last_eval_loss,
            "last_scores": self.last_scores,
            "lengths": self.lengths,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the ``state`` of a checkpoint, except its lengths."""
        self.step, self.meter, self.wall_before = state["step"], Meter(**state["meter"]), state["wall"]
        self.last_loss, self.last_eval_loss = state["last_loss"], state["last_eval_loss"]
        self.last_scores = state.get("last_scores", {})


@dataclass(slots=True)
class _Pending:
    """A step whose loss is still on the GPU."""

    step: int
    loss: torch.Tensor
    grad_norm: torch.Tensor
    num_target_tokens: int
    rate: float


class Progress(RunState):
    """Collect a run's losses and speed. They are fetched from the device in groups, a few times a minute."""

    def __init__(
        self, plan: Plan, world: DistributedContext, device: Device, costs: flops.Costs, output: Path, rows: int
    ) -> None:
        super().__init__(plan.steps(rows), world, flops.peak_flops(device.name))
        self.plan, self.costs, self.output = plan, costs, output
        self.steps_per_epoch = plan.steps_per_epoch(rows)
        self.lengths = add_length([], 0, steps=self.steps)
        self.best_step, self.best_eval_loss, self.evals_since_best = 0, math.inf, 0  # step 0: none was evaluated
        self.skips_overflow = device.dtype == torch.float16
        self.metrics: Metrics | None = None  # those of the first process
        self._pending: list[_Pending] = []

    def begin(self) -> None:
        """Start the clock, and open metrics.jsonl after step ``step``."""
        self.first_step = self.step
        if self.world.is_main_process:
            self.metrics = Metrics(self.output / "metrics.jsonl", self.step)
            self.metrics.track(self.plan.settings.tracker, self.plan.settings)
        self.started = time.monotonic()
        self.meter.lap()

    def add_step(
        self, lengths: list[int], num_target_tokens: int, loss: torch.Tensor, norm: torch.Tensor, rate: float
    ) -> None:
        """Count a step; flush() fetches its loss and norm from the device later.

        lengths: tokens of each example. loss: summed over all processes. norm: of the gradient. Both are scalars in
        fp32. rate: the learning rate.
        """
        self.step += 1
        self.meter.count(sum(lengths), self.costs.of_examples(lengths, num_target_tokens))
        self._pending.append(_Pending(self.step, loss, norm, num_target_tokens, rate))

    def add_test(self, loss: float, scores: dict[str, float] | None = None) -> None:
        """Record and print an evaluation loss, in nats per target token. scores: of a classifier."""
        self.last_eval_loss, self.last_scores = loss, scores or {}
        self.evals_since_best += 1
        if loss < self.best_eval_loss:
            self.best_step, self.best_eval_loss, self.evals_since_best = self.step, loss, 0
        if self.metrics:
            named = {f"eval_{name}": score for name, score in self.last_scores.items()}
            self.metrics.add([{"step": self.step, "eval_loss": loss, **named}])
            self.print_evaluation()

    def flush(self) -> None:
        """Fetch the losses of all steps since the last flush together, and record them.

        Raises:
            TaskError: a loss or a gradient is not finite. In fp16 a step with such a gradient was skipped, and its
                scale lowered.
        """
        if not self._pending:
            return
        values = torch.stack([torch.stack([item.loss, item.grad_norm]) for item in self._pending]).tolist()
        lines: list[dict[str, Any]] = []
        broken = None
        for item, (summed, norm) in zip(self._pending, values, strict=True):
            mean = summed / max(item.num_target_tokens, 1)
            if not math.isfinite(mean):
                broken = f"the loss is {mean} at step {item.step}"
            elif not math.isfinite(norm) and not self.skips_overflow:
                broken = f"the norm of the gradient is {norm} at step {item.step}"
            if broken:
                break
            self.last_loss = mean
            lines.append(
                {
                    "step": item.step,
                    "loss": mean,
                    "lr": item.rate,
                    "grad_norm": norm if math.isfinite(norm) else None,
                    "num_target_tokens": item.num_target_tokens,
                }
            )
        self._pending.clear()
        if self.metrics:
            self.metrics.add(lines)
        if broken:
            raise TaskError(f"{broken}: {self.advise()}")

    def advise(self) -> str:
        """Return a hint for a number that is not finite, with the remaining checkpoint."""
        newest = checkpoint.latest(self.output / "checkpoints")
        return checkpoint.advise_restart(self.plan.settings.learning_rate, newest)

    def report(self) -> None:
        """Print one line in the main process: steps, losses, speed, time left."""
        self.print_line(self.plan.rate(self.step - 1, self.steps), epoch=self.step / self.steps_per_epoch)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: plain values."""
        kept = self.best_step if self.plan.settings.load_best_model_at_end else 0
        best = [self.best_step, self.best_eval_loss, self.evals_since_best]
        return {**super().state(), "best": best, "kept_step": kept}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the ``state`` of a checkpoint."""
        super().restore(state)
        self.best_step, self.best_eval_loss, self.evals_since_best = state.get("best", [0, math.inf, 0])
        former = state.get("lengths") or [{"from_step": 0, "steps": state.get("steps", self.steps)}]
        self.lengths = add_length(former, self.step, steps=self.steps)


@contextlib.contextmanager
def peak_memory(device: Device) -> Iterator[dict[str, int]]:
    """Yield a dict that holds, afterwards, ``bytes``: the most memory this process held on the GPU, or on the CPU."""
    peak: dict[str, int] = {}
    if device.is_gpu:
        torch.cuda.reset_peak_memory_stats(device.torch_device)
    try:
        yield peak
    finally:
        if device.is_gpu:
            peak["bytes"] = torch.cuda.max_memory_reserved(device.torch_device)
        else:
            peak["bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
