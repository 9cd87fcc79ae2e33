"""Every causal model of this transformers: trained exactly, or refused with the reason.

The fast part has a few families; all of them run where EKIBEN_EVERY_FAMILY=1 is set, and print a table (-s). What
training computes (LossModule) is compared with transformers' own eager forward of one ids at a time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"), str(ROOT / "entrypoints")]

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ekiben_tasks.data.packing import pack as make_batch
from ekiben_tasks.data.packing import split_micro_batches
from ekiben_tasks.data.tokenize import Example
from ekiben_tasks.models import attention, discovery, proof, shrink
from ekiben_tasks.models.tuning import LossModule, apply_tuning_method, check_head
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.training.settings import Settings

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
EXACT = 1e-4
FEW = {
    "llama": "packed",
    "qwen3": "packed",
    "gemma2": "packed",
    "gemma3_text": "packed",
    "gpt_oss": "packed",
    "mistral": "packed",
    "phi3": "packed",
    "olmo2": "packed",
    "mixtral": "packed",
    "cohere": "packed",
    "stablelm": "padded",
    "gptj": "padded",
    "mamba": "padded",
    "deepseek_v32": "equal",
}
# Where a configuration's defaults describe no model.
MISSING: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
    "dots1": {
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}
# What a family has only where its configuration asks for it.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon, alibi": ("falcon", {"alibi": True}),
    "llama, dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "mixtral, windows": ("mixtral", {"sliding_window": 4096}),
    "phi3, windows": ("phi3", {"sliding_window": 2047}),
    "phimoe, windows": ("phimoe", {"sliding_window": 2047}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}),
    "qwen3_moe, windows": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}),
    "starcoder2, windows": ("starcoder2", {"sliding_window": 4096}),
    "granite, scaled": ("granite", {"logits_scaling": 8.0, "residual_multiplier": 0.22, "embedding_multiplier": 12.0}),
}


def config_of(name: str) -> Any:
    kind, changes = VARIANTS.get(name, (name, MISSING.get(name, {})))
    return transformers.AutoConfig.for_model(kind, **changes)


def gradient(causal: Any) -> torch.Tensor:
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in causal.parameters()]
    return torch.cat([each.flatten() for each in parts]).clone()


def difference(config: Any, verified: proof.Proof) -> tuple[float, float]:
    """Return how far (loss, gradient) of training are from transformers', on other sequences than the proof's."""
    torch.manual_seed(1)
    causal = proof._build_small(config)
    if verified.masks:  # those of the real model are found in the complete depth
        for name, mask in discovery.discover(causal, torch.arange(3, 43)[None]).differing():
            setattr(causal.get_submodule(name), attention.MASK, mask)
    torch.manual_seed(7)
    sequences = [proof.random_tokens(causal, length) for length in (41, 13, 29, 13)]
    causal.set_attn_implementation("eager")
    expected = 0.0
    for ids in sequences:
        logits = causal(input_ids=ids[None], use_cache=False).logits[0, 4:-1]
        loss = F.cross_entropy(logits.float(), ids[5:], reduction="sum")
        loss.backward()
        expected += loss.item()
    expected_gradient = gradient(causal)
    causal = proof.copy_with(causal, verified.implementation)
    proof._proofs[causal.config.to_json_string(use_diff=False)] = verified  # what is right for it is right for this one
    module = LossModule(causal, torch.float32).eval()
    check_head(module)
    examples = [Example(ids.numpy().astype(np.int32), ((5, len(ids)),)) for ids in sequences]
    total = 0.0
    for group in split_micro_batches(examples, 8, 200, verified.layout):
        loss = module(make_batch(group, verified.layout))
        loss.backward()
        total += loss.item()
    return abs(total - expected) / expected, float(
        (gradient(causal) - expected_gradient).norm() / expected_gradient.norm()
    )


@pytest.mark.parametrize("name", FEW)
def test_a_family_is_trained_exactly(name: str) -> None:
    config = config_of(name)
    verified = proof.verify(config)
    assert verified.layout == FEW[name], verified.reasons
    loss, grad = difference(config, verified)
    assert loss < 1e-5 and grad < EXACT, (loss, grad)


@pytest.mark.parametrize("name", ["bert", "blt"])
def test_what_cannot_be_trained_is_refused_with_the_reason(name: str) -> None:
    reason = {"bert": "its tokens see those behind them", "blt": "it would have .* parameters"}[name]
    with pytest.raises(TaskError, match=f"model_type {name}: .*{reason}"):
        proof.verify(config_of(name))


@pytest.mark.parametrize("name", ["qwen3", "mamba", "gemma3_text", "mixtral"])
@pytest.mark.parametrize("method", ["lora", "last-layer", "full"])
def test_each_method_finds_what_it_trains(name: str, method: Any) -> None:
    model = apply_tuning_method(
        transformers.AutoModelForCausalLM.from_config(shrink.shrink(config_of(name))), Settings(method=method)
    )
    trained = {path for path, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    if method == "last-layer":
        assert any("norm" in path for path in trained) and not any(".layers." in path for path in trained)
    if method == "lora":
        assert all("lora_" in path for path in trained)


@pytest.mark.skipif(os.environ.get("EKIBEN_EVERY_FAMILY") != "1", reason="takes a quarter of an hour")
def test_no_family_is_silently_wrong() -> None:
    counts = {"packed": 0, "padded": 0, "equal": 0, "refused": 0}
    wrong: list[str] = []
    print("\n| family | layout | gradient | loss | reasons not faster |\n|---|---|---|---|---|")
    for name in [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS]:
        try:
            config = config_of(name)
            verified = proof.verify(config)
        except Exception as error:  # some default configurations are none
            counts["refused"] += 1
            print(f"| {name} | refused | | | {' '.join(str(error).split())[:200]} |", flush=True)
            continue
        try:
            loss, grad = difference(config, verified)
        except Exception as error:  # all are tried before the test fails
            wrong.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            continue
        counts[verified.layout] += 1
        if not (loss < 1e-5 and grad < EXACT):
            wrong.append(f"{name}: {loss:.0e} {grad:.0e}")
        reasons = "; ".join(verified.reasons)[:200].replace("|", "/")
        print(
            f"| {name} | {verified.layout} ({verified.implementation}) | {grad:.0e} | {loss:.0e} | {reasons} |",
            flush=True,
        )
    print(counts)
    assert wrong == []
    assert counts["packed"] >= 95
    assert counts["packed"] + counts["padded"] + counts["equal"] >= 125
