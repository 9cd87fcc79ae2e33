"""Read the items of a data file: JSON, JSON lines, CSV, TSV, Parquet, Arrow and plain text, which may be compressed."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ekiben_tasks.task import input_files
from ekiben_tasks.task.errors import TaskError

ADVICE = "save the examples as JSONL in UTF-8, one object per line, or as Parquet"
_TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
_TABLES = (".parquet", ".arrow")
SUFFIXES = (*_TEXTS, *_TABLES)
# Metadata files of Dataset.save_to_disk().
_METADATA = {"dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"}
_BLANK = b"\xef\xbb\xbf \t\r\n"


def is_data(file: Path) -> bool:
    """Return whether the name of ``file`` is that of a data file."""
    return _format(file) in SUFFIXES and file.name not in _METADATA


def is_text(file: Path) -> bool:
    """Return whether the name of ``file`` is that of a plain text."""
    return _format(file) == ".txt"


def read_file(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield (file and line or number, item) of each item in ``file``; a ValueError is an item that is damaged.

    Raises:
        TaskError: the file cannot be read, or its name says no format.
    """
    suffix = _format(file)
    try:
        if suffix == ".parquet":
            yield from _read_parquet(file)
        elif suffix == ".arrow":
            yield from _read_arrow(file)
        elif suffix in (".csv", ".tsv"):
            yield from _read_csv(file, "," if suffix == ".csv" else "\t")
        elif suffix == ".txt":
            yield str(file), input_files.read_text(file, ADVICE, max_size=input_files.MAX_JSON)
        elif suffix in _TEXTS:
            yield from _read_list(file) if _holds_list(file, suffix) else _read_lines(file)
        else:
            compressed = f"; text files may end in {' or '.join(input_files.COMPRESSED)}, too"
            raise TaskError(f"{file}: its type is unknown; name it {', '.join(SUFFIXES)}{compressed}")
    except OSError as error:
        raise TaskError(f"{file}: cannot be read: {error.strerror or error}") from None


def _format(file: Path) -> str:
    """Return the suffix of the format: .jsonl of a.jsonl.gz. Tables compress themselves."""
    if file.suffix in input_files.COMPRESSED:
        inner = file.with_suffix("").suffix
        return inner if inner in _TEXTS else ""
    return file.suffix


def _holds_list(file: Path, suffix: str) -> bool:
    """Return whether a JSON file is one value, whatever its name, and not an example in each line."""
    lines = (line.strip(_BLANK) for _, line in input_files.read_lines(file, ADVICE) if line.strip(_BLANK))
    first, is_single = next(lines, b""), next(lines, None) is None
    if first.startswith(b"["):
        return is_single or not first.endswith(b"]")
    return suffix == ".json" and (is_single or not first.endswith(b"}"))


def _read_lines(file: Path) -> Iterator[tuple[str, Any]]:
    for number, line in input_files.read_lines(file, ADVICE):
        if line.strip(_BLANK):
            try:
                yield f"{file} line {number}", input_files.parse_json(input_files.decode(line))
            except ValueError as error:
                yield f"{file} line {number}", error


def _read_list(file: Path) -> Iterator[tuple[str, Any]]:
    parsed = input_files.read_json(file, ADVICE, max_size=input_files.MAX_JSON)
    if not isinstance(parsed, list):
        raise TaskError(f"{file}: must be a list of objects, one per example")
    for number, item in enumerate(parsed, 1):
        yield f"{file} item {number}", item


def _read_csv(file: Path, delimiter: str) -> Iterator[tuple[str, Any]]:
    """Yield each record as text: a number stays as it is written. The first line has the names of the columns."""
    csv.field_size_limit(input_files.MAX_LINE)
    reader = csv.reader(_decode_lines(file), delimiter=delimiter, strict=True)
    header: list[str] = []
    try:
        for values in reader:
            where = f"{file} line {reader.line_num}"
            if not values:
                continue
            if not header:
                header = values
                if len(set(header)) < len(header):
                    raise TaskError(f"{where}: two columns have one name")
            elif len(values) != len(header):
                yield where, ValueError(f"has {len(values)} values, and the first line names {len(header)} columns")
            else:
                yield where, dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise TaskError(f"{file} line {reader.line_num}: is not CSV: {error}") from None


def _decode_lines(file: Path) -> Iterator[str]:
    for number, line in input_files.read_lines(file, ADVICE):
        try:
            yield input_files.decode(line) if number == 1 else line.decode()
        except ValueError as error:
            reason = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else error
            raise TaskError(f"{file} line {number}: {reason}; {ADVICE}") from None


def _read_parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow  # imported here: half a second of import that most runs do not need
    import pyarrow.parquet

    input_files.check_regular(file, ADVICE)
    try:
        table = pyarrow.parquet.read_table(file)
    except pyarrow.ArrowInvalid as error:
        raise TaskError(f"{file}: is not a Parquet file: {error}") from None
    for number, item in enumerate(table.to_pylist(), 1):
        yield f"{file} row {number}", item


def _read_arrow(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the items of an Arrow file or of a stream, as Dataset.save_to_disk() writes it."""
    import pyarrow
    import pyarrow.ipc

    input_files.check_regular(file, ADVICE)
    try:
        with pyarrow.OSFile(str(file)) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            table = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source).read_all()
    except pyarrow.ArrowInvalid as error:
        raise TaskError(f"{file}: is not an Arrow file: {error}") from None
    for number, item in enumerate(table.to_pylist(), 1):
        yield f"{file} row {number}", item
