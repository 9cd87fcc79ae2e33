"""Every process has all that is trained: one GPU, or several that sum their gradients once a step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from learner import Learner
from world import World

if TYPE_CHECKING:
    from loop import Plan


class Replicated:
    """fp32 copies of the trained weights and of their gradients, each as one vector: one reduction, one norm for all.

    A parameter's gradient is added to the vector's as soon as autograd has it, and freed.
    """

    def __init__(self, learner: Learner, plan: Plan, world: World, *, collective: bool = False) -> None:
        self.learner, self.plan, self.world, self.collective = learner, plan, world, collective
        named = [(name, part) for name, part in learner.model.named_parameters() if part.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = [part for _, part in named]
        device = self.parameters[0].device
        sizes = [part.numel() for part in self.parameters]
        self.vector = torch.empty(sum(sizes), device=device)
        self.gradient = torch.zeros_like(self.vector)
        self.copies = [part.view_as(own) for part, own in zip(self.vector.split(sizes), self.parameters, strict=True)]
        with torch.no_grad():
            torch._foreach_copy_(self.copies, self.parameters)
        for copy, part, own in zip(self.copies, self.gradient.split(sizes), self.parameters, strict=True):
            copy.grad = part.view_as(own)
            own.register_post_accumulate_grad_hook(_folder(copy.grad))
        self.optimizer = make_optimizer(self.copies, plan, device)
        # fp16 gradients underflow without it; a no-op elsewhere.
        self.scaler = torch.GradScaler(device.type, enabled=learner.dtype == torch.float16)

    def loss(self, pack: Any) -> torch.Tensor:
        return torch.as_tensor(self.learner(pack))

    def backward(self, loss: torch.Tensor, factor: float, *, last: bool) -> None:
        self.scaler.scale(loss * factor).backward()

    def forget(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.gradient.zero_()

    def step(self, rate: float) -> torch.Tensor:
        self.world.sum(self.gradient)
        self.scaler.unscale_(self.optimizer)
        norm = self.gradient.norm()
        self.gradient.mul_((self.plan.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._spread()
        self.gradient.zero_()
        return norm

    def save(self, folder: Path) -> dict[str, Any]:
        if not self.world.leads:
            return {}
        return {
            "weights": self.vector.cpu(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        self.vector.copy_(state["weights"])
        self._spread()
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def weights(self) -> dict[str, torch.Tensor]:
        if hasattr(self.learner.model, "peft_config"):
            return {name: copy.cpu() for name, copy in zip(self.names, self.copies, strict=True)}
        if self.collective:
            from sharded import gather_weights

            return gather_weights(self.learner)
        return {name: part.cpu() for name, part in self.learner.model.state_dict().items()}

    def _spread(self) -> None:
        """Copy the vector back into the model."""
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.copies)


def make_optimizer(parameters: list[torch.Tensor], plan: Plan, device: torch.device) -> torch.optim.Optimizer:
    return torch.optim.AdamW(decay_groups(parameters, plan), lr=plan.learning_rate, fused=device.type == "cuda")


def decay_groups(parameters: list[torch.Tensor], plan: Plan) -> list[dict[str, Any]]:
    """For an optimizer: norms and biases do not decay."""
    groups = [
        {"params": [part for part in parameters if part.ndim > 1], "weight_decay": plan.weight_decay},
        {"params": [part for part in parameters if part.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _folder(gradient: torch.Tensor) -> Any:
    def fold(parameter: torch.Tensor) -> None:
        gradient.add_(parameter.grad)
        parameter.grad = None

    return fold
