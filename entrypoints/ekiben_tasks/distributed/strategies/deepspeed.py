"""Shard the weights among the processes with DeepSpeed."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Literal

from ekiben_tasks.distributed.options import DeepSpeed

if TYPE_CHECKING:
    from ekiben_tasks.distributed.context import DistributedContext
    from ekiben_tasks.distributed.optimizer import OptimizerConfig
    from ekiben_tasks.distributed.strategy import ModelRequest, ParallelStrategy
    from ekiben_tasks.models.memory import Strategy as MemoryLayout

SUMMARY = "by DeepSpeed"
PROCESSES = "any"
NEEDS_PROCESS_GROUP = True
TAKES_QUANTIZED = False
COMPILES = False  # its hooks break a compiled block into pieces


def unavailable(options: DeepSpeed) -> str | None:
    """Return a hint if the image lacks DeepSpeed or the op of ``options``, else None."""
    if importlib.util.find_spec("deepspeed") is None:
        return (
            "this image has no DeepSpeed; use the recipe finetune, build this one with --layer deepspeed-plain or "
            "--layer deepspeed, or take parallel=fsdp, which shares the weights in the same way"
        )
    if options.optimizer == "deepspeed" and not options.takes_adam_op():
        return (
            f"deepspeed.optimizer=deepspeed needs DeepSpeed's op {options.adam_op}, which is not compiled in this"
            " image; build it with --layer deepspeed, or take deepspeed.optimizer=auto"
        )
    return None


def memory_layout(options: DeepSpeed) -> tuple[MemoryLayout, Literal["none", "optimizer", "all"]]:
    """Return the layout ``zero2`` or ``zero3``, and what ``options`` offload to the host's memory."""
    return "zero2" if options.stage == 2 else "zero3", options.offload


def create(
    request: ModelRequest, optimizer: OptimizerConfig, world: DistributedContext, options: DeepSpeed
) -> ParallelStrategy:
    """Load the model, sharded by DeepSpeed, and return its strategy.

    Raises:
        TaskError: the model cannot be loaded, or no layer has the name of a target.
    """
    from ekiben_tasks.distributed import partitioned

    return partitioned.create(request, optimizer, world, options)
