"""Make the optimizer of every strategy: AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), norms without decay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from ekiben_tasks.distributed.saved_state import Reader


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Hold the learning rate, the weight decay, and the norm that gradients are clipped to."""

    learning_rate: float
    weight_decay: float
    max_grad_norm: float  # longer gradients are clipped to this; 0: none are


def make_optimizer(
    parameters: list[torch.Tensor], config: OptimizerConfig, device: torch.device
) -> torch.optim.Optimizer:
    """Return AdamW for ``parameters``, of any shapes, fused on a GPU."""
    return torch.optim.AdamW(decay_groups(parameters, config), lr=config.learning_rate, fused=device.type == "cuda")


def name_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return what implements ``optimizer``: "torch.optim.AdamW, fused" or "deepspeed.ops.adam.DeepSpeedCPUAdam"."""
    kind = type(optimizer)
    fused = ", fused" if optimizer.defaults.get("fused") else ""
    return f"{kind.__module__.rpartition('.')[0]}.{kind.__name__}{fused}"


def decay_groups(parameters: list[torch.Tensor], config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: tensors of one dimension, which are norms and biases, do not decay."""
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def load_weights(read: Reader, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Copy weights of another strategy's checkpoint into ``parameters``, and AdamW's state of them into ``optimizer``.

    parameters: by name, complete or sharded over the processes, each of which then takes its own shard.

    Raises:
        TaskError: the checkpoint cannot be read, or is another model's.
    """
    states: dict[int, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        saved = read(name)
        with torch.no_grad():
            parameter.copy_(_like(saved.weight, parameter))
        states[id(parameter)] = {
            "step": torch.tensor(saved.step),
            "exp_avg": _like(saved.exp_avg, parameter),
            "exp_avg_sq": _like(saved.exp_avg_sq, parameter),
        }
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {index: states[id(parameter)] for index, parameter in enumerate(order)}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` where ``parameter`` is; of a sharded one the shard that this process has, as every process read
    it.
    """
    tensor = tensor.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return tensor


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
