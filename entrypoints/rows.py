"""Instruction rows out of hub data sets, folders, JSON, JSONL and Parquet files, checked one by one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forms import INSTRUCTION, AnyRow, Form, check_form, read_row
from settings import TaskError, nearest

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True, slots=True)
class Source:
    location: str
    test_share: float


@dataclass(frozen=True, slots=True)
class BadRow:
    where: str
    problem: str


@dataclass(slots=True)
class Rows:
    """What a run learns from and is tested on. ``sha256`` is of the rows read, in order, before the split."""

    train: list[AnyRow] = field(default_factory=list)
    test: list[AnyRow] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    sha256: str = ""


def parse_sources(data: Any, test_share: float) -> list[Source]:
    """The ``data`` setting: a place, a list of places, or ``{source, test_share}`` groups. Errors: TaskError."""
    items = data if isinstance(data, list) else [data]
    if data in (None, "", []) or not items:
        raise TaskError("setting data: is empty; name a hub data set, a folder or a .jsonl, .json or .parquet file")
    return [_parse_source(item, test_share) for item in items]


def check_places(sources: Sequence[Source]) -> bool:
    """Whether any source is of the hub. Errors: TaskError for a file or folder that is not there."""
    of_hub = [is_hub(source.location) for source in sources]  # all of them: each may be a typo
    return any(of_hub)


def read_all(sources: Sequence[Source], *, seed: int, skip_bad: bool, form: Form = INSTRUCTION) -> Rows:
    """Every source's rows, split. Errors: TaskError: nothing found, no rows, bad rows (unless ``skip_bad``)."""
    check_form(form)
    rows, digest = Rows(), hashlib.sha256()
    for source in sources:
        good, bad, correctable = _read_source(source.location, form)
        rows.bad += bad
        if bad and correctable and not skip_bad:
            raise TaskError(tell_bad(bad))
        if not good:
            raise TaskError(f"{source.location}: holds no usable row" + (f"; {tell_bad(bad)}" if bad else ""))
        for row in good:
            digest.update(json.dumps(dataclasses.astuple(row), ensure_ascii=False).encode())
        rows.counts[source.location] = rows.counts.get(source.location, 0) + len(good)
        train, test = split(good, source.test_share, seed)
        rows.train += train
        rows.test += test
    rows.sha256 = digest.hexdigest()
    return rows


def read_questions(location: str, form: Form, *, skip_bad: bool) -> tuple[list[AnyRow], list[BadRow]]:
    """The rows of one place, of which only what is asked has to be there. Errors: as ``read_all``."""
    check_form(form)
    good, bad, correctable = _read_source(location, form, asked=True)
    if bad and correctable and not skip_bad:
        raise TaskError(tell_bad(bad))
    if not good:
        raise TaskError(f"{location}: holds no usable row" + (f"; {tell_bad(bad)}" if bad else ""))
    return good, bad


def split(rows: list[AnyRow], test_share: float, seed: int) -> tuple[list[AnyRow], list[AnyRow]]:
    """(train, test), the same for the same seed, rows and share. At least one row stays for training."""
    count = min(round(len(rows) * test_share) or (1 if test_share > 0 else 0), len(rows) - 1)
    chosen = set(random.Random(seed).sample(range(len(rows)), count))
    train = [row for index, row in enumerate(rows) if index not in chosen]
    return train, [rows[index] for index in sorted(chosen)]


def _parse_source(item: Any, test_share: float) -> Source:
    if isinstance(item, str) and item:
        return Source(item, test_share)
    if isinstance(item, dict):
        for key in item:
            if key not in ("source", "test_share"):
                raise TaskError(
                    f"setting data: no key '{key}' in a source.{nearest(str(key), ('source', 'test_share'))}"
                )
        share = item.get("test_share", test_share)
        if not isinstance(share, (int, float)) or not 0 <= share < 1:
            raise TaskError(f"setting data: test_share must be at least 0 and below 1, not {share!r}")
        if isinstance(item.get("source"), str) and item["source"]:
            return Source(item["source"], float(share))
    raise TaskError(f"setting data: {item!r} is no source; write a place, or {{source: PLACE, test_share: 0.01}}")


def _read_source(location: str, form: Form, *, asked: bool = False) -> tuple[list[AnyRow], list[BadRow], bool]:
    """(rows, bad rows, whether the user can correct the bad ones: a hub data set is as its owner left it)."""
    if is_hub(location):
        return *_check(_read_hub(location), form, asked), False
    return *_check(_read_path(Path(location).expanduser()), form, asked), True


def is_hub(location: str) -> bool:
    """Whether ``location`` is an id of the hub. Errors: TaskError for a file or folder that is not there."""
    path = Path(location).expanduser()
    if path.exists():
        return False
    if path.suffix in _SUFFIXES or location.startswith(("/", "./", "../", "~")) or not _HUB_ID.fullmatch(location):
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        close = nearest(path.name, beside)
        hint = close if "Did you mean" in close else ""
        raise TaskError(f"data {path.absolute()}: no such file or folder; is it bound into the container?{hint}")
    return True


def _read_path(path: Path) -> Iterator[tuple[str, Any]]:
    if path.is_file():
        yield from _read_file(path)
        return
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        raise TaskError(f"{path}: is a saved Arrow data set; write it as Parquet: dataset.to_parquet('rows.parquet')")
    files = sorted(file for suffix in _SUFFIXES for file in path.rglob(f"*{suffix}") if file.is_file())
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not files:
        raise TaskError(f"{path}: holds no {', '.join(_SUFFIXES)} file")
    for file in files:
        yield from _read_file(file)


def _read_file(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        if file.suffix == ".parquet":
            yield from _read_parquet(file)
        elif file.suffix == ".json":
            yield from _read_json(file)
        elif file.suffix == ".jsonl":
            yield from _read_jsonl(file)
        else:
            raise TaskError(f"{file}: what kind of file is it? name it {', '.join(_SUFFIXES)}")
    except OSError as error:
        raise TaskError(f"{file}: cannot be read: {error.strerror or error}") from None


def _read_jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                yield f"{file} line {number}", _parse(text)


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        return ValueError(f"is not UTF-8 (byte {error.start}); save the file as UTF-8")
    except json.JSONDecodeError as error:
        return ValueError(f"is not JSON: {error.msg} at column {error.colno}")


def _read_json(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        parsed = json.loads(file.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise TaskError(f"{file}: is not UTF-8 (byte {error.start}); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        hint = "; one object per line is JSONL: name the file .jsonl" if error.msg == "Extra data" else ""
        raise TaskError(f"{file}: is not JSON: {error.msg} at line {error.lineno} column {error.colno}{hint}") from None
    if not isinstance(parsed, list):
        raise TaskError(f"{file}: must be a list of objects, one per row")
    for number, item in enumerate(parsed, 1):
        yield f"{file} item {number}", item


def _read_parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow  # only here: half a second of import that most runs do not need
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except pyarrow.ArrowInvalid as error:
        raise TaskError(f"{file}: is not a Parquet file: {error}") from None
    for number, item in enumerate(table.to_pylist(), 1):
        yield f"{file} row {number}", item


def _read_hub(name: str) -> Iterator[tuple[str, Any]]:
    import datasets  # only here: seconds of import that local files do not need

    from hub import explain

    datasets.disable_progress_bars()
    try:
        table = datasets.load_dataset(name, split="train")
    except Exception as error:
        raise TaskError(explain(error, name, "data set")) from error
    for number, item in enumerate(table, 1):
        yield f"{name} row {number}", item


def _check(items: Iterator[tuple[str, Any]], form: Form, asked: bool) -> tuple[list[AnyRow], list[BadRow]]:
    good: list[AnyRow] = []
    bad: list[BadRow] = []
    for where, item in items:
        row = read_row(item, form, asked=asked)
        if isinstance(row, str):
            bad.append(BadRow(where, row))
        else:
            good.append(row)
    return good, bad


def tell_bad(bad: Sequence[BadRow]) -> str:
    """How many, the first five of them, and what to do."""
    shown = "\n".join(f"  {row.where}: {row.problem}" for row in bad[:5])
    more = f"\n  and {len(bad) - 5} more" if len(bad) > 5 else ""
    return f"{len(bad)} bad row{'s' * (len(bad) > 1)}; correct them, or leave them out with --skip-bad\n{shown}{more}"
