"""The OCI form of a layer: an uncompressed pax tar, written, hashed and read."""

from __future__ import annotations

import hashlib
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from ekiben.formats.squashfs.reader import SquashfsReader

from ekiben.formats.layer import CHUNK, WHITEOUT_PREFIX, Entry, Kind, LayerEntry, read_chunks, write_entries
from ekiben.formats.xattrs import content_xattrs, from_pax, to_pax


class TarWriter:
    """Writes the OCI form of a layer, an uncompressed pax tar, by calling ``out`` with its pieces."""

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
        """Begin an entry."""
        self._pad()
        self._put(tar_header(entry))

    def write(self, chunk: bytes) -> None:
        """Write a part of the entry's content."""
        self._put(chunk)

    def close(self) -> None:
        """Write the end of the archive."""
        self._pad()
        self._put(bytes(2 * tarfile.BLOCKSIZE))


def tar_stream(entries: Iterable[LayerEntry]) -> Iterator[bytes]:
    """Yield the tar form of ``entries`` in chunks of at least half a CHUNK, but the last."""
    waiting: list[bytes] = []
    sink = TarWriter(waiting.append)

    def flushed(minimum: int) -> Iterator[bytes]:
        if waiting and sum(map(len, waiting)) >= minimum:
            data = b"".join(waiting)
            waiting.clear()
            yield data

    for entry, chunks in entries:
        sink.add(entry)
        for chunk in chunks or ():
            sink.write(chunk)
            yield from flushed(CHUNK // 2)
        yield from flushed(CHUNK // 2)
    sink.close()
    yield from flushed(1)


class DigestWriter(TarWriter):
    """Hashes the tar form on a thread and keeps nothing; ``diff_id`` and ``size`` are valid after ``close``."""

    def __init__(self) -> None:
        super().__init__(self._take)
        self._hash = hashlib.sha256()
        self._pool: ThreadPoolExecutor | None = None  # threads pay off from two batches on
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
            from concurrent.futures import ThreadPoolExecutor  # imported here: it brings logging with it

            self._pool = ThreadPoolExecutor(1, thread_name_prefix="diff_id")
        self._jobs.append(self._pool.submit(self._update, self._batch))
        self._batch, self._batch_bytes = [], 0
        if len(self._jobs) > 4:
            self._jobs.popleft().result()

    def _update(self, batch: Sequence[bytes]) -> None:
        for data in batch:
            self._hash.update(data)

    def close(self) -> None:
        """Write the end of the archive, and finish its digests."""
        super().close()
        if self._pool:
            self._pool.shutdown()
        self._update(self._batch)

    @property
    def diff_id(self) -> str:
        """Return the digest of the tar, once it is closed."""
        return "sha256:" + self._hash.hexdigest()

    @property
    def size(self) -> int:
        """Return how many bytes of the archive have been written."""
        return self._position


def tar_digest(reader: SquashfsReader, *, without: str | None = None) -> tuple[str, int]:
    """Return the diff_id of a layer and the size of its tar, from its files; ``without`` what is in this folder.

    Raises StoreError when the layer is damaged.
    """
    tar, entries = DigestWriter(), reader.contents()
    if without is not None:
        entries = (item for item in entries if not item[0].path.startswith(f"{without}/"))
    write_entries(entries, tar)
    return tar.diff_id, tar.size


def tar_entries(archive: IO[bytes]) -> Iterator[LayerEntry]:
    """Yield the entries of a layer's tar as tar_stream() wrote it, read once from front to end.

    Raises ValueError for an entry that no layer has.
    """
    with tarfile.open(fileobj=archive, mode="r|", encoding="utf-8", errors="surrogateescape") as tar:
        for info in tar:
            path = "" if info.name in (".", "./") else info.name
            head, _, name = path.rpartition("/")
            kind = next((kind for kind, code in _TAR_TYPES.items() if code == info.type), None)
            if kind is None:
                raise ValueError(f"{path!r} is of a kind that no layer has")
            if name.startswith(WHITEOUT_PREFIX):
                kind, path = "whiteout", f"{head}/{name[len(WHITEOUT_PREFIX) :]}".lstrip("/")
            xattrs = content_xattrs(from_pax(info.pax_headers)) if kind in ("file", "dir") else ()
            entry = Entry(path, kind, info.mode, info.uid, info.gid, int(info.mtime), info.size, info.linkname, xattrs)
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
    """Return the header blocks of one entry."""
    info = tarfile.TarInfo(_whiteout_name(entry.path) if entry.kind == "whiteout" else entry.path or "./")
    info.type = _TAR_TYPES[entry.kind]
    info.mode, info.uid, info.gid, info.mtime = entry.mode, entry.uid, entry.gid, entry.mtime
    info.size = entry.size if entry.kind == "file" else 0
    info.linkname = entry.target
    info.pax_headers = to_pax(entry.xattrs)
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _whiteout_name(path: str) -> str:
    head, _, name = path.rpartition("/")
    return f"{head}/{WHITEOUT_PREFIX}{name}" if head else WHITEOUT_PREFIX + name
