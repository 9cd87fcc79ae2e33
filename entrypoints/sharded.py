"""The weights shared among the processes (FSDP2): each keeps its part of every block and gathers a block while it works.

The first process alone reads the model. It gives every block away before the next one is touched, so the others never
hold more of it than a block and their own parts, on the GPU, and next to nothing in the host's memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from learner import Learner, find_blocks
from replicated import make_optimizer
from settings import TaskError
from world import World

if TYPE_CHECKING:
    from loop import Plan

SHARDS = "shards"


def shard(learner: Learner, device: torch.device, world: World, *, trained: bool) -> None:
    """Spread the model over the processes, in place: real weights at the first process, meta at the others, to parts on ``device``.

    trained: the weights learn, so parts are kept in fp32, and gathered in the learner's dtype. Otherwise all that wants
    a gradient (an adapter, the last layer) is small and stays whole in every process.
    """
    policy = MixedPrecisionPolicy(param_dtype=learner.dtype, reduce_dtype=torch.float32)
    blocks = find_blocks(learner.body)
    inside = {id(part) for block in blocks for part in block.modules()}
    rest = [part for part in learner.modules() if id(part) not in inside]

    def spread(parts: list[Any], whole: Any) -> None:
        for part in parts:
            _receive(part, device, world, widen=trained)
        if whole is learner:
            learner.causal.tie_weights()
        own = {parameter for parameter in whole.parameters() if parameter.requires_grad}
        options: dict[str, Any] = {"mp_policy": policy} if trained else {"ignored_params": own}
        fully_shard(whole, **options)

    for block in blocks:
        spread(list(block.modules()), block)
    spread(rest, learner)


def _receive(part: Any, device: torch.device, world: World, *, widen: bool) -> None:
    """Weights and buffers of one module itself, without its children, from the first process."""
    for table in (part._parameters, part._buffers):
        for name, tensor in table.items():
            if tensor is None:
                continue
            here = tensor.detach().to(device) if world.leads else torch.empty_like(tensor, device=device)
            if world.size > 1:
                dist.broadcast(here, 0)
            if table is part._parameters:
                here = here.float() if widen else here
                here = torch.nn.Parameter(here, requires_grad=tensor.requires_grad)
            table[name] = here


class Sharded:
    """Weights, gradients and optimizer in parts; the model is spread already."""

    collective = True

    def __init__(self, learner: Learner, plan: Plan, world: World, device: torch.device) -> None:
        self.learner, self.plan, self.world = learner, plan, world
        self.parameters = [part for part in learner.parameters() if part.requires_grad]
        self.optimizer = make_optimizer(self.parameters, plan, device)

    def loss(self, pack: Any) -> torch.Tensor:
        return torch.as_tensor(self.learner(pack))

    def backward(self, loss: torch.Tensor, factor: float, *, last: bool) -> None:
        # FSDP takes the mean over the processes where the sum is wanted.
        (loss * (factor * self.world.size)).backward()

    def forget(self) -> None:
        self.optimizer.zero_grad()

    def step(self, rate: float) -> torch.Tensor:
        norm: Any = torch.nn.utils.clip_grad_norm_(self.parameters, self.plan.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.as_tensor(norm.full_tensor())

    def save(self, folder: Path) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.learner, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=str(folder / SHARDS))
        return {}

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        model, optimizer = get_state_dict(self.learner, self.optimizer)
        try:
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=str(folder / SHARDS))
        except Exception as error:
            raise TaskError(f"{folder}: cannot be read ({error}); remove it, or start again with --fresh") from error
        set_state_dict(self.learner, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def weights(self) -> dict[str, torch.Tensor]:
        return gather_weights(self.learner)


def gather_weights(learner: Learner) -> dict[str, torch.Tensor]:
    """Every weight whole, on the CPU, in the first process; in the dtype they are gathered in for work."""
    whole = get_model_state_dict(learner, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    # Gathered, a tied head is a second copy of the table.
    tied = {name for name, _ in learner.named_parameters(remove_duplicate=False)}
    tied -= {name for name, _ in learner.named_parameters()}
    return {name.removeprefix("model."): part.to(learner.dtype) for name, part in whole.items() if name not in tied}
