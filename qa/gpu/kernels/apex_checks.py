"""apex's kernels against torch's own arithmetic in fp64, in fp32, fp16 and bf16, forward and backward; with the
extensions of apex.contrib that were compiled.

python3 qa/gpu/kernels/apex_checks.py
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from apex.fused_dense import FusedDense, FusedDenseGeluDense
from apex.mlp import MLP
from apex.multi_tensor_apply import multi_tensor_applier
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
from apex_contrib_checks import compiled_checks
from common import DTYPES, assert_near, compare_module, exact, randn, run

HALVES = (torch.float16, torch.bfloat16)


def check_layer_norm() -> None:
    for dtype in DTYPES:
        for width in (256, 1000, 4096):
            module = FusedLayerNorm(width).cuda().to(dtype)
            torch.nn.init.normal_(module.weight)
            torch.nn.init.normal_(module.bias)
            compare_module(
                module,
                lambda x, p, w=width: F.layer_norm(x, (w,), p["weight"], p["bias"], 1e-5),
                randn(37, width, dtype=dtype, grad=True),
                f"FusedLayerNorm({width})",
            )


def check_rms_norm() -> None:
    for dtype in DTYPES:
        for width in (256, 1000, 4096):
            module = FusedRMSNorm(width).cuda().to(dtype)
            torch.nn.init.normal_(module.weight)
            compare_module(
                module,
                lambda x, p, w=width: F.rms_norm(x, (w,), p["weight"], 1e-5),
                randn(37, width, dtype=dtype, grad=True),
                f"FusedRMSNorm({width})",
            )


def check_fused_dense() -> None:
    for dtype in DTYPES:
        module = FusedDense(512, 256).cuda()
        torch.nn.init.normal_(module.weight, std=0.05)
        torch.nn.init.normal_(module.bias)
        compare_module(
            module.to(dtype),
            lambda x, p: F.linear(x, p["weight"], p["bias"]),
            randn(128, 512, dtype=dtype, grad=True),
            "FusedDense",
        )


def check_fused_dense_gelu_dense() -> None:
    def reference(x: torch.Tensor, p: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, p["weight1"], p["bias1"]), approximate="tanh"), p["weight2"], p["bias2"])

    for dtype in HALVES:  # cuBLASLt fuses GELU for these
        module = FusedDenseGeluDense(256, 512, 128).cuda()
        for param in module.parameters():
            torch.nn.init.normal_(param, std=0.05)
        compare_module(module.to(dtype), reference, randn(64, 256, dtype=dtype, grad=True), "FusedDenseGeluDense")


def check_mlp() -> None:
    sizes = [480, 1024, 512, 256]
    for dtype in (torch.float32, torch.float16):  # apex dispatches these
        # In fp16 a rounding at 0 switches the whole gradient of a unit of ReLU.
        for activation in ("none", "relu", "sigmoid") if dtype == torch.float32 else ("none", "sigmoid"):
            act = {"none": lambda x: x, "relu": torch.relu, "sigmoid": torch.sigmoid}[activation]

            def reference(x: torch.Tensor, p: dict[str, torch.Tensor], act: Any = act) -> torch.Tensor:
                for number in range(len(sizes) - 1):
                    x = act(F.linear(x, p[f"weight_{number}"], p[f"bias_{number}"]))
                return x

            module = MLP(sizes, activation=activation).cuda().to(dtype)
            compare_module(module, reference, randn(64, sizes[0], dtype=dtype, grad=True), f"MLP, {activation}")


def softmax_case(name: str, x: torch.Tensor, keep: torch.Tensor | None, *extra: torch.Tensor) -> None:
    """forward(x, [mask], scale) and backward(gradient, output, scale) of a module. keep: what is attended to."""
    scale, module = 0.7, import_module(name)
    reference_inputs = exact(x.requires_grad_())
    scores = reference_inputs * scale if keep is None else (reference_inputs * scale).masked_fill(~keep, float("-inf"))
    expected = torch.softmax(scores, -1)
    actual = module.forward(x.detach(), *extra, scale)
    assert_near(actual, expected, f"{name}, output", x.dtype)
    weight = torch.randn_like(actual)
    expected.backward(weight.double())
    # It writes the gradient over the one it is given.
    assert_near(module.backward(weight.clone(), actual, scale), reference_inputs.grad, f"{name}, gradient", x.dtype)


def check_softmax() -> None:
    for dtype in HALVES:
        softmax_case("scaled_softmax_cuda", randn(2, 4, 128, 256, dtype=dtype), None)


def check_masked_softmax() -> None:
    for dtype in HALVES:
        mask = torch.rand(2, 1, 128, 256, device="cuda") < 0.3
        mask[..., 0] = False
        softmax_case("scaled_masked_softmax_cuda", randn(2, 4, 128, 256, dtype=dtype), ~mask, mask)


def check_generic_masked_softmax() -> None:
    for dtype in HALVES:
        mask = torch.rand(2, 1, 128, 333, device="cuda") < 0.3
        mask[..., 0] = False
        softmax_case("generic_scaled_masked_softmax_cuda", randn(2, 4, 128, 333, dtype=dtype), ~mask, mask)


def check_causal_softmax() -> None:
    for dtype in HALVES:
        keep = torch.ones(128, 128, device="cuda", dtype=torch.bool).tril()
        softmax_case("scaled_upper_triang_masked_softmax_cuda", randn(8, 128, 128, dtype=dtype), keep)


def check_multi_tensor() -> None:
    amp = import_module("amp_C")
    for dtype in DTYPES:
        tensors = [randn(size, dtype=dtype) for size in (1, 555, 70_001)]
        overflow = torch.zeros(1, dtype=torch.int, device="cuda")
        outputs = [torch.empty_like(item) for item in tensors]
        multi_tensor_applier(amp.multi_tensor_scale, overflow, [tensors, outputs], 0.25)
        for actual, item in zip(outputs, tensors, strict=True):
            assert_near(actual, item * 0.25, "multi_tensor_scale", dtype)
        if dtype != torch.bfloat16:  # apex has none for it
            other = [randn(item.numel(), dtype=dtype) for item in tensors]
            multi_tensor_applier(amp.multi_tensor_axpby, overflow, [tensors, other, outputs], 2.0, -3.0, -1)
            for actual, a, b in zip(outputs, tensors, other, strict=True):
                assert_near(actual, 2 * a.double() - 3 * b.double(), "multi_tensor_axpby", dtype)
        norm, each = multi_tensor_applier(amp.multi_tensor_l2norm, overflow, [tensors], True)
        assert_near(norm.squeeze(), torch.cat(tensors).double().norm(), "multi_tensor_l2norm", torch.float32)
        assert_near(each, torch.stack([item.double().norm() for item in tensors]), "norm of each", torch.float32)
        assert overflow.item() == 0
        tensors[2][7] = float("inf")
        multi_tensor_applier(amp.multi_tensor_scale, overflow, [tensors, outputs], 0.25)
        assert overflow.item() == 1, f"an infinite {dtype} was not seen"


def optimize(ours: Any, theirs: Any, dtype: torch.dtype, steps: int, name: str) -> None:
    """Give both optimizers the same gradients; ours steps parameters of ``dtype``, theirs fp32 ones."""
    (group,), (other,) = ours.param_groups, theirs.param_groups
    for _ in range(steps):
        for one, two in zip(group["params"], other["params"], strict=True):
            one.grad = torch.randn_like(one)
            two.grad = one.grad.float().clone()  # FusedLAMB writes its update over the gradient
        ours.step()
        theirs.step()
    for one, two in zip(group["params"], other["params"], strict=True):
        assert_near(one, two, name, dtype)


def parameters(dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    ours = [randn(*dims, dtype=dtype, grad=True) for dims in ((1000, 77), (1,), (4096,))]
    return ours, [item.detach().float().clone().requires_grad_() for item in ours]


def check_adam() -> None:
    for dtype in DTYPES:
        for decoupled in (True, False):
            ours, theirs = parameters(dtype)
            options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
            plain = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, foreach=False, **options)
            optimize(
                FusedAdam(ours, adam_w_mode=decoupled, **options), plain, dtype, 10, f"FusedAdam, AdamW: {decoupled}"
            )


def check_sgd() -> None:
    for dtype in (torch.float32, torch.float16):  # apex dispatches these
        ours, theirs = parameters(dtype)
        options: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}
        optimize(FusedSGD(ours, **options), torch.optim.SGD(theirs, foreach=False, **options), dtype, 10, "FusedSGD")


class Lamb:
    """LAMB as https://arxiv.org/abs/1904.00962 has it, with the gradient's norm clipped first, as apex does."""

    def __init__(
        self,
        params: list[torch.Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float,
    ) -> None:
        self.param_groups = [{"params": params}]
        self.lr, self.betas, self.eps, self.weight_decay, self.max_grad_norm = (
            lr,
            betas,
            eps,
            weight_decay,
            max_grad_norm,
        )
        self.moments = [(torch.zeros_like(item), torch.zeros_like(item)) for item in params]
        self.count = 0

    def step(self) -> None:
        params = self.param_groups[0]["params"]
        norm = torch.cat([item.grad.flatten() for item in params]).norm()
        (one, two), self.count = self.betas, self.count + 1
        with torch.no_grad():
            for item, (first, second) in zip(params, self.moments, strict=True):
                gradient = item.grad / (norm / self.max_grad_norm).clamp(min=1.0)
                first.mul_(one).add_(gradient, alpha=1 - one)
                second.mul_(two).add_(gradient**2, alpha=1 - two)
                update = first / (1 - one**self.count) / ((second / (1 - two**self.count)).sqrt() + self.eps)
                update += self.weight_decay * item
                item -= self.lr * item.norm() / update.norm() * update


def check_lamb() -> None:
    for dtype in (torch.float32, torch.float16):  # FusedLAMB refuses bf16
        ours, theirs = parameters(dtype)
        # apex keeps the moments in the parameters' type: squares of clipped gradients would be 0 in fp16.
        options: dict[str, Any] = {
            "lr": 1e-2,
            "betas": (0.9, 0.999),
            "eps": 1e-6,
            "weight_decay": 0.01,
            "max_grad_norm": 1.0 if dtype == torch.float32 else 1e6,
        }
        optimize(FusedLAMB(ours, **options), Lamb(theirs, **options), dtype, 5, "FusedLAMB")


if __name__ == "__main__":
    run({**globals(), **compiled_checks()})
