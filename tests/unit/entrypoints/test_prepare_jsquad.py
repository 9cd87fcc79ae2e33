"""prepare-jsquad on files of the real format."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"), str(ROOT / "entrypoints")]

import prepare_jsquad
from ekiben_tasks.task.errors import TaskError


def question(number: int, text: str = "東京", start: int = 10) -> dict[str, Any]:
    answers = [{"text": text, "answer_start": start}, {"text": "二つ目", "answer_start": 0}]
    return {"question": f"首都は? {number}", "id": f"a1p0q{number}", "answers": answers, "is_impossible": False}


def squad(*paragraphs: dict[str, Any], title: str = "日本") -> dict[str, Any]:
    return {"version": "1.1", "data": [{"title": title, "paragraphs": list(paragraphs)}]}


CONTEXT = "日本 [SEP] 首都は東京で、東京は大きい。"


def write(file: Path, content: Any) -> Path:
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return file


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_folder_in_jglues_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = CONTEXT.index("東京")
    many = [question(number, start=start) for number in range(7)]
    write(
        tmp_path / "train-v1.3.json",
        squad({"context": CONTEXT, "qas": many[:4]}, {"context": CONTEXT, "qas": many[4:]}),
    )
    write(tmp_path / "valid-v1.3.json", squad({"context": CONTEXT, "qas": many[:2]}))
    assert prepare_jsquad.main([str(tmp_path), "--output", str(tmp_path / "data")]) == 0
    train = read(tmp_path / "data/jsquad-train.jsonl")
    assert len(train) == 7
    assert len(read(tmp_path / "data/jsquad-valid.jsonl")) == 2
    assert train[0] == {
        "title": "日本",
        "context": "首都は東京で、東京は大きい。",
        "question": "首都は? 0",
        "answer": {"text": "東京", "answer_start": 3},
    }
    assert all(row["context"][row["answer"]["answer_start"] :].startswith(row["answer"]["text"]) for row in train)
    assert "jsquad-train.jsonl: 7 questions on 1 articles, 0 invalid left out" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["jsquad-train.jsonl", "jsquad-valid.jsonl"]


def test_the_offset_of_an_answer_is_kept(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", squad({"context": CONTEXT, "qas": [question(0, start=CONTEXT.rindex("東京"))]}))
    assert prepare_jsquad.main([str(file), "--output", str(tmp_path)]) == 0
    assert read(tmp_path / "a.jsonl")[0]["answer"]["answer_start"] == 7


def test_bad_questions_are_named_or_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = [
        question(1, text="大阪"),
        {"question": " ", "id": "x", "answers": [{"text": "東京", "answer_start": 0}]},
        {"question": "?", "id": "y", "answers": []},
    ]
    file = write(tmp_path / "a.json", squad({"context": CONTEXT, "qas": [question(0), *bad]}))
    with pytest.raises(TaskError) as error:
        prepare_jsquad.main([str(file), "--output", str(tmp_path / "out")])
    message = str(error.value)
    assert "3 invalid examples" in message
    assert "article 1 question a1p0q1: the answer '大阪' is not in its context" in message
    assert "question x: question is empty" in message
    assert "question y: has no answer" in message
    assert not list((tmp_path / "out").iterdir())
    assert prepare_jsquad.main([str(file), "--output", str(tmp_path / "out"), "--skip-invalid"]) == 0
    assert "1 questions on 1 articles, 3 invalid left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([1], "not in SQuAD's format"),
        ({"data": [{"title": "x"}]}, "KeyError: 'paragraphs'"),
        ({"data": []}, "holds no question"),
    ],
)
def test_files_of_another_format_are_refused(tmp_path: Path, content: Any, problem: str) -> None:
    file = write(tmp_path / "a.json", content)
    with pytest.raises(TaskError, match=problem):
        prepare_jsquad.main([str(file), "--output", str(tmp_path / "out")])


def test_empty_and_missing_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"holds no train\*\.json or valid\*\.json"):
        prepare_jsquad.main([str(tmp_path), "--output", str(tmp_path / "out")])
    with pytest.raises(TaskError, match="no such file or folder"):
        prepare_jsquad.main([str(tmp_path / "gone.json"), "--output", str(tmp_path / "out")])


def test_hub_dataset_with_answers_in_lists() -> None:
    answers = {"text": ["東京"], "answer_start": [CONTEXT.index("東京")]}
    items = [
        {"title": "日本", "context": CONTEXT, "question": "?", "answers": answers},
        {"title": "日本", "context": CONTEXT, "question": "?", "answers": {"text": [], "answer_start": []}},
    ]
    rows, bad = prepare_jsquad.read_questions(prepare_jsquad._read_table("x/y", items))
    assert [row["answer"] for row in rows] == [{"text": "東京", "answer_start": 3}]
    assert [(each.where, each.problem) for each in bad] == [("x/y row 2", "has no answer")]


def test_shipped_sample_is_reproduced_from_the_squad_sample(tmp_path: Path) -> None:
    data = ROOT / "recipes" / "finetune" / "data"
    assert prepare_jsquad.main([str(data / "sample-squad.json"), "--output", str(tmp_path)]) == 0
    assert (tmp_path / "sample-squad.jsonl").read_bytes() == (data / "sample.jsonl").read_bytes()
