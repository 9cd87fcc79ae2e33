"""Shard the weights among the processes with FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ekiben_tasks.distributed.context import DistributedContext
    from ekiben_tasks.distributed.optimizer import OptimizerConfig
    from ekiben_tasks.distributed.strategy import ModelRequest, ParallelStrategy

SUMMARY = "weights shared (fsdp)"
PROCESSES = "several"
NEEDS_PROCESS_GROUP = False
TAKES_QUANTIZED = False
COMPILES = True


def unavailable(options: None) -> None:
    """Return None: FSDP2 is part of PyTorch."""


def memory_layout(options: None) -> tuple[Literal["fsdp"], Literal["none"]]:
    """Return the layout ``fsdp``, in which weights and optimizer state are sharded, without offloading."""
    return "fsdp", "none"


def create(
    request: ModelRequest, optimizer: OptimizerConfig, world: DistributedContext, options: Any
) -> ParallelStrategy:
    """Load and shard the model, and return its strategy.

    Raises:
        TaskError: the model cannot be loaded, or cannot be trained this way.
    """
    from ekiben_tasks.distributed import sharded

    return sharded.create(request, optimizer, world, options)
