"""DeepSpeed's compiled optimizers against torch's: those of the GPU, and that of the CPU which offloading uses.

python3 qa/gpu/kernels/deepspeed_checks.py
"""

from __future__ import annotations

from typing import Any

import torch
from common import assert_near, randn, run
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import FusedLion

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def check_ops_are_compiled() -> None:
    missing = [name for name in ("fused_adam", "fused_lion", "cpu_adam") if not installed_ops.get(name)]
    assert not missing, f"not compiled: {missing}"


def optimize(ours: Any, theirs: Any) -> None:
    for _ in range(20):
        for one, two in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
            one.grad = torch.randn_like(one)
            two.grad = one.grad.clone()
        ours.step()
        theirs.step()
    for one, two in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        assert_near(one, two, type(ours).__name__, torch.float32)


def pairs(device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    start = [randn(*dims).to(device) for dims in ((1000, 77), (1,), (4096,))]
    ours, theirs = ([item.clone().requires_grad_() for item in start] for _ in range(2))
    return ours, theirs


def check_fused_adam() -> None:
    ours, theirs = pairs("cuda")
    optimize(FusedAdam(ours, adam_w_mode=True, **OPTIONS), torch.optim.AdamW(theirs, foreach=False, **OPTIONS))


def check_cpu_adam() -> None:
    ours, theirs = pairs("cpu")
    optimize(DeepSpeedCPUAdam(ours, adamw_mode=True, **OPTIONS), torch.optim.AdamW(theirs, foreach=False, **OPTIONS))


class Lion:
    """https://arxiv.org/abs/2302.06675, algorithm 2."""

    def __init__(
        self, params: list[torch.Tensor], *, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        self.param_groups = [{"params": params}]
        self.lr, self.betas, self.weight_decay = lr, betas, weight_decay
        self.moments = [torch.zeros_like(item) for item in params]

    def step(self) -> None:
        one, two = self.betas
        with torch.no_grad():
            for item, moment in zip(self.param_groups[0]["params"], self.moments, strict=True):
                update = (one * moment + (1 - one) * item.grad).sign()
                item -= self.lr * (update + self.weight_decay * item)
                moment.mul_(two).add_(item.grad, alpha=1 - two)


def check_fused_lion() -> None:
    ours, theirs = pairs("cuda")
    options: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
    optimize(FusedLion(ours, **options), Lion(theirs, **options))


if __name__ == "__main__":
    run(globals())
