"""Define parallel strategies, and find one by its name.

Each module of ``strategies`` is one, and its name is what the setting ``parallel`` takes. A module added to that folder
is found; nothing else has to know it. It imports torch in ``create()`` alone: a wrong setting is refused before that.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from ekiben_tasks.distributed import strategies
from ekiben_tasks.task.errors import SettingError, nearest

if TYPE_CHECKING:
    import torch

    from ekiben_tasks.data.packing import PackedBatch
    from ekiben_tasks.distributed.context import DistributedContext
    from ekiben_tasks.distributed.optimizer import OptimizerConfig
    from ekiben_tasks.models.attention_kernel import AttentionKernel
    from ekiben_tasks.models.classifier import Classes
    from ekiben_tasks.models.device import Device
    from ekiben_tasks.models.memory import Strategy as MemoryLayout
    from ekiben_tasks.models.tuning import LossModule, TuningMethod


class ParallelStrategy(Protocol):
    """Define a model in training as the training loop uses it. Every process calls every method in the same order."""

    loss_module: LossModule
    optimizer: torch.optim.Optimizer
    collective: bool  # the forward pass uses collectives: all processes must run it equally often

    def loss(self, batch: PackedBatch) -> torch.Tensor:
        """Return the summed loss of a micro-batch, a scalar in fp32."""

    def backward(self, loss: torch.Tensor, factor: float, *, last: bool) -> None:
        """Add the gradient of ``loss``, a scalar, times ``factor`` to that of this step.

        last: no other micro-batch of this step follows.
        """

    def zero_grad(self) -> None:
        """Drop the gradients of this step."""

    def step(self, rate: float) -> torch.Tensor:
        """Sum the gradients over the processes, clip them, and update the weights at learning rate ``rate``.

        Returns:
            The norm before clipping, a scalar in fp32.
        """

    def is_finite(self) -> bool:
        """Return whether the trained weights that this process keeps are all finite."""

    def save(self, folder: Path) -> dict[str, Any]:
        """Write large state into ``folder`` and return small state: together the state after the last step."""

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Restore the state that save() of any strategy left, in any number of processes.

        Raises:
            TaskError: it cannot be read, or belongs to another model.
        """

    def weights(self) -> dict[str, torch.Tensor]:
        """Return, in the first process, parameter name → tensor on the CPU: an adapter's weights, else all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """Describe the model to train: what is loaded, which weights are trained, how its blocks run."""

    path: str  # a folder or a hub id, as locate_model() returns it
    name: str  # as the user gave it
    device: Device
    tuning: TuningMethod
    bits: Literal[16, 8, 4] = 16  # of frozen weights
    checkpointed_blocks: int = 0  # their activations are computed again in the backward pass
    compile: bool = False
    attention_kernel: AttentionKernel = "auto"
    classes: Classes | None = None  # of a classification head


class StrategyModule(Protocol):
    """Define the interface of a module of ``strategies``."""

    SUMMARY: str  # the layout, printed after the number of processes: "weights sharded (fsdp)"
    PROCESSES: Literal["one", "several", "any"]  # numbers of processes that it supports
    NEEDS_PROCESS_GROUP: bool  # also where there is one process
    TAKES_QUANTIZED: bool  # frozen weights of 8 or 4 bits
    COMPILES: bool  # whether its blocks can be compiled

    def unavailable(self, options: Any) -> str | None:
        """Return why this image cannot run it and what to do instead, or None.

        options: the group of settings that has the strategy's name, or None.
        """

    def memory_layout(self, options: Any) -> tuple[MemoryLayout, Literal["none", "optimizer", "all"]]:
        """Return (how weights and optimizer are spread, what is in the host's memory), for the memory estimate.

        options: the group of settings that has the strategy's name, or None.
        """

    def create(
        self, request: ModelRequest, optimizer: OptimizerConfig, world: DistributedContext, options: Any
    ) -> ParallelStrategy:
        """Load the model, spread it over the processes, and return it ready to train.

        options: the group of settings that has the strategy's name, or None.

        Raises:
            TaskError: the model cannot be loaded, or cannot be trained this way.
        """


def names() -> list[str]:
    """Return the names of all strategies, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(strategies.__path__))


def find(name: str) -> StrategyModule:
    """Return the module of the strategy ``name``.

    Raises:
        SettingError: there is none.
    """
    if name not in names():
        raise SettingError(f"setting parallel: no strategy is called '{name}'.{nearest(name, ['auto', *names()])}")
    return cast(StrategyModule, importlib.import_module(f"{strategies.__name__}.{name}"))
