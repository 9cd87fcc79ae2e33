"""The model as training runs it: packed rows, attention, compiled blocks, the loss."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

import numpy as np
import torch

from ekiben_tasks.data import (
    packing,
    sources,
)
from ekiben_tasks.data.tokenize import Example, Instruction, encode_examples
from ekiben_tasks.distributed import strategy
from ekiben_tasks.models import (
    attention,
    compile_patches,
    load,
    memory,
    proof,
    tiny,
)
from ekiben_tasks.models import device as device_module
from ekiben_tasks.models import loss as losses
from ekiben_tasks.models.lora import Lora
from ekiben_tasks.models.tuning import LossModule, apply_tuning_method
from ekiben_tasks.training import plan as plan_module
from ekiben_tasks.training import (
    run_summary,
    train,
)
from ekiben_tasks.training.plan import make_plan, will_compile
from ekiben_tasks.training.prepare import Prepared
from support.multiprocess import same_environment  # noqa: F401
from support.tiny_runs import (  # noqa: F401
    CPU,
    ENTRYPOINTS,
    base,
    device,
    small,
    tokenizer,
    trained,
)

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours


def test_micro_batches_hold_every_example_once_within_the_limits(tokenizer: Any) -> None:
    examples = encode_examples(tokenizer, [Instruction("問" * n, "答" * (n % 7 + 1)) for n in range(1, 40)])
    packs = packing.split_micro_batches(examples, max_examples=8, max_tokens=300)
    assert sorted(id(example) for pack in packs for example in pack) == sorted(map(id, examples))
    for chosen in packs:
        assert len(chosen) <= 8
        assert len(chosen) == 1 or sum(len(example.ids) for example in chosen) <= 300


@pytest.mark.parametrize("method", ["lora", "full"])
def test_packed_loss_and_gradient_equal_those_of_single_examples(
    method: str, base: Path, tokenizer: Any, device: device_module.Device
) -> None:
    """Against transformers' own loss, one row at a time, without any packing."""
    three = [
        Instruction("日本の首都はどこですか。", "東京です。"),
        Instruction("7かける8は?", "56です。", "計算"),
        Instruction("色は?", "青"),
    ]
    examples = encode_examples(tokenizer, three)
    adapter = Lora(dropout=0.0, target_modules=("query_key_value", "dense_h_to_4h"))
    settings = small(base, method=method, lora=adapter)
    plain = apply_tuning_method(load.load_base(str(base), device, "eager"), settings)
    packed = apply_tuning_method(load.load_base(str(base), device, attention.ATTENTION), settings)
    for model in (plain, packed):  # an adapter's second matrix starts at 0, and so would the first one's gradient
        torch.manual_seed(3)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += torch.randn_like(parameter) * 0.05
    learnt = sum(example.num_target_tokens for example in examples)
    expected = single_losses(plain, examples)
    (expected / learnt).backward()

    loss_module = LossModule(packed, torch.float32)
    total = loss_module(packing.pack(examples))
    (total / learnt).backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    gradients = [
        (a.grad, b.grad) for a, b in zip(plain.parameters(), packed.parameters(), strict=True) if a.requires_grad
    ]
    assert len(gradients) == (8 if method == "lora" else 28)
    for ours, theirs in gradients:
        assert ours is not None and theirs is not None and theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
    with torch.no_grad():
        assert loss_module(packing.pack(examples)).item() == pytest.approx(total.item(), rel=1e-5)


def single_losses(model: Any, examples: list[Any]) -> torch.Tensor:
    """Summed loss by transformers' own forward, row by row."""
    total = torch.zeros(())
    for example in examples:
        ids = torch.tensor(example.ids, dtype=torch.long)[None]
        labels = ids.clone()
        labels[:, : example.targets[0][0]] = -100
        total = total + model(input_ids=ids, labels=labels).loss * example.num_target_tokens
    return total


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo", "gpt_neox", "falcon", "mpt", "llama"])
def test_packed_examples_do_not_attend_to_each_other(kind: str, tokenizer: Any) -> None:
    """Every architecture: one pack of four rows has the loss of the four alone, in whatever order they lie."""
    texts = [
        Instruction("長い問い" * 9, "答え"),
        Instruction("問い", "とても長い答え" * 6),
        Instruction("a", "b"),
        Instruction("空は?", "青い" * 20),
    ]
    examples = encode_examples(tokenizer, texts)
    model = tiny.random_model(kind, len(tokenizer)).eval()
    attention.register()
    with torch.no_grad():
        expected = single_losses(model, examples).item()
        model.set_attn_implementation(proof.choose_attention(model.config))
        loss_module = LossModule(model, torch.float32)
        assert loss_module.layout == ("packed" if kind in ("gpt2", "gpt_neox", "llama") else "padded")
        for order in (examples, examples[::-1]):
            assert loss_module(packing.pack(order, loss_module.layout)).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_uniform_examples_have_the_same_loss(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 300, (128,), generator=generator).numpy() for _ in range(3)]
    pack = packing.pack([Example(row, ((5, 128),)) for row in ids])
    assert pack.is_uniform
    model = tiny.random_model(kind, 300).eval()
    attention.register()
    model.set_attn_implementation(attention.ATTENTION)
    loss_module = LossModule(model, torch.float32)
    with torch.no_grad():
        alone = sum(loss_module(packing.pack([Example(row, ((5, 128),))])).item() for row in ids)
        assert loss_module(pack).item() == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("generate", "generate --adapter out/adapter"),
        ("evaluate", "evaluate --adapter out/adapter"),
        ("upload", "upload --input out/adapter --name you/out --dry-run"),
    ],
)
def test_the_suggested_command_is_a_task_of_the_image(
    task: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / task).write_text("#!/bin/sh\n")
    (tmp_path / task).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = {"mfu": None, "steps": 1, "time_to_train_s": 1.0, "tokens_per_s": 1.0, "peak_memory_bytes": 1, "data": {}}
    assert run_summary.format_footer(found, "adapter", Path("out"))[-1] == f"try         {message}"


@pytest.mark.parametrize("kind", ["gpt_neox", "llama"])
def test_a_block_is_one_graph_for_any_number_of_tokens(kind: str) -> None:
    """What is traced, without generating code: no breaks, no width left open, nothing traced again for other rows."""
    from torch.fx.experimental.symbolic_shapes import is_concrete_int

    model = tiny.random_model(kind, 300).eval()
    attention.register()
    model.set_attn_implementation(attention.ATTENTION)
    loss_module = LossModule(model.requires_grad_(False), torch.float32)
    packs = [packing.pack([Example(np.arange(128) % 300, ((5, 128),))] * rows) for rows in (5, 3)]
    shapes: list[list[Any]] = []

    def look(graph: Any, _inputs: Any) -> Any:
        found = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
        shapes.append([part.shape for part in found if isinstance(part, torch.Tensor)])
        return graph.forward

    with torch.no_grad():
        expected = [loss_module(pack).item() for pack in packs]
        torch._dynamo.reset()
        loss_module.compile_blocks(backend=look)
        assert [loss_module(pack).item() for pack in packs] == pytest.approx(expected, rel=1e-6)
    assert len(shapes) == 1
    states = [shape for shape in shapes[0] if len(shape) == 3]
    assert len(states) == 3  # of the rows, and the cosines and sines of their places
    assert [(is_concrete_int(shape[1]), is_concrete_int(shape[2])) for shape in states] == 3 * [(False, True)]


def test_compiled_blocks_with_adapters_have_one_graph_and_the_same_gradients() -> None:
    """More blocks than are ever compiled again for what differs in them; a rank that is filled up, which must not
    show.
    """
    import transformers

    attention.register()
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 300}
    config = transformers.GPTNeoXConfig(num_hidden_layers=12, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention.ATTENTION)
    model = apply_tuning_method(model, train.Settings(method="lora", lora=Lora(r=3, dropout=0.0)))
    trained = [part for part in model.parameters() if part.requires_grad]
    for part in trained:
        torch.nn.init.normal_(part, std=0.1)
    loss_module = LossModule(model, torch.float32)
    batch = packing.pack([Example(np.arange(64) % 300, ((5, 64),))] * 3)
    graphs: list[Any] = []

    def look(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def learn() -> list[torch.Tensor]:
        model.zero_grad()
        loss = loss_module(batch)
        loss.backward()
        return [loss.detach(), *(part.grad.clone() for part in trained)]

    expected = learn()
    torch._dynamo.reset()
    loss_module.compile_blocks(backend=look)
    torch.testing.assert_close(learn(), expected)
    assert len(graphs) == 2  # of all blocks, and of the loss
    assert sum("built-in function pad" in str(node.target) for node in graphs[0].graph.nodes) == 2


@pytest.mark.parametrize(
    "lora",
    [
        Lora(r=3, use_dora=True),
        Lora(r=3, use_rslora=True, rank_pattern={"query_key_value": 5}, alpha_pattern={"query_key_value": 3}),
        Lora(modules_to_save=("embed_in", "lm_head"), target_modules=("dense",)),
        Lora(target_modules=("embed_in", "lm_head"), use_dora=True),
        Lora(trainable_token_indices=(5, 7, 290)),
    ],
)
def test_compiled_blocks_with_other_adapters_have_the_same_gradients(lora: Lora) -> None:
    import transformers

    attention.register()
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 300}
    config = transformers.GPTNeoXConfig(num_hidden_layers=2, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention.ATTENTION)
    model = apply_tuning_method(model, train.Settings(method="lora", lora=replace(lora, dropout=0.0)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        torch.nn.init.normal_(parameter, std=0.1)
    loss_module = LossModule(model, torch.float32)
    batch = packing.pack([Example(np.arange(64) % 300, ((5, 64),))] * 3)

    def learn() -> list[torch.Tensor]:
        model.zero_grad()
        loss = loss_module(batch)
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in trained)]

    expected = learn()
    assert all(gradient.abs().max() > 0 for gradient in expected)
    torch._dynamo.reset()
    loss_module.compile_blocks(backend="eager")
    torch.testing.assert_close(learn(), expected)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_an_adapters_factor_is_applied_once(share: float) -> None:
    """Compiled and then tested uncompiled, where all heads are turned and where a quarter of each is."""
    import transformers

    attention.register()
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 300}
    config = transformers.GPTNeoXConfig(num_hidden_layers=2, rotary_pct=share, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention.ATTENTION)
    model = apply_tuning_method(model, train.Settings(method="lora", lora=Lora(r=4, alpha=20, dropout=0.0)))
    for part in model.parameters():
        torch.nn.init.normal_(part, std=0.1)
    loss_module = LossModule(model.eval(), torch.float32)
    pack = packing.pack([Example(np.arange(32) % 300, ((5, 32),))] * 2)
    expected = loss_module(pack).item()
    loss_module.compile_blocks(backend="eager")
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        assert loss_module(pack).item() == pytest.approx(expected, rel=1e-6)


def test_fused_gelu_is_exact() -> None:
    rows = torch.linspace(-12, 12, 100_001, requires_grad=True)
    fused = compile_patches._Gelu.apply(rows)
    (slope,) = torch.autograd.grad(fused.sum(), rows)
    wide = rows.detach().double().requires_grad_()
    exact = torch.nn.functional.gelu(wide)
    (exact_slope,) = torch.autograd.grad(exact.sum(), wide)
    assert (fused - exact).abs().max() < 5e-7
    assert (slope - exact_slope).abs().max() < 5e-7


FUSED_ROPE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb
from ekiben_tasks.models.fused_rope import apply_rotary_pos_emb as fused_rope

tokens, heads, size = 5, 3, 20
base, change = torch.randn(2, 1, tokens, heads * 3 * size)
angles = torch.rand(1, tokens, size // 2) * 6
cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
for more in (None, change):
    both = (base if more is None else base + more).requires_grad_()
    query, key, value = both.view(1, tokens, heads, 3 * size).transpose(1, 2).chunk(3, -1)
    expected = (*apply_rotary_pos_emb(query, key, cos, sin), value)
    parts = [part.clone().requires_grad_() for part in (base, more) if part is not None]
    found = fused_rope(parts[0], parts[1] if more is not None else None, cos, sin)
    slopes = [torch.randn_like(part) for part in expected]
    wanted = torch.autograd.grad(expected, both, slopes)[0]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    for slope in torch.autograd.grad(found, parts, slopes):
        torch.testing.assert_close(slope, wanted)
"""


def test_fused_rope_equals_transformers() -> None:
    """Forward and backward, with an adapter's share and without, by Triton's interpreter."""
    command = [sys.executable, "-W", "ignore", "-c", FUSED_ROPE, str(ENTRYPOINTS)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr


H200 = device_module.Device(torch.device("cuda"), "NVIDIA H200", torch.bfloat16, 139 * memory.GIB)


def test_conditions_for_compiling_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "compiler_missing", lambda: None)
    auto, yes, no = (train.Settings(compile=wanted, epochs=2) for wanted in ("auto", True, False))
    assert [will_compile(strategy.find("none"), auto, H200, tokens) for tokens in (500_000, 500_001)] == [False, True]
    assert [will_compile(strategy.find("none"), wanted, H200, 1) for wanted in (yes, no)] == [True, False]
    assert not will_compile(strategy.find("deepspeed"), yes, H200, 500_001)
    assert not will_compile(strategy.find("none"), auto, device_module.choose_device(CPU), 500_001)
    monkeypatch.setattr(plan_module, "compiler_missing", lambda: "no C compiler")
    assert not will_compile(strategy.find("none"), auto, H200, 500_001)


def test_no_more_blocks_are_checkpointed_than_memory_requires() -> None:
    """Llama-2-7B's shape, every weight on 4 GPUs: compiled, packs twice as large as pays on one GPU."""
    import transformers

    config = transformers.LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32)
    with torch.device("meta"):
        shape = transformers.AutoModelForCausalLM.from_config(config)
    data = Prepared([Example(np.zeros(4096, np.int32), ((1, 4096),))] * 32, [], sources.SplitExamples(), 0)
    settings = train.Settings(method="full", batch_size=32)
    plans = {}
    for compiled in (False, True):
        profile = memory.profile_model(shape, longest=4096, strategy="fsdp", gpus=4, compiled=compiled)
        plans[compiled] = make_plan(settings, H200, memory.expect_memory(profile), profile, data)
    assert [plan.compile for plan in plans.values()] == [False, True]
    assert [plan.checkpointed for plan in plans.values()] == [0, 0]
    assert 4096 < plans[False].max_tokens < plans[True].max_tokens <= 32_768
    alone = memory.profile_model(shape, longest=4096, gpus=1)
    roomy = memory.Memory(weights=0, gradients=0, optimizer=0, loss=0, per_token=1, per_token_checkpointed=1)
    assert make_plan(settings, H200, roomy, alone, data).max_tokens == 16_384
    assert make_plan(settings, H200, roomy, profile, data).max_tokens == 32_768


def test_chunked_loss_equals_the_full_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden, head, targets = torch.randn(50, 16), torch.randn(30, 16), torch.randint(0, 30, (50,))

    def found(work: Any) -> tuple[torch.Tensor, ...]:
        inputs = (hidden.clone().requires_grad_(), head.clone().requires_grad_())
        loss = work(*inputs)
        (loss * 0.1).backward()
        return loss.detach(), inputs[0].grad, inputs[1].grad  # type: ignore[return-value]

    whole = found(lambda hidden, head: losses.head_loss(hidden, head, targets))
    monkeypatch.setattr(losses, "CHUNK", 7)
    chunked = found(lambda hidden, head: losses.head_loss(hidden, head, targets))
    theirs = found(lambda hidden, head: torch.nn.functional.cross_entropy(hidden @ head.T, targets, reduction="sum"))
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(chunked, theirs)
