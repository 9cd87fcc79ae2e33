"""Training, asking and merging with a tiny random model: every number here comes from the real libraries."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parent.parent
RECIPE = Path(os.environ.get("EKIBEN_RECIPE", ROOT / "recipes" / "lora-opencalm"))
ENTRYPOINTS = Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"
sys.path.insert(0, str(ENTRYPOINTS))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import chat  # noqa: E402
import fusion  # noqa: E402
import hub  # noqa: E402
import loss as losses  # noqa: E402
import memory  # noqa: E402
import merge  # noqa: E402
import models  # noqa: E402
import packing  # noqa: E402
import parallel  # noqa: E402
import plot  # noqa: E402
import report  # noqa: E402
import rows  # noqa: E402
import settings as options  # noqa: E402
import smoke  # noqa: E402
import tiny  # noqa: E402
import together  # noqa: E402
import train  # noqa: E402
from learner import Learner, dress  # noqa: E402
from prompt import Example, Row, encode_prompts, encode_rows, escape, render_prompt  # noqa: E402
from settings import TaskError  # noqa: E402
from together import same_environment  # noqa: E402, F401
from world import REQUEUE  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
SAMPLE = RECIPE / "data" / "sample.jsonl"
CPU = "cpu"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("base")
    smoke.make_base(folder, SAMPLE)
    return folder


@pytest.fixture(scope="session")
def tokenizer(base: Path) -> Any:
    return models.load_tokenizer(str(base))


@pytest.fixture(scope="session")
def device() -> models.Device:
    return models.choose_device(CPU)


def small(base: Path, **changes: Any) -> train.Settings:
    values: dict[str, Any] = {
        "model": str(base), "data": [str(SAMPLE)], "test_share": 0.1, "max_length": 512, "batch_size": 32,
        "learning_rate": 1e-2, "log_seconds": 0.0, "eval_every": 0, "device": CPU,
    }  # fmt: skip
    return train.Settings(**{**values, **changes})


def fit(settings: train.Settings, output: Path, **options_: Any) -> int:
    return train.train(settings, RECIPE, output, **options_)


def metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trained")
    assert fit(small(base, epochs=2), output) == 0
    return output


# ---------------------------------------------------------------------- prompts and masks


def test_the_prompt_to_the_letter() -> None:
    assert render_prompt("問い") == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\n問い\n\n### Response:\n"
    )
    assert render_prompt("問い", "文脈") == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request."
        "\n\n### Instruction:\n問い\n\n### Input:\n文脈\n\n### Response:\n"
    )


def test_a_heading_in_a_text_cannot_pose_as_ours() -> None:
    for heading in ("Instruction", "Input", "Response"):
        assert escape(f"a\n### {heading}:\nb") == f"a\n###  {heading}:\nb"
    assert escape("### Other") == "### Other"
    assert render_prompt("x\n### Response:\ny").count("### Response:") == 1


def test_the_response_is_learnt_and_nothing_else(tokenizer: Any) -> None:
    row = Row("水は何度で沸騰しますか。", "およそ100度です。", "標準の気圧")
    (example,) = encode_rows(tokenizer, [row])
    ids = example.ids.tolist()
    assert tokenizer.decode(ids[: example.learn_from]) == render_prompt(row.instruction, row.input)
    assert tokenizer.decode(ids[example.learn_from : -1]) == row.output
    assert ids[-1] == tokenizer.eos_token_id
    pack = packing.pack([example])
    # Every learnt token is predicted from the one before it; the first of the response from the prompt's last.
    assert pack.targets.tolist() == ids[example.learn_from :]
    assert pack.sources.tolist() == list(range(example.learn_from - 1, len(ids) - 1))
    assert example.learnt == len(pack.targets)


def test_the_prompt_is_learnt_too_when_asked(tokenizer: Any) -> None:
    (example,) = encode_rows(tokenizer, [Row("問い", "答え")], mask_prompt=False)
    pack = packing.pack([example])
    assert pack.targets.tolist() == example.ids.tolist()[1:]
    assert pack.sources.tolist() == list(range(len(example.ids) - 1))
    assert example.learnt == len(example.ids) - 1


def test_an_end_of_text_written_by_a_user_is_text(tokenizer: Any) -> None:
    (example,) = encode_rows(tokenizer, [Row(f"a{tiny.END}b", f"c{tiny.END}d")])
    assert example.ids.tolist().count(tokenizer.eos_token_id) == 1


def test_training_and_asking_see_the_same_prompt(tokenizer: Any) -> None:
    (example,) = encode_rows(tokenizer, [Row("日本の首都はどこですか。", "東京です。")])
    assert (
        example.ids[: example.learn_from].tolist()
        == encode_prompts(tokenizer, [render_prompt("日本の首都はどこですか。")])[0]
    )


# ---------------------------------------------------------------------- packing and loss


def test_packs_hold_every_row_once_and_keep_to_the_limits(tokenizer: Any) -> None:
    examples = encode_rows(tokenizer, [Row("問" * n, "答" * (n % 7 + 1)) for n in range(1, 40)])
    packs = packing.cut(examples, max_rows=8, max_tokens=300)
    assert sorted(id(example) for pack in packs for example in pack) == sorted(map(id, examples))
    for chosen in packs:
        assert len(chosen) <= 8
        assert len(chosen) == 1 or sum(len(row.ids) for row in chosen) <= 300


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_packed_loss_and_its_gradient_are_those_of_single_rows(
    method: str, base: Path, tokenizer: Any, device: models.Device
) -> None:
    """Against transformers' own loss, one row at a time, without any packing."""
    three = [Row("日本の首都はどこですか。", "東京です。"), Row("7かける8は?", "56です。", "計算"), Row("色は?", "青")]
    examples = encode_rows(tokenizer, three)
    adapter = train.Lora(dropout=0.0, target_modules=("query_key_value", "dense_h_to_4h"))
    settings = small(base, method=method, lora=adapter)
    plain = dress(models.load_base(str(base), device, "eager"), settings)
    packed = dress(models.load_base(str(base), device, packing.ATTENTION), settings)
    for model in (plain, packed):  # an adapter's second matrix starts at 0, and so would the first one's gradient
        torch.manual_seed(3)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += torch.randn_like(parameter) * 0.05
    learnt = sum(example.learnt for example in examples)
    expected = single_losses(plain, examples)
    (expected / learnt).backward()

    learner = Learner(packed, torch.float32)
    total = learner(packing.pack(examples))
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
        assert learner(packing.pack(examples)).item() == pytest.approx(total.item(), rel=1e-5)


def single_losses(model: Any, examples: list[Any]) -> torch.Tensor:
    """Summed loss by transformers' own forward, row by row."""
    total = torch.zeros(())
    for example in examples:
        ids = torch.tensor(example.ids, dtype=torch.long)[None]
        labels = ids.clone()
        labels[:, : example.learn_from] = -100
        total = total + model(input_ids=ids, labels=labels).loss * example.learnt
    return total


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo", "gpt_neox", "falcon", "mpt", "llama"])
def test_rows_of_a_pack_do_not_see_each_other(kind: str, tokenizer: Any) -> None:
    """Every architecture: one pack of four rows has the loss of the four alone, in whatever order they lie."""
    texts = [Row("長い問い" * 9, "答え"), Row("問い", "とても長い答え" * 6), Row("a", "b"), Row("空は?", "青い" * 20)]
    examples = encode_rows(tokenizer, texts)
    model = tiny.random_model(kind, len(tokenizer)).eval()
    packing.register()
    with torch.no_grad():
        expected = single_losses(model, examples).item()
        model.set_attn_implementation(packing.choose_attention(model.config))
        learner = Learner(model, torch.float32)
        assert learner.layout == ("packed" if kind in ("gpt2", "gpt_neox", "llama") else "padded")
        for order in (examples, examples[::-1]):
            assert learner(packing.pack(order, learner.layout)).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_rows_of_one_length_take_another_way_to_the_same_loss(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 300, (128,), generator=generator).numpy() for _ in range(3)]
    pack = packing.pack([Example(row, 5) for row in ids])
    assert pack.is_even
    model = tiny.random_model(kind, 300).eval()
    packing.register()
    model.set_attn_implementation(packing.ATTENTION)
    learner = Learner(model, torch.float32)
    with torch.no_grad():
        alone = sum(learner(packing.pack([Example(row, 5)])).item() for row in ids)
        assert learner(pack).item() == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("generate", "generate --adapter out/adapter"), ("evaluate", "evaluate --adapter out/adapter"),
        ("upload", "upload --input out/adapter --name you/out --dry-run"),
    ],
)  # fmt: skip
def test_what_to_try_is_a_task_of_the_image(
    task: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / task).write_text("#!/bin/sh\n")
    (tmp_path / task).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = {"mfu": None, "steps": 1, "time_to_train_s": 1.0, "tokens_per_s": 1.0, "peak_memory_bytes": 1}
    assert report.conclude(found, "adapter", Path("out"))[-1] == f"try         {said}"


@pytest.mark.parametrize("kind", ["gpt_neox", "llama"])
def test_a_block_is_one_graph_for_any_number_of_tokens(kind: str) -> None:
    """What is traced, without generating code: no breaks, no width left open, nothing traced again for other rows."""
    from torch.fx.experimental.symbolic_shapes import is_concrete_int

    model = tiny.random_model(kind, 300).eval()
    packing.register()
    model.set_attn_implementation(packing.ATTENTION)
    learner = Learner(model.requires_grad_(False), torch.float32)
    packs = [packing.pack([Example(np.arange(128) % 300, 5)] * rows) for rows in (5, 3)]
    shapes: list[list[Any]] = []

    def look(graph: Any, _inputs: Any) -> Any:
        found = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
        shapes.append([part.shape for part in found if isinstance(part, torch.Tensor)])
        return graph.forward

    with torch.no_grad():
        expected = [learner(pack).item() for pack in packs]
        torch._dynamo.reset()
        learner.compile_blocks(backend=look)
        assert [learner(pack).item() for pack in packs] == pytest.approx(expected, rel=1e-6)
    assert len(shapes) == 1
    states = [shape for shape in shapes[0] if len(shape) == 3]
    assert len(states) == 3  # of the rows, and the cosines and sines of their places
    assert [(is_concrete_int(shape[1]), is_concrete_int(shape[2])) for shape in states] == 3 * [(False, True)]


def test_blocks_with_adapters_are_one_graph_and_learn_the_same() -> None:
    """More blocks than are ever compiled anew for what differs in them; a rank that is filled up, which must not show."""
    import transformers

    packing.register()
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 300}
    config = transformers.GPTNeoXConfig(num_hidden_layers=12, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=packing.ATTENTION)
    model = dress(model, train.Settings(method="lora", lora=train.Lora(r=3, dropout=0.0)))
    trained = [part for part in model.parameters() if part.requires_grad]
    for part in trained:
        torch.nn.init.normal_(part, std=0.1)
    learner = Learner(model, torch.float32)
    pack = packing.pack([Example(np.arange(64) % 300, 5)] * 3)
    graphs: list[Any] = []

    def look(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def learn() -> list[torch.Tensor]:
        model.zero_grad()
        loss = learner(pack)
        loss.backward()
        return [loss.detach(), *(part.grad.clone() for part in trained)]

    expected = learn()
    torch._dynamo.reset()
    learner.compile_blocks(backend=look)
    torch.testing.assert_close(learn(), expected)
    assert len(graphs) == 2  # of all blocks, and of the loss
    assert sum("built-in function pad" in str(node.target) for node in graphs[0].graph.nodes) == 2


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_an_adapters_factor_is_applied_once(share: float) -> None:
    """Compiled and then tested uncompiled, where all heads are turned and where a quarter of each is."""
    import transformers

    packing.register()
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 300}
    config = transformers.GPTNeoXConfig(num_hidden_layers=2, rotary_pct=share, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=packing.ATTENTION)
    model = dress(model, train.Settings(method="lora", lora=train.Lora(r=4, alpha=20, dropout=0.0)))
    for part in model.parameters():
        torch.nn.init.normal_(part, std=0.1)
    learner = Learner(model.eval(), torch.float32)
    pack = packing.pack([Example(np.arange(32) % 300, 5)] * 2)
    expected = learner(pack).item()
    learner.compile_blocks(backend="eager")
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        assert learner(pack).item() == pytest.approx(expected, rel=1e-6)


def test_gelu_is_the_exact_one() -> None:
    rows = torch.linspace(-12, 12, 100_001, requires_grad=True)
    fused = fusion._Gelu.apply(rows)
    (slope,) = torch.autograd.grad(fused.sum(), rows)
    wide = rows.detach().double().requires_grad_()
    exact = torch.nn.functional.gelu(wide)
    (exact_slope,) = torch.autograd.grad(exact.sum(), wide)
    assert (fused - exact).abs().max() < 5e-7
    assert (slope - exact_slope).abs().max() < 5e-7


TURN = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb
from turning import turn

tokens, heads, size = 5, 3, 20
base, change = torch.randn(2, 1, tokens, heads * 3 * size)
angles = torch.rand(1, tokens, size // 2) * 6
cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
for more in (None, change):
    both = (base if more is None else base + more).requires_grad_()
    query, key, value = both.view(1, tokens, heads, 3 * size).transpose(1, 2).chunk(3, -1)
    expected = (*apply_rotary_pos_emb(query, key, cos, sin), value)
    parts = [part.clone().requires_grad_() for part in (base, more) if part is not None]
    found = turn(parts[0], parts[1] if more is not None else None, cos, sin)
    slopes = [torch.randn_like(part) for part in expected]
    wanted = torch.autograd.grad(expected, both, slopes)[0]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    for slope in torch.autograd.grad(found, parts, slopes):
        torch.testing.assert_close(slope, wanted)
"""


def test_the_turning_kernel_does_what_transformers_does() -> None:
    """Forward and backward, with an adapter's share and without, by Triton's interpreter."""
    command = [sys.executable, "-W", "ignore", "-c", TURN, str(Path(train.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr


H200 = models.Device(torch.device("cuda"), "NVIDIA H200", torch.bfloat16, 139 * memory.GIB)


def test_what_is_compiled_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "compiler_missing", lambda: None)
    auto, yes, no = (train.Settings(compile=wanted, epochs=2) for wanted in ("auto", True, False))
    assert [parallel.will_compile("none", auto, H200, tokens) for tokens in (500_000, 500_001)] == [False, True]
    assert [parallel.will_compile("none", wanted, H200, 1) for wanted in (yes, no)] == [True, False]
    assert not parallel.will_compile("deepspeed", yes, H200, 500_001)
    assert not parallel.will_compile("none", auto, models.choose_device(CPU), 500_001)
    monkeypatch.setattr(models, "compiler_missing", lambda: "no C compiler")
    assert not parallel.will_compile("none", auto, H200, 500_001)


def test_no_more_is_computed_twice_than_memory_asks() -> None:
    """Llama-2-7B's shape, every weight on 4 GPUs: compiled, packs twice as large as pays on one GPU."""
    import transformers

    config = transformers.LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32)
    with torch.device("meta"):
        shape = transformers.AutoModelForCausalLM.from_config(config)
    data = train.Prepared([Example(np.zeros(4096, np.int32), 1)] * 32, [], rows.Rows(), 0)
    settings = train.Settings(method="full", batch_size=32)
    plans = {}
    for compiled in (False, True):
        needs = memory.count_needs(shape, longest=4096, strategy="fsdp", gpus=4, compiled=compiled)
        plans[compiled] = train.make_plan(settings, H200, memory.expect_memory(needs), needs, data)
    assert [plan.compile for plan in plans.values()] == [False, True]
    assert [plan.checkpointed for plan in plans.values()] == [0, 0]
    assert 4096 < plans[False].max_tokens < plans[True].max_tokens <= 32_768
    alone = memory.count_needs(shape, longest=4096, gpus=1)
    roomy = memory.Memory(weights=0, gradients=0, optimizer=0, loss=0, per_token=1, per_token_checkpointed=1)
    assert train.make_plan(settings, H200, roomy, alone, data).max_tokens == 16_384
    assert train.make_plan(settings, H200, roomy, needs, data).max_tokens == 32_768


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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


# ---------------------------------------------------------------------- a run


def test_a_run_learns_and_leaves_its_record(trained: Path) -> None:
    found = [line["loss"] for line in metrics(trained) if "loss" in line]
    assert len(found) == 12
    assert found[-1] < found[0] - 0.1
    run = json.loads((trained / "run.json").read_text())
    assert run["status"] == "finished"
    assert run["steps"] == 12
    assert run["data"]["rows"] + run["data"]["test_rows"] == 208
    assert run["final_test_perplexity"] == pytest.approx(math.exp(run["final_test_loss"]), rel=1e-4)
    assert run["versions"]["torch"] == torch.__version__.split("+")[0] or run["versions"]["torch"] == torch.__version__
    assert run["tokens_per_s"] > 0
    assert run["site"]["host"] and run["device"]["attention"] == "sdpa row by row over packed rows"
    assert drawn_colours(trained / "loss.png") >= {(255, 255, 255), *plot.COLOURS[:2]}
    assert (trained / "adapter" / "adapter_model.safetensors").is_file()
    assert not list(trained.glob("**/*staged*"))


def drawn_colours(file: Path) -> set[tuple[int, ...]]:
    """Of a PNG without filters, read as the format says."""
    data, pixels, at = file.read_bytes(), b"", 8
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        content = data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + content)
        pixels += content if kind == b"IDAT" else b""
        at += 12 + length
    rows_ = np.frombuffer(zlib.decompress(pixels), dtype=np.uint8).reshape(plot.HEIGHT, 1 + 3 * plot.WIDTH)[:, 1:]
    return {tuple(map(int, colour)) for colour in np.unique(rows_.reshape(-1, 3), axis=0)}


def test_how_a_step_is_cut_changes_nothing(base: Path, trained: Path, tmp_path: Path) -> None:
    lora = train.Lora(dropout=0.0)
    assert fit(small(base, lora=lora), tmp_path / "auto") == 0
    assert fit(small(base, lora=lora, micro_batch=5), tmp_path / "five") == 0
    for ours, theirs in zip(metrics(tmp_path / "auto"), metrics(tmp_path / "five"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_checkpointed_activations_change_nothing(base: Path, tmp_path: Path) -> None:
    assert fit(small(base), tmp_path / "a") == 0
    assert fit(small(base, gradient_checkpointing=True), tmp_path / "b") == 0
    for ours, theirs in zip(metrics(tmp_path / "a"), metrics(tmp_path / "b"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_run_in_two_halves_has_the_same_losses(base: Path, trained: Path, tmp_path: Path) -> None:
    """Stopped by SIGTERM in the middle of an epoch, and started again with the same command."""
    settings, log = small(base, epochs=2), tmp_path / "log"
    code, said = stop_at(3, signal.SIGTERM, log, settings, tmp_path / "run")
    assert code == REQUEUE == 75, said
    assert "SIGTERM: saving and stopping" in said
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "interrupted"
    stopped_at = max(line["step"] for line in metrics(tmp_path / "run"))
    assert 3 <= stopped_at < 12

    again = together.run(1, log, fit, settings, tmp_path / "run")
    assert f"step {stopped_at} of 12" in again
    ours = [(line["step"], line["loss"]) for line in metrics(tmp_path / "run") if "loss" in line]
    theirs = [(line["step"], line["loss"]) for line in metrics(trained) if "loss" in line]
    assert ours == theirs
    first = load_file(str(tmp_path / "run" / "adapter" / "adapter_model.safetensors"))
    second = load_file(str(trained / "adapter" / "adapter_model.safetensors"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def stop_at(step: int, number: int, log: Path, *args: Any) -> tuple[int, str]:
    """(exit code, output) of a run that gets the signal when it says that ``step`` is done."""
    (process,) = together.start(1, log, fit, *args)
    output = Path(f"{log}-0")
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.is_alive():
        if output.is_file() and f"step {step}/" in output.read_text():
            os.kill(process.pid, number)
            break
        time.sleep(0.01)
    (code,) = together.wait([process])
    return code, output.read_text()


@pytest.mark.parametrize(
    ("saves", "code", "said"), [(False, 75, "nothing to save yet"), (True, 3, "saving and stopping")]
)
def test_a_signal_ends_what_has_nothing_to_save(saves: bool, code: int, said: str) -> None:
    program = f"""
import os, signal, sys, world
stop = world.Stop()
stop.saves = {saves}
stop.listen()
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(3 if stop.exit_code == world.REQUEUE else 4)
"""
    env = {**os.environ, "PYTHONPATH": str(ENTRYPOINTS)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=60)
    assert (done.returncode, said in done.stderr) == (code, True)


def test_a_checkpoint_of_another_run_is_not_continued(base: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    with pytest.raises(TaskError, match=r"learning_rate was '0.01' and is '0.02'.*--fresh"):
        fit(small(base, epochs=2, learning_rate=2e-2), tmp_path / "run")
    assert fit(small(base, max_steps=2, learning_rate=2e-2), tmp_path / "run", fresh=True) == 0


def test_a_cut_off_checkpoint_is_never_seen(base: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".staged-1").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".staged-1" / "state.pt").write_bytes(b"half")
    (tmp_path / "checkpoints" / "step-000009").mkdir()
    assert fit(small(base, max_steps=1), tmp_path) == 0
    assert metrics(tmp_path)[0]["step"] == 1


def test_a_loss_that_is_no_number_stops_the_run(base: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"the loss is (nan|inf) at step \d+: try --set learning_rate="):
        fit(small(base, learning_rate=1e18, warmup_steps=0), tmp_path)


def test_a_dry_run_writes_nothing(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(small(base), tmp_path / "run", dry=True) == 0
    said = capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    for part in ("202,496 parameters", "trainable", "187 rows to learn, 21 to test on", "GiB expected"):
        assert part in said


def test_rows_too_long_are_left_out_and_counted(base: Path, tmp_path: Path) -> None:
    assert fit(small(base, max_length=80, max_steps=1), tmp_path) == 0
    data = json.loads((tmp_path / "run.json").read_text())["data"]
    assert data["too_long"] > 0
    assert data["rows"] + data["test_rows"] + data["too_long"] == 208
    with pytest.raises(TaskError, match="none of the 187 rows fits 3 tokens"):
        fit(small(base, max_length=3), tmp_path / "none")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"lora": train.Lora(target_modules=("q_proj",))},
            r"no layer is called q_proj; this model has .*query_key_value",
        ),
        ({"model": "/nowhere/model"}, "no such folder; is it bound into the container"),
        ({"batch_size": 0}, "batch_size: must be at least 1"),
        ({"learning_rate": -1.0}, "learning_rate: must be above 0"),
    ],
)
def test_what_cannot_work_is_said_at_once(base: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        fit(small(base, **changes), tmp_path)


def test_the_recipe_is_the_one_it_is_named_after() -> None:
    """The values of the published OpenCALM run this recipe follows."""
    made = options.load(train.Settings, RECIPE / "configs" / "train.yaml")
    assert made.model == "cyberagent/open-calm-3b"
    assert made.lora == train.Lora(r=4, alpha=16, dropout=0.05, target_modules=("query_key_value",))
    assert (made.batch_size, made.epochs, made.learning_rate, made.warmup_steps, made.eval_every) == (
        32,
        1,
        3e-4,
        200,
        500,
    )
    shares = [source.test_share for source in rows.parse_sources(made.data, made.test_share)]
    assert shares == [0.01, 0.03]
    options.load(chat.Settings, RECIPE / "configs" / "chat.yaml")
    options.load(merge.Settings, RECIPE / "configs" / "merge.yaml")


# ---------------------------------------------------------------------- what comes after


def test_a_reloaded_adapter_gives_the_same_logits(base: Path, trained: Path, device: models.Device) -> None:
    ids = torch.arange(5, 25)[None]
    state = torch.load(next((trained / "checkpoints").glob("step-000012")) / "state.pt", weights_only=True)
    fresh = models.add_adapter(models.load_base(str(base), device, "sdpa"), r=4, alpha=16, dropout=0.0,
                               target_modules=("query_key_value",), seed=0)  # fmt: skip
    start = 0
    for parameter in (p for p in fresh.parameters() if p.requires_grad):
        parameter.data = state["weights"][start : start + parameter.numel()].view_as(parameter).clone()
        start += parameter.numel()
    loaded, name = models.load_adapter(trained / "adapter", device)
    assert name == str(base)
    assert torch.equal(merge.logits(loaded, ids), merge.logits(fresh, ids))
    with loaded.disable_adapter():
        assert not torch.equal(merge.logits(loaded, ids), merge.logits(fresh, ids))


def test_merging_keeps_the_logits_and_refuses_a_full_folder(
    trained: Path, device: models.Device, tmp_path: Path
) -> None:
    assert merge.main(["--adapter", str(trained / "adapter"), "--output", str(tmp_path / "merged")]) == 0
    ids = torch.arange(5, 25)[None]
    adapted, _ = models.load_adapter(trained / "adapter", device)
    merged = models.load_base(str(tmp_path / "merged"), device, "sdpa")
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(merge.logits(merged, ids), merge.logits(adapted, ids), rtol=1e-4, atol=1e-4)
    assert models.load_tokenizer(str(tmp_path / "merged")).eos_token_id == 0
    with pytest.raises(TaskError, match="is not empty"):
        merge.main(["--adapter", str(trained / "adapter"), "--output", str(tmp_path / "merged")])
    assert (
        merge.main(
            ["--adapter", str(trained / "adapter"), "--output", str(tmp_path / "half"), "--set", "dtype=bfloat16"]
        )
        == 0
    )
    assert all(
        tensor.dtype == torch.bfloat16 for tensor in load_file(str(tmp_path / "half" / "model.safetensors")).values()
    )


def test_old_checkpoints_that_call_the_head_embed_out_load(base: Path, device: models.Device, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "old")
    file = tmp_path / "old" / "model.safetensors"
    weights = load_file(str(file))
    assert "lm_head.weight" in weights or "embed_out.weight" in weights
    save_file(
        {name.replace("lm_head", "embed_out"): tensor for name, tensor in weights.items()}, str(file), {"format": "pt"}
    )
    ids = torch.arange(20)[None]
    ours = models.load_base(str(tmp_path / "old"), device, "sdpa")
    assert torch.equal(merge.logits(ours, ids), merge.logits(models.load_base(str(base), device, "sdpa"), ids))
    binary = tmp_path / "bin"
    shutil.copytree(tmp_path / "old", binary)
    torch.save(load_file(str(binary / "model.safetensors")), binary / "pytorch_model.bin")
    (binary / "model.safetensors").unlink()
    assert torch.equal(merge.logits(models.load_base(str(binary), device, "sdpa"), ids), merge.logits(ours, ids))


def test_chat_prints_the_response_alone(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    common = ["--adapter", str(trained / "adapter"), "--set", "device=cpu", "--set", "max_new_tokens=12", "--greedy"]

    def ask(*more: str, stdin: str = "") -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        assert chat.main([*common, *more]) == 0
        return capsys.readouterr().out

    answer = ask("日本の首都はどこですか。")
    assert "### " not in answer
    assert "日本の首都" not in answer[:12]
    # The same without a question argument: one line in, one answer out, and the end of input ends it.
    assert ask(stdin="日本の首都はどこですか。\n\n日本の首都はどこですか。\n") == answer * 2
    (tmp_path / "long.txt").write_text("貸出期間は14日間とする。" * 300, encoding="utf-8")
    with pytest.raises(TaskError, match="shorten the context"):
        ask("--context", str(tmp_path / "long.txt"), "何日借りられますか。")
    with pytest.raises(TaskError, match="cannot be read"):
        ask("--context", str(tmp_path / "none.txt"), "何日借りられますか。")


def test_a_temperature_samples_and_a_seed_repeats(trained: Path, device: models.Device, tokenizer: Any) -> None:
    model, _ = models.load_adapter(trained / "adapter", device)

    def ask(seed: int, **changes: Any) -> str:
        torch.manual_seed(seed)
        return chat.answer(model, tokenizer, "空は?", "", chat.Settings(max_new_tokens=20, **changes))

    assert len({ask(seed, temperature=1.5) for seed in range(4)}) > 1
    assert ask(1) == ask(1)
    assert len({ask(seed, temperature=0.0) for seed in range(3)}) == 1
    with pytest.raises(TaskError, match="shorten the context"):
        chat.answer(model, tokenizer, "空は?", "長い文脈です。" * 400, chat.Settings())


def test_an_adapter_that_is_none(base: Path, device: models.Device, tmp_path: Path, trained: Path) -> None:
    with pytest.raises(
        TaskError, match=r"no adapter_config.json there, so it is no adapter; there is one in .*/adapter"
    ):
        models.load_adapter(trained, device)
    with pytest.raises(TaskError, match="so it is no model \\(it is an adapter: chat and merge take it\\)"):
        models.load_base(str(trained / "adapter"), device, "sdpa")
    other = tmp_path / "other"
    smoke.make_base(other, SAMPLE, width=32)
    with pytest.raises(TaskError, match="does not fit the base model"):
        models.load_adapter(trained / "adapter", device, base=str(other))


# ---------------------------------------------------------------------- the hub, played by a local server


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "GatedRepo", "accept terms.*HF_TOKEN"),
        (401, "RepoNotFound", "not on the hub, or private.*HF_TOKEN"),
        (404, "RepoNotFound", "not on the hub, or private"),
        (404, "EntryNotFound", "a file is missing"),
    ],
)
def test_what_the_hub_says_in_one_sentence(tmp_path: Path, status: int, code: str, said: str) -> None:
    """In a process of its own: the hub's library reads its address once, when it is imported."""
    import http.server
    import re
    import threading

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {
        **os.environ,
        "HF_HOME": str(tmp_path),
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "PYTHONPATH": str(ENTRYPOINTS),
    }
    code_ = "import sys, hub, settings; settings.run(lambda: print(hub.locate_model(sys.argv[1])) or 0)"
    done = subprocess.run([sys.executable, "-c", code_, "some/model"], capture_output=True, text=True, env=env)
    server.shutdown()
    server.server_close()
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(f"error: model some/model: .*{said}", done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_without_a_network_train_says_so_once(tmp_path: Path) -> None:
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    command = [
        sys.executable,
        str(ENTRYPOINTS / "train.py"),
        "--dry-run",
        "--data",
        str(SAMPLE),
        "--set",
        "model=some/model",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "only what was downloaded before is used" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("error: model some/model: not in the cache ")
    assert "Retrying" not in done.stderr


def test_explain_falls_back_to_what_was_raised() -> None:
    assert "ValueError: odd" in hub.explain(ValueError("odd"), "a/b", "model")


# ---------------------------------------------------------------------- the proof


def test_the_smoke_proves_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.prove(train.Settings(), SAMPLE, tmp_path / "out") == 0
    assert capsys.readouterr().out.count("smoke ") >= 7


def test_the_smoke_fails_when_nothing_is_learnt(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": n, "loss": 5.0}) + "\n" for n in range(20)))
    with pytest.raises(TaskError, match="smoke: failed: the loss falls"):
        smoke.check_loss_fell(tmp_path)
