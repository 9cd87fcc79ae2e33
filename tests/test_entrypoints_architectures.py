"""Names, FLOPs and memory of every architecture, against the real classes, torch's own counter and autograd's own hooks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small only wait for a second thread
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"), str(ROOT / "entrypoints")]

import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import architectures  # noqa: E402
import flops  # noqa: E402
import memory  # noqa: E402
import packing  # noqa: E402
import tiny  # noqa: E402
from architectures import ARCHITECTURES  # noqa: E402
from learner import Learner  # noqa: E402
from settings import TaskError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
KINDS = sorted(ARCHITECTURES)


def model(kind: str, method: str = "full", attention: str = "eager", **sizes: int) -> Any:
    made = tiny.random_model(kind, 128, **sizes)
    made.set_attn_implementation(attention)
    if method == "full":
        return made
    made.requires_grad_(False)
    if method == "last-layer":
        for name in architectures.last_layer(made.config):
            made.get_submodule(name).requires_grad_(True)
        return made
    known = ARCHITECTURES[kind]
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
def test_the_names_are_those_of_the_real_classes(kind: str) -> None:
    known, made = ARCHITECTURES[kind], model(kind, layers=4)
    blocks = architectures.list_blocks(made)
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
    assert (known.attention == "interface") == bool(made._supports_attention_backend)
    for implementation in ("sdpa", "eager"):
        works = implementation == "eager" or bool(made._supports_sdpa)
        assert (implementation in known.implementations) == works, implementation


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_layer_never_reaches_the_first(kind: str) -> None:
    made = model(kind, "last-layer")
    trained = {name for name, parameter in made.named_parameters() if parameter.requires_grad}
    tied = made.config.tie_word_embeddings
    assert trained <= {f"{ARCHITECTURES[kind].final_norm}.{end}" for end in ("weight", "bias")} | {"lm_head.weight"}
    assert ("lm_head.weight" in trained) == (not tied)
    assert not made.get_input_embeddings().weight.requires_grad


def test_an_architecture_that_is_not_known_is_named() -> None:
    config = transformers.AutoConfig.for_model("opt")
    with pytest.raises(TaskError, match=r"'opt'.*gpt_neox.*lora\.target_modules"):
        architectures.find_architecture(config)


def test_windows() -> None:
    assert architectures.attention_windows(tiny.random_model("gpt_neo", 10).config) == [None, 16]
    assert architectures.attention_windows(tiny.random_model("llama", 10).config) == [None, None]


# ------------------------------------------------------------------------------------------------------------ FLOPs


def test_full_training_of_gpt_2_by_hand() -> None:
    """12 blocks of 12 * 768^2 weights, a head of 50257 * 768; 6 each; attention 12 * 768 a pair in each block."""
    costs = flops.training_costs(meta("gpt2"))
    assert costs.per_token == 6 * 12 * 12 * 768**2
    assert costs.per_learnt == 6 * 50257 * 768
    assert costs.of_rows([2, 3], 4) == 5 * costs.per_token + 4 * costs.per_learnt + 12 * 12 * 768 * (3 + 6)


def test_lora_of_llama_with_grouped_heads_by_hand() -> None:
    """Llama-3.2-1B: 16 blocks; q and o 2048 x 2048, k and v 2048 x 512, three of 2048 x 8192; LoRA of rank 8 on q and v."""
    made = meta(
        "llama", hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=8192, vocab_size=128256, tie_word_embeddings=True,
    ).requires_grad_(False)  # fmt: skip
    with torch.device("meta"):
        made = peft.get_peft_model(
            made, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )
    costs = flops.training_costs(made)
    frozen = 16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192)
    adapter = 16 * 8 * ((2048 + 2048) + (2048 + 512))
    assert costs.per_token == 4 * frozen + 6 * adapter
    assert costs.per_learnt == 4 * 128256 * 2048
    assert costs.per_pair == ((None, 16 * 12 * 32 * 64),)


def test_the_last_layer_needs_no_backward_pass_through_the_blocks() -> None:
    tied, untied = (flops.training_costs(model(kind, "last-layer")) for kind in ("gpt2", "gpt_neox"))
    assert tied.per_token == untied.per_token == 2 * 2 * 12 * 64**2
    assert tied.per_learnt == 4 * 128 * 64
    assert untied.per_learnt == 6 * 128 * 64
    assert tied.per_pair == ((None, 2 * 4 * 64),)


@pytest.mark.parametrize("kind", KINDS)
def test_full_training_is_what_torch_counts(kind: str) -> None:
    """Eager attention computes the whole square, so that is what it is compared with."""
    made, length = model(kind).train(), 24
    costs = flops.training_costs(made)
    expected = (
        costs.per_token * length + costs.per_learnt * length + sum(cost for _, cost in costs.per_pair) * length**2
    )
    with FlopCounterMode(display=False) as counter:
        made(input_ids=torch.arange(length)[None]).logits.sum().backward()
    # Rotary embeddings multiply positions by frequencies, a product no weight is in.
    assert counter.get_total_flops() == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_lora_is_what_torch_counts_but_for_the_first_block(kind: str) -> None:
    made, length = model(kind, "lora", layers=4).train(), 24
    costs = flops.training_costs(made)
    expected = (
        costs.per_token * length + costs.per_learnt * length + sum(cost for _, cost in costs.per_pair) * length**2
    )
    with FlopCounterMode(display=False) as counter:
        made(input_ids=torch.arange(length)[None]).logits.sum().backward()
    assert 0.9 * expected < counter.get_total_flops() < expected * 1.0005


def test_pairs() -> None:
    assert flops.count_pairs(4) == 10
    assert flops.count_pairs(4, 2) == 1 + 2 + 2 + 2
    assert flops.count_pairs(4, 4) == flops.count_pairs(4, 9) == 10
    costs = flops.training_costs(model("gpt_neo"))
    assert dict(costs.per_pair) == {None: 12 * 64, 16: 12 * 64}
    assert costs.of_rows([20], 0) == 20 * costs.per_token + 12 * 64 * (210 + 136 + 4 * 16)


def test_utilisation_divides_by_every_gpu() -> None:
    """16 A100s, 16,384,000 tokens of a 70B model in 48,600 s: 45 % of one GPU, which is 2.8 % of all."""
    assert flops.utilisation(6 * 7e10 * 16_384_000, 48_600, 16, 312e12) == pytest.approx(0.02837, rel=1e-3)
    assert flops.peak_flops("NVIDIA H200") == 989e12
    assert flops.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert flops.peak_flops("Radeon") is None


# ----------------------------------------------------------------------------------------------------------- memory


def kept_for_backward(made: Any, length: int, **how: Any) -> int:
    """Bytes that autograd keeps of one forward pass of the body, weights and buffers left out; ``how``: for attention."""
    causal = architectures.strip_adapter(made)
    own = {tensor.untyped_storage().data_ptr() for tensor in [*causal.parameters(), *causal.buffers()]}
    kept: dict[int, int] = {}

    def see(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        output = causal.base_model(input_ids=torch.arange(length)[None] % 128, use_cache=False, **how)
    assert output.last_hidden_state.shape[1] == length  # keeps the graph alive until here
    return sum(kept.values())


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_blocks_keep_is_what_autograd_keeps(kind: str, method: str) -> None:
    known, length = ARCHITECTURES[kind], 96
    packing.register()
    attention = packing.ATTENTION if known.attention == "interface" else known.implementations[-2:][0]
    attention = attention if attention in ("sdpa", packing.ATTENTION) else "eager"
    two, four = (model(kind, method, attention, layers=layers).to(torch.bfloat16).train() for layers in (2, 4))
    measured = (kept_for_backward(four, length) - kept_for_backward(two, length)) / 2
    expected = memory.expect_memory(memory.count_needs(four, longest=length)).per_token * length / 4
    assert 0.95 * measured < expected < 1.35 * measured


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_compiled_blocks_keep_is_what_autograd_keeps(
    kind: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced and cut in two as for a GPU, without generating code: that chooses what is kept."""
    plain, length = torch.nn.Module.compile, 96
    # Sizes left open keep the same, and take ten times as long to trace.
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: plain(self, **{**how, "dynamic": False}))
    packing.register()
    torch._dynamo.reset()
    how = {"even_rows": 1} if ARCHITECTURES[kind].attention == "interface" else {}  # one kernel, as on a GPU
    measured = {}
    for layers in (2, 4):
        made = model(kind, method, layers=layers).to(torch.bfloat16).train()
        made.set_attn_implementation(packing.choose_attention(made.config))
        Learner(made, torch.bfloat16).compile_blocks("aot_eager_decomp_partition")
        measured[layers] = kept_for_backward(made, length, **how)
    one = (measured[4] - measured[2]) / 2
    expected = memory.expect_memory(memory.count_needs(made, longest=length, compiled=True)).per_token * length / 4
    assert 0.8 * expected < one <= expected


def test_the_last_layer_keeps_nothing_of_the_blocks() -> None:
    made = model("llama", "last-layer", packing.ATTENTION)
    assert kept_for_backward(made, 32) < 32 * 64 * 4 * 4  # the norm's own, and no block's
    needs = memory.count_needs(made)
    assert needs.layers == 1
    assert needs.trainable == 64 + 128 * 64


def needs(method: str = "full", **choices: Any) -> memory.Needs:
    """A 7B Llama."""
    made = meta("llama")
    if method == "lora":
        with torch.device("meta"):
            lora = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            made = peft.get_peft_model(made.requires_grad_(False), lora)
    return memory.count_needs(made, longest=4096, **choices)


def test_a_7b_by_hand() -> None:
    full = needs()
    count = 2 * 32000 * 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096
    assert (full.frozen, full.trainable, full.unit) == (0, count, 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    one = memory.expect_memory(full)
    assert (one.weights, one.gradients, one.optimizer) == (2 * count, 4 * count, 12 * count)
    sharded = memory.expect_memory(needs(strategy="fsdp", gpus=4))
    assert sharded.gradients == 4 * count // 4
    assert sharded.weights == 2 * 2 * full.unit
    second = memory.expect_memory(needs(strategy="zero2", gpus=4))
    assert (second.weights, second.optimizer) == (one.weights, one.optimizer // 4)
    some, all_ = (memory.expect_memory(needs(strategy="zero3", gpus=4, offload=what)) for what in ("optimizer", "all"))
    assert (some.weights, some.optimizer, some.host) == (2 * count // 4 + 2 * 2 * full.unit, 0, (4 + 12) * count // 4)
    assert (all_.weights, all_.host) == (2 * 2 * full.unit, (2 + 4 + 12) * count // 4)
    assert sharded.of(100, checkpointing=True) < sharded.of(100, checkpointing=False)


def test_quantised_weights_are_smaller() -> None:
    plain, four = (memory.expect_memory(needs("lora", bits=bits)).weights for bits in (16, 4))
    products = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert plain - four == pytest.approx(products * (2 - 0.5 - 1 / 16), abs=1)


def test_what_would_make_it_fit_does_fit() -> None:
    room = int(0.9 * 79 * memory.GIB)
    full = needs()
    assert memory.expect_memory(full).of(4096, checkpointing=True) > room
    said = memory.suggest(full, room)
    assert any("2 GPUs" in line and "parallel=fsdp" in line for line in said)
    assert any("method=lora" in line for line in said)
    assert any("B200" in line and "H200" in line for line in said)
    lora = needs("lora")
    small = int(0.9 * 14 * memory.GIB)
    assert any("bits=4" in line for line in memory.suggest(lora, small))
    assert not any("method=lora" in line for line in memory.suggest(lora, small))
    assert memory.suggest(needs(strategy="fsdp", gpus=128), 1 << 20) == [
        f"a GPU with more memory: {', '.join(memory.SIZES)}"
    ]
    assert memory.memory_of("NVIDIA A100-SXM4-80GB") == 79 * memory.GIB


# The shapes of the models that recipes/finetune names; what is left out is the architecture's default.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "cerebras/Cerebras-GPT-256M": ("gpt2", {"n_layer": 14, "n_embd": 1088, "n_head": 17, "n_positions": 2048}),
    "cerebras/Cerebras-GPT-13B": ("gpt2", {"n_layer": 40, "n_embd": 5120, "n_head": 40, "n_positions": 2048}),
    "databricks/dolly-v2-12b": ("gpt_neox", {
        "num_hidden_layers": 36, "hidden_size": 5120, "num_attention_heads": 40, "intermediate_size": 20480, "vocab_size": 50280,
    }),
    "tiiuae/falcon-7b": ("falcon", {
        "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71, "vocab_size": 65024, "multi_query": True,
    }),
    "rinna/japanese-gpt-neox-3.6b": ("gpt_neox", {
        "num_hidden_layers": 36, "hidden_size": 2816, "num_attention_heads": 22, "intermediate_size": 11264, "vocab_size": 32000,
    }),
    "mosaicml/mpt-7b": ("mpt", {"n_layers": 32, "d_model": 4096, "n_heads": 32, "vocab_size": 50432}),
    "cyberagent/open-calm-7b": ("gpt_neox", {
        "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 16384, "vocab_size": 52224,
    }),
    "openlm-research/open_llama_13b_600bt": ("llama", {
        "num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 40, "intermediate_size": 13824, "vocab_size": 32000,
    }),
}  # fmt: skip
TABLE = ROOT / "recipes" / "finetune" / "README.md"


def dressed(made: Any, method: str) -> Any:
    made.requires_grad_(method == "full")
    if method == "last-layer":
        for name in architectures.last_layer(made.config):
            made.get_submodule(name).requires_grad_(True)
    if method != "lora":
        return made
    with torch.device("meta"):  # r as configs/lora.yaml has it
        names = list(architectures.find_architecture(made.config).lora)
        return peft.get_peft_model(made, peft.LoraConfig(r=2, target_modules=names, task_type="CAUSAL_LM"))


def rows_of_the_table() -> list[list[str]]:
    lines = [
        line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| `") and " B |" in line
    ]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_of_models_is_complete() -> None:
    assert [row[0] for row in rows_of_the_table()] == list(SHAPES)


@pytest.mark.parametrize("row", rows_of_the_table(), ids=lambda row: row[0])
def test_the_table_of_models_says_what_is_reckoned(row: list[str]) -> None:
    kind, sizes = SHAPES[row[0]]
    known, made = ARCHITECTURES[kind], meta(kind, **sizes)
    reckoned = [
        memory.expect_memory(memory.count_needs(dressed(meta(kind, **sizes), method), longest=2048))
        .of(2048, checkpointing=True) / memory.GIB
        for method in ("last-layer", "lora", "full")
    ]  # fmt: skip
    said = [
        known.name, f"{sum(part.numel() for part in made.parameters()) / 1e9:.2f} B", ", ".join(known.lora),
        ", ".join(architectures.last_layer(made.config)), *(f"{size:.0f}" for size in reckoned),
    ]  # fmt: skip
    assert row[1:] == said
