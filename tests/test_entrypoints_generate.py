"""Batch answers with tiny random models of every architecture: alone or in a batch, at once or in two goes."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small only wait for a second thread
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [
    str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"),
    str(ROOT / "entrypoints"),
    str(ROOT / "tests"),
]

import torch  # noqa: E402
import transformers  # noqa: E402

import generate  # noqa: E402
import journal  # noqa: E402
import models  # noqa: E402
import tiny  # noqa: E402
import together  # noqa: E402
from architectures import ARCHITECTURES  # noqa: E402
from forms import Form  # noqa: E402
from generate import Question, Settings  # noqa: E402
from sampling import Sampling, sample  # noqa: E402
from settings import SettingError, TaskError  # noqa: E402
from together import same_environment  # noqa: E402, F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
TEXTS = [f"設問: {number}番の山の高さは? 答え: {number * 37}m です。" for number in range(40)]
FORM = Form(kind="template", prompt="設問: {question}\n\n答え: ")
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16], [20, 21]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.learn_tokenizer(TEXTS, 300)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and 20 rows beside it."""
    folder = tmp_path_factory.mktemp("model")
    tiny.make_model(folder, TEXTS, "llama", vocabulary=300)
    rows = [{"question": f"{number}番の山の" + "高さ" * (number % 5) + "は?"} for number in range(20)]
    (folder / "rows.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    return folder


def settings(place: Path, output: Path, **changes: Any) -> Settings:
    made = Settings(
        model=str(place), data=str(place / "rows.json"), form=FORM, output=str(output), examples=9, max_new_tokens=6,
        batch_size=4, device="cpu",
    )  # fmt: skip
    return replace(made, **changes)


def run(made: Settings, **options: Any) -> list[dict[str, Any]]:
    assert generate.generate(made, Path("/nonexistent"), **options) == 0
    return lines(Path(made.output))


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


# --------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_a_batch_gives_what_each_row_alone_gives(kind: str, tokenizer: Any) -> None:
    model = tiny.random_model(kind, len(tokenizer)).eval()
    for how in (Sampling(repetition_penalty=1.3), Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.1, seed=3)):
        together = sample(model, tokenizer, PROMPTS, range(4), 8, how)
        alone = [sample(model, tokenizer, [ids], [number], 8, how)[0] for number, ids in enumerate(PROMPTS)]
        assert together == alone
        assert len({tuple(ids) for ids, _ in together}) > 1


def test_greedy_is_what_transformers_gives(tokenizer: Any) -> None:
    model = tiny.random_model("gpt_neox", len(tokenizer)).eval()
    ids = torch.tensor([PROMPTS[2]])
    for penalty in (1.0, 1.4):
        theirs = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, repetition_penalty=penalty,
            pad_token_id=0, eos_token_id=0,
        )  # fmt: skip
        ours, _ = sample(model, tokenizer, [PROMPTS[2]], [0], 10, Sampling(repetition_penalty=penalty))[0]
        assert ours == [token for token in theirs[0, len(PROMPTS[2]) :].tolist() if token != 0]


def test_chance_follows_the_probabilities(tokenizer: Any) -> None:
    """First tokens of 3,000 rows against softmax(logits / temperature) cut to its nucleus."""
    model = tiny.random_model("llama", len(tokenizer), layers=1, width=16).eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0]])).logits[0, -1].float()
    wanted = (logits / 0.7).softmax(-1)
    ordered, order = wanted.sort(descending=True)
    kept = ordered.cumsum(-1) - ordered < 0.8
    wanted = torch.zeros_like(wanted).scatter_(0, order[kept], ordered[kept] / ordered[kept].sum())
    how = Sampling(temperature=0.7, top_p=0.8, seed=1)
    answers = sample(model, tokenizer, [PROMPTS[0]] * 3000, range(3000), 1, how)
    tokens = torch.tensor([ids[0] if ids else tokenizer.eos_token_id for ids, _ in answers])
    found = torch.bincount(tokens, minlength=len(wanted)) / 3000
    assert found[wanted == 0].sum() == 0
    assert (found - wanted).abs().max() < 4 * (0.25 / 3000) ** 0.5


def test_an_answer_ends_at_its_end(tokenizer: Any) -> None:
    model = tiny.random_model("llama", len(tokenizer)).eval()
    with torch.no_grad():  # whatever is asked, the end is the likeliest
        model.model.norm.weight.zero_()
    assert sample(model, tokenizer, [[5]], [0], 8, Sampling()) == [([], True)]


# ------------------------------------------------------------------------------------------------------------- rows


def test_rows_are_chosen_by_the_seed() -> None:
    assert generate.choose(5, 0, 1) == generate.choose(5, 9, 1) == [0, 1, 2, 3, 4]
    assert generate.choose(1000, 100, 42) == generate.choose(1000, 100, 42) != generate.choose(1000, 100, 43)
    assert len(set(generate.choose(1000, 100, 42))) == 100


def test_batches_are_of_alike_lengths_and_one_room() -> None:
    questions = [Question(index, [1] * (1 + index % 7), 5 if index != 3 else 2) for index in range(20)]
    batches = generate.cut(questions, 8)
    assert sorted(question.index for batch in batches for question in batch) == list(range(20))
    assert [len(batch) for batch in batches] == [1, 8, 8, 3]
    assert all(len({question.room for question in batch}) == 1 for batch in batches)
    lengths = [len(question.ids) for batch in batches[1:] for question in batch]
    assert lengths == sorted(lengths, reverse=True)


# ------------------------------------------------------------------------------------------------------------- runs


def test_a_run_is_the_same_whatever_its_batches(place: Path, tmp_path: Path) -> None:
    first = run(settings(place, tmp_path / "a.jsonl"))
    assert [line["index"] for line in first] == generate.choose(20, 9, 42)
    assert first[0]["prompt"].endswith("は?\n\n答え: ")
    assert sorted(first[0]) == ["complete", "ended", "index", "prompt", "tokens"]
    assert run(settings(place, tmp_path / "b.jsonl", batch_size=1)) == first
    assert run(settings(place, tmp_path / "c.jsonl", seed=43)) != first
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_a_killed_run_goes_on(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run(settings(place, tmp_path / "whole.jsonl"))
    begun = settings(place, tmp_path / "begun.jsonl")
    original = journal.Journal.finish
    journal.Journal.finish = lambda _: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            generate.generate(begun, Path("/nonexistent"))
    finally:
        journal.Journal.finish = original  # type: ignore[method-assign]
    part = tmp_path / ".begun.jsonl.part-0"
    text = part.read_bytes()
    kept = text.split(b"\n")
    part.write_bytes(b"\n".join(kept[:5]) + b"\n" + kept[5][:20])  # cut in the middle of a line
    assert not (tmp_path / "begun.jsonl").exists()
    with pytest.raises(TaskError, match=r"other settings or data.*--fresh"):
        generate.generate(replace(begun, temperature=0.3), Path("/nonexistent"))
    assert run(begun) == whole
    assert "resumed     4 answers were there" in capsys.readouterr().out
    with pytest.raises(TaskError, match=r"is there already.*--fresh"):
        generate.generate(begun, Path("/nonexistent"))
    assert run(begun, fresh=True) == whole


def test_two_processes_share_the_rows(place: Path, tmp_path: Path) -> None:
    said = together.run(
        2, tmp_path / "said", generate.generate, settings(place, tmp_path / "two.jsonl"), Path("/nonexistent")
    )
    assert lines(tmp_path / "two.jsonl") == run(settings(place, tmp_path / "one.jsonl"))
    assert said.count("done  ") == 1
    assert "done  " not in (tmp_path / "said-1").read_text()


def test_a_full_disk_keeps_what_was_answered(place: Path, tmp_path: Path) -> None:
    """The kernel's own limit on the size of a file stands for the disk: text is cut in the middle of a line, too."""
    made = settings(place, tmp_path / "a.jsonl", batch_size=1)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        with pytest.raises(TaskError, match=r"cannot be written: File too large; what was answered before is kept"):
            generate.generate(made, Path("/nonexistent"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / ".a.jsonl.part-0").stat().st_size == 600
    assert not (tmp_path / "a.jsonl").exists()
    assert run(made) == run(settings(place, tmp_path / "b.jsonl"))


def test_bad_rows_and_rows_without_room(place: Path, tmp_path: Path) -> None:
    rows = [{"question": "よい"}, {"qestion": "?"}, {"question": "長" * 2000}, {"question": "また"}]
    data = tmp_path / "rows.json"
    data.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    made = settings(place, tmp_path / "a.jsonl", data=str(data))
    with pytest.raises(TaskError, match=r"rows\.json item 2: question is missing\. Did you mean 'qestion'"):
        generate.generate(made, Path("/nonexistent"))
    data.write_text(json.dumps([rows[0], *rows[2:]], ensure_ascii=False), encoding="utf-8")
    with pytest.raises(
        TaskError, match=r"row 2 leaves no room for an answer \(1 of 3 do not: the model takes 1,024 tokens"
    ):
        generate.generate(made, Path("/nonexistent"))
    assert [line["index"] for line in run(made, skip_bad=True)] == [0, 2]
    data.write_text("[]")
    with pytest.raises(TaskError, match="holds no usable row"):
        generate.generate(made, Path("/nonexistent"))


def test_wrong_settings_are_said_together(place: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError) as error:
        generate.generate(settings(place, tmp_path / "a", top_p=0, batch_size=0), Path("/nonexistent"))
    assert "batch_size: must be at least 1, not 0" in str(error.value)
    assert "top_p: must be above 0" in str(error.value)


def test_an_adapter_is_applied(place: Path, tmp_path: Path) -> None:
    import peft

    base = transformers.AutoModelForCausalLM.from_pretrained(place)
    torch.manual_seed(0)
    lora = peft.LoraConfig(
        r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(base, lora)
    adapted.save_pretrained(tmp_path / "adapter")
    plain = run(settings(place, tmp_path / "plain.jsonl", temperature=0.0))
    with_adapter = run(
        settings(place, tmp_path / "adapted.jsonl", temperature=0.0, adapter=str(tmp_path / "adapter"), model="")
    )
    assert [line["prompt"] for line in plain] == [line["prompt"] for line in with_adapter]
    assert plain != with_adapter


def test_quantised_weights_need_a_gpu(place: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.fail("this test is for machines without a GPU")
    with pytest.raises(TaskError, match=r"bits=4: needs a GPU.*--set bits=16"):
        generate.generate(settings(place, tmp_path / "a.jsonl", bits=4), Path("/nonexistent"))


def test_weights_that_are_no_numbers(place: Path, tmp_path: Path) -> None:
    """Said before a file full of noise is written."""
    broken = transformers.AutoModelForCausalLM.from_pretrained(place)
    with torch.no_grad():
        broken.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    broken.save_pretrained(tmp_path / "broken")
    models.load_tokenizer(str(place)).save_pretrained(tmp_path / "broken")
    with pytest.raises(TaskError, match="no numbers"):
        generate.generate(
            settings(tmp_path / "broken", tmp_path / "a.jsonl", data=str(place / "rows.json")), Path("/nonexistent")
        )
    assert not (tmp_path / "a.jsonl").exists()
