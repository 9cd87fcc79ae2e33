"""Format what a training run prints before and after, and build its record, run.json."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ekiben_tasks.distributed.optimizer import name_optimizer
from ekiben_tasks.models.attention_kernel import SDPA_KERNELS
from ekiben_tasks.models.device import GIB, Device, compiler_missing
from ekiben_tasks.models.memory import has_expandable_segments
from ekiben_tasks.task import run_metadata
from ekiben_tasks.training.settings import Settings, list_unused

if TYPE_CHECKING:
    from ekiben_tasks.models.attention_choice import ChosenKernels
    from ekiben_tasks.models.classifier import Classes
    from ekiben_tasks.models.memory import Memory
    from ekiben_tasks.models.proof import Proof
    from ekiben_tasks.task.checksums import ModelChecksum
    from ekiben_tasks.training import loop
    from ekiben_tasks.training import plan as plan_module
    from ekiben_tasks.training.prepare import Prepared


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Hold everything that is decided before weights are loaded."""

    settings: Settings
    parallel: str
    processes: int
    spread: str  # the layout of each process, as text
    device: Device
    no_device: str | None  # why a dry run has no GPU
    attention: str  # in words
    proof: Proof
    classes: Classes | None  # of a classification head
    kernels: ChosenKernels
    plan: plan_module.Plan
    data: Prepared
    memory: Memory
    layers: int
    parameters: int
    trainable: int
    trained: str  # in words
    form: str  # of the rows, in words
    output: str  # in words

    @property
    def expected_bytes(self) -> int:
        """Return the bytes of one GPU's memory that the allocator is expected to reserve, at most those that are free.

        Where the plan needs more than are free, return what it needs.
        """
        return max(self.needed_bytes, min(self._at_peak(self._reserved), self.device.memory))

    @property
    def needed_bytes(self) -> int:
        """Return the bytes of one GPU's memory that the plan needs."""
        return self._at_peak(self.memory.total)

    def _reserved(self, tokens: int, *, checkpointing: bool) -> int:
        return self.memory.reserved(tokens, checkpointing=checkpointing, expandable=has_expandable_segments(os.environ))

    def _at_peak(self, estimate: Callable[..., int]) -> int:
        examples = min(math.ceil(self.plan.settings.batch_size / self.processes), self.plan.max_rows)
        if self.plan.sequence_length:
            most = self.plan.step_tokens(self.data.longest, self.processes)
        else:
            most = self.data.batch_tokens(examples)
        tokens = min(self.plan.max_tokens, most, self.data.tokens)
        plain, checkpointed = (estimate(tokens, checkpointing=which) for which in (False, True))
        return plain - (plain - checkpointed) * self.plan.checkpointed // self.layers


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Hold the results of a run that has ended."""

    exit_code: int | None  # None: it has finished
    peak_memory: int  # bytes
    started: float  # seconds since the epoch
    checksum: ModelChecksum


def format_header(summary: RunSummary) -> list[str]:
    """Return the lines printed before a run."""
    settings, plan, data, device = summary.settings, summary.plan, summary.data, summary.device
    too_long = f"{data.too_long} longer than {data.limit:,} tokens{data.limit_reason}"
    left_out = f"{too_long} and {len(data.rows.bad)} invalid ones left out"
    steps = plan.steps(data.count)
    batch = f"{settings.batch_size} rows"
    if data.sequences is not None:
        filled = data.tokens / (len(data.sequences) * plan.sequence_length)
        batch = (
            f"{settings.batch_size} packed sequences of at most {plan.sequence_length:,} tokens"
            f" ({len(data.sequences):,}, {filled:.0%} full)"
        )
    compiling = "compiled" if plan.compile else "not compiled"
    if not plan.compile and device.is_gpu and compiler_missing():
        compiling += f" ({compiler_missing()} in this image)"
    sources = ", ".join(f"{name} ({count:,})" for name, count in data.rows.counts.items())
    bits = f", in {settings.bits} bits" if settings.bits < 16 else ""
    where = f"{summary.processes} x {device.name} {summary.spread}" if summary.processes > 1 else device.name
    twice = f", {plan.checkpointed} of {summary.layers} blocks checkpointed" if plan.checkpointed else ""
    expected = f"{summary.expected_bytes / GIB:.1f} GiB expected"
    if not summary.memory.is_counted:
        expected += " (as of a Llama of its widths: this model cannot be counted)"
    host = f", and {summary.memory.host / GIB:.1f} GiB of the host's for each" if summary.memory.host else ""
    lines = [
        f"model       {settings.model}: {summary.parameters:,} parameters{bits}",
        f"trains      {summary.trained}: {summary.trainable:,} trainable",
        f"data        {sources}",
        f"            {len(data.train):,} rows for training, {len(data.test):,} for evaluation; {left_out}",
        *(f"            {note}" for note in data.rows.notes),
        f"            as {summary.form}{_name_labels(data.labels)}",
        (
            f"            {data.tokens:,} tokens, {data.num_target_tokens:,} of them targets; the longest row has"
            f" {data.longest:,}"
        ),
        f"steps       {steps:,} of {batch}, {settings.epochs:g} epoch{'s' * (settings.epochs > 1)}",
        f"device      {where}, {str(device.dtype).removeprefix('torch.')}, {compiling}",
        f"attention   {summary.attention}",
        *_proof_lines(summary.proof),
        (
            f"memory      {expected} of {device.memory / GIB:.1f} GiB"
            f" free{' on each' * (summary.processes > 1)}{twice}{host}"
        ),
        f"output      {summary.output}",
    ]
    if summary.no_device:
        many = f"; planned for {summary.processes} GPUs {summary.spread}" if summary.processes > 1 else ""
        (index,) = (number for number, line in enumerate(lines) if line.startswith("device "))
        lines[index] = f"device      none: {summary.no_device}{many}"
        lines[-2] = f"memory      {expected}{twice}{host}"
    return [*lines, *_notes(summary, steps)]


def _name_labels(labels: Sequence[str]) -> str:
    """Return how many labels there are, with the first ones, as part of a line."""
    more = ", …" if len(labels) > 5 else ""
    return f"; {len(labels)} labels: {', '.join(labels[:5])}{more}" if labels else ""


def _notes(summary: RunSummary, steps: int) -> list[str]:
    """Return the lines about settings that slow the run down, or do not have their usual effect."""
    settings, lines = summary.settings, list[str]()
    if summary.parallel == "deepspeed" and summary.processes > 1 and settings.deepspeed.offload == "none":
        # Two H200, 1B, every weight: 90 % of twice one GPU's speed by fsdp, 66 by ZeRO-2, 56 by ZeRO-3.
        lines.append(
            "note        parallel=fsdp shards as much and is faster: its blocks are compiled, DeepSpeed's are not"
        )
    if (
        summary.parallel == "deepspeed"
        and settings.deepspeed.offload != "none"
        and not settings.deepspeed.takes_adam_op()
    ):
        lines.append(
            "note        the optimizer steps in the host's memory by torch's AdamW; DeepSpeed's CPUAdam is in images "
            "built with --layer deepspeed"
        )
    if summary.kernels.note:
        lines.append(f"note        {summary.kernels.note}")
    lines += [f"note        {sentence}" for sentence in list_unused(settings, summary.parallel)]
    if (warmup := summary.plan.warmup(steps)) > steps:
        highest = summary.plan.rate(steps - 1, steps)
        lines.append(f"note        the warm-up is {warmup:,} steps, so the learning rate reaches {highest:.2g} alone")
    return lines


def name_attention(proof: Proof, kernel: str) -> str:
    """Return a description of the attention. kernel: for mixed lengths."""
    if proof.layout == "padded":
        return f"{proof.implementation} over padded rows (this architecture does not support packed rows)"
    if proof.layout == "equal":
        return (
            f"{proof.implementation} over rows of equal length (this architecture supports neither packing nor padding)"
        )
    return f"{kernel} row by row over packed rows" if kernel in SDPA_KERNELS else f"{kernel} over packed rows"


def _proof_lines(proof: Proof) -> list[str]:
    """Return how the layout of batches was verified, and why faster ones were rejected."""
    return [
        f"            on a small model the gradient is within {proof.gradient:.0e} of that of one row at a time",
        *(f"            not {reason}" for reason in proof.reasons),
    ]


def result(summary: RunSummary, run: loop.Run, outcome: Outcome) -> dict[str, Any]:
    """Return the content of run.json."""
    settings, data = summary.settings, summary.data
    return {
        **run_metadata.run_record(settings, outcome.exit_code, outcome.started),
        "model": {
            **run_metadata.model_record(settings.model, outcome.checksum, wait=outcome.exit_code is None),
            "parameters": summary.parameters,
            "trainable": summary.trainable,
        },
        "data": {
            "sha256": data.rows.sha256,
            "sources": data.rows.counts,
            "versions": data.rows.versions,
            "rows": len(data.train),
            "sequences": None if data.sequences is None else len(data.sequences),
            "eval_rows": len(data.test),
            "tokens": data.tokens,
            "num_target_tokens": data.num_target_tokens,
            **({"labels": list(data.labels)} if data.labels else {}),
            "too_long": data.too_long,
            "bad": len(data.rows.bad),
            "notes": data.rows.notes,
        },
        "device": {
            "name": run.device.name,
            "count": run.world.size,
            "parallel": summary.parallel,
            "dtype": str(run.device.dtype).removeprefix("torch."),
            "attention": summary.attention,
            "layout": {
                "name": summary.proof.layout,
                "not": list(summary.proof.reasons),
                "loss_difference": summary.proof.loss,
                "gradient_difference": summary.proof.gradient,
            },
            "attention_kernels": {"one_length": summary.kernels.one_length, "mixed": summary.kernels.mixed},
            "compiled": run.plan.compile,
            "checkpointed_blocks": run.checkpointed,
            "tokens_at_a_time": run.batches.max_tokens,
        },
        "optimizer": name_optimizer(run.strategy.optimizer),
        "steps": run.step,
        "schedule": {
            "name": run.plan.settings.schedule,
            "warmup_steps": run.plan.warmup(run.steps),
            "lengths": run.progress.lengths,
        },
        **run.progress.measurements(),
        "best_step": run.progress.best_step or None,
        "best_eval_loss": run.progress.best_eval_loss if run.progress.best_step else None,
        "expected_memory_bytes": summary.expected_bytes,
        "peak_memory_bytes": outcome.peak_memory,
    }


def format_footer(summary: dict[str, Any], what: str, output: Path) -> list[str]:
    """Return the lines printed after a run. summary: the content of run.json.

    what: 'adapter' or 'model', the folder of ``output`` that holds the trained weights.
    """
    mfu = f", MFU {summary['mfu']:.0%}" if summary["mfu"] else ""
    # The next task, if this recipe has it.
    weights = output / what
    ways = {
        "generate": f"generate --{what} {weights}",
        "chat": f'chat --{what} {weights} "質問"',
        "evaluate": f"evaluate --{what} {weights}",
        "upload": f"upload --input {weights} --name you/{output.name} --dry-run",
    }
    task = next((name for name in ways if shutil.which(name)), "chat")
    if "labels" in summary["data"]:
        task = "python"
        loader = f'transformers\' pipeline("text-classification", model="{weights}")'
        ways[task] = (
            loader if what == "model" else f"peft's AutoPeftModelForSequenceClassification, {weights}/labels.json"
        )
    return [
        (
            f"done        {summary['steps']:,} steps in {summary['time_to_train_s']:,.0f} s,"
            f" {summary['tokens_per_s']:,.0f} tokens/s{mfu}, at most {summary['peak_memory_bytes'] / 2**30:.1f} GiB"
        ),
        f"{what:<12}{weights}   loss {output / 'loss.png'}   record {output / 'run.json'}",
        f"try         {ways[task]}",
    ]
