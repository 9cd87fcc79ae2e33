"""Shard the weights among the processes with FSDP2: each keeps its part of a block and gathers the block to compute it.

The first process alone reads the model. It broadcasts and shards one block after the other, so the others never hold
more of the model than one block and their own parts on the GPU, and next to nothing in the host's memory.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ekiben_tasks.distributed.context import DistributedContext
from ekiben_tasks.distributed.gather import gather_weights
from ekiben_tasks.distributed.model_loading import load_loss_module
from ekiben_tasks.distributed.optimizer import OptimizerConfig, load_weights, make_optimizer, set_learning_rate
from ekiben_tasks.distributed.replicated import ReplicatedStrategy
from ekiben_tasks.distributed.saved_state import open_saved
from ekiben_tasks.distributed.strategy import ModelRequest
from ekiben_tasks.models.checkpoint_folder import SHARDS
from ekiben_tasks.models.description import find_blocks
from ekiben_tasks.models.sharded_checkpoint import read_metadata, read_shards, write_shards
from ekiben_tasks.models.tuning import LossModule
from ekiben_tasks.task.errors import TaskError


def create(
    request: ModelRequest, optimizer: OptimizerConfig, world: DistributedContext, options: None
) -> ShardedStrategy | ReplicatedStrategy:
    """Load and shard the model, and return its strategy.

    Where most weights are frozen, only those are sharded: the trained ones are complete in every process.

    Raises:
        TaskError: the model cannot be loaded, or cannot be trained this way.
    """
    loss_module = load_loss_module(request, world)
    device, trained = request.device.torch_device, request.tuning.method == "full"
    shard(loss_module, device, world, trained=trained)
    if trained:
        return ShardedStrategy(loss_module, optimizer, world, device)
    return ReplicatedStrategy(loss_module, optimizer, world, collective=True)


def shard(loss_module: LossModule, device: torch.device, world: DistributedContext, *, trained: bool) -> None:
    """Shard the model among the processes, in place, onto ``device``.

    The first process has real weights before, the others meta tensors. trained: all weights are trained, so shards are
    kept in fp32 and gathered in the loss module's dtype. Otherwise whatever requires a gradient (an adapter, the last
    layer) is small and stays complete in every process.
    """
    policy = MixedPrecisionPolicy(param_dtype=loss_module.dtype, reduce_dtype=torch.float32)
    blocks = find_blocks(loss_module.body)
    inside = {id(module) for block in blocks for module in block.modules()}
    rest = [module for module in loss_module.modules() if id(module) not in inside]

    counts = Counter(id(tensor) for module in loss_module.modules() for tensor in module._parameters.values())
    tied = {number: None for number, count in counts.items() if count > 1}

    def spread(modules: list[Any], parent: Any) -> None:
        for module in modules:
            _receive(module, device, world, tied, widen=trained)
        trainable = {parameter for parameter in parent.parameters() if parameter.requires_grad}
        options: dict[str, Any] = {"mp_policy": policy} if trained else {"ignored_params": trainable}
        fully_shard(parent, **options)

    for block in blocks:
        spread(list(block.modules()), block)
    spread(rest, loss_module)


def _receive(
    module: Any, device: torch.device, world: DistributedContext, tied: dict[int, Any], *, widen: bool
) -> None:
    """Weights and buffers of one module itself, without its children, from the first process.

    tied: id of a weight that several modules have → what it has become.
    """
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is None:
                continue
            if tied.get(id(tensor)) is not None:
                table[name] = tied[id(tensor)][1]
                continue
            here = tensor.detach().to(device) if world.is_main_process else torch.empty_like(tensor, device=device)
            if world.size > 1:
                dist.broadcast(here, 0)
            if table is module._parameters:
                here = here.float() if widen else here
                here = torch.nn.Parameter(here, requires_grad=tensor.requires_grad)
            table[name] = here
            if id(tensor) in tied:
                tied[id(tensor)] = (tensor, here)  # kept, or another tensor could get its id


class ShardedStrategy:
    """Train all weights of a model that is sharded already; gradients and optimizer state are sharded, too."""

    collective = True

    def __init__(
        self, loss_module: LossModule, config: OptimizerConfig, world: DistributedContext, device: torch.device
    ) -> None:
        self.loss_module, self.config, self.world = loss_module, config, world
        self.trainable = {name: param for name, param in loss_module.model.named_parameters() if param.requires_grad}
        self.parameters = list(self.trainable.values())
        self.optimizer = make_optimizer(self.parameters, config, device)

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the summed loss of ``batch``, a scalar in fp32."""
        return torch.as_tensor(self.loss_module(batch))

    def backward(self, loss: torch.Tensor, factor: float, *, last: bool) -> None:
        """Add the gradient of ``loss``, a scalar, times ``factor``, summed over the processes.

        ``last`` has no effect.
        """
        # FSDP averages over the processes; we need the sum.
        (loss * (factor * self.world.size)).backward()

    def zero_grad(self) -> None:
        """Drop the gradients of this step."""
        self.optimizer.zero_grad()

    def step(self, rate: float) -> torch.Tensor:
        """Clip the gradients, and update the weights at learning rate ``rate``.

        Returns:
            The norm before clipping (Pascanu et al. 2013, arXiv:1211.5063, algorithm 1), a scalar in fp32.
        """
        norm: Any = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm or math.inf)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.as_tensor(norm.full_tensor())

    def is_finite(self) -> bool:
        """Return whether this process's shards of the trained weights are finite."""
        return all(bool(parameter.to_local().isfinite().all()) for parameter in self.parameters)

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the weights and the optimizer's state into ``folder``, each process its shards; return {}."""
        model, optimizer = get_state_dict(self.loss_module, self.optimizer)
        write_shards({"model": model, "optimizer": optimizer}, folder / SHARDS)
        return {}

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Restore the state that save() of any strategy left in ``folder`` and ``state``.

        Raises:
            TaskError: it cannot be read, or belongs to another model.
        """
        if not (folder / SHARDS).is_dir():
            sizes = {name: param.size() for name, param in self.trainable.items()}
            load_weights(open_saved(folder, state, sizes), self.trainable, self.optimizer)
            return
        read_metadata(folder / SHARDS)
        model, optimizer = get_state_dict(self.loss_module, self.optimizer)
        try:
            read_shards({"model": model, "optimizer": optimizer}, folder / SHARDS, alone=False)
        except Exception as error:
            raise TaskError(
                f"{folder}: cannot be read ({error}); remove it, or start again with --overwrite"
            ) from error
        set_state_dict(self.loss_module, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return name → complete weight on the CPU, in the first process; {} in the others."""
        return gather_weights(self.loss_module)
