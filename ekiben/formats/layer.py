"""Entries of a layer in canonical order, sent to writers in one pass.

The canonical form is what makes equal layers equal bytes under every executor:

- entries are sorted depth first, names compared as bytes, the root directory ("") first;
- owners are numbers, there are no names, no atime; only permission bits in ``mode``;
- of extended attributes there are those that are content (see ekiben.formats.xattrs), of files and directories;
- a directory's mtime is the epoch, any other entry's is clamped to the epoch;
- a removed path is one ``whiteout`` entry; there are no opaque directories;
- of several names of one file the first in order is the file, the others are ``hardlink`` entries.
"""

from __future__ import annotations

import contextlib
import errno
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

from ekiben.core.checked import MAX_JSON
from ekiben.core.files import digest_of, open_regular

Kind = Literal["dir", "file", "symlink", "hardlink", "fifo", "whiteout"]

Xattrs = tuple[tuple[str, bytes], ...]  # by name, sorted

WHITEOUT_PREFIX = ".wh."  # OCI image spec, "Whiteouts"
CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One path of a layer.

    ``path`` is relative, without leading or trailing slash; "" is the root directory. Bytes that are
    not UTF-8 travel as surrogate escapes. ``target`` is a symlink's text, or a hard link's other path.
    """

    path: str
    kind: Kind
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    size: int = 0
    target: str = ""
    xattrs: Xattrs = ()

    @property
    def order(self) -> tuple[bytes, ...]:
        """Return the sort key of an entry."""
        return sort_key(self.path)


# An entry with its data: an iterator of chunks for a file that has some, else None.
LayerEntry = tuple[Entry, Iterable[bytes] | None]


def sort_key(path: str) -> tuple[bytes, ...]:
    """Return the key that sorts paths depth first, names as bytes: a directory precedes its entries."""
    return tuple(encode_name(name) for name in path.split("/")) if path else ()


def encode_name(name: str) -> bytes:
    """Return a path's bytes: UTF-8, whatever this machine's locale says, for the bytes are what a layer holds."""
    return name.encode("utf-8", "surrogateescape")


def decode_name(name: bytes) -> str:
    """Return a path as text; bytes that are not UTF-8 become surrogate escapes, which encode_name() undoes."""
    return name.decode("utf-8", "surrogateescape")


class LayerWriter(Protocol):
    """Writes a layer: ``add`` an entry, then ``write`` the ``entry.size`` bytes of a file, ``close`` once."""

    def add(self, entry: Entry) -> None:
        """Begin an entry; the content of a file follows by write()."""

    def write(self, chunk: bytes) -> None:
        """Write a part of the file's content."""

    def close(self) -> None:
        """End the layer."""


def write_entries(entries: Iterable[LayerEntry], *writers: LayerWriter) -> None:
    """Send every entry to every writer, reading each byte once, and close the writers.

    Raises OSError of a writer, ValueError when entries are out of order or a file has not its size.
    """
    last: tuple[bytes, ...] | None = None
    for entry, chunks in entries:
        order = entry.order
        if last is not None and order <= last:
            raise ValueError(f"layer entries out of order: {entry.path!r}")
        last = order
        for writer in writers:
            writer.add(entry)
        left = entry.size if entry.kind == "file" else 0
        for chunk in chunks or ():
            left -= len(chunk)
            for writer in writers:
                writer.write(chunk)
        if left:
            raise ValueError(f"{entry.path!r} changed while it was read: {left:+d} bytes of {entry.size} left")
    for writer in writers:
        writer.close()


def read_chunks(read: Callable[[int], bytes], size: int) -> Iterator[bytes]:
    """Yield ``size`` bytes from ``read`` in chunks; end early when the source does."""
    while size > 0:
        chunk = read(min(CHUNK, size))
        if not chunk:
            return
        size -= len(chunk)
        yield chunk


@dataclass(frozen=True, slots=True)
class File:
    """A file that goes into a layer: ``destination`` is absolute; the content is a path on the host or bytes.

    What %files copies has the ``line`` that says so, with the ``target`` it names and the ``name`` of what it copies:
    where the target is a folder of the layers below, it goes into it by that name (see ekiben.formats.placement), which
    then decides about the content when ``name_counts``. ``is_folder``: a folder in which nothing is. ``stage``: the
    build stage that made it. ``real`` is the path without links that was checked: what is read must still lie there.
    """

    destination: str
    mode: int
    source: Path | None = None
    content: bytes = b""
    is_folder: bool = False
    line: int = 0
    target: str = ""
    name: str = ""
    name_counts: bool = False
    stage: str = ""
    real: Path | None = None

    @property
    def size(self) -> int:
        """Return the bytes of its content."""
        return self.source.stat().st_size if self.source else len(self.content)

    def open(self) -> BinaryIO:
        """Open its content for reading.

        Raises OSError, also when it is not a regular file, or lies elsewhere than when it was checked.
        """
        if self.source is None:
            return io.BytesIO(self.content)
        with contextlib.ExitStack() as stack:
            stream = stack.enter_context(open_regular(self.source))
            if self.real is not None and Path(f"/proc/self/fd/{stream.fileno()}").readlink() != self.real:
                raise OSError(errno.ELOOP, f"it no longer points to {self.real}", str(self.source))
            stack.pop_all()
            return stream

    def text(self) -> str:
        """Return its content, a small file of text. Raises OSError."""
        with self.open() as stream:
            return stream.read(MAX_JSON).decode("utf-8", "replace")

    def sha256(self) -> str:
        """Return 64 hex digits. Raises OSError."""
        with self.open() as stream:
            return digest_of(stream).removeprefix("sha256:")
