"""Make the optimizer of every strategy: AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), norms without decay.

Where the trained weights are complete in every process, others are there, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from ekiben_tasks.distributed.options import OptimizerName
from ekiben_tasks.distributed.saved_state import Reader

# Bytes per weight of an optimizer's state and an exact copy of the weight.
STATE_SIZES: dict[OptimizerName, int] = {"adamw": 12, "adamw_8bit": 6, "adafactor": 5, "muon": 12}
BF16_STATE_SIZE = 8  # of AdamW's without such a copy


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Hold the optimizer's name and numbers."""

    learning_rate: float
    weight_decay: float
    max_grad_norm: float  # maximum norm of the gradient; 0: no clipping
    betas: tuple[float, float] = (0.9, 0.999)  # AdamW's
    name: OptimizerName = "adamw"
    weights: Literal["fp32", "bf16"] = "fp32"  # bf16: without an exact copy


def make_optimizer(
    parameters: list[torch.Tensor], config: OptimizerConfig, device: torch.device, tables: Collection[int] = ()
) -> torch.optim.Optimizer:
    """Return the optimizer of ``parameters``, of any shapes; AdamW is fused on a GPU.

    tables: ids of those that belong to embeddings and head, which Muon leaves to AdamW.
    """
    groups, common = decay_groups(parameters, config), {"lr": config.learning_rate, "betas": config.betas}
    if config.name == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, **common)
    if config.name == "adafactor":  # as transformers' Trainer makes it
        from transformers.optimization import Adafactor

        return Adafactor(groups, lr=config.learning_rate, scale_parameter=False, relative_step=False)
    if config.name == "muon":
        matrices = [each for each in parameters if each.ndim == 2 and id(each) not in tables]
        if matrices:
            kept = {id(each) for each in matrices}
            adamw_groups = decay_groups([each for each in parameters if id(each) not in kept], config)
            return MuonWithAdamW(matrices, adamw_groups, config, fused=device.type == "cuda")
    return torch.optim.AdamW(groups, **common, fused=device.type == "cuda")


class MuonWithAdamW:
    """Step matrices by Muon (Jordan et al. 2024), all else by AdamW, at one learning rate.

    Muon's update is scaled to the size of AdamW's (Liu et al. 2025, arXiv:2502.16982, section 2.2).
    """

    def __init__(
        self, matrices: list[torch.Tensor], adamw_groups: list[dict[str, Any]], config: OptimizerConfig, *, fused: bool
    ) -> None:
        rate, decay = config.learning_rate, config.weight_decay
        self.optimizers = [torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")]
        if adamw_groups:
            self.optimizers.append(torch.optim.AdamW(adamw_groups, lr=rate, betas=config.betas, fused=fused))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of both."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """Update the weights."""
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)


def name_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of ``optimizer``: "torch.optim.AdamW, fused" or "deepspeed.ops.adam.DeepSpeedCPUAdam"."""
    if isinstance(optimizer, MuonWithAdamW):
        return " and ".join(map(name_optimizer, optimizer.optimizers))
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
        TaskError: the checkpoint cannot be read, or belongs to another model.
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
