"""Conversations, whole models, and sharded checkpoints made whole, with tiny random models."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small only wait for a second thread
ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"), str(ROOT / "entrypoints")]

import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file

import chat
import merge_weights
from ekiben_tasks.data import tokenize
from ekiben_tasks.data.schema import Conversation, DatasetFormat, Message
from ekiben_tasks.generation import chat as chat_library
from ekiben_tasks.generation.sampling import StrippingStreamer, printable
from ekiben_tasks.generation.settings import ChatSettings
from ekiben_tasks.models import adapter, checkpoint_folder, load, merge, tiny
from ekiben_tasks.models.device import choose_device
from ekiben_tasks.task.errors import SettingError, TaskError

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
TEXTS = [f"質問: {number}番は? 答え: {number * 37}です。" for number in range(40)]
CHAT = ["--set=form.kind=chat", "--set=device=cpu", "--set=max_new_tokens=8", "--greedy"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    tiny.make_model(folder, TEXTS, "llama", vocabulary=300)
    return folder


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    saved = dict(os.environ)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    os.environ.clear()
    os.environ.update(saved)


def make_adapter(model_dir: Path, folder: Path, kind: str) -> Path:
    import peft

    from ekiben_tasks.models.architecture import find_module

    known = find_module(kind).ARCHITECTURE
    torch.manual_seed(1)
    lora = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=list(known.linear),
        fan_in_fan_out=known.transposed,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    made = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(model_dir), lora)
    made.save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------------------------- chat


def test_conversation_keeps_earlier_messages(
    model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Conversation] = []
    real = chat_library.encode_prompts

    def watch(tokenizer: Any, rows: Any) -> Any:
        asked.extend(rows)
        return real(tokenizer, rows)

    monkeypatch.setattr(chat_library, "encode_prompts", watch)
    monkeypatch.setattr("sys.stdin", io.StringIO("一番は?\n\n二番は?\n"))
    assert chat.main(["--model", str(model_dir), "--set=system=短く答える。", *CHAT]) == 0
    first, second, *rest = capsys.readouterr().out.split("\n")
    assert rest == [""]
    assert [message.role for message in asked[1].messages] == ["system", "user", "assistant", "user"]
    assert asked[1].messages[:3] == (*asked[0].messages, Message("assistant", first or " "))
    assert asked[1].messages[3].content == "二番は?"
    assert isinstance(second, str)


def test_single_and_streamed_answers_are_equal(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = adapter.load_ready(str(model_dir), "", choose_device("cpu"))
    settings = ChatSettings(form=DatasetFormat(kind="chat"), max_new_tokens=12, temperature=0.0)
    tokenize.apply_format(tokenizer, settings.form)
    answer = chat_library.answer(model, tokenizer, "三番は?", "", settings)
    assert capsys.readouterr().out == ""
    assert chat_library.answer(model, tokenizer, "三番は?", "", settings, stream=True) == answer
    assert capsys.readouterr().out.rstrip() == printable(answer)
    assert answer


def test_streamed_answer_shows_control_characters_as_text(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    streamer = StrippingStreamer(load.load_tokenizer(model_dir))
    streamer.on_finalized_text(" \x1b[2J一\r\n\t\x9b二")
    streamer.on_finalized_text("\x07\x00", stream_end=True)
    assert capsys.readouterr().out == "\\x1b[2J一\n\t\\x9b二\\x07\\x00\n"


def test_too_long_conversation_is_reset(
    model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("一番は?\n" + "長" * 2000 + "\n一番は?\n"))
    assert chat.main(["--model", str(model_dir), *CHAT]) == 0
    captured = capsys.readouterr()
    assert "the model takes 1,024: shorten the context; the conversation starts over" in captured.err
    first, second = captured.out.splitlines()
    assert first == second


def test_prompt_template_is_refused_for_chat(model_dir: Path) -> None:
    with pytest.raises(SettingError, match=r"form\.kind=template: is not a question"):
        chat.main(["--model", str(model_dir), "--set=form.kind=template", "--set=form.prompt={q}", "質問"])


# ---------------------------------------------------------------------------------------------------- merge-weights


@pytest.fixture
def checkpoint(model_dir: Path, tmp_path: Path) -> Path:
    """As a sharded run leaves it, but in one shard: other weights than the base's."""
    trained = tiny.random_model("llama", len(load.load_tokenizer(str(model_dir))), seed=5)
    folder = tmp_path / "result" / "checkpoints" / "step-000007"
    folder.mkdir(parents=True)
    weights = {f"model.{name}": tensor for name, tensor in trained.state_dict().items()}
    dcp.save({"model": weights}, checkpoint_id=str(folder / "shards"), no_dist=True)
    torch.save({"step": 7, "fingerprint": {"model": str(model_dir)}}, folder / "state.pt")
    return folder


def test_a_sharded_checkpoint_becomes_a_model(checkpoint: Path, tmp_path: Path, model_dir: Path) -> None:
    run = checkpoint.parent.parent
    assert merge_weights.main([str(run), "--output", str(tmp_path / "one")]) == 0
    assert merge_weights.main([str(checkpoint), "--output", str(tmp_path / "many"), "--set=file_gb=0.0001"]) == 0
    wanted = tiny.random_model("llama", len(load.load_tokenizer(str(model_dir))), seed=5)
    ids = torch.arange(100, 116)[None]
    for name in ("one", "many"):
        made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert torch.equal(merge.logits(made, ids), merge.logits(wanted, ids))
        assert transformers.AutoTokenizer.from_pretrained(tmp_path / name).eos_token == tiny.END
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 3
    assert merge_weights.main([str(run), "--output", str(tmp_path / "half"), "--set=dtype=bfloat16"]) == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "half/model.safetensors").values()} == {torch.bfloat16}


def test_merged_weights_keep_the_chat_template_and_generation_config(
    checkpoint: Path, tmp_path: Path, model_dir: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(model_dir, base)
    transformers.GenerationConfig(max_new_tokens=77, eos_token_id=0).save_pretrained(base)
    settings = {"model": str(base), "form.kind": "chat", "form.chat": "prompter"}
    torch.save({"step": 7, "fingerprint": settings}, checkpoint / "state.pt")
    assert merge_weights.main([str(checkpoint), "--output", str(tmp_path / "out")]) == 0
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenize.PROMPTER
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").max_new_tokens == 77


def test_the_newest_checkpoint_is_the_highest_step_also_above_a_million(checkpoint: Path) -> None:
    for step in ("step-999999", "step-1000000"):
        shutil.copytree(checkpoint, checkpoint.with_name(step))
    assert checkpoint_folder.find_checkpoint(checkpoint.parent.parent).parent.name == "step-1000000"


def test_a_checkpoint_of_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    for kind, sizes, problem in (
        ("llama", {"width": 32}, r"embed_tokens\.weight is \[\d+, 64\] there and \[\d+, 32\] here"),
        ("llama", {"layers": 3}, r"it has no model\.layers\.2\."),
        ("gpt2", {}, "it has no transformer"),
    ):
        other = tmp_path / "other"
        tiny.make_model(other, TEXTS, kind, vocabulary=300, **sizes)
        with pytest.raises(TaskError, match=problem):
            merge_weights.main([str(checkpoint), "--base", str(other), "--output", str(tmp_path / "out")])
        assert list((tmp_path / "out").iterdir()) == []


def test_other_folders_are_refused_as_sharded_checkpoints(tmp_path: Path, model_dir: Path) -> None:
    for folder, problem in ((model_dir, "complete model already"), (tmp_path, "holds no sharded checkpoint")):
        with pytest.raises(TaskError, match=problem):
            merge_weights.main([str(folder), "--output", str(tmp_path / "out")])
    (tmp_path / "adapter").mkdir()
    with pytest.raises(TaskError, match="holds an adapter; `merge`"):
        merge_weights.main([str(tmp_path), "--output", str(tmp_path / "out")])


def test_checkpoint_of_an_adapter_or_a_missing_model_is_refused(tmp_path: Path, model_dir: Path) -> None:
    dcp.save({"model": {"a.lora_A.weight": torch.zeros(2)}}, checkpoint_id=str(tmp_path / "shards"), no_dist=True)
    with pytest.raises(TaskError, match="name it with --base"):
        merge_weights.main([str(tmp_path), "--output", str(tmp_path / "out")])
    with pytest.raises(TaskError, match="is an adapter's"):
        merge_weights.main([str(tmp_path), "--base", str(model_dir), "--output", str(tmp_path / "out")])


def test_nan_weights_are_not_written(checkpoint: Path, tmp_path: Path, model_dir: Path) -> None:
    weights = {
        f"model.{name}": tensor
        for name, tensor in load.load_base(str(model_dir), choose_device("cpu")).state_dict().items()
    }
    weights["model.model.norm.weight"][3] = float("nan")
    dcp.save({"model": weights}, checkpoint_id=str(tmp_path / "shards"), no_dist=True)
    with pytest.raises(TaskError, match=r"model\.norm\.weight holds NaN or infinite values"):
        merge_weights.main([str(tmp_path), "--base", str(model_dir), "--output", str(tmp_path / "out")])
    assert list((tmp_path / "out").iterdir()) == []


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[None]:
    """The kernel's own limit on the size of a file stands for a full disk."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_full_disk_leaves_no_partial_model(checkpoint: Path, tmp_path: Path, model_dir: Path) -> None:
    folder = make_adapter(model_dir, tmp_path / "adapter", "llama")
    for name in ("whole", "merged"):
        (tmp_path / name).mkdir()
        with (
            small_disk(50_000),
            pytest.raises(TaskError, match=f"{name}: cannot be written .*File too large.*free disk space"),
        ):
            if name == "whole":
                merge_weights.main([str(checkpoint), "--output", str(tmp_path / name)])
            else:
                merge.merge(folder, tmp_path / name, choose_device("cpu"))
        assert list((tmp_path / name).iterdir()) == []
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


# ------------------------------------------------------------------------------------------------------------ merge


def test_an_adapter_finds_its_base_from_another_folder(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that says absolutely where its base is, and one that PEFT wrote with a path relative to the adapter."""
    shutil.copytree(model_dir, tmp_path / "base")
    made = make_adapter(tmp_path / "base", tmp_path / "adapter", "llama")
    monkeypatch.chdir(tmp_path)
    model, _ = adapter.load_adapter(made, choose_device("cpu"))
    weights = {name: part.detach() for name, part in model.named_parameters() if "lora_" in name}
    adapter.save_adapter(model, tmp_path / "saved", weights, "./base")
    config = json.loads((made / "adapter_config.json").read_text())
    (made / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "../base"}))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert adapter.load_adapter(tmp_path / "saved", choose_device("cpu"))[1] == str(tmp_path / "base")
    (tmp_path / "elsewhere" / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere" / "deeper")
    assert Path(adapter.load_adapter(made, choose_device("cpu"))[1]).resolve() == tmp_path / "base"


def test_an_adapter_names_the_revision_of_its_base(model_dir: Path, tmp_path: Path) -> None:
    model, _ = adapter.load_adapter(make_adapter(model_dir, tmp_path / "adapter", "llama"), choose_device("cpu"))
    weights = {name: part.detach() for name, part in model.named_parameters() if "lora_" in name}
    adapter.save_adapter(model, tmp_path / "saved", weights, "owner/name@v2")
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("owner/name", "v2")
    with pytest.raises(TaskError, match="owner/name@v2"):
        adapter.load_adapter(tmp_path / "saved", choose_device("cpu"))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_all_linear_layers_get_an_adapter(kind: str) -> None:
    from ekiben_tasks.models.architecture import find_module
    from ekiben_tasks.models.tuning import apply_tuning_method
    from ekiben_tasks.task import settings
    from ekiben_tasks.training.settings import Settings

    tuning = settings.load(Settings, None, ["lora.target_modules=all-linear"])
    model = apply_tuning_method(tiny.random_model(kind, 300), tuning)
    adapted = {
        name.split(".lora_A")[0].rsplit(".", 1)[-1] for name, _ in model.named_modules() if name.endswith("lora_A")
    }
    assert adapted == set(find_module(kind).ARCHITECTURE.linear)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo", "falcon", "mpt", "llama"])
def test_every_architecture_merges_to_the_same_logits(kind: str, tmp_path: Path) -> None:
    tiny.make_model(tmp_path / "base", TEXTS, kind, vocabulary=300)
    folder = make_adapter(tmp_path / "base", tmp_path / "adapter", kind)
    device = choose_device("cpu")
    (tmp_path / "merged").mkdir()
    assert merge.merge(folder, tmp_path / "merged", device, base=str(tmp_path / "base")) < 1e-5
    ids = torch.arange(100, 116)[None]
    plain = merge.logits(load.load_base(str(tmp_path / "base"), device), ids)
    assert not torch.allclose(merge.logits(load.load_base(str(tmp_path / "merged"), device), ids), plain, atol=1e-3)


def test_a_base_with_infinite_weights_is_not_merged(tmp_path: Path, model_dir: Path) -> None:
    folder = make_adapter(model_dir, tmp_path / "adapter", "llama")
    broken = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    with torch.no_grad():
        broken.model.norm.weight[0] = float("inf")
    broken.save_pretrained(tmp_path / "broken")
    (tmp_path / "out").mkdir()
    with pytest.raises(TaskError, match="logits that are NaN"):
        merge.merge(folder, tmp_path / "out", choose_device("cpu"), base=str(tmp_path / "broken"))
    assert list((tmp_path / "out").iterdir()) == []
