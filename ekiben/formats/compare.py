"""Compare two layers entry by entry."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from ekiben.formats.layer import Entry, LayerEntry, sort_key
from ekiben.formats.squashfs.reader import SquashfsReader


def comparable(entry: Entry) -> tuple[object, ...]:
    """Return the fields by which entries of one path are compared: all but their time."""
    return entry.kind, entry.mode, entry.uid, entry.gid, entry.size, entry.target, entry.xattrs


def layer_differences(before: SquashfsReader, after: SquashfsReader) -> Iterator[str]:
    """Yield a line for each entry in which two layers differ, with its path and the fields that do."""
    one, other = _hashed(before.contents()), _hashed(after.contents())
    left, right = next(one, None), next(other, None)
    while left or right:
        if right is None or (left and sort_key(left[0].path) < sort_key(right[0].path)):
            assert left
            yield f"{left[0].path}: only the first has it"
            left = next(one, None)
        elif left is None or sort_key(right[0].path) < sort_key(left[0].path):
            yield f"{right[0].path}: only the second has it"
            right = next(other, None)
        else:
            if fields := [*_entry_differences(left[0], right[0]), *(["content"] if left[1] != right[1] else [])]:
                yield f"{left[0].path or '/'}: {', '.join(fields)}"
            left, right = next(one, None), next(other, None)


def _hashed(members: Iterator[LayerEntry]) -> Iterator[tuple[Entry, bytes]]:
    return ((entry, hash_chunks(chunks or ())) for entry, chunks in members)


def _entry_differences(one: Entry, other: Entry) -> Iterator[str]:
    for field in ("kind", "mode", "uid", "gid", "mtime", "size", "target", "xattrs"):
        first, second = getattr(one, field), getattr(other, field)
        if first != second:
            yield f"{field} {first:o} → {second:o}" if field == "mode" else f"{field} {first} → {second}"


def hash_chunks(chunks: Iterable[bytes]) -> bytes:
    """Return the SHA-256 of all chunks as 32 bytes."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.digest()
