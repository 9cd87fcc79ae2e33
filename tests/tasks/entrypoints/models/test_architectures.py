"""Names, FLOPs and memory of every architecture, against the real classes, torch's own counter and autograd's own
hooks.
"""

from __future__ import annotations

import os
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small only wait for a second thread
ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"), str(ROOT / "entrypoints")]

import peft
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from ekiben_tasks.models import (
    activations,
    architecture,
    attention_choice,
    description,
    flops,
    memory,
    proof,
    tiny,
)
from ekiben_tasks.models import attention as attention_module
from ekiben_tasks.models import loss as losses
from ekiben_tasks.models.tuning import LossModule, apply_tuning_method
from ekiben_tasks.training import settings as train_settings

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
KINDS = architecture.names()


def model(kind: str, method: str = "full", attention: str = "eager", **sizes: int) -> Any:
    made = tiny.random_model(kind, 128, **sizes)
    made.set_attn_implementation(attention)
    if method == "full":
        return made
    made.requires_grad_(False)
    if method == "last-layer":
        for name in architecture.last_layer(made):
            made.get_submodule(name).requires_grad_(True)
        return made
    known = architecture.find_module(kind).ARCHITECTURE
    lora = peft.LoraConfig(
        r=2, lora_dropout=0.1, target_modules=list(known.lora), fan_in_fan_out=known.transposed, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(made, lora)


def meta(kind: str, **sizes: Any) -> Any:
    config = transformers.AutoConfig.for_model(kind, **sizes)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


# ------------------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize("kind", KINDS)
def test_module_names_match_transformers(kind: str) -> None:
    known, made = architecture.find_module(kind).ARCHITECTURE, model(kind, layers=4)
    blocks = architecture.list_blocks(made)
    assert len(blocks) == made.config.num_hidden_layers == 4
    products = {
        name.rsplit(".", 1)[-1]
        for name, part in blocks[0].named_modules()
        if isinstance(part, (torch.nn.Linear, transformers.pytorch_utils.Conv1D))
    }
    assert set(known.linear) == products
    assert set(known.lora) <= products
    assert known.transposed == any(type(part).__name__ == "Conv1D" for part in blocks[0].modules())
    assert made.get_submodule(known.final_norm).weight.shape == (64,)
    derived = description.find_blocks_path(made), proof.verify(made.config).late  # as for a family without a file
    assert derived == (known.blocks, (known.final_norm,))


@pytest.mark.parametrize("kind", KINDS)
def test_last_layer_excludes_the_first_block(kind: str) -> None:
    made = model(kind, "last-layer")
    trained = {name for name, parameter in made.named_parameters() if parameter.requires_grad}
    tied = made.config.tie_word_embeddings
    assert trained <= {
        f"{architecture.find_module(kind).ARCHITECTURE.final_norm}.{end}" for end in ("weight", "bias")
    } | {"lm_head.weight"}
    assert ("lm_head.weight" in trained) == (not tied)
    assert not made.get_input_embeddings().weight.requires_grad


def test_attention_windows() -> None:
    assert architecture.attention_windows(tiny.random_model("gpt_neo", 10).config, 2) == [None, 16]
    assert architecture.attention_windows(tiny.random_model("llama", 10).config, 2) == [None, None]
    alternating = transformers.AutoConfig.for_model("gemma2", num_hidden_layers=3, sliding_window=8)
    assert architecture.attention_windows(alternating, 3) == [8, None, 8]
    everywhere = transformers.AutoConfig.for_model("mistral", num_hidden_layers=2, sliding_window=8)
    assert architecture.attention_windows(everywhere, 2) == [8, 8]


# ------------------------------------------------------------------------------------------------------------ FLOPs


def test_flops_of_full_gpt_2_training_by_hand() -> None:
    """12 blocks of 12 * 768^2 weights, a head of 50257 * 768; 6 each; attention 12 * 768 a pair in each block."""
    costs = flops.training_costs(meta("gpt2"))
    assert costs.per_token == 6 * 12 * 12 * 768**2
    assert costs.per_target == 6 * 50257 * 768
    assert costs.of_examples([2, 3], 4) == 5 * costs.per_token + 4 * costs.per_target + 12 * 12 * 768 * (3 + 6)


def test_flops_of_llama_lora_with_grouped_heads_by_hand() -> None:
    """Llama-3.2-1B: 16 blocks; q and o 2048 x 2048, k and v 2048 x 512, three of 2048 x 8192; LoRA of rank 8 on q and
    v.
    """
    made = meta(
        "llama",
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=128256,
        tie_word_embeddings=True,
    ).requires_grad_(False)
    with torch.device("meta"):
        made = peft.get_peft_model(
            made, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )
    costs = flops.training_costs(made)
    frozen = 16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192)
    adapter = 16 * 8 * ((2048 + 2048) + (2048 + 512))
    assert costs.per_token == 4 * frozen + 6 * adapter
    assert costs.per_target == 4 * 128256 * 2048
    assert costs.per_pair == ((None, 16 * 12 * 32 * 64),)


def test_the_last_layer_needs_no_backward_pass_through_the_blocks() -> None:
    tied, untied = (flops.training_costs(model(kind, "last-layer")) for kind in ("gpt2", "gpt_neox"))
    assert tied.per_token == untied.per_token == 2 * 2 * 12 * 64**2
    assert tied.per_target == 4 * 128 * 64
    assert untied.per_target == 6 * 128 * 64
    assert tied.per_pair == ((None, 2 * 4 * 64),)


@pytest.mark.parametrize("kind", KINDS)
def test_flops_of_full_training_equal_torchs_count(kind: str) -> None:
    """Eager attention computes the whole square, so that is what it is compared with."""
    made, length = model(kind).train(), 24
    costs = flops.training_costs(made)
    expected = (
        costs.per_token * length + costs.per_target * length + sum(cost for _, cost in costs.per_pair) * length**2
    )
    with FlopCounterMode(display=False) as counter:
        made(input_ids=torch.arange(length)[None]).logits.sum().backward()
    # Rotary embeddings multiply positions by frequencies, a product no weight is in.
    assert counter.get_total_flops() == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_flops_of_lora_equal_torchs_count_after_the_first_block(kind: str) -> None:
    made, length = model(kind, "lora", layers=4).train(), 24
    costs = flops.training_costs(made)
    expected = (
        costs.per_token * length + costs.per_target * length + sum(cost for _, cost in costs.per_pair) * length**2
    )
    with FlopCounterMode(display=False) as counter:
        made(input_ids=torch.arange(length)[None]).logits.sum().backward()
    assert 0.9 * expected < counter.get_total_flops() < expected * 1.0005


def test_count_pairs_with_attention_windows() -> None:
    assert flops.count_pairs(4) == 10
    assert flops.count_pairs(4, 2) == 1 + 2 + 2 + 2
    assert flops.count_pairs(4, 4) == flops.count_pairs(4, 9) == 10
    costs = flops.training_costs(model("gpt_neo"))
    assert dict(costs.per_pair) == {None: 12 * 64, 16: 12 * 64}
    assert costs.of_examples([20], 0) == 20 * costs.per_token + 12 * 64 * (210 + 136 + 4 * 16)


def test_mfu_divides_by_all_gpus() -> None:
    """16 A100s, 16,384,000 tokens of a 70B model in 48,600 s: 45 % of one GPU, which is 2.8 % of all."""
    assert flops.utilisation(6 * 7e10 * 16_384_000, 48_600, 16, 312e12) == pytest.approx(0.02837, rel=1e-3)
    assert flops.peak_flops("NVIDIA H200") == 989e12
    assert flops.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert flops.peak_flops("Radeon") is None


# ----------------------------------------------------------------------------------------------------------- memory


def kept_for_backward(made: Any, length: int, **how: Any) -> int:
    """Bytes that autograd keeps of one forward pass of the body, weights and buffers left out; ``how``: for
    attention.
    """
    causal = architecture.strip_adapter(made)
    if causal.config._attn_implementation == attention_module.ATTENTION:
        how.setdefault("uniform_rows", 1)
    weights = {tensor.untyped_storage().data_ptr() for tensor in [*causal.parameters(), *causal.buffers()]}
    kept: dict[int, int] = {}

    def see(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        output = causal.base_model(input_ids=torch.arange(length)[None] % 128, use_cache=False, **how)
    assert output.last_hidden_state.shape[1] == length  # keeps the graph alive until here
    return sum(kept.values())


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_bytes_equal_autograds(kind: str, method: str) -> None:
    length = 96
    attention_module.register()
    attention = proof.choose_attention(tiny.random_model(kind, 128).config)
    two, four = (model(kind, method, attention, layers=layers).to(torch.bfloat16).train() for layers in (2, 4))
    measured = (kept_for_backward(four, length) - kept_for_backward(two, length)) / 2
    expected = memory.expect_memory(memory.profile_model(four, longest=length)).per_token * length / 4
    assert 0.9 * measured < expected < 1.35 * measured


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("gemma3_text", {"head_dim": 16}),
        ("qwen3", {"head_dim": 16}),
        ("mixtral", {"num_local_experts": 4, "sliding_window": None}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}),
    ],
)
def test_activation_bytes_of_families_without_a_file(kind: str, sizes: dict[str, Any]) -> None:
    """Gemma 3 keeps more than half again of what a Llama of its sizes does, a mixture of experts several times that."""
    attention_module.register()
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, **sizes}
    measured = {}
    for layers in (2, 4):
        config = transformers.AutoConfig.for_model(
            kind, vocab_size=128, num_hidden_layers=layers, max_position_embeddings=256, **sizes
        )
        causal = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        causal.set_attn_implementation(proof.choose_attention(config))
        measured[layers] = kept_for_backward(causal, 96)
    expected = memory.expect_memory(memory.profile_model(causal, longest=96)).per_token * 96 / 4
    assert 0.9 < expected / ((measured[4] - measured[2]) / 2) < 1.35


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama"])
def test_activation_bytes_with_the_kernel_math(kind: str) -> None:
    """It keeps the square of the scores."""
    attention_module.register()
    two, four = (model(kind, "full", attention_module.ATTENTION, layers=layers).train() for layers in (2, 4))
    with attention_choice.kernels_in_use("math", torch.device("cpu")):
        measured = (kept_for_backward(four, 256) - kept_for_backward(two, 256)) / 2
    profiles = [memory.profile_model(four, longest=256, size=4, keeps_scores=keeps) for keeps in (True, False)]
    expected, without = (memory.expect_memory(profile).per_token * 256 / 4 for profile in profiles)
    assert 0.9 * measured < expected < 1.35 * measured
    assert without < 0.9 * measured


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_bytes_of_compiled_blocks_equal_autograds(
    kind: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced and cut in two as for a GPU, without generating code: that chooses what is kept."""
    plain, length = torch.nn.Module.compile, 96
    # Sizes left open keep the same, and take ten times as long to trace.
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: plain(self, **{**how, "dynamic": False}))
    attention_module.register()
    torch._dynamo.reset()
    packed = proof.choose_layout(tiny.random_model(kind, 128).config) == "packed"
    how = {"uniform_rows": 1} if packed else {}  # one kernel, as on a GPU
    measured = {}
    for layers in (2, 4):
        made = model(kind, method, layers=layers).to(torch.bfloat16).train()
        made.set_attn_implementation(proof.choose_attention(made.config))
        LossModule(made, torch.bfloat16).compile_blocks("aot_eager_decomp_partition")
        measured[layers] = kept_for_backward(made, length, **how)
    one = (measured[4] - measured[2]) / 2
    expected = memory.expect_memory(memory.profile_model(made, longest=length, compiled=True)).per_token * length / 4
    assert 0.7 * expected < one <= 1.02 * expected


def test_model_that_cannot_be_counted_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> float:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    counted = memory.expect_memory(memory.profile_model(meta("llama"), longest=64))
    monkeypatch.setattr(activations, "_count", fail)
    estimated = memory.expect_memory(memory.profile_model(meta("llama"), longest=64))
    assert (counted.is_counted, estimated.is_counted) == (True, False)
    assert 0.8 < estimated.per_token / counted.per_token < 1.25


def test_last_layer_training_keeps_no_block_activations() -> None:
    made = model("llama", "last-layer", attention_module.ATTENTION)
    assert kept_for_backward(made, 32) < 32 * 64 * 4 * 4  # the norm's own, and no block's
    profile = memory.profile_model(made)
    assert profile.layers == 1
    assert profile.trainable == 64 + 128 * 64


def profile(method: str = "full", **choices: Any) -> memory.MemoryProfile:
    """A 7B Llama."""
    made = meta("llama")
    if method == "lora":
        with torch.device("meta"):
            lora = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            made = peft.get_peft_model(made.requires_grad_(False), lora)
    return memory.profile_model(made, longest=4096, **choices)


def test_memory_of_a_7b_model_by_hand() -> None:
    full = profile()
    count = 2 * 32000 * 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096
    assert (full.frozen, full.trainable, full.unit) == (0, count, 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    one = memory.expect_memory(full)
    assert (one.weights, one.gradients, one.optimizer) == (2 * count, 4 * count, 12 * count)
    sharded = memory.expect_memory(profile(strategy="fsdp", gpus=4))
    assert sharded.gradients == 4 * count // 4
    # Gathered: what is outside blocks, the block at work, the next, and the buffer of one; a gradient, and its sum in
    # fp32.
    root = 2 * 32000 * 4096 + 4096
    assert (sharded.weights, sharded.buffers) == (0, 2 * (root + 3 * full.unit) + (2 + 4) * root)
    second = memory.expect_memory(profile(strategy="zero2", gpus=4))
    assert (second.weights, second.optimizer) == (one.weights, one.optimizer // 4)
    some, all_ = (
        memory.expect_memory(profile(strategy="zero3", gpus=4, offload=what)) for what in ("optimizer", "all")
    )
    assert (some.weights, some.optimizer, some.host) == (2 * count // 4, 0, (4 + 12) * count // 4)
    assert (all_.weights, all_.host) == (0, (2 + 4 + 12) * count // 4)
    assert some.buffers == all_.buffers == 2 * 10**9 + 2 * (5 * 10**8 + count // 4)
    assert second.buffers == 2 * (2 * 5 * 10**8 + count // 4)
    assert sharded.total(100, checkpointing=True) < sharded.total(100, checkpointing=False)


def test_host_memory_is_suggested_with_deepspeed() -> None:
    """7B with every weight: 112 GB of weights and optimizer, of which one GPU needs little more than the gathered
    weights.
    """
    way = "weights in the host's memory (--set parallel=deepspeed --set deepspeed.offload=all)"
    budget_bytes = 70 * memory.GIB
    assert way in memory.suggest(profile(), budget_bytes, offloads=True)
    assert way not in memory.suggest(profile(), budget_bytes)
    assert way not in memory.suggest(profile(), memory.GIB, offloads=True)


def test_bytes_of_the_loss_are_counted() -> None:
    """Of each tensor that softmax_loss has while it works, by torch's own dispatch; beside the logits it is given."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Peak(TorchDispatchMode):
        def __init__(self, logits: torch.Tensor) -> None:
            super().__init__()
            self.sizes, self.peak = {logits.untyped_storage()._cdata: 0}, 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            results = func(*args, **(kwargs or {}))
            for storage in (
                tensor.untyped_storage() for tensor in tree_leaves(results) if isinstance(tensor, torch.Tensor)
            ):
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, storage._cdata)
            self.peak = max(self.peak, sum(self.sizes.values()))
            return results

    vocabulary, positions = 8192, 64
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.randn(positions, vocabulary).to(dtype)
        with Peak(logits) as counter:
            losses.softmax_loss(logits, torch.randint(0, vocabulary, (positions,)))
        small = replace(profile(), vocabulary=vocabulary, width=0, size=dtype.itemsize)
        expected = memory.expect_memory(small).loss / losses.CHUNK / vocabulary - dtype.itemsize
        assert counter.peak / logits.numel() == pytest.approx(expected, abs=0.01)


NEOX = {
    "vocab_size": 52224,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 8192,
    "tie_word_embeddings": False,
}
LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("kind", "sizes", "method", "tokens", "choices", "measured"),
    [
        ("gpt_neox", NEOX, "lora", 16_384, {}, (36.1,)),
        ("gpt_neox", NEOX, "full", 16_384, {}, (77.4,)),
        ("gpt_neox", NEOX, "full", 16_384, {"strategy": "ddp", "gpus": 2}, (63.5, 71.7)),
        ("llama", LLAMA, "full", 16_384, {"compiled": True}, (55.5,)),
        ("llama", LLAMA, "full", 32_768, {"compiled": True, "strategy": "fsdp", "gpus": 2}, (80.7,)),
        ("llama", LLAMA, "full", 16_384, {"strategy": "zero2", "gpus": 2}, (68, 71)),
        ("llama", LLAMA, "full", 16_384, {"strategy": "zero3", "gpus": 2}, (68, 71)),
    ],
    ids=["lora", "full", "ddp", "compiled", "fsdp", "zero2", "zero3"],
)
def test_expected_memory_is_within_a_tenth_of_what_was_reserved(
    kind: str, sizes: dict[str, Any], method: str, tokens: int, choices: dict[str, Any], measured: tuple[float, ...]
) -> None:
    """max_memory_reserved() of runs on H100s (GPT-NeoX) and H200s (Llama), in GiB, before expandable_segments was the
    default.
    """
    with torch.device("meta"):
        meta_model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes))
    meta_model = apply_tuning_method(meta_model, train_settings.Settings(method=method))
    expected = memory.expect_memory(memory.profile_model(meta_model, longest=2048, **choices))
    reserved = expected.reserved(tokens, checkpointing=False, expandable=False) / memory.GIB
    for bytes_reserved in measured:
        assert 0.9 * bytes_reserved < reserved < 1.1 * bytes_reserved


@pytest.mark.parametrize(
    ("kind", "sizes", "method", "tokens", "choices", "measured"),
    [
        (
            "gpt_neox",
            {
                **NEOX,
                "hidden_size": 2560,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "intermediate_size": 10_240,
            },
            "lora",
            16_384,
            {},
            41.5,
        ),
        ("llama", LLAMA, "full", 14_600, {}, 55.7),
        # Two examples on each: less than a chunk of the loss.
        ("llama", LLAMA, "full", 1740, {"strategy": "fsdp", "gpus": 4}, 13.2),
    ],
    ids=["lora", "full", "fsdp"],
)
def test_expected_memory_with_expandable_segments_is_within_a_tenth(
    kind: str, sizes: dict[str, Any], method: str, tokens: int, choices: dict[str, Any], measured: float
) -> None:
    """max_memory_reserved() of `qa/gpu/tasks_at_size.py` on H100s, in GiB; examples of 350 to 1,050 tokens."""
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(kind, **sizes)
        meta_model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    meta_model = apply_tuning_method(meta_model, train_settings.Settings(method=method))
    expected = memory.expect_memory(memory.profile_model(meta_model, longest=1050, **choices))
    assert expected.reserved(tokens, checkpointing=False, expandable=True) / memory.GIB == pytest.approx(
        measured, rel=0.1
    )


@pytest.mark.parametrize(
    ("env", "expandable"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: true"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_ALLOC_CONF": "backend:native", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, False),
    ],
)
def test_expandable_segments_are_read_from_the_allocators_setting(env: dict[str, str], expandable: bool) -> None:
    assert memory.has_expandable_segments(env) is expandable


def test_quantized_weights_need_less_memory() -> None:
    plain, four = (memory.expect_memory(profile("lora", bits=bits)).weights for bits in (16, 4))
    products = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert plain - four == pytest.approx(products * (2 - 0.5 - 1 / 16), abs=1)


def test_suggested_settings_fit() -> None:
    budget = int(0.9 * 79 * memory.GIB)
    full = profile()
    assert memory.expect_memory(full).total(4096, checkpointing=True) > budget
    suggestion = memory.suggest(full, budget)
    assert any("2 GPUs" in line and "parallel=fsdp" in line for line in suggestion)
    assert any("method=lora" in line for line in suggestion)
    assert any("B200" in line and "H200" in line for line in suggestion)
    lora = profile("lora")
    small = int(0.9 * 14 * memory.GIB)
    assert any("bits=4" in line for line in memory.suggest(lora, small))
    assert not any("method=lora" in line for line in memory.suggest(lora, small))
    assert memory.suggest(profile(strategy="fsdp", gpus=128), 1 << 20) == [
        f"a GPU with more memory: {', '.join(memory.SIZES)}"
    ]


# The shapes of the models that recipes/finetune names; what is left out is the architecture's default.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "cerebras/Cerebras-GPT-256M": ("gpt2", {"n_layer": 14, "n_embd": 1088, "n_head": 17, "n_positions": 2048}),
    "cerebras/Cerebras-GPT-13B": ("gpt2", {"n_layer": 40, "n_embd": 5120, "n_head": 40, "n_positions": 2048}),
    "databricks/dolly-v2-12b": (
        "gpt_neox",
        {
            "num_hidden_layers": 36,
            "hidden_size": 5120,
            "num_attention_heads": 40,
            "intermediate_size": 20480,
            "vocab_size": 50280,
        },
    ),
    "tiiuae/falcon-7b": (
        "falcon",
        {
            "num_hidden_layers": 32,
            "hidden_size": 4544,
            "num_attention_heads": 71,
            "vocab_size": 65024,
            "multi_query": True,
        },
    ),
    "rinna/japanese-gpt-neox-3.6b": (
        "gpt_neox",
        {
            "num_hidden_layers": 36,
            "hidden_size": 2816,
            "num_attention_heads": 22,
            "intermediate_size": 11264,
            "vocab_size": 32000,
        },
    ),
    "mosaicml/mpt-7b": ("mpt", {"n_layers": 32, "d_model": 4096, "n_heads": 32, "vocab_size": 50432}),
    "cyberagent/open-calm-7b": (
        "gpt_neox",
        {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "intermediate_size": 16384,
            "vocab_size": 52224,
        },
    ),
    "openlm-research/open_llama_13b_600bt": (
        "llama",
        {
            "num_hidden_layers": 40,
            "hidden_size": 5120,
            "num_attention_heads": 40,
            "intermediate_size": 13824,
            "vocab_size": 32000,
        },
    ),
}
TABLE = ROOT / "recipes" / "finetune" / "README.md"


def dressed(made: Any, method: str) -> Any:
    made.requires_grad_(method == "full")
    if method == "last-layer":
        for name in architecture.last_layer(made):
            made.get_submodule(name).requires_grad_(True)
    if method != "lora":
        return made
    with torch.device("meta"):  # r as configs/lora.yaml has it
        names = list(architecture.lora_targets(made))
        return peft.get_peft_model(made, peft.LoraConfig(r=2, target_modules=names, task_type="CAUSAL_LM"))


def rows_of_the_table() -> list[list[str]]:
    lines = [
        line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| `") and " B |" in line
    ]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_of_models_is_complete() -> None:
    assert [row[0] for row in rows_of_the_table()] == list(SHAPES)


@pytest.mark.parametrize("row", rows_of_the_table(), ids=lambda row: row[0])
def test_table_of_models_matches_the_computed_values(row: list[str]) -> None:
    kind, sizes = SHAPES[row[0]]
    known, made = architecture.find_module(kind).ARCHITECTURE, meta(kind, **sizes)
    reckoned = [
        memory.expect_memory(memory.profile_model(dressed(meta(kind, **sizes), method), longest=2048)).total(
            2048, checkpointing=True
        )
        / memory.GIB
        for method in ("last-layer", "lora", "full")
    ]
    expected = [
        known.name,
        f"{sum(part.numel() for part in made.parameters()) / 1e9:.2f} B",
        ", ".join(known.lora),
        ", ".join(architecture.last_layer(made)),
        *(f"{size:.0f}" for size in reckoned),
    ]
    assert row[1:] == expected
