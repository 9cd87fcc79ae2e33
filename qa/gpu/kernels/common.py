"""What the kernel checks share: which checks exist, and how far results may be from torch's.

A check is a function without arguments. `run(globals())` runs all of a module, prints a line for each, and exits with 1
when one failed.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Of the largest value of the reference. The products of fp32 are exact ones: run() turns TF32 off.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def randn(*dims: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*dims, device="cuda", dtype=torch.float32).to(dtype).requires_grad_(grad)


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in fp64 with its own gradient."""
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def assert_near(actual: torch.Tensor | None, expected: torch.Tensor | None, what: str, dtype: torch.dtype) -> None:
    """Compare by the largest difference over the largest value of the reference; NaN never passes."""
    assert actual is not None and expected is not None, f"{what}: no gradient"
    assert actual.size() == expected.size(), (
        f"{what}: {tuple(actual.size())} where {tuple(expected.size())} is expected"
    )
    error = ((actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-9)).item()
    assert error <= TOLERANCE[dtype], f"{what} in {dtype}: differs by {error:.1e} of the largest value"


def compare_module(module: torch.nn.Module, reference: Any, x: torch.Tensor, name: str) -> None:
    """Compare output and every gradient. reference: of the input and the parameters by name, all in fp64."""
    parameters = {key: exact(value) for key, value in module.named_parameters()}
    reference_inputs = exact(x)
    actual, expected = module(x), reference(reference_inputs, parameters)
    assert_near(actual, expected, f"{name}, output", x.dtype)
    weight = torch.randn_like(actual)
    actual.backward(weight)
    expected.backward(weight.double())
    assert_near(x.grad, reference_inputs.grad, f"{name}, gradient of the input", x.dtype)
    for key, value in module.named_parameters():
        assert_near(value.grad, parameters[key].grad, f"{name}, gradient of {key}", x.dtype)


def run(names: Mapping[str, Any]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    checks: list[Callable[[], None]] = [item for name, item in names.items() if name.startswith("check_")]
    failed = 0
    for check in checks:
        torch.manual_seed(0)
        try:
            check()
            torch.cuda.synchronize()
        except Exception:
            failed += 1
            print(f"FAILED {check.__name__}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"passed {check.__name__}", flush=True)
    print(
        f"{len(checks) - failed} of {len(checks)} passed on {torch.cuda.get_device_name()}, torch {torch.__version__}",
        flush=True,
    )
    sys.exit(1 if failed else 0)
