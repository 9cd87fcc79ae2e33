"""The model card: what it shows of the records, what it escapes, and when it is a user's."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "entrypoints"))

from ekiben_tasks.task import files, model_card
from ekiben_tasks.task.errors import TaskError

SECRET = "hf_abcdefghijklmnop"
RECORD: dict[str, Any] = {
    "status": "finished",
    "steps": 120,
    "settings": {
        "model": "/home/me/models/x",
        "method": "lora",
        "learning_rate": 3e-4,
        "compile": True,
        "lora": {"r": 8, "target_modules": SECRET},
        "note": f"token {SECRET}",
        "form": {"kind": "template", "prompt": "````\n{question}\n", "response": "{answer}"},
    },
    "site": {"host": "node-17"},
    "model": {"name": "lab/base", "commit": "0123456789abcdef" * 2 + "01234567", "parameters": 3_000_000_000},
    "data": {"sources": {"lab/rows": 64000, "/home/me/secret/a|b](x)\n---.jsonl": 7}, "rows": 64007},
    "image": {"recipe": "finetune", "stack": "cu130", "recipe_sha256": "ab" * 32, "layers": [{"cache_key": "cd" * 32}]},
    "final_eval_loss": 1.5,
    "versions": {"torch": "2.11.0"},
}
CARD = model_card.Card(name="you/x", base="lab/base", is_adapter=True, licence="apache-2.0", training=RECORD)


def test_card_shows_the_records_and_nothing_private() -> None:
    scores = {"scores": {"jsquad": {"f1": 81.25}, "<b>|": {"acc,none": "a|b"}}}
    text = replace(CARD, evaluations=[scores]).text()
    front, body = yaml.safe_load(text.split("---\n")[1]), text.partition("-->\n")[2]
    assert front["base_model"] == "lab/base"
    assert (front["base_model_relation"], front["license"], front["datasets"]) == (
        "adapter",
        "apache-2.0",
        ["lab/rows"],
    )
    for line in (
        "| base | lab/base, revision 0123456789ab |",
        "| parameters | 3,000,000,000 |",
        "| image, checksum of the recipe's files | abababababab |",
        "| lab/rows | 64,000 |",
        "| a\\|b\\]\\(x\\) ---.jsonl | 7 |",
        "| loss, evaluation | 1.5 |",
        "| lora.r | 8 |",
        "| compile | true |",
        "| jsquad | f1 | 81.25 |",
        "| &lt;b>\\| | acc,none | a\\|b |",
        "| torch | 2.11.0 |",
        "`````text",
    ):
        assert line in body.splitlines(), line
    assert not [word for word in (SECRET, "/home", "node-17", "secret/") if word in text]


def test_hostile_records_make_a_card() -> None:
    values: list[Any] = [None, 3, "x", [], {}, ["a"], {"a": {}}, {"scores": 1}, float("nan"), "\ud800", "a\n---\nb: c"]
    for name in (*RECORD, "last"):
        for value in values:
            text = replace(CARD, training={**RECORD, name: value}, evaluations=[{"scores": {"t": value}}]).text()
            assert yaml.safe_load(text.split("---\n")[1])["library_name"] == "peft"


def test_card_of_a_user_stays(tmp_path: Path) -> None:
    assert model_card.write(tmp_path, CARD)
    assert model_card.write(tmp_path, replace(CARD, licence="mit"))
    file = tmp_path / "README.md"
    assert "license: mit" in file.read_text(encoding="utf-8")
    file.write_text(file.read_text(encoding="utf-8") + "mine\n", encoding="utf-8")
    assert not model_card.write(tmp_path, CARD)
    (tmp_path / "staged").mkdir()
    files.replace_folder(tmp_path / "staged", tmp_path / "adapter")
    file.rename(tmp_path / "adapter/README.md")
    (tmp_path / "staged").mkdir()
    files.replace_folder(tmp_path / "staged", tmp_path / "adapter")
    assert (tmp_path / "adapter/README.md").read_text(encoding="utf-8").endswith("mine\n")


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlanguage: ja\nlicense: CC-BY-SA-4.0\n---\n# x\n", "cc-by-sa-4.0"),
        ("---\nlicense: 'mit'\n---\n", "mit"),
        ("# x\nlicense: mit\n", ""),
        ("---\nlicense: a b: c\n---\n", ""),
        ("---\nx: y\n---\nlicense: mit\n", ""),
    ],
)
def test_licence_is_that_of_the_metadata(card: str, licence: str) -> None:
    assert model_card.read_licence(card) == licence


def test_record_follows_the_model_that_is_written_from_another(tmp_path: Path) -> None:
    adapter, merged = tmp_path / "result/adapter", tmp_path / "merged"
    adapter.mkdir(parents=True)
    merged.mkdir()
    assert model_card.find_training(adapter) is None
    (tmp_path / "result/run.json").write_text(json.dumps(RECORD))
    model_card.carry_training(adapter, merged)
    assert model_card.find_training(merged) == {key: value for key, value in RECORD.items() if key != "site"}
    (merged / ".training.json").write_text("[")
    with pytest.raises(TaskError, match=r"\.training\.json: "):
        model_card.find_training(merged)
    with pytest.raises(TaskError, match="has no scores"):
        model_card.read_evaluation(tmp_path / "result")
