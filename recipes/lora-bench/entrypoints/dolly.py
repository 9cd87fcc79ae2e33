"""Read databricks-dolly-15k, split and tokenise its rows, and write and read the prepared files."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ekiben_tasks.task import input_files
from ekiben_tasks.task.errors import TaskError

NAME = "databricks/databricks-dolly-15k"
COLUMNS = ("instruction", "context", "response", "category")
ROWS = 15_011  # of the published set
FILE = "dolly.jsonl"
RECORD = "processed.json"
IGNORED = -100  # label of a token without a loss

Row = dict[str, str]


def read(path: Path) -> list[Row]:
    """Return the rows of ``path``, a .jsonl file or a folder with dolly.jsonl; a null column is an empty string.

    Raises:
        TaskError: there is no such file, it is empty, or a line is not JSON or lacks a column.
    """
    file = path / FILE if path.is_dir() else path
    rows = []
    for number, line in input_files.read_lines(file, "download writes one, --input names another"):
        try:
            row = input_files.parse_json(input_files.decode(line))
        except ValueError as error:
            raise TaskError(f"{file} line {number}: {error}") from None
        missing = [name for name in COLUMNS if not isinstance(row, dict) or name not in row]
        if missing:
            raise TaskError(f"{file} line {number}: {', '.join(missing)} is missing; a row has {', '.join(COLUMNS)}")
        rows.append({name: row[name] or "" for name in COLUMNS})
    if not rows:
        raise TaskError(f"{file}: is empty")
    return rows


def count_empty(rows: Sequence[Row]) -> dict[str, int]:
    """Return column → number of rows where it is null or blank."""
    return {name: sum(not row[name].strip() for row in rows) for name in COLUMNS}


def split(rows: Sequence[Row], validation_split: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Return (training, evaluation) rows, shuffled by ``seed``; the number of the second is rounded up."""
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    count = math.ceil(len(rows) * validation_split)
    return shuffled[count:], shuffled[:count]


def encode(tokenizer: Any, row: Row, max_length: int) -> tuple[list[int], list[int]]:
    """Return (tokens, labels) of ``row``, at most ``max_length`` each.

    The labels of instruction and context are IGNORED; the response and the end of text are targets.
    """
    from ekiben_tasks.data.schema import PromptCompletion
    from ekiben_tasks.data.tokenize import encode_examples

    prompt = row["instruction"] + (f"\n{row['context']}" if row["context"] else "") + "\n"
    (example,) = encode_examples(tokenizer, [PromptCompletion(prompt, row["response"])])
    ids, start = example.ids.tolist(), example.targets[0][0]
    return ids[:max_length], ([IGNORED] * start + ids[start:])[:max_length]


def write_split(file: Path, encoded: Sequence[tuple[list[int], list[int]]]) -> None:
    """Write (tokens, labels) of each example as a Parquet file: columns input_ids, attention_mask, labels, int32."""
    import pyarrow
    import pyarrow.parquet

    numbers = pyarrow.list_(pyarrow.int32())
    columns = {
        "input_ids": [ids for ids, _ in encoded],
        "attention_mask": [[1] * len(ids) for ids, _ in encoded],
        "labels": [labels for _, labels in encoded],
    }
    pyarrow.parquet.write_table(
        pyarrow.table({name: pyarrow.array(rows, numbers) for name, rows in columns.items()}), file
    )


def read_split(folder: Path, name: str) -> list[tuple[list[int], list[int]]]:
    """Return (tokens, labels) of every example of the split ``name``, "train" or "test".

    Raises:
        TaskError: the file cannot be read.
    """
    import pyarrow
    import pyarrow.parquet

    input_files.check_regular(folder.absolute() / f"{name}.parquet", "preprocess writes one")
    try:
        table = pyarrow.parquet.read_table(folder / f"{name}.parquet", columns=["input_ids", "labels"])
    except pyarrow.ArrowInvalid as error:
        raise TaskError(f"data {folder / name}.parquet: cannot be read: {error}") from None
    return list(zip(table["input_ids"].to_pylist(), table["labels"].to_pylist(), strict=True))


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record that preprocess wrote into ``folder``.

    Raises:
        TaskError: it cannot be read.
    """
    return input_files.read_object(folder.absolute() / RECORD, "preprocess writes such a folder")


def digest(rows: Sequence[Row]) -> str:
    """Return one SHA-256 over the columns of all rows, in order."""
    whole = hashlib.sha256()
    for row in rows:
        whole.update(json.dumps([row[name] for name in COLUMNS], ensure_ascii=False).encode())
    return whole.hexdigest()
