"""What a training run says before and after, and its record, run.json."""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import models
import packing
import record
from train_settings import Settings

if TYPE_CHECKING:
    import loop
    from memory import Memory
    from train import Prepared

_HOW = {
    "none": "",
    "ddp": "each with the whole model",
    "fsdp": "weights shared (fsdp)",
    "deepspeed": "by DeepSpeed",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """Everything that is decided before weights are loaded."""

    settings: Settings
    parallel: str
    processes: int
    device: models.Device
    no_device: str | None  # why there is no GPU, in a dry run
    attention: str
    plan: loop.Plan
    data: Prepared
    memory: Memory
    layers: int
    parameters: int
    trainable: int
    trained: str  # in words
    form: str  # of the rows, in words
    output: Path

    @property
    def expected_bytes(self) -> int:
        """Of the memory of one GPU, with the plan's packs."""
        rows = min(self.plan.batch_size, self.plan.max_rows)
        tokens = min(self.plan.max_tokens, self.data.longest * rows, self.data.tokens)
        plain, checkpointed = (self.memory.of(tokens, checkpointing=which) for which in (False, True))
        return plain - (plain - checkpointed) * self.plan.checkpointed // self.layers


def announce(intent: Intent) -> list[str]:
    settings, plan, data, device = intent.settings, intent.plan, intent.data, intent.device
    left_out = f"{data.too_long} longer than {settings.max_length} tokens and {len(data.rows.bad)} bad left out"
    steps = plan.steps(len(data.train))
    compiling = "compiled" if plan.compile else "not compiled"
    if not plan.compile and device.is_gpu and models.compiler_missing():
        compiling += f" ({models.compiler_missing()} in this image)"
    sources = ", ".join(f"{name} ({count:,})" for name, count in data.rows.counts.items())
    bits = f", in {settings.bits} bits" if settings.bits < 16 else ""
    where = f"{intent.processes} x {device.name} {_HOW[intent.parallel]}" if intent.processes > 1 else device.name
    twice = f", {plan.checkpointed} of {intent.layers} blocks checkpointed" if plan.checkpointed else ""
    expected = f"{intent.expected_bytes / models.GIB:.1f} GiB expected"
    host = f", and {intent.memory.host / models.GIB:.1f} GiB of the host's for each" if intent.memory.host else ""
    lines = [
        f"model       {settings.model}: {intent.parameters:,} parameters{bits}",
        f"trains      {intent.trained}: {intent.trainable:,} trainable",
        f"data        {sources}",
        f"            {len(data.train):,} rows to learn, {len(data.test):,} to test on; {left_out}",
        f"            as {intent.form}",
        f"            {data.tokens:,} tokens, {data.learnt:,} of them learnt; the longest row has {data.longest:,}",
        f"steps       {steps:,} of {plan.batch_size} rows, {plan.epochs} epoch{'s' * (plan.epochs > 1)}",
        f"device      {where}, {str(device.dtype).removeprefix('torch.')}, {compiling}",
        f"attention   {intent.attention}",
        f"memory      {expected} of {device.memory / models.GIB:.1f} GiB free{' on each' * (intent.processes > 1)}{twice}{host}",
        f"output      {intent.output.absolute()}",
    ]
    if intent.no_device:
        lines[7] = f"device      none: {intent.no_device}"
        lines[9] = f"memory      {expected}{twice}{host}"
    if settings.warmup_steps > steps // 10:
        lines.append(f"note        warm-up is {steps // 10} steps, a tenth of all, not {settings.warmup_steps}")
    return lines


def name_attention(layout: packing.Layout, implementation: str, kernel: str) -> str:
    """In words. implementation: transformers' name for it; kernel: packing.prefer_kernels()'s."""
    if layout == "padded":
        return f"{implementation} over rows side by side, filled up (this architecture's cannot take packed rows)"
    return "sdpa row by row over packed rows" if kernel == "sdpa" else f"{kernel} over packed rows"


def result(intent: Intent, run: loop.Run, peak: int, exit_code: int | None, started: float) -> dict[str, Any]:
    settings, data = intent.settings, intent.data
    speed, mfu = run.speed()
    return {
        "status": "finished" if exit_code is None else "interrupted",
        "settings": dataclasses.asdict(settings),
        "model": {"name": settings.model, "parameters": intent.parameters, "trainable": intent.trainable},
        "data": {
            "sha256": data.rows.sha256,
            "sources": data.rows.counts,
            "rows": len(data.train),
            "test_rows": len(data.test),
            "tokens": data.tokens,
            "learnt_tokens": data.learnt,
            "too_long": data.too_long,
            "bad": len(data.rows.bad),
        },
        "device": {
            "name": run.device.name,
            "count": run.world.size,
            "parallel": intent.parallel,
            "dtype": str(run.device.dtype).removeprefix("torch."),
            "attention": intent.attention,
            "compiled": run.plan.compile,
            "checkpointed_blocks": run.checkpointed,
            "tokens_at_a_time": run.max_tokens,
        },
        "site": record.site(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "steps": run.step,
        "time_to_train_s": round(run.wall, 1),
        "tokens_per_s": round(speed, 1),
        "mfu": None if mfu is None else round(mfu, 4),
        "expected_memory_bytes": intent.expected_bytes,
        "peak_memory_bytes": peak,
        "final_loss": _number(run.last_loss),
        "final_test_loss": _number(run.last_test_loss),
        "final_test_perplexity": _number(math.exp(min(run.last_test_loss, 100))),
        "seed": settings.seed,
        "versions": record.versions(),
        "image": record.image(),
    }


def conclude(found: dict[str, Any], what: str, output: Path) -> list[str]:
    """what: 'adapter' or 'model', the folder of ``output`` that holds what was trained."""
    mfu = f", MFU {found['mfu']:.0%}" if found["mfu"] else ""
    # What this recipe has to go on with.
    place = output / what
    ways = {
        "generate": f"generate --{what} {place}", "chat": f'chat --{what} {place} "質問"',
        "evaluate": f"evaluate --{what} {place}", "upload": f"upload --input {place} --name you/{output.name} --dry-run",
    }  # fmt: skip
    task = next((name for name in ways if shutil.which(name)), "chat")
    return [
        f"done        {found['steps']:,} steps in {found['time_to_train_s']:,.0f} s, {found['tokens_per_s']:,.0f} tokens/s"
        f"{mfu}, at most {found['peak_memory_bytes'] / 2**30:.1f} GiB",
        f"{what:<12}{place}   loss {output / 'loss.png'}   record {output / 'run.json'}",
        f"try         {ways[task]}",
    ]


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
