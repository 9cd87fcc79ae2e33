"""The file system of a base, read as somebody else's bytes: links are followed inside it only, sizes have limits."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass

from ekiben.core.errors import StoreError
from ekiben.formats.layer import Entry
from ekiben.formats.squashfs.reader import SquashfsReader

_MAX_LINKS = 40  # as many as Linux follows
_MAX_TEXT = 4 << 20  # bytes of a file with text
_MAX_ENTRIES = 50_000  # of a folder


@dataclass(frozen=True, slots=True)
class BaseFiles:
    """A base's one layer. Paths begin with "/"; methods raise StoreError for a damaged one."""

    reader: SquashfsReader

    def resolve(self, path: str) -> str | None:
        """Return the path without links that ``path`` leads to, None where nothing is there."""
        done, left = "", _names_of(path)
        for _ in range(_MAX_LINKS):
            while left:
                name = left.pop(0)
                step = posixpath.dirname(done) if name == ".." else posixpath.join(done, name)
                if step and (entry := self.reader.lookup(step)) is None:
                    return None
                if step and entry is not None and entry.kind == "symlink":
                    left = [*_names_of(entry.target), *left]
                    done = "" if entry.target.startswith("/") else done
                    break
                done = step
            else:
                return f"/{done}"
        return None

    def entry(self, path: str) -> Entry | None:
        """Return what ``path`` leads to, None where nothing is there."""
        real = self.resolve(path)
        return self.reader.lookup(real.strip("/")) if real else None

    def is_folder(self, path: str) -> bool:
        """Return whether ``path`` leads to a folder."""
        entry = self.entry(path)
        return entry is not None and entry.kind == "dir"

    def names(self, path: str) -> list[str]:
        """Return the names in a folder, sorted; none where it is no folder."""
        real = self.resolve(path)
        if real is None:
            return []
        entries = self.reader.children(real.strip("/"))
        if len(entries) > _MAX_ENTRIES:
            raise StoreError(f"{path} of the base has {len(entries)} entries, more than the {_MAX_ENTRIES} of a folder")
        return sorted(entry.path.rpartition("/")[2] for entry in entries)

    def read(self, path: str, max_size: int = _MAX_TEXT) -> bytes | None:
        """Return a file's content, None where there is no file. Raises StoreError where it has more bytes."""
        entry = self.entry(path)
        if entry is None or entry.kind not in ("file", "hardlink"):
            return None
        return self.reader.read_file(entry.path, max_size)

    def text(self, path: str) -> str:
        """Return a file's text, "" where there is no file."""
        return (self.read(path) or b"").decode("utf-8", "replace")

    def blocks(self, path: str, size: int = 1 << 20, overlap: int = 64) -> Iterator[bytes]:
        """Yield a file in pieces that overlap; nothing where there is no file."""
        entry = self.entry(path)
        if entry is None or entry.kind not in ("file", "hardlink"):
            return
        file = self.reader.open_file(entry.path)
        for start in range(0, entry.size, size):
            yield file.read_at(start, min(size + overlap, entry.size - start))


def _names_of(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]
