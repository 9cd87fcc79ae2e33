"""Rows out of files: what is good is read, what is bad is named."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy", reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

from ekiben_tasks.data import sources
from ekiben_tasks.data.tokenize import Instruction
from ekiben_tasks.task.errors import TaskError

GOOD = {"instruction": "問い", "output": "答え"}
SAMPLES = [ROOT / "recipes" / "lora-opencalm" / "data" / "sample.jsonl"]
SAMPLE = next(
    path for path in [*SAMPLES, Path(os.environ.get("EKIBEN_RECIPE", "")) / "data" / "sample.jsonl"] if path.is_file()
)


def write(file: Path, items: list[Any]) -> Path:
    file.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items), encoding="utf-8")
    return file


def read(*files: Path, skip_bad: bool = False, share: float = 0.0) -> sources.SplitExamples:
    named = [sources.Source(str(file), share) for file in files]
    return sources.read_all(named, seed=1, skip_bad=skip_bad)


def test_jsonl_json_parquet_and_folders_load_alike(tmp_path: Path) -> None:
    items = [{**GOOD, "input": "文脈"}, GOOD]
    jsonl = write(tmp_path / "a.jsonl", items)
    (tmp_path / "b.json").write_text(json.dumps(items), encoding="utf-8")
    expected = [Instruction("問い", "答え", "文脈"), Instruction("問い", "答え")]
    assert read(jsonl).train == read(tmp_path / "b.json").train == expected
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(items), tmp_path / "c.parquet")
    assert read(tmp_path / "c.parquet").train == expected
    (tmp_path / ".hidden.jsonl").write_text("junk")
    found = read(tmp_path)
    assert found.train == expected * 3
    assert found.sha256 == read(jsonl, tmp_path / "b.json", tmp_path / "c.parquet").sha256


def test_known_dataset_names(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl", [{"instruction": "q", "context": "c", "response": "r", "index": "1", "category": "x"}]
    )
    assert read(file).train == [Instruction("q", "r", "c")]


@pytest.mark.parametrize(
    ("asked", "answered"), [("prompt", "response"), ("question", "answer"), ("question", "completion")]
)
def test_known_dataset_columns(tmp_path: Path, asked: str, answered: str) -> None:
    assert read(write(tmp_path / "a.jsonl", [{asked: "q", answered: "a"}])).train == [Instruction("q", "a")]


def test_the_files_read_are_recorded_with_their_checksums(tmp_path: Path) -> None:
    first, second = (write(tmp_path / f"{name}.jsonl", [GOOD] * count) for name, count in (("a", 1), ("b", 2)))
    sums = {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in (first, second)}
    assert read(tmp_path).versions == sums
    assert read(first).versions == {str(first): sums[str(first)]}


def test_subset_and_revision_of_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[Any] = []
    commit = "0123456789abcdef0123456789abcdef01234567"

    def load_dataset(*arguments: Any, **options: Any) -> Any:
        asked.append((arguments, options))
        table = datasets.Dataset.from_list([GOOD])
        table.info.download_checksums = {f"hf://datasets/owner/name@{commit}/data/train.parquet": {}}
        return table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    group = {"source": "owner/name", "subset": "ja", "split": "validation", "revision": "v2"}
    found = sources.read_all(sources.parse_sources([group], 0.0), seed=0, skip_bad=False)
    assert asked == [(("owner/name", "ja"), {"split": "validation", "revision": "v2"})]
    assert found.versions == {"owner/name": commit}
    with pytest.raises(TaskError, match="subset names a part of a hub data set"):
        sources.parse_sources([{"source": str(tmp_path), "subset": "ja"}], 0.0)


def test_a_byte_order_mark_and_empty_lines_are_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\n\n  \n" + json.dumps(GOOD).encode()
    )
    assert len(read(tmp_path / "a.jsonl").train) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"instruction": "q"', "is not JSON"),
        ('["q", "a"]', "is not an object"),
        ('{"instruction": "q"}', "output is missing"),
        ('{"instruction": "q", "output": " "}', "output is empty"),
        ('{"instruction": 5, "output": "a"}', "instruction is 5, not text"),
        ('{"instrution": "q", "output": "a"}', "instruction is missing. Did you mean 'instrution'?"),
    ],
)
def test_invalid_example_is_named_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(GOOD) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(TaskError) as caught:
        read(file)
    assert f"{file} line 2: {message}" in str(caught.value)
    assert "--skip-invalid" in str(caught.value)
    kept = read(file, skip_bad=True)
    assert (len(kept.train), len(kept.bad)) == (1, 1)


def test_invalid_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"instruction": "問い", "output": "答え"}\n'.encode("cp932"))
    with pytest.raises(TaskError, match=r"a\.jsonl line 1: is not UTF-8"):
        read(tmp_path / "a.jsonl")


def test_empty_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(TaskError, match="no valid example"):
        read(tmp_path / "empty.jsonl")
    (tmp_path / "folder").mkdir()
    with pytest.raises(TaskError, match=r"holds no \.jsonl"):
        read(tmp_path / "folder")
    with pytest.raises(TaskError, match="setting data: is empty"):
        sources.parse_sources([], 0.0)
    write(tmp_path / "rows.jsonl", [GOOD])
    with pytest.raises(TaskError, match=r"no such file or folder.*Did you mean 'rows.jsonl'"):
        sources.check_locations([sources.Source(str(tmp_path / "row.jsonl"), 0.0)])


def test_lines_and_lists_are_read_whatever_the_name(tmp_path: Path) -> None:
    expected = [Instruction("問い", "答え")] * 2
    assert read(write(tmp_path / "a.json", [GOOD, GOOD])).train == expected
    for indent in (None, 1):
        (tmp_path / "b.jsonl").write_text("\ufeff" + json.dumps([GOOD, GOOD], indent=indent), encoding="utf-8")
        assert read(tmp_path / "b.jsonl").train == expected


def test_validation_split_of_each_source() -> None:
    parsed = sources.parse_sources(["a/b", {"source": "c/d", "validation_split": 0.5}], 0.1)
    assert parsed == [sources.Source("a/b", 0.1), sources.Source("c/d", 0.5)]
    assert sources.parse_sources([{"source": "c/d", "test_share": 0.5}], 0.1) == parsed[1:]  # until the next release
    assert sources.check_locations(parsed)
    for wrong in ([{"sorce": "a/b"}], [{"source": "a/b", "test_share": 2}], [3]):
        with pytest.raises(TaskError, match="setting data"):
            sources.parse_sources(wrong, 0.1)


def test_the_split_is_exact_disjoint_and_repeats() -> None:
    many = [Instruction(str(number), "a") for number in range(200)]
    train, test = sources.split(many, 0.03, seed=7)
    assert len(test) == 6
    assert sorted(train + test, key=lambda row: int(row.instruction)) == many
    assert sources.split(many, 0.03, seed=7) == (train, test)
    assert sources.split(many, 0.03, seed=8)[1] != test
    assert sources.split(many, 0.0, seed=7) == (many, [])
    assert len(sources.split(many[:2], 0.9, seed=7)[0]) == 1


def test_the_sample_is_good_and_varied() -> None:
    found = read(SAMPLE)
    assert 150 <= len(found.train) <= 300
    with_input = sum(bool(row.input) for row in found.train)
    assert 0.1 < with_input / len(found.train) < 0.4
    assert len({(row.instruction, row.input) for row in found.train}) == len(found.train)
    assert len({row.output for row in found.train}) > 0.95 * len(found.train)
