"""What a layer is made of: entries in one canonical order, written to sinks in one pass.

The canonical form is what makes equal layers equal bytes under every executor:

- entries are sorted depth first, names compared as bytes, the root directory ("") first;
- owners are numbers, there are no names, no xattrs, no atime; only permission bits in ``mode``;
- a directory's mtime is the epoch, any other entry's is clamped to the epoch;
- a removed path is one ``whiteout`` entry; there are no opaque directories;
- of several names of one file the first in order is the file, the others are ``hardlink`` entries.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

Kind = Literal["dir", "file", "symlink", "hardlink", "fifo", "whiteout"]

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

    @property
    def order(self) -> tuple[bytes, ...]:
        return sort_key(self.path)


# An entry with its data: an iterator of chunks for a file that has some, else None.
Member = tuple[Entry, Iterable[bytes] | None]


def sort_key(path: str) -> tuple[bytes, ...]:
    """Depth first, names as bytes: a directory comes right before what it holds."""
    return tuple(os.fsencode(part) for part in path.split("/")) if path else ()


class Sink(Protocol):
    """Takes a layer: ``add`` an entry, then ``write`` exactly ``entry.size`` bytes when it is a file, ``close`` once."""

    def add(self, entry: Entry) -> None: ...
    def write(self, chunk: bytes) -> None: ...
    def close(self) -> None: ...


def pour(members: Iterable[Member], *sinks: Sink) -> None:
    """Send every member to every sink, reading each byte once. Errors: OSError of a sink, ValueError on wrong order or size."""
    last: tuple[bytes, ...] | None = None
    for entry, chunks in members:
        order = entry.order
        if last is not None and order <= last:
            raise ValueError(f"layer entries out of order: {entry.path!r}")
        last = order
        for sink in sinks:
            sink.add(entry)
        left = entry.size if entry.kind == "file" else 0
        for chunk in chunks or ():
            left -= len(chunk)
            for sink in sinks:
                sink.write(chunk)
        if left:
            raise ValueError(f"{entry.path!r} changed while it was read: {left:+d} bytes of {entry.size} left")
    for sink in sinks:
        sink.close()


class TarSink:
    """The OCI form of a layer: an uncompressed pax tar, handed to ``out`` piece by piece."""

    def __init__(self, out: Callable[[bytes], object]) -> None:
        self._out = out
        self._position = 0

    def _put(self, data: bytes) -> None:
        self._out(data)
        self._position += len(data)

    def _pad(self) -> None:
        if rest := self._position % tarfile.BLOCKSIZE:
            self._put(bytes(tarfile.BLOCKSIZE - rest))

    def add(self, entry: Entry) -> None:
        self._pad()
        self._put(tar_header(entry))

    def write(self, chunk: bytes) -> None:
        self._put(chunk)

    def close(self) -> None:
        self._pad()
        self._put(bytes(2 * tarfile.BLOCKSIZE))


def tar_stream(members: Iterable[Member]) -> Iterator[bytes]:
    """The tar form of ``members`` as a stream of chunks of at least half a CHUNK, but the last."""
    waiting: list[bytes] = []
    sink = TarSink(waiting.append)

    def flushed(least: int) -> Iterator[bytes]:
        if waiting and sum(map(len, waiting)) >= least:
            data = b"".join(waiting)
            waiting.clear()
            yield data

    for entry, chunks in members:
        sink.add(entry)
        for chunk in chunks or ():
            sink.write(chunk)
            yield from flushed(CHUNK // 2)
        yield from flushed(CHUNK // 2)
    sink.close()
    yield from flushed(1)


class DigestSink(TarSink):
    """Hashes the tar form without keeping it, on a thread of its own; ``diff_id`` and ``size`` are valid after ``close``."""

    def __init__(self) -> None:
        super().__init__(self._take)
        self._hash = hashlib.sha256()
        self._pool: ThreadPoolExecutor | None = None  # where there is more than a batch to hash
        self._jobs: deque[Future[None]] = deque()
        self._batch: list[bytes] = []
        self._batch_bytes = 0

    def _take(self, data: bytes) -> None:
        self._batch.append(data)
        self._batch_bytes += len(data)
        if self._batch_bytes >= CHUNK:
            self._submit()

    def _submit(self) -> None:
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor  # late: it brings logging with it

            self._pool = ThreadPoolExecutor(1, thread_name_prefix="diff_id")
        self._jobs.append(self._pool.submit(self._update, self._batch))
        self._batch, self._batch_bytes = [], 0
        if len(self._jobs) > 4:
            self._jobs.popleft().result()

    def _update(self, batch: Sequence[bytes]) -> None:
        for data in batch:
            self._hash.update(data)

    def close(self) -> None:
        super().close()
        if self._pool:
            self._pool.shutdown()
        self._update(self._batch)

    @property
    def diff_id(self) -> str:
        return "sha256:" + self._hash.hexdigest()

    @property
    def size(self) -> int:
        return self._position


def tar_members(archive: IO[bytes]) -> Iterator[Member]:
    """The members of a layer's tar as tar_stream() wrote it, read once from front to end. Errors: ValueError for any other's."""
    with tarfile.open(fileobj=archive, mode="r|", encoding="utf-8", errors="surrogateescape") as tar:
        for info in tar:
            path = "" if info.name in (".", "./") else info.name
            head, _, name = path.rpartition("/")
            kind = next((kind for kind, code in _TAR_TYPES.items() if code == info.type), None)
            if kind is None:
                raise ValueError(f"{path!r} is of a kind that no layer has")
            if name.startswith(WHITEOUT_PREFIX):
                kind, path = "whiteout", f"{head}/{name[len(WHITEOUT_PREFIX) :]}".lstrip("/")
            entry = Entry(path, kind, info.mode, info.uid, info.gid, int(info.mtime), info.size, info.linkname)
            data = tar.extractfile(info) if kind == "file" and info.size else None
            yield entry, read_chunks(data.read, info.size) if data else None


_TAR_TYPES: dict[Kind, bytes] = {
    "dir": tarfile.DIRTYPE,
    "file": tarfile.REGTYPE,
    "symlink": tarfile.SYMTYPE,
    "hardlink": tarfile.LNKTYPE,
    "fifo": tarfile.FIFOTYPE,
    "whiteout": tarfile.REGTYPE,
}


def tar_header(entry: Entry) -> bytes:
    info = tarfile.TarInfo(_whiteout_name(entry.path) if entry.kind == "whiteout" else entry.path or "./")
    info.type = _TAR_TYPES[entry.kind]
    info.mode, info.uid, info.gid, info.mtime = entry.mode, entry.uid, entry.gid, entry.mtime
    info.size = entry.size if entry.kind == "file" else 0
    info.linkname = entry.target
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _whiteout_name(path: str) -> str:
    head, _, name = path.rpartition("/")
    return f"{head}/{WHITEOUT_PREFIX}{name}" if head else WHITEOUT_PREFIX + name


def read_chunks(read: Callable[[int], bytes], size: int) -> Iterator[bytes]:
    """``size`` bytes from ``read`` in chunks; ends early when the source does."""
    while size > 0:
        chunk = read(min(CHUNK, size))
        if not chunk:
            return
        size -= len(chunk)
        yield chunk
