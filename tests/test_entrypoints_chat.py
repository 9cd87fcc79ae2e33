"""Conversations, whole models, and sharded checkpoints made whole, with tiny random models."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small only wait for a second thread
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"), str(ROOT / "entrypoints")]

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import chat  # noqa: E402
import merge  # noqa: E402
import merge_weights  # noqa: E402
import models  # noqa: E402
import prompt  # noqa: E402
import tiny  # noqa: E402
from forms import Dialogue, Form, Turn  # noqa: E402
from settings import SettingError, TaskError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
TEXTS = [f"質問: {number}番は? 答え: {number * 37}です。" for number in range(40)]
CHAT = ["--set=form.kind=chat", "--set=device=cpu", "--set=max_new_tokens=8", "--greedy"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def adapter(place: Path, folder: Path, kind: str) -> Path:
    import peft

    from architectures import ARCHITECTURES

    known = ARCHITECTURES[kind]
    torch.manual_seed(1)
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=list(known.linear), fan_in_fan_out=known.transposed, init_lora_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    made = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(place), lora)
    made.save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------------------------- chat


def test_a_conversation_remembers(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Dialogue] = []
    real = prompt.encode_questions

    def watch(tokenizer: Any, rows: Any) -> Any:
        asked.extend(rows)
        return real(tokenizer, rows)

    monkeypatch.setattr(prompt, "encode_questions", watch)
    monkeypatch.setattr("sys.stdin", io.StringIO("一番は?\n\n二番は?\n"))
    assert chat.main(["--model", str(place), "--set=system=短く答える。", *CHAT]) == 0
    first, second, *rest = capsys.readouterr().out.split("\n")
    assert rest == [""]
    assert [turn.role for turn in asked[1].turns] == ["system", "user", "assistant", "user"]
    assert asked[1].turns[:3] == (*asked[0].turns, Turn("assistant", first or " "))
    assert asked[1].turns[3].content == "二番は?"
    assert isinstance(second, str)


def test_one_question_and_a_stream_say_the_same(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = models.load_ready(str(place), "", models.choose_device("cpu"))
    settings = chat.Settings(form=Form(kind="chat"), max_new_tokens=12, temperature=0.0)
    prompt.set_form(tokenizer, settings.form)
    said = chat.answer(model, tokenizer, "三番は?", "", settings)
    assert capsys.readouterr().out == ""
    assert chat.answer(model, tokenizer, "三番は?", "", settings, stream=True) == said
    assert capsys.readouterr().out.rstrip() == said
    assert said


def test_a_dialogue_too_long_is_said_and_forgotten(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("一番は?\n" + "長" * 2000 + "\n一番は?\n"))
    assert chat.main(["--model", str(place), *CHAT]) == 0
    said = capsys.readouterr()
    assert "the model takes 1,024: shorten the context; what was said before is forgotten" in said.err
    first, second = said.out.splitlines()
    assert first == second


def test_a_template_is_not_for_chat(place: Path) -> None:
    with pytest.raises(SettingError, match=r"form\.kind: a template asks about columns"):
        chat.main(["--model", str(place), "--set=form.kind=template", "--set=form.prompt={q}", "質問"])


# ---------------------------------------------------------------------------------------------------- merge-weights


@pytest.fixture
def checkpoint(place: Path, tmp_path: Path) -> Path:
    """As a sharded run leaves it, but in one shard: other weights than the base's."""
    trained = tiny.random_model("llama", len(models.load_tokenizer(str(place))), seed=5)
    folder = tmp_path / "result" / "checkpoints" / "step-000007"
    folder.mkdir(parents=True)
    weights = {f"model.{name}": tensor for name, tensor in trained.state_dict().items()}
    dcp.save({"model": weights}, checkpoint_id=str(folder / "shards"), no_dist=True)
    torch.save({"step": 7, "fingerprint": {"model": str(place)}}, folder / "state.pt")
    return folder


def test_a_sharded_checkpoint_becomes_a_model(checkpoint: Path, tmp_path: Path, place: Path) -> None:
    run = checkpoint.parent.parent
    assert merge_weights.main([str(run), "--output", str(tmp_path / "one")]) == 0
    assert merge_weights.main([str(checkpoint), "--output", str(tmp_path / "many"), "--set=file_gb=0.0001"]) == 0
    wanted = tiny.random_model("llama", len(models.load_tokenizer(str(place))), seed=5)
    ids = torch.arange(100, 116)[None]
    for name in ("one", "many"):
        made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert torch.equal(merge.logits(made, ids), merge.logits(wanted, ids))
        assert transformers.AutoTokenizer.from_pretrained(tmp_path / name).eos_token == tiny.END
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 3
    assert merge_weights.main([str(run), "--output", str(tmp_path / "half"), "--set=dtype=bfloat16"]) == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "half/model.safetensors").values()} == {torch.bfloat16}


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


def test_what_is_no_sharded_checkpoint(tmp_path: Path, place: Path) -> None:
    for folder, problem in ((place, "whole model already"), (tmp_path, "holds no sharded checkpoint")):
        with pytest.raises(TaskError, match=problem):
            merge_weights.main([str(folder), "--output", str(tmp_path / "out")])
    (tmp_path / "adapter").mkdir()
    with pytest.raises(TaskError, match="holds an adapter; `merge`"):
        merge_weights.main([str(tmp_path), "--output", str(tmp_path / "out")])


def test_a_checkpoint_of_an_adapter_or_without_its_model(tmp_path: Path, place: Path) -> None:
    dcp.save({"model": {"a.lora_A.weight": torch.zeros(2)}}, checkpoint_id=str(tmp_path / "shards"), no_dist=True)
    with pytest.raises(TaskError, match="name it with --base"):
        merge_weights.main([str(tmp_path), "--output", str(tmp_path / "out")])
    with pytest.raises(TaskError, match="is an adapter's"):
        merge_weights.main([str(tmp_path), "--base", str(place), "--output", str(tmp_path / "out")])


def test_numbers_that_are_none_are_not_written(checkpoint: Path, tmp_path: Path, place: Path) -> None:
    weights = {
        f"model.{name}": tensor
        for name, tensor in models.load_base(str(place), models.choose_device("cpu")).state_dict().items()
    }
    weights["model.model.norm.weight"][3] = float("nan")
    dcp.save({"model": weights}, checkpoint_id=str(tmp_path / "shards"), no_dist=True)
    with pytest.raises(TaskError, match=r"model\.norm\.weight holds numbers that are none"):
        merge_weights.main([str(tmp_path), "--base", str(place), "--output", str(tmp_path / "out")])
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


def test_a_full_disk_leaves_nothing(checkpoint: Path, tmp_path: Path, place: Path) -> None:
    folder = adapter(place, tmp_path / "adapter", "llama")
    for name in ("whole", "merged"):
        (tmp_path / name).mkdir()
        with (
            small_disk(50_000),
            pytest.raises(TaskError, match=f"{name}: cannot be written .*File too large.*make room"),
        ):
            if name == "whole":
                merge_weights.main([str(checkpoint), "--output", str(tmp_path / name)])
            else:
                merge.merge(folder, tmp_path / name, models.choose_device("cpu"))
        assert list((tmp_path / name).iterdir()) == []
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


# ------------------------------------------------------------------------------------------------------------ merge


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo", "falcon", "mpt", "llama"])
def test_every_architecture_merges_to_the_same_logits(kind: str, tmp_path: Path) -> None:
    tiny.make_model(tmp_path / "base", TEXTS, kind, vocabulary=300)
    folder = adapter(tmp_path / "base", tmp_path / "adapter", kind)
    device = models.choose_device("cpu")
    (tmp_path / "merged").mkdir()
    assert merge.merge(folder, tmp_path / "merged", device, base=str(tmp_path / "base")) < 1e-5
    ids = torch.arange(100, 116)[None]
    plain = merge.logits(models.load_base(str(tmp_path / "base"), device), ids)
    assert not torch.allclose(merge.logits(models.load_base(str(tmp_path / "merged"), device), ids), plain, atol=1e-3)


def test_a_base_with_numbers_that_are_none_is_not_merged(tmp_path: Path, place: Path) -> None:
    folder = adapter(place, tmp_path / "adapter", "llama")
    broken = transformers.AutoModelForCausalLM.from_pretrained(place)
    with torch.no_grad():
        broken.model.norm.weight[0] = float("inf")
    broken.save_pretrained(tmp_path / "broken")
    (tmp_path / "out").mkdir()
    with pytest.raises(TaskError, match="logits that are no numbers"):
        merge.merge(folder, tmp_path / "out", models.choose_device("cpu"), base=str(tmp_path / "broken"))
    assert list((tmp_path / "out").iterdir()) == []
