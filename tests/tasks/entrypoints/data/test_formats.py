"""Every format of data files gives the same examples, and damage is named by file and line."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("numpy", "datasets", "pyarrow"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

import datasets
import pyarrow
import pyarrow.ipc

from ekiben_tasks.data import sources
from ekiben_tasks.data.schema import Instruction
from ekiben_tasks.task.errors import TaskError

ITEMS = [
    {"instruction": "富士山の\n高さは?", "input": "", "output": '3776m, "約"'},
    {"instruction": "tab\there", "input": "文脈", "output": "5"},
]
EXPECTED = [Instruction("富士山の\n高さは?", '3776m, "約"'), Instruction("tab\there", "5", "文脈")]
LINES = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in ITEMS).encode()


def read(path: Path) -> list[Any]:
    return list(sources.read_all([sources.Source(str(path))], seed=0, skip_bad=False).train)


def write(file: Path) -> Path:
    """Write ITEMS in the format that the name of ``file`` says, with the library datasets where it can."""
    table = datasets.Dataset.from_list(ITEMS)
    inner = file.name.removesuffix(".gz").removesuffix(".zst")
    plain = file.with_name(inner)
    if inner.endswith((".csv", ".tsv")):
        table.to_csv(plain, sep="\t" if inner.endswith("tsv") else ",")
    elif inner.endswith(".parquet"):
        table.to_parquet(plain)
    elif inner.endswith(".arrow"):
        with pyarrow.OSFile(str(plain), "wb") as out, pyarrow.ipc.new_file(out, table.data.table.schema) as writer:
            writer.write_table(table.data.table)
    elif inner.endswith(".json"):
        plain.write_text(json.dumps(ITEMS, indent=1), encoding="utf-8")
    else:
        plain.write_bytes(LINES)
    if file.suffix == ".gz":
        file.write_bytes(gzip.compress(plain.read_bytes()))
    elif file.suffix == ".zst":
        with pyarrow.output_stream(str(file), compression="zstd") as out:
            out.write(plain.read_bytes())
    return file


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.ndjson", "a.json", "a.csv", "a.tsv", "a.parquet", "a.arrow"]
    + [f"a.{inner}.{outer}" for inner in ("jsonl", "json", "csv") for outer in ("gz", "zst")],
)
def test_every_format_gives_the_same_examples(name: str, tmp_path: Path) -> None:
    assert read(write(tmp_path / name)) == EXPECTED


def test_a_saved_data_set_is_read_by_its_splits(tmp_path: Path) -> None:
    train, test = datasets.Dataset.from_list(ITEMS), datasets.Dataset.from_list(ITEMS[:1])
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(str(tmp_path / "saved"))
    examples = sources.read_all([sources.Source(str(tmp_path / "saved"))], seed=0, skip_bad=False)
    assert (examples.train, examples.test) == (EXPECTED, EXPECTED[:1])
    train.save_to_disk(str(tmp_path / "single"))
    assert read(tmp_path / "single") == EXPECTED


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", gzip.compress(LINES)[:-12], "a.jsonl.gz: is not a complete .gz file"),
        ("a.jsonl.gz", LINES, "a.jsonl.gz: is not a complete .gz file"),
        ("a.jsonl.zst", LINES, "a.jsonl.zst: cannot be read"),
        ("a.csv", b"instruction,output\nq,a,b\n", "a.csv line 2: has 3 values, and the first line names 2 columns"),
        ("a.csv", b"output,output\nq,a\n", "a.csv line 1: two columns have one name"),
        ("a.csv", b'instruction,output\n"q,a\n', "a.csv line 2: is not CSV: unexpected end of data"),
        ("a.csv", "instruction,output\n問,答\n".encode("cp932"), "a.csv line 2: is not UTF-8"),
        ("a.arrow", b"ARROW1\0\0" + b"\0" * 50, "a.arrow: is not an Arrow file"),
        ("a.parquet", b"PAR1" + b"\0" * 50, "a.parquet: is not a Parquet file"),
        ("a.parquet.gz", b"", "a.parquet.gz: its type is unknown; name it .jsonl"),
        ("a.doc", b"x", "a.doc: its type is unknown; name it .jsonl"),
    ],
)
def test_damaged_files_are_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError) as caught:
        read(tmp_path / name)
    assert message in str(caught.value)
