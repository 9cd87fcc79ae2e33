"""Extensions of apex.contrib against torch's own arithmetic in fp64, as apex_checks.py, which runs those that were
compiled.

The distributed optimizer runs in a process for each GPU of this machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import DTYPES, assert_near, compare_module, exact, randn


def check_xentropy() -> None:
    loss_of = import_module("apex.contrib.xentropy").SoftmaxCrossEntropyLoss.apply
    for dtype in (torch.float32, torch.float16):  # its backward refuses bf16
        for smoothing in (0.0, 0.1):
            logits = randn(64, 1003, dtype=dtype, grad=True)
            labels = torch.randint(1, 1003, (64,), device="cuda")
            labels[::7] = 0  # the padding, which counts for nothing
            reference_inputs = exact(logits)
            actual = loss_of(logits, labels, smoothing, 0, dtype == torch.float16)  # fp32 losses of fp16 alone
            expected = F.cross_entropy(reference_inputs, labels, reduction="none", label_smoothing=smoothing)
            expected = expected.masked_fill(labels == 0, 0)
            name = f"xentropy, smoothing {smoothing}"
            assert_near(actual, expected, f"{name}, losses", dtype)
            weight = torch.rand(64, device="cuda")
            actual.backward(weight.clone())  # it writes zeros into what it is given
            expected.backward(weight.double())
            assert_near(logits.grad, reference_inputs.grad, f"{name}, gradient", dtype)


def check_fast_layer_norm() -> None:
    module_of = import_module("apex.contrib.layer_norm").FastLayerNorm
    for dtype in DTYPES:
        for width in (1024, 4096, 12288):
            module = module_of(width).cuda().to(dtype)
            torch.nn.init.normal_(module.weight)
            torch.nn.init.normal_(module.bias)
            compare_module(
                module,
                lambda x, p, w=width: F.layer_norm(x, (w,), p["weight"], p["bias"], 1e-5),
                randn(37, width, dtype=dtype, grad=True),
                f"FastLayerNorm({width})",
            )


def check_group_norm() -> None:
    module_of = import_module("apex.contrib.group_norm").GroupNorm
    for dtype in DTYPES:
        for groups, width, size, act in ((32, 320, 32, ""), (16, 640, 16, "silu"), (32, 1280, 64, "silu")):

            def reference(x: torch.Tensor, p: dict[str, torch.Tensor], groups: int = groups, act: str = act) -> Any:
                normal = F.group_norm(x, groups, p["weight"], p["bias"], 1e-5)
                return F.silu(normal) if act else normal

            module = module_of(groups, width, act=act).cuda().to(dtype)
            torch.nn.init.normal_(module.weight)
            torch.nn.init.normal_(module.bias)
            x = randn(2, width, size, size, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
            compare_module(module, reference, x, f"GroupNorm({groups}, {width}), {act or 'no activation'}")


def check_focal_loss() -> None:
    """Labels: a class; -1, none of them; -2, an example that counts for nothing. The last classes are padding."""
    alpha, gamma, classes, padded = 0.24, 2.0, 80, 88
    loss_of = import_module("apex.contrib.focal_loss.focal_loss").focal_loss
    for dtype in (torch.float32, torch.float16):  # apex dispatches these
        x = randn(200, padded, dtype=dtype, grad=True)
        labels = torch.randint(-2, classes, (200,), device="cuda")
        positives = (labels >= 0).sum().float()
        reference_inputs = exact(x)
        actual = loss_of(x, labels, positives, classes, alpha, gamma)
        targets = F.one_hot(labels.clamp(min=0), classes).double() * (labels >= 0)[:, None]
        scores = reference_inputs[:, :classes]
        probability = torch.sigmoid(scores)
        right = probability * targets + (1 - probability) * (1 - targets)
        share = alpha * targets + (1 - alpha) * (1 - targets)
        each = share * (1 - right) ** gamma * F.binary_cross_entropy_with_logits(scores, targets, reduction="none")
        expected = each[labels != -2].sum() / positives.double()
        assert_near(actual, expected, "focal loss", dtype)
        actual.backward()
        expected.backward()
        assert_near(x.grad, reference_inputs.grad, "focal loss, gradient", dtype)


def check_index_mul_2d() -> None:
    multiply = import_module("apex.contrib.index_mul_2d").index_mul_2d
    for dtype in (torch.float32, torch.float16):  # apex takes these
        table, factors = randn(50, 96, dtype=dtype, grad=True), randn(400, 96, dtype=dtype, grad=True)
        index = torch.randint(0, 50, (400,), device="cuda")
        reference_inputs = exact(table), exact(factors)
        actual, expected = multiply(table, factors, index), reference_inputs[0][index] * reference_inputs[1]
        assert_near(actual, expected, "index_mul_2d, output", dtype)
        weight = torch.randn_like(actual)
        actual.backward(weight)
        expected.backward(weight.double())
        for one, two, name in zip((table, factors), reference_inputs, ("table", "factors"), strict=True):
            assert_near(one.grad, two.grad, f"index_mul_2d, gradient of the {name}", dtype)


def check_distributed_adam() -> None:
    """In a process for each GPU, against torch's AdamW with the mean of all gradients."""
    with tempfile.TemporaryDirectory() as folder:
        processes = torch.cuda.device_count()
        torch.multiprocessing.spawn(step_distributed_adam, (processes, Path(folder) / "rendezvous"), processes)


def step_distributed_adam(rank: int, processes: int, rendezvous: Path) -> None:
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=processes,
        device_id=torch.device("cuda", rank),
    )
    optimizer_of = import_module("apex.contrib.optimizers.distributed_fused_adam").DistributedFusedAdam
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    for dtype in DTYPES:
        torch.manual_seed(0)  # the same parameters everywhere
        ours = [torch.nn.Parameter(randn(*dims, dtype=dtype)) for dims in ((1000, 77), (1,), (4096,))]
        theirs = [item.detach().float().clone().requires_grad_() for item in ours]
        optimizer, plain = optimizer_of(ours, **options), torch.optim.AdamW(theirs, foreach=False, **options)
        for _ in range(5):
            every = [[torch.randn_like(item) for item in ours] for _ in range(processes)]
            torch.stack([(a * b).sum() for a, b in zip(ours, every[rank], strict=True)]).float().sum().backward()
            for item, *gradients in zip(theirs, *every, strict=True):
                item.grad = torch.stack([gradient.float() for gradient in gradients]).mean(0)
            for one in (optimizer, plain):
                one.step()
                one.zero_grad()
        for actual, expected in zip(ours, theirs, strict=True):
            assert_near(actual, expected, f"DistributedFusedAdam in {processes} processes", dtype)
    torch.distributed.destroy_process_group()


CHECKS: dict[str, Callable[[], None]] = {
    "xentropy_cuda": check_xentropy,
    "fast_layer_norm": check_fast_layer_norm,
    "group_norm_cuda": check_group_norm,
    "focal_loss_cuda": check_focal_loss,
    "fused_index_mul_2d": check_index_mul_2d,
    "distributed_adam_cuda": check_distributed_adam,
}


def compiled_checks() -> dict[str, Callable[[], None]]:
    """Return the checks of the extensions that are installed, by name."""
    return {check.__name__: check for module, check in CHECKS.items() if find_spec(module)}
