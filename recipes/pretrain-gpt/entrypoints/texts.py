"""Read plain texts from .txt, .jsonl and .parquet files: one document each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ekiben_tasks.data.sources import InvalidExample
from ekiben_tasks.task import input_files
from ekiben_tasks.task.errors import TaskError, nearest

SUFFIXES = (".txt", ".jsonl", ".parquet")
SAMPLE = "sample"
_ADVICE = "save the texts as .txt or .jsonl in UTF-8, or as .parquet"


def find_files(sources: Sequence[str], recipe: Path) -> list[Path]:
    """Return the files that ``sources`` name, with those in folders; 'sample' is the recipe's own file.

    Raises:
        TaskError: a file or folder does not exist, has another suffix, or holds no such file.
    """
    files: list[Path] = []
    for source in sources:
        path = recipe / "data" / "sample.jsonl" if source == SAMPLE else Path(source).expanduser()
        if path.is_dir():
            inside = sorted(file for suffix in SUFFIXES for file in path.rglob(f"*{suffix}") if not file.is_dir())
            if not inside:
                raise TaskError(f"data {path}: holds no {', '.join(SUFFIXES)} file")
            files += inside
        elif not path.exists():
            beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            close = nearest(path.name, beside)
            hint = close if "Did you mean" in close else ""
            raise TaskError(f"data {path.absolute()}: no such file or folder; is it bound into the container?{hint}")
        elif path.suffix not in SUFFIXES:
            raise TaskError(f"data {path}: unknown format; rename it to {', '.join(SUFFIXES)}")
        else:
            files.append(path)
    for file in files:
        input_files.check_regular(file, _ADVICE)
    return files


def read_documents(
    files: Sequence[Path], column: str, skipped: list[InvalidExample] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (where it is, the text) of every document that is not blank.

    A .txt file is one document. A row of .jsonl and .parquet has its text in ``column``. skipped: invalid rows are
    added to this list and left out.

    Raises:
        TaskError: a file cannot be read, or a row is invalid and ``skipped`` is None.
    """
    for file in files:
        for where, item in _read(file, column):
            if isinstance(item, str):
                if item.strip():
                    yield where, item
            elif skipped is not None:
                skipped.append(InvalidExample(where, _problem(item, column)))
            else:
                raise TaskError(
                    f"{where}: {_problem(item, column)}; correct it, or leave such rows out with --skip-invalid"
                )


def format_skipped(skipped: Sequence[InvalidExample]) -> list[str]:
    """Return the lines that say how many rows --skip-invalid left out, and why the first of them was."""
    first = f"; the first is {skipped[0].where}: {skipped[0].problem}" if skipped else ""
    return [f"left out    {len(skipped):,} invalid row{'s' * (len(skipped) > 1)}{first}"] if skipped else []


def digest(files: Sequence[Path]) -> str:
    """Return one SHA-256 over the files' contents, in order."""
    combined = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            combined.update(hashlib.file_digest(stream, "sha256").digest())
    return combined.hexdigest()


def _read(file: Path, column: str) -> Iterator[tuple[str, Any]]:
    """(position, the text or the value found instead)."""
    try:
        if file.suffix == ".txt":
            yield str(file), input_files.read_text(file, _ADVICE, max_size=input_files.MAX_JSON)
        elif file.suffix == ".parquet":
            yield from _read_parquet(file, column)
        else:
            for number, line in input_files.read_lines(file, _ADVICE):
                if line.strip(b"\xef\xbb\xbf \t\r\n"):
                    yield f"{file} line {number}", _parse(line, column)
    except OSError as error:
        raise TaskError(f"{file}: cannot be read: {error.strerror or error}") from None


def _parse(line: bytes, column: str) -> Any:
    try:
        row = input_files.parse_json(input_files.decode(line))
    except ValueError as error:
        return error
    return row.get(column, row) if isinstance(row, dict) else row


def _read_parquet(file: Path, column: str) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    input_files.check_regular(file, _ADVICE)
    try:
        source = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise TaskError(f"{file}: is not a Parquet file: {error}") from None
    if column not in source.schema_arrow.names:
        raise TaskError(f"{file}: no column {column!r}.{nearest(column, source.schema_arrow.names)}")
    number = 0
    for batch in source.iter_batches(columns=[column]):
        for item in batch.column(0).to_pylist():
            number += 1
            yield f"{file} row {number}", item


def _problem(item: Any, column: str) -> str:
    if isinstance(item, ValueError):
        return str(item)
    if isinstance(item, dict):
        return f"no {column!r} in it.{nearest(column, map(str, item))}".rstrip(".")
    return f"{column} is {item!r}, not text"
