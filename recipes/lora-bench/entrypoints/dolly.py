"""databricks-dolly-15k: its rows, what is missing in them, their tokens, and the files those are kept in."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from settings import TaskError

NAME = "databricks/databricks-dolly-15k"
COLUMNS = ("instruction", "context", "response", "category")
ROWS = 15_011  # of the published set
FILE = "dolly.jsonl"
RECORD = "processed.json"
IGNORED = -100  # the label of a token whose loss is not taken

Row = dict[str, str]


def read(place: Path) -> list[Row]:
    """The rows of ``place``, a .jsonl file or a folder with dolly.jsonl. Errors: TaskError: which line, what."""
    file = place / FILE if place.is_dir() else place
    if not file.is_file():
        raise TaskError(f"data {file.absolute()}: no such file; download writes one, --input names another")
    rows = []
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise TaskError(f"{file} line {number}: is not JSON: {error}") from None
            missing = [name for name in COLUMNS if not isinstance(row, dict) or name not in row]
            if missing:
                raise TaskError(
                    f"{file} line {number}: {', '.join(missing)} is missing; a row has {', '.join(COLUMNS)}"
                )
            rows.append({name: row[name] or "" for name in COLUMNS})
    if not rows:
        raise TaskError(f"{file}: is empty")
    return rows


def count_empty(rows: Sequence[Row]) -> dict[str, int]:
    """Column → rows where it is null or blank."""
    return {name: sum(not row[name].strip() for row in rows) for name in COLUMNS}


def split(rows: Sequence[Row], test_share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """(to learn from, to test on); a tenth of 15,011 is 1,502, rounded up."""
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    tests = math.ceil(len(rows) * test_share)
    return shuffled[tests:], shuffled[:tests]


def encode(tokenizer: Any, row: Row, max_length: int) -> tuple[list[int], list[int]]:
    """(tokens, labels): instruction and context are read only; the response is learnt, and that the text then ends.

    Both parts are tokenised apart, so no token is half prompt and half response.
    """
    prompt = row["instruction"] + (f"\n{row['context']}" if row["context"] else "") + "\n"
    asked = tokenizer(prompt)["input_ids"]
    end = tokenizer.eos_token_id
    asked = asked[:-1] if len(asked) > 1 and asked[-1] == end else asked
    answer = [*tokenizer(row["response"], add_special_tokens=False)["input_ids"], end]
    return (asked + answer)[:max_length], ([IGNORED] * len(asked) + answer)[:max_length]


def write_split(file: Path, encoded: Sequence[tuple[list[int], list[int]]]) -> None:
    import pyarrow
    import pyarrow.parquet

    numbers = pyarrow.list_(pyarrow.int32())
    columns = {
        "input_ids": [ids for ids, _ in encoded], "attention_mask": [[1] * len(ids) for ids, _ in encoded],
        "labels": [labels for _, labels in encoded],
    }  # fmt: skip
    pyarrow.parquet.write_table(
        pyarrow.table({name: pyarrow.array(rows, numbers) for name, rows in columns.items()}), file
    )


def read_split(folder: Path, name: str) -> list[tuple[list[int], list[int]]]:
    """(tokens, labels) of every row. Errors: TaskError."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(folder / f"{name}.parquet", columns=["input_ids", "labels"])
    except FileNotFoundError:
        raise TaskError(f"data {folder.absolute()}: no {name}.parquet there; preprocess writes one") from None
    except pyarrow.ArrowInvalid as error:
        raise TaskError(f"data {folder / name}.parquet: cannot be read: {error}") from None
    return list(zip(table["input_ids"].to_pylist(), table["labels"].to_pylist(), strict=True))


def read_record(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise TaskError(f"data {folder.absolute()}: no {RECORD} there; preprocess writes such a folder") from None
    return found


def digest(rows: Sequence[Row]) -> str:
    whole = hashlib.sha256()
    for row in rows:
        whole.update(json.dumps([row[name] for name in COLUMNS], ensure_ascii=False).encode())
    return whole.hexdigest()
