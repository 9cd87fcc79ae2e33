"""jsquad and perplexity: their numbers, several processes, and what is refused."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

import torch

from ekiben_tasks.data.schema import DatasetFormat
from ekiben_tasks.data.sources import Source
from ekiben_tasks.evaluation import frame, perplexity, squad
from ekiben_tasks.evaluation.settings import (
    PerplexitySettings,
    SquadSettings,
    check_perplexity,
    check_squad,
)
from ekiben_tasks.models import load
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.errors import SettingError, TaskError
from support import multiprocess
from support.multiprocess import same_environment  # noqa: F401
from support.tiny_runs import SAMPLE, base, fit, metrics, small  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
FORM = DatasetFormat("template", "{instruction}\n", "{output}")


def scores_of(output: Path) -> dict[str, Any]:
    return dict(json.loads((output / frame.RECORD).read_text(encoding="utf-8"))["scores"])


# exact match and F1 as JGLUE's squad_metrics.py gives them
@pytest.mark.parametrize(
    ("answers", "prediction", "exact", "f1"),
    [
        (["東京"], "東京", 100, 100),
        (["東京"], " 東京。。", 100, 100),
        (["東京"], "東京都", 0, 80),
        (["東京都", "東京"], "東京", 100, 100),
        (["ABC"], "abc", 100, 100),
        (["5月から7月"], "7月から5月", 0, 100),
        (["雨 季"], "雨季", 0, 80),
        (["東京"], "", 0, 0),
        (["。"], "。", 100, 100),
        (["東京"], "大阪", 0, 0),
    ],
)
def test_scores_are_jglues(answers: list[str], prediction: str, exact: float, f1: float) -> None:
    scores = squad.score([squad.Question("t", "c", "q", tuple(answers))], [prediction])
    assert scores == {"exact_match": exact, "f1": pytest.approx(f1), "questions": 1}


def questions_file(file: Path, count: int, **changes: Any) -> Path:
    questions = [
        {"id": str(number), "question": f"{number}つ目は?", "answers": [{"text": "東京", "answer_start": 0}]}
        for number in range(count)
    ]
    questions[-1] |= changes
    paragraph = {"context": "日本 [SEP] 東京は大きい。", "qas": questions}
    file.write_text(json.dumps({"data": [{"title": "日本", "paragraphs": [paragraph]}]}), encoding="utf-8")
    return file


def test_jsquad_answers_and_scores(base: Path, tmp_path: Path) -> None:
    file = questions_file(tmp_path / "q.json", 7)
    settings = SquadSettings(
        model=str(base),
        form=DatasetFormat("template", "{context}\n{question}\n", "{answers[0]}"),
        max_new_tokens=6,
        batch_size=2,
        device="cpu",
    )
    one, two = (replace(settings, output=str(tmp_path / name)) for name in ("one", "two"))
    multiprocess.run(2, tmp_path / "log", squad.evaluate, two, file)
    assert squad.evaluate(one, file) == 0
    assert scores_of(tmp_path / "one") == scores_of(tmp_path / "two")
    lines = (tmp_path / "one" / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    questions = squad.read_questions(file)
    assert questions[0].context == "東京は大きい。"
    answers = [json.loads(line)["complete"].strip().partition("\n")[0] for line in lines]
    assert scores_of(tmp_path / "one")["jsquad"] == squad.score(questions, answers)
    with pytest.raises(TaskError, match="holds a finished evaluation"):
        squad.evaluate(one, file)
    (tmp_path / "one" / frame.RECORD).unlink()  # as a run that was killed before it had scores
    with pytest.raises(TaskError, match="start again with --overwrite"):
        squad.evaluate(one, file)
    assert squad.evaluate(one, file, overwrite=True) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answers": []}, "article 1 question 2: has no answer"),
        ({"question": None}, "article 1 question 2: question is missing or no text"),
        ({"answers": [3]}, "is not in SQuAD's format"),
    ],
)
def test_bad_questions_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=message):
        squad.read_questions(questions_file(tmp_path / "q.json", 3, **changes))


@pytest.mark.parametrize("longest", [4, 7, 50])
def test_texts_are_as_likely_as_token_by_token(base: Path, tmp_path: Path, longest: int) -> None:
    """Each token once, from as many before it as its window has; windows as lm-evaluation-harness makes them."""
    texts = ["富士山は日本で一番高い山です。", "京都", "猿も木から落ちる。"]
    items = tmp_path / "data.jsonl"
    items.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[1:]), encoding="utf-8")
    (tmp_path / "first.txt").write_text(texts[0], encoding="utf-8")
    sources = [Source(str(tmp_path / "first.txt")), Source(str(items))]
    settings = PerplexitySettings(model=str(base), device="cpu", batch_size=3, max_length=longest)
    one, two = (replace(settings, output=str(tmp_path / name)) for name in ("one", "two"))
    if longest == 7:
        multiprocess.run(2, tmp_path / "log", perplexity.evaluate, two, sources)
    assert perplexity.evaluate(one, sources) == 0
    model = load.load_base(str(base), load_device()).eval()
    tokenizer = load.load_tokenizer(str(base))
    total, count = 0.0, 0
    for text in texts:
        ids = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]
        for at in range(1, len(ids)):
            end = min((at - 1) // longest * longest + longest, len(ids) - 1)  # the last that its window counts
            before = ids[max(end - longest, 0) : at]
            logits = model(input_ids=torch.tensor([before])).logits[0, -1].double()
            total -= float(torch.log_softmax(logits, -1)[ids[at]])
            count += 1
    scores = scores_of(tmp_path / "one")["texts"]
    assert scores["tokens"] == count
    assert scores["loss"] == pytest.approx(total / count, rel=1e-5)
    assert scores["bits_per_byte"] == pytest.approx(total / len("".join(texts).encode()) / math.log(2), rel=1e-5)
    if longest == 7:
        assert scores_of(tmp_path / "two")["texts"] == pytest.approx(scores, rel=1e-6)


def test_responses_are_as_likely_as_in_training(base: Path, tmp_path: Path) -> None:
    data = [{"source": str(SAMPLE), "validation_split": 0.3}]
    training = small(base, data=data, form=FORM, method="full", max_steps=1, learning_rate=1e-12, eval_every=1)
    assert fit(training, tmp_path / "run") == 0
    expected = next(line["eval_loss"] for line in metrics(tmp_path / "run") if "eval_loss" in line)
    from ekiben_tasks.data.sources import read_all

    held_out = tmp_path / "test.jsonl"
    items = read_all([Source(str(SAMPLE), 0.3)], seed=training.seed, skip_bad=False, form=FORM).test
    held_out.write_text(
        "".join(json.dumps({"instruction": item.prompt[:-1], "output": item.completion}) + "\n" for item in items),
        encoding="utf-8",
    )
    settings = PerplexitySettings(
        model=str(base), device="cpu", counts="responses", form=FORM, output=str(tmp_path / "out")
    )
    perplexity.evaluate(settings, [Source(str(held_out))])
    assert scores_of(tmp_path / "out")["responses"]["loss"] == pytest.approx(expected, rel=1e-4)


def load_device() -> Any:
    from ekiben_tasks.models.device import choose_device

    return choose_device("cpu")


def test_bad_settings_and_texts_are_named(tmp_path: Path) -> None:
    for kind, check, assignments, message in (
        (PerplexitySettings, check_perplexity, ["column="], "setting column: '' names no column"),
        (PerplexitySettings, check_perplexity, ["examples=-1"], "setting examples: must be at least 0"),
        (SquadSettings, check_squad, ["max_new_tokens=0"], "setting max_new_tokens: must be at least 1"),
        (SquadSettings, check_squad, ["form.kind=chat"], "are no conversations"),
    ):
        with pytest.raises(SettingError, match=message):
            check(options.load(kind, None, assignments))
    items = tmp_path / "data.jsonl"
    items.write_text('{"text": "a"}\n{"content": "b"}\n{"text": \n', encoding="utf-8")
    with pytest.raises(TaskError, match=r"line 2: text is missing\. .*\n.*line 3: is not JSON"):
        perplexity.read_texts(PerplexitySettings(), [Source(str(items))])
    assert perplexity.read_texts(PerplexitySettings(), [Source(str(items))], skip=True).plain == ["a"]
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    with pytest.raises(TaskError, match=r"a\.txt: a plain text has no response"):
        perplexity.read_texts(PerplexitySettings(counts="responses"), [Source(str(tmp_path / "a.txt"))])
