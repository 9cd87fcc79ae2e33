"""Train in one process, on a single GPU or on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ekiben_tasks.distributed.context import DistributedContext
    from ekiben_tasks.distributed.optimizer import OptimizerConfig
    from ekiben_tasks.distributed.strategy import ModelRequest, ParallelStrategy

SUMMARY = ""
PROCESSES = "one"
NEEDS_PROCESS_GROUP = False
TAKES_QUANTIZED = True
COMPILES = True


def unavailable(options: None) -> None:
    """Return None: every image can run it."""


def memory_layout(options: None) -> tuple[Literal["none"], Literal["none"]]:
    """Return the layout ``none``, in which one GPU holds all weights and states, without offloading."""
    return "none", "none"


def create(
    request: ModelRequest, optimizer: OptimizerConfig, world: DistributedContext, options: Any
) -> ParallelStrategy:
    """Load the model, complete in this process, and return its strategy.

    Raises:
        TaskError: the model cannot be loaded, or cannot be trained this way.
    """
    from ekiben_tasks.distributed import replicated

    return replicated.create(request, optimizer, world, options)
