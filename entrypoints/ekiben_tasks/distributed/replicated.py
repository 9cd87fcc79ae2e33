"""Keep all that is trained complete in every process: one GPU, or several that sum their gradients once a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ekiben_tasks.distributed.bf16_adamw import RoundingAdamW
from ekiben_tasks.distributed.context import DistributedContext
from ekiben_tasks.distributed.gather import gather_weights, tied_names
from ekiben_tasks.distributed.model_loading import load_loss_module
from ekiben_tasks.distributed.optimizer import OptimizerConfig, load_weights, make_optimizer, set_learning_rate
from ekiben_tasks.distributed.saved_state import open_saved
from ekiben_tasks.distributed.strategy import ModelRequest
from ekiben_tasks.models.description import find_head
from ekiben_tasks.models.tuning import LossModule


class ReplicatedStrategy:
    """Keep the trained weights and their gradients in fp32, each as one vector: one reduction, one norm for all.

    A parameter's gradient is added to the vector's as soon as autograd has it, and freed.
    """

    def __init__(
        self, loss_module: LossModule, config: OptimizerConfig, world: DistributedContext, *, collective: bool = False
    ) -> None:
        self.loss_module, self.config, self.world, self.collective = loss_module, config, world, collective
        named = [
            (name, parameter) for name, parameter in loss_module.model.named_parameters() if parameter.requires_grad
        ]
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        device = self.parameters[0].device
        sizes = [parameter.numel() for parameter in self.parameters]
        self.vector = torch.empty(sum(sizes), device=device)
        self.gradient = torch.zeros_like(self.vector)
        self.copies = [
            view.view_as(parameter) for view, parameter in zip(self.vector.split(sizes), self.parameters, strict=True)
        ]
        with torch.no_grad():
            torch._foreach_copy_(self.copies, self.parameters)
        for copy, gradient, parameter in zip(self.copies, self.gradient.split(sizes), self.parameters, strict=True):
            copy.grad = gradient.view_as(parameter)
            parameter.register_post_accumulate_grad_hook(_make_accumulator(copy.grad))
        causal = loss_module.causal
        ends = [causal.get_input_embeddings(), find_head(causal)]
        in_tables = {id(parameter) for module in ends for parameter in module.parameters()}
        pairs = zip(self.copies, self.parameters, strict=True)
        tables = {id(copy) for copy, parameter in pairs if id(parameter) in in_tables}
        self.optimizer = make_optimizer(self.copies, config, device, tables)
        # fp16 gradients underflow without it; a no-op elsewhere.
        self.scaler = torch.GradScaler(device.type, enabled=loss_module.dtype == torch.float16)

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the summed loss of ``batch``, a scalar in fp32."""
        return torch.as_tensor(self.loss_module(batch))

    def backward(self, loss: torch.Tensor, factor: float, *, last: bool) -> None:
        """Add the gradient of ``loss``, a scalar, times ``factor`` to the fp32 gradient.

        In fp16 the gradient is scaled until step().
        """
        self.scaler.scale(loss * factor).backward()

    def zero_grad(self) -> None:
        """Set the gradients of this step to 0."""
        for parameter in self.parameters:
            parameter.grad = None
        self.gradient.zero_()

    def step(self, rate: float) -> torch.Tensor:
        """Sum the gradients over the processes, clip them, and update the weights at learning rate ``rate``.

        In fp16, a step whose gradient overflowed is skipped (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

        Returns:
            The gradient's norm before clipping (Pascanu et al. 2013, arXiv:1211.5063, algorithm 1), a scalar in fp32.
        """
        self.world.all_reduce(self.gradient)
        self.scaler.unscale_(self.optimizer)
        norm = self.gradient.norm()
        if self.config.max_grad_norm > 0:
            self.gradient.mul_((self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        set_learning_rate(self.optimizer, rate)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._spread()
        self.gradient.zero_()
        return norm

    def is_finite(self) -> bool:
        """Return whether all trained weights are finite."""
        return bool(self.vector.isfinite().all())

    def save(self, folder: Path) -> dict[str, Any]:
        """Return the trained weights and the optimizer's state in the first process, {} in the others.

        Nothing is written into ``folder``.
        """
        if not self.world.is_main_process:
            return {}
        return {
            "weights": self.vector.cpu(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Restore the state after a step that save() of any strategy left in ``folder`` and ``state``.

        Raises:
            TaskError: the checkpoint of another strategy cannot be read, or belongs to another model.
        """
        if "weights" in state:
            self.vector.copy_(state["weights"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scaler.load_state_dict(state["scaler"])
        else:
            copies = dict(zip(self.names, self.copies, strict=True))
            sizes = {name: copy.size() for name, copy in copies.items()}
            load_weights(open_saved(folder, state, sizes), copies, self.optimizer)
        self._spread()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return parameter name → tensor on the CPU: an adapter's in fp32, else all in the model's dtype.

        Where the frozen weights are sharded, only the first process gets all weights.
        """
        if hasattr(self.loss_module.model, "peft_config"):
            return {name: copy.cpu() for name, copy in zip(self.names, self.copies, strict=True)}
        if self.collective:
            return gather_weights(self.loss_module)
        model = self.loss_module.model
        tied = tied_names(model)
        return {name: weight.cpu() for name, weight in model.state_dict().items() if name not in tied}

    def _spread(self) -> None:
        """Copy the vector back into the model."""
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.copies)


class Bf16Strategy(ReplicatedStrategy):
    """Train weights that exist in bf16 alone, with fp32 gradients; the optimizer rounds them stochastically."""

    def __init__(self, loss_module: LossModule, config: OptimizerConfig, world: DistributedContext) -> None:
        self.loss_module, self.config, self.world, self.collective = loss_module, config, world, False
        named = {name: each for name, each in loss_module.model.named_parameters() if each.requires_grad}
        self.names, self.parameters = list(named), list(named.values())
        self.copies = [parameter.detach() for parameter in self.parameters]  # the weights themselves
        sizes = [parameter.numel() for parameter in self.parameters]
        self.gradient = torch.zeros(sum(sizes), device=self.parameters[0].device)
        pairs = zip(self.gradient.split(sizes), self.parameters, strict=True)
        gradients = [gradient.view_as(parameter) for gradient, parameter in pairs]
        for gradient, parameter in zip(gradients, self.parameters, strict=True):
            parameter.register_post_accumulate_grad_hook(_make_accumulator(gradient))
        self.optimizer = RoundingAdamW(self.copies, gradients, config)
        self.scaler = torch.GradScaler(self.gradient.device.type, enabled=False)

    def is_finite(self) -> bool:
        """Return whether all trained weights are finite."""
        return all(bool(weight.isfinite().all()) for weight in self.copies)

    def save(self, folder: Path) -> dict[str, Any]:
        """Return the trained weights and the optimizer's state in the first process, {} in the others."""
        if not self.world.is_main_process:
            return {}
        weights = torch.cat([weight.view(-1).cpu() for weight in self.copies])
        return {"weights": weights, "optimizer": self.optimizer.state_dict()}

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Restore the state after a step that save() left in ``state``."""
        for weight, saved in zip(
            self.copies, state["weights"].split([weight.numel() for weight in self.copies]), strict=True
        ):
            weight.copy_(saved.view_as(weight))
        self.optimizer.load_state_dict(state["optimizer"])

    def _spread(self) -> None:
        """Do nothing: the model has the weights already."""


def create(
    request: ModelRequest, optimizer: OptimizerConfig, world: DistributedContext, options: None
) -> ReplicatedStrategy:
    """Load the model, complete in this process, and return its strategy.

    Raises:
        TaskError: the model cannot be loaded, or cannot be trained this way.
    """
    if optimizer.weights == "bf16":
        return Bf16Strategy(load_loss_module(request), optimizer, world)
    return ReplicatedStrategy(load_loss_module(request), optimizer, world)


def _make_accumulator(gradient: torch.Tensor) -> Any:
    """Return a hook that adds a parameter's gradient to ``gradient``."""

    def accumulate(parameter: torch.Tensor) -> None:
        gradient.add_(parameter.grad)
        parameter.grad = None

    return accumulate
