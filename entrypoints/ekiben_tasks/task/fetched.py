"""Check a model that was fetched from the hub by the record of its files' SHA-256."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ekiben_tasks.task import input_files
from ekiben_tasks.task.errors import TaskError

RECORD = "ekiben-model.json"  # in the model's folder; in the hub's cache beside its snapshots


def check_fetched(path: Path) -> None:
    """Check the files of a model's folder that was fetched, or of a snapshot in the hub's cache, by its record.

    A file is read again where its time is not that of the record. Without a record nothing is checked.

    Raises:
        TaskError: a file is missing, or has other bytes.
    """
    record = find_record(path)
    if not record.is_file():
        return
    content = input_files.read_object(record, "fetch the model again")
    advice = "fetch the model again with --fetch-only"
    changed = {}
    for name, entry in _entries(content, record).items():
        file = path / name
        if not file.is_file():
            raise TaskError(f"{file}: is missing; {advice}")
        status = file.stat()
        if status.st_size != entry.get("bytes"):
            raise TaskError(f"{file}: has {status.st_size:,} bytes, and its record {entry.get('bytes'):,}; {advice}")
        if status.st_mtime_ns != entry.get("mtime_ns"):
            changed[name] = file
    for name, file in changed.items():
        if hash_file(file) != _entries(content, record)[name].get("sha256"):
            raise TaskError(f"{file}: its SHA-256 is not that of its record, so it is damaged; {advice}")


def fetched_commit(folder: Path) -> str | None:
    """Return the commit that the model in ``folder`` was fetched at; None where it was not fetched."""
    try:
        commit = input_files.read_object(folder / RECORD, "")["commit"]
    except (TaskError, OSError, KeyError):
        return None
    return commit if isinstance(commit, str) else None


def find_record(path: Path) -> Path:
    """Return the file of a model's record. A snapshot of the hub's cache may be read-only, and has only links."""
    if path.parent.name == "snapshots":
        return path.parent.parent / "ekiben" / f"{path.name}.json"
    return path / RECORD


def _entries(content: Mapping[str, Any], record: Path) -> dict[str, dict[str, Any]]:
    files = content.get("files")
    if not isinstance(files, dict) or not all(
        isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and name == Path(name).name
        for name, entry in files.items()
    ):
        raise TaskError(f"{record}: is damaged; fetch the model again with --fetch-only")
    return files


def hash_file(file: Path) -> str:
    """Return the SHA-256 of ``file``."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
