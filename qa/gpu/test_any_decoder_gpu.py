"""Windows and sinks in torch's flash kernel, alone, compiled, and in small models of families that have them.

python3 -m pytest -q qa/gpu/test_any_decoder_gpu.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
import numpy as np
import torch

if not torch.cuda.is_available():
    assert not Path("/dev/nvidiactl").exists(), "there is an NVIDIA driver, and this torch sees no GPU"
    pytest.skip("no GPU", allow_module_level=True)
ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))
import transformers

from ekiben_tasks.data.packing import pack as make_batch
from ekiben_tasks.data.tokenize import Example
from ekiben_tasks.models import attention, attention_choice, proof, shrink
from ekiben_tasks.models.device import choose_device
from ekiben_tasks.models.tuning import LossModule

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
LENGTHS = (333, 64, 179)


@pytest.mark.parametrize(("heads", "kept", "size"), [(8, 8, 64), (8, 2, 64), (4, 2, 128), (4, 1, 256)])
def test_windows_and_sinks_of_the_kernel(heads: int, kept: int, size: int) -> None:
    device = choose_device("auto")
    difference = attention_choice.compare_kernel("varlen", heads, kept, size, device, limited=True)
    assert difference < attention_choice.MAX_DIFFERENCE


@pytest.mark.parametrize("limits", [{"sliding_window": 64}, {"sliding_window": 64, "s_aux": True}, {"s_aux": True}])
def test_compiled_attention_is_the_same(limits: dict[str, Any]) -> None:
    torch.manual_seed(0)
    drawn = [torch.randn(1, heads, sum(LENGTHS), 64) for heads in (8, 2, 2)] + [torch.randn(8)]

    def results(call: Any, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        *states, sinks = [tensor.bfloat16().to(device, dtype).requires_grad_() for tensor in drawn]
        known = {**limits, **({"s_aux": sinks} if limits.get("s_aux") else {})}
        ends = torch.tensor([0, *np.cumsum(LENGTHS)], device=device, dtype=torch.int32)
        lengths = {"row_lengths": LENGTHS} if device == "cpu" else {"cu_seq_lens_q": ends}
        mixed, _ = call(torch.nn.Module(), *states, None, max_length_q=512, **lengths, **known)
        learned = [*states, *([sinks] if "s_aux" in known else [])]
        gradients = [mixed, *torch.autograd.grad(mixed.float().square().sum(), learned)]
        return [tensor.detach().float().cpu() for tensor in gradients]

    exact = results(attention.attend, "cpu", torch.float32)
    eager = results(attention.attend, "cuda", torch.bfloat16)
    compiled = results(torch.compile(attention.attend, fullgraph=True, dynamic=True), "cuda", torch.bfloat16)
    for reference, one, two in zip(exact, eager, compiled, strict=True):
        error = (one - reference).norm() / reference.norm()
        assert error < 2e-2
        assert (two - reference).norm() / reference.norm() < max(1.5 * error, 1e-3)


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "mistral", "qwen3", "gemma2"])
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_packed_loss_and_gradient_are_the_cpus(kind: str, compiles: bool) -> None:
    """bf16 on the GPU by the chosen kernel, beside fp32 on the CPU ids by ids."""
    torch._dynamo.reset()
    config = shrink.shrink(transformers.AutoConfig.for_model(kind))
    chance = torch.Generator().manual_seed(0)
    sequences = [torch.randint(3, 120, (length,), generator=chance) for length in LENGTHS]
    batch = make_batch([Example(ids.numpy().astype(np.int32), ((1, len(ids)),)) for ids in sequences])
    found = {}
    for device in (choose_device("cpu"), choose_device("auto")):
        model = proof.build(config).to(device.torch_device, device.dtype).train()
        verified = proof.verify(config)
        model.set_attn_implementation(verified.implementation)
        kernels = attention_choice.choose_kernels("auto", config, device, is_here=True, longest=333)
        module = LossModule(model, device.dtype, kernels.setting)
        if compiles and device.is_gpu:
            module.compile_blocks()
        loss = module(batch.to(device.torch_device))
        (loss / len(batch.labels)).backward()
        gradients = [p.grad.float().cpu().flatten() for p in model.parameters() if p.grad is not None]
        found[device.torch_device.type] = (loss.item() / len(batch.labels), torch.cat(gradients))
    assert found["cuda"][0] == pytest.approx(found["cpu"][0], rel=2e-2)
    assert torch.nn.functional.cosine_similarity(found["cuda"][1], found["cpu"][1], dim=0) > 0.98
