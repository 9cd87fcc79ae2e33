"""Plan a run before its first step: its steps, and how they fit the memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ekiben_tasks.distributed.optimizer import BF16_STATE_SIZE, STATE_SIZES, OptimizerConfig
from ekiben_tasks.distributed.strategy import StrategyModule
from ekiben_tasks.models.device import Device, compiler_missing
from ekiben_tasks.models.memory import SPREAD, Memory, MemoryProfile
from ekiben_tasks.training.prepare import Prepared
from ekiben_tasks.training.settings import Settings


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold the plan of a run. max_rows, max_tokens: of one micro-batch."""

    settings: Settings
    max_rows: int
    max_tokens: int
    checkpointed: int  # blocks with recomputed activations
    compile: bool
    sequence_length: int = 0  # tokens of a packed sequence; 0: batch_size counts examples

    @property
    def optimizer(self) -> OptimizerConfig:
        """Return the optimizer's part of the plan."""
        settings = self.settings
        return OptimizerConfig(
            settings.learning_rate,
            settings.weight_decay,
            settings.max_grad_norm,
            (settings.adam_beta1, settings.adam_beta2),
            settings.optimizer,
            settings.weights,
        )

    def step_tokens(self, longest: int, processes: int) -> int:
        """Return how many tokens of a step one of ``processes`` has at most. longest: of an example."""
        return _step_tokens(self.settings.batch_size, self.sequence_length, longest, processes)

    def steps(self, rows: int) -> int:
        """Return how many steps the run takes with ``rows`` training examples, or packed sequences."""
        total = math.ceil(self.settings.epochs * self.steps_per_epoch(rows) - 1e-9)
        return min(total, self.settings.max_steps) if self.settings.max_steps > 0 else total

    def steps_per_epoch(self, rows: int) -> int:
        """Return how many steps one epoch of ``rows`` training examples takes."""
        return math.ceil(rows / self.settings.batch_size)

    def warmup(self, steps: int) -> int:
        """Return how many of ``steps`` are the warm-up, as transformers' TrainingArguments.get_warmup_steps()."""
        return _count(self.settings.warmup_steps, steps)

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of ``step`` (from 0) of ``steps``: a linear warm-up, then the schedule.

        It falls to min_learning_rate linearly or along half a cosine (Loshchilov and Hutter 2017, arXiv:1608.03983,
        equation 5, without restarts), in decay_steps at the end alone (wsd: Hu et al. 2024, arXiv:2404.06395), or
        not.
        """
        settings, warmup = self.settings, self.warmup(steps)
        low = settings.min_learning_rate / settings.learning_rate
        if step < warmup:
            share = (step + 1) / warmup
            # As transformers has it, whose other warm-ups begin at 0.
            return settings.learning_rate * (low + (1 - low) * share if settings.schedule == "wsd" else share)
        begin = max(warmup, steps - _count(settings.decay_steps, steps)) if settings.schedule == "wsd" else warmup
        left = min((steps - step) / max(steps - begin, 1), 1.0)
        cosine = (1 - math.cos(math.pi * left)) / 2
        shares = {"linear": left, "cosine": cosine, "wsd": cosine, "constant": 1.0}
        return settings.learning_rate * (low + (1 - low) * shares[settings.schedule])


def _count(number: float, steps: int) -> int:
    """Return a number of steps, of which a ``number`` below 1 is a share."""
    return int(number) if number >= 1 else math.ceil(number * steps)


def make_plan(settings: Settings, device: Device, memory: Memory, profile: MemoryProfile, data: Prepared) -> Plan:
    """Return how the run trains: micro-batches that fit the memory, checkpointed blocks, steps."""
    checkpointed, max_tokens = _fit_memory(settings, device, memory, profile, data)
    packed, micro_batch = data.sequences is not None, settings.micro_batch
    return Plan(
        settings,
        max_rows=len(data.train) if packed else micro_batch if isinstance(micro_batch, int) else settings.batch_size,
        max_tokens=max_tokens,
        checkpointed=checkpointed,
        compile=profile.compiled,
        sequence_length=data.limit if packed else 0,
    )


def will_compile(strategy: StrategyModule, settings: Settings, device: Device, tokens: int) -> bool:
    """Return whether blocks are compiled: as the settings say or, for ``auto``, in long runs on a GPU with bf16.

    tokens: of one epoch.
    """
    if not strategy.COMPILES:
        return False
    if settings.compile != "auto":
        return settings.compile
    worth_it = tokens * settings.epochs > 1_000_000  # it takes about half a minute to compile
    return worth_it and device.has_bf16 and compiler_missing() is None


def memory_choices(
    strategy: StrategyModule, settings: Settings, device: Device, processes: int, tokens: int, options: Any
) -> dict[str, Any]:
    """Return the fields of MemoryProfile that depend on how the run trains. tokens: of one epoch."""
    layout, offload = strategy.memory_layout(options)
    return {
        "strategy": layout,
        "gpus": processes,
        "offload": offload,
        "bits": settings.bits,
        "optimizer_size": BF16_STATE_SIZE if settings.weights == "bf16" else STATE_SIZES[settings.optimizer],
        "size": device.dtype.itemsize,
        "keeps_scores": settings.attention == "math",
        "compiled": will_compile(strategy, settings, device, tokens),
    }


def _fit_memory(
    settings: Settings, device: Device, memory: Memory, profile: MemoryProfile, data: Prepared
) -> tuple[int, int]:
    """Return (blocks to checkpoint, tokens of a micro-batch) within nine tenths of the memory.

    They are as large as pays. Where even those that are large enough for full speed do not fit, as many blocks as
    necessary are checkpointed.
    """
    most, enough = (16_384, 8192) if device.is_gpu else (4096, 1024)
    if device.is_gpu and profile.strategy == "fsdp":
        most = 32_768  # each micro-batch costs gathering every weight
    room = max(int(0.9 * device.memory) - memory.fixed, 0)
    # Processes that gather weights from each other cannot take smaller micro-batches once the memory is full.
    spread = 1 + SPREAD if profile.strategy in ("fsdp", "zero2", "zero3") else 1
    plain, twice = int(memory.per_token * spread), int(memory.per_token_checkpointed * spread)
    sequence = 0 if data.sequences is None else data.limit
    if isinstance(settings.micro_batch, int):
        micro_batch_tokens = most = (sequence or data.longest) * settings.micro_batch
    else:
        micro_batch_tokens = max(
            data.longest, min(enough, _step_tokens(settings.batch_size, sequence, data.longest, profile.gpus))
        )
    layers = profile.layers
    if settings.gradient_checkpointing == "auto":
        share = (micro_batch_tokens * plain - room) / max(micro_batch_tokens * (plain - twice), 1)
        checkpointed = min(max(-int(-share * layers // 1), 0), layers)
    else:
        checkpointed = layers if settings.gradient_checkpointing else 0
    per_token = plain - (plain - twice) * checkpointed // layers
    return checkpointed, max(min(room // max(per_token, 1), most), data.longest)


def _step_tokens(batch_size: int, sequence_length: int, longest: int, processes: int) -> int:
    """Return how many tokens of a step one process has at most. sequence_length: 0 where ``batch_size`` counts
    examples.
    """
    if not sequence_length:
        return math.ceil(batch_size / processes) * longest
    if processes == 1:
        return batch_size * sequence_length
    # The examples of all sequences are dealt out one by one, the longest first.
    return math.ceil(batch_size * sequence_length / processes) + longest
