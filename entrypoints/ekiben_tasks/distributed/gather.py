"""Gather sharded weights into complete ones."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ekiben_tasks.models.tuning import LossModule


def gather_weights(loss_module: LossModule) -> dict[str, torch.Tensor]:
    """Return name → complete weight on the CPU, in the loss module's dtype, in the first process; {} in the others.

    Every process has to call this. A weight that is tied to another is left out. Shapes are the parameters' own.
    """
    full = get_model_state_dict(loss_module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    tied = tied_names(loss_module)
    return {
        name.removeprefix("model."): weight.to(loss_module.dtype) for name, weight in full.items() if name not in tied
    }


def tied_names(module: torch.nn.Module) -> set[str]:
    """Return the further names of weights that have several, a tied head's: copied to the CPU, each is a tensor of its
    own.
    """
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return names - {name for name, _ in module.named_parameters()}
