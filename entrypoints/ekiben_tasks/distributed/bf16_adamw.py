"""Step weights that exist in bf16 alone, by AdamW with stochastic rounding.

An update is often smaller than half of the distance between two bf16 numbers: rounding to the nearest one would lose
it. Rounded up or down at random, with the nearer one likelier, it is right on average (Gupta et al. 2015,
arXiv:1502.02551, section 3.1; for bf16: Zamirai et al. 2020, arXiv:2010.06192).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ekiben_tasks.distributed.optimizer import OptimizerConfig

_CHUNK = 1 << 24  # weights at a time: what is computed for them in fp32 takes 16 bytes each
_EPS = 1e-8
_LOW_BITS = 16  # of fp32, which bf16 has not


def round_stochastically(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return ``values``, fp32, in bf16: the larger of the two nearest magnitudes where ``noise`` carries into it.

    noise: int32, uniform from 0 to 2^16 - 1, of the same shape.
    """
    bits = values.view(torch.int32) + noise
    return bits.bitwise_and(-(1 << _LOW_BITS)).view(torch.float32).bfloat16()


class RoundingAdamW:
    """Step bf16 parameters by AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101); moments are fp32.

    gradients: fp32, one for each parameter. The noise depends on the step alone, so it is the same in every process,
    and in a resumed run. Vectors, which are norms and biases, do not decay.
    """

    def __init__(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor], config: OptimizerConfig) -> None:
        self.parameters, self.gradients, self.config = parameters, gradients, config
        self.param_groups: list[dict[str, Any]] = [{"lr": config.learning_rate}]
        self.defaults: dict[str, Any] = {}
        self.moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in gradients]
        self.steps = 0

    def step(self) -> None:
        """Update the weights."""
        self.steps += 1
        with torch.no_grad():
            self._update_all()

    def _update_all(self) -> None:
        generator = torch.Generator(self.gradients[0].device).manual_seed(self.steps)
        for parameter, gradient, moments in zip(self.parameters, self.gradients, self.moments, strict=True):
            decay = self.config.weight_decay if parameter.ndim > 1 else 0.0
            parts = [each.view(-1).split(_CHUNK) for each in (parameter, gradient, *moments)]
            for weight, *rest in zip(*parts, strict=True):
                self._update(weight, tuple(rest), decay, generator)

    def _update(
        self, weight: torch.Tensor, state: tuple[torch.Tensor, ...], decay: float, generator: torch.Generator
    ) -> None:
        """Update a part of one parameter. state: its gradient, and both moments."""
        gradient, mean, square = state
        rate, (beta1, beta2) = self.param_groups[0]["lr"], self.config.betas
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        divisor = square.sqrt().div_(math.sqrt(1 - beta2**self.steps)).add_(_EPS)
        exact = weight.float().mul_(1 - rate * decay).addcdiv_(mean, divisor, value=-rate / (1 - beta1**self.steps))
        noise = torch.randint(1 << _LOW_BITS, exact.shape, dtype=torch.int32, device=exact.device, generator=generator)
        weight.copy_(round_stochastically(exact, noise))

    def state_dict(self) -> dict[str, Any]:
        """Return the moments and the number of steps."""
        return {"steps": self.steps, "moments": [list(pair) for pair in self.moments]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what state_dict() returned."""
        self.steps = int(state["steps"])
        for kept, saved in zip(self.moments, state["moments"], strict=True):
            for moment, value in zip(kept, saved, strict=True):
                moment.copy_(value)
