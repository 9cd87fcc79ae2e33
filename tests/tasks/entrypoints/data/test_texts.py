"""Plain texts joined and cut as TRL does, mixtures drawn as datasets does, and sources that are read in part."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "datasets"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

import datasets

from ekiben_tasks.data import sources
from ekiben_tasks.data.schema import DatasetFormat, PromptCompletion
from ekiben_tasks.data.sources import parse_sources, read_all
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.training.prepare import Prepared, prepare_data
from support.multiprocess import same_environment  # noqa: F401
from support.tiny_runs import base, fit, metrics, small, tokenizer  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
TEXT = DatasetFormat(kind="text")
TEXTS = [f"富士山の高さは{number}メートルです。<|endoftext|>" * (1 + number % 7) for number in range(40)]


def write(file: Path, items: list[Any]) -> Path:
    file.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items), encoding="utf-8")
    return file


def prepare(data: Any, tokenizer: Any, **changes: Any) -> Prepared:
    settings = small(Path("base"), data=data, **{"form": TEXT, "validation_split": 0.0, **changes})
    return prepare_data(settings, parse_sources(settings.data, settings.validation_split), tokenizer, 10_000, False)


@pytest.mark.parametrize("length", [16, 33, 100_000])
def test_texts_are_packed_as_trl_wraps_them(tokenizer: Any, tmp_path: Path, length: int) -> None:
    packing = pytest.importorskip("trl.data_utils", reason="TRL is not in the image")
    file = write(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    ids = [[*tokenizer(text, split_special_tokens=True)["input_ids"], tokenizer.eos_token_id] for text in TEXTS]
    table = datasets.Dataset.from_dict({"input_ids": ids})
    theirs = packing.pack_dataset(table, seq_length=min(length, 10_000), strategy="wrapped")["input_ids"][:]
    prepared = prepare([str(file)], tokenizer, max_length=length)
    assert [example.ids.tolist() for example in prepared.train] == theirs
    assert all(example.targets == ((0, len(example.ids)),) for example in prepared.train)


def test_texts_come_from_a_column_or_a_file(tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"body": "一", "text": "no"}, {"body": "二"}])
    (tmp_path / "b.txt").write_text("三\n\n四\n", encoding="utf-8")
    form = DatasetFormat(kind="text", column="body")
    read = read_all(parse_sources(str(tmp_path), 0.0), seed=0, skip_bad=False, form=form)
    assert read.train == [PromptCompletion("", text) for text in ("一", "二", "三\n\n四\n")]
    assert read.notes == ["nothing uses the columns text (1)"]
    source = sources.Source(str(tmp_path))
    assert sources.read_prompts(source, form, skip_bad=False)[0][0] == PromptCompletion("一", "")
    write(tmp_path / "a.jsonl", [{"boddy": "x"}, {"body": 5}, {"body": " "}, 7])
    with pytest.raises(TaskError) as error:
        read_all(parse_sources(str(tmp_path), 0.0), seed=0, skip_bad=False, form=form)
    for problem in ("line 1: body is missing. Did you mean 'boddy'?", "line 2: body is 5, not text", "body is empty"):
        assert problem in str(error.value)
    assert 'line 4: is not an object like {"body": ...}' in str(error.value)
    with pytest.raises(TaskError, match=r"b\.txt: is not an object like"):
        read_all(parse_sources(str(tmp_path / "b.txt"), 0.0), seed=0, skip_bad=False)


def test_training_on_texts(base: Path, tmp_path: Path, capsys: Any) -> None:
    file = write(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    settings = small(base, data=[str(file)], form=TEXT, max_length=64, max_steps=3, batch_size=4)
    assert fit(settings, tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert "plain text, joined and cut" in printed and "36 texts are joined and cut into rows of 64 tokens" in printed
    assert len([line for line in metrics(tmp_path / "out") if "loss" in line]) == 3


@pytest.mark.parametrize("mixture", ["first_exhausted", "all_exhausted"])
@pytest.mark.parametrize("weights", [[0.7, 0.3], [2, 6], [1, 0.01]])
def test_mixtures_are_those_of_datasets(mixture: Any, weights: list[float], tmp_path: Path) -> None:
    by_name = {name: [{"text": f"{name}{number}"} for number in range(count)] for name, count in (("a", 50), ("b", 20))}
    files = [write(tmp_path / f"{name}.jsonl", items) for name, items in by_name.items()]
    data = [{"source": str(file), "weight": weight} for file, weight in zip(files, weights, strict=True)]
    data.append({"source": str(files[1]), "validation_split": 1})
    read = read_all(parse_sources(data, 0.0), seed=3, skip_bad=False, form=TEXT, mixture=mixture)
    theirs = datasets.interleave_datasets(
        [datasets.Dataset.from_list(items) for items in by_name.values()],
        [weight / sum(weights) for weight in weights],
        seed=3,
        stopping_strategy=mixture,
    )["text"][:]
    assert [each.completion for each in read.train if isinstance(each, PromptCompletion)] == theirs
    assert len(read.test) == 20
    from_first = [text for text in theirs if text.startswith("a")]
    assert read.notes[0] == (
        f"{files[0]}: {len(from_first):,} of {len(theirs):,} rows of the mixture, {len(set(from_first))} of its 50"
    )
    again = read_all(parse_sources(data, 0.0), seed=3, skip_bad=False, form=TEXT, mixture=mixture)
    assert (again.train, again.sha256) == (read.train, read.sha256)
    plain = read_all(parse_sources([str(file) for file in files], 0.0), seed=3, skip_bad=False, form=TEXT)
    assert plain.sha256 != read.sha256


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"weight": 0}, "weight must be above 0, not 0"),
        ({"weight": "a"}, "weight must be above 0, not 'a'"),
        ({"weight": 1}, "give each source that is trained on a weight, or none"),
        ({"take": -1}, r"take must be a number of rows \(0: all\), not -1"),
        ({"take": 1.5}, "take must be a number of rows"),
        ({"wieght": 1}, "no key 'wieght' in a source. Did you mean 'weight'?"),
    ],
)
def test_wrong_groups_are_refused(group: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=f"setting data: {message}"):
        parse_sources([{"source": "a", **group}, "b"], 0.0)


def test_take_reads_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a hub data set are fetched one by one."""
    file = write(tmp_path / "a.jsonl", [{"text": f"t{number}"} for number in range(9)] + ["damaged"])
    data = [{"source": str(file), "take": 3}]
    assert len(read_all(parse_sources(data, 0.0), seed=0, skip_bad=False, form=TEXT).train) == 3
    fetched: list[int] = []

    def generate() -> Any:
        for number in range(1000):
            fetched.append(number)
            yield {"text": f"t{number}"}

    asked: list[Any] = []

    def load_dataset(*arguments: Any, **options: Any) -> Any:
        asked.append((arguments, options))
        return datasets.IterableDataset.from_generator(generate)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    group = {"source": "owner/name", "subset": "ja", "revision": "v2", "take": 5}
    read = read_all(parse_sources([group], 0.0), seed=0, skip_bad=False, form=TEXT)
    assert [each.completion for each in read.train if isinstance(each, PromptCompletion)] == [f"t{n}" for n in range(5)]
    assert asked == [(("owner/name", "ja"), {"split": "train", "revision": "v2", "streaming": True})]
    assert len(fetched) < 10
