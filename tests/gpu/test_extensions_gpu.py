"""Compiled extensions against torch's own results, on a GPU, in the image that ships them.

EKIBEN_SIF names a built image with `deepspeed` or `flash-attn`; what it does not hold is skipped: `make test-gpu`.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
SIF = Path(os.environ.get("EKIBEN_SIF", ""))

FUSED_ADAM = """\
import torch
from deepspeed.ops.adam import FusedAdam

torch.manual_seed(0)
start = [torch.randn(size, device="cuda") for size in ((1000, 77), (1,), (4096,))]
ours, theirs = ([item.clone().requires_grad_() for item in start] for _ in range(2))
settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
steps = FusedAdam(ours, adam_w_mode=True, **settings), torch.optim.AdamW(theirs, fused=False, foreach=False, **settings)
for _ in range(20):
    for pair in zip(ours, theirs):
        grad = torch.randn_like(pair[0])
        for item in pair:
            item.grad = grad.clone()
    for optimizer in steps:
        optimizer.step()
for one, other in zip(ours, theirs):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
"""
FLASH_ATTENTION = """\
import torch
import torch.nn.functional as F
from flash_attn import flash_attn_func

torch.manual_seed(0)
for heads, kept, width, causal in ((8, 8, 64, True), (8, 2, 128, True), (4, 4, 256, False)):
    q = torch.randn(2, 333, heads, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(2, 333, kept, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    exact = [item.detach().float().requires_grad_() for item in (q, k, v)]
    there = [item.transpose(1, 2).repeat_interleave(heads // item.shape[2], 1) for item in exact]
    wanted = F.scaled_dot_product_attention(*there, is_causal=causal).transpose(1, 2)
    found = flash_attn_func(q, k, v, causal=causal)
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)
    weight = torch.randn_like(wanted)
    wanted.backward(weight)
    found.backward(weight.bfloat16())
    for one, other in zip((q, k, v), exact):
        torch.testing.assert_close(one.grad.float(), other.grad, rtol=5e-2, atol=5e-2)
"""


@pytest.mark.skipif(
    "EKIBEN_SIF" not in os.environ, reason="needs a built image: EKIBEN_SIF=one that has deepspeed or flash-attn"
)
@pytest.mark.parametrize(("package", "script"), [("deepspeed", FUSED_ADAM), ("flash_attn", FLASH_ATTENTION)])
def test_results_are_torch_s(package: str, script: str, tmp_path: Path) -> None:
    inside = ["apptainer", "--silent", "exec", "--nv", "--cleanenv", "--bind", str(tmp_path), str(SIF), "python"]
    looked = [*inside, "-c", f"import importlib.util as u; print(u.find_spec('{package}') is not None)"]
    there = subprocess.run(looked, capture_output=True, text=True, check=False)
    assert there.returncode == 0, there.stderr  # an image that does not run is not one without the package
    if there.stdout.strip() == "False":
        pytest.skip(f"{SIF} has no {package}")
    (tmp_path / "test.py").write_text(script)
    done = subprocess.run([*inside, str(tmp_path / "test.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
