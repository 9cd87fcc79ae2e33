"""Keep the complete model in every process, and sum the gradients once a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ekiben_tasks.distributed.context import DistributedContext
    from ekiben_tasks.distributed.optimizer import OptimizerConfig
    from ekiben_tasks.distributed.strategy import ModelRequest, ParallelStrategy

SUMMARY = "each with the whole model"
PROCESSES = "several"
NEEDS_PROCESS_GROUP = False
TAKES_QUANTIZED = True
COMPILES = True


def unavailable(options: None) -> None:
    """Return None: every image can run it."""


def memory_layout(options: None) -> tuple[Literal["ddp"], Literal["none"]]:
    """Return the layout ``ddp``, in which every GPU has all weights and optimizer state, without offloading."""
    return "ddp", "none"


def create(
    request: ModelRequest, optimizer: OptimizerConfig, world: DistributedContext, options: Any
) -> ParallelStrategy:
    """Load the model, complete in this process, and return its strategy.

    Raises:
        TaskError: the model cannot be loaded, or cannot be trained this way.
    """
    from ekiben_tasks.distributed import replicated

    return replicated.create(request, optimizer, world, options)
