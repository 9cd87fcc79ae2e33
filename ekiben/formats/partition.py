"""A squashfs in a file, or as a part of one: read, copied, and compared with its digest on the way."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ekiben.core.errors import StoreError
from ekiben.core.files import open_regular
from ekiben.core.inner_path import AnyPath

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

COPY = 1 << 20
_HASHED = 1 << 24  # bytes hashed at a time: a thread that is busy in Python delays the next piece by up to 5 ms
_FLUSHED = 1 << 26  # bytes after which the disk begins to write a file that is waited for
_FICLONERANGE = 0x4020940D  # linux/fs.h
_AHEAD = 1 << 24  # bytes that the kernel reads ahead of the copy
# Bytes that may wait for the hash: an eighth of the memory, where they should still be when it comes to them.
_MAX_UNHASHED = max(1 << 28, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8)
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True)
class Partition:
    """A squashfs, ``size`` bytes at ``offset`` of ``path``; ``digest`` is theirs: ``sha256:`` and 64 hex digits.

    ``is_checked``: they were compared with it, and the file has not been written to since.
    """

    path: AnyPath
    offset: int
    size: int
    digest: str
    is_checked: bool = False


def read_partition(partition: Partition, start: int = 0) -> Iterator[bytes]:
    """Yield a partition's bytes from ``start`` on. Raises StoreError when it ends early."""
    with _open(partition.path) as source:
        source.seek(partition.offset + start)
        while start < partition.size:
            data = source.read(min(COPY, partition.size - start))
            if not data:
                raise StoreError(f"{partition.path}: ends {partition.size - start} bytes early", hint=_HINT)
            start += len(data)
            yield data


class Hasher:
    """A thread that hashes the bytes in ``file``: it detects a bad copy as well as a bad source.

    Where the file shares the blocks of its source there is no copy, and the source may be read: it is in memory.
    """

    def __init__(self, file: int, digest: hashlib._Hash | None = None) -> None:
        from concurrent.futures import ThreadPoolExecutor  # imported here: it brings logging with it

        self._file, self._digest, self._buffer = file, digest or hashlib.sha256(), memoryview(bytearray(_HASHED))
        self._pool: ThreadPoolExecutor = ThreadPoolExecutor(1, thread_name_prefix="sha256")
        self._waiting: deque[Future[None]] = deque()
        self._handles: list[int] = []

    def __enter__(self) -> Hasher:
        return self

    def __exit__(self, *failure: object) -> None:
        self._pool.shutdown(cancel_futures=failure[0] is not None)
        for handle in self._handles:
            os.close(handle)
        if failure[0] is None:
            self._wait_for_all_but(0)

    def take(self, start: int, end: int, shared: BinaryIO | None = None, offset: int = 0) -> None:
        """Hash the next bytes; those of ``shared`` from ``offset`` on, where the file has the same blocks.

        Waits while more than _MAX_UNHASHED are not hashed: what it reads should still be in memory.
        """
        handle = self._file
        if shared:
            handle = os.dup(shared.fileno())  # the caller may close its file before this is hashed
            self._handles.append(handle)
        for at in range(start, end, _HASHED):
            self._wait_for_all_but(_MAX_UNHASHED // _HASHED)
            position = offset + at - start if shared else at
            self._waiting.append(self._pool.submit(self._hash, handle, position, min(_HASHED, end - at)))

    def _wait_for_all_but(self, count: int) -> None:
        while len(self._waiting) > count:
            self._waiting.popleft().result()

    def digest(self) -> str:
        """Return the digest of the bytes since the last call."""
        self._wait_for_all_but(0)
        digest, self._digest = "sha256:" + self._digest.hexdigest(), hashlib.sha256()
        return digest

    def _hash(self, handle: int, start: int, count: int) -> None:
        buffer = self._buffer[:count]
        while buffer:
            got = os.preadv(handle, [buffer], start)
            if not got:
                raise OSError(errno.EIO, "the written bytes cannot be read back")
            self._digest.update(buffer[:got])
            buffer, start = buffer[got:], start + got


def copy_partition(
    partition: Partition,
    out: BinaryIO,
    on_bytes: Callable[[int], None],
    partition_hasher: Hasher | None = None,
    file_hasher: Hasher | None = None,
    *,
    flush: bool = False,
) -> None:
    """Copy a partition to the position of ``out`` while the hashers read what was written.

    ``partition_hasher`` hashes this partition alone, and its digest is compared; ``file_hasher`` all of the file.
    ``flush``: the caller will wait for the disk, which begins to write at once. Raises StoreError when the digest is
    not the partition's.
    """
    hashers = [hasher for hasher in (partition_hasher, file_hasher) if hasher]
    start, sent = out.tell(), 0
    with _open(partition.path) as source:
        if _share(partition, source, out.fileno(), start):
            shared = source if partition.is_checked else None  # else another user may be writing to the source
            for hasher in hashers:
                hasher.take(start, start + partition.size, shared, partition.offset)
            on_bytes(sent := partition.size)
        for done in range(sent, partition.size, COPY):
            count = min(COPY, partition.size - done)
            _will_need(source, partition.offset + done + _AHEAD, COPY)
            _copy_range(partition, source, out.fileno(), done, start + done, count)
            for hasher in hashers:
                hasher.take(start + done, start + done + count)
            if flush and (done + count - sent >= _FLUSHED or done + count == partition.size):
                start_writing(out, start + sent, done + count - sent)
                sent = done + count
            on_bytes(count)
    if partition_hasher and (digest := partition_hasher.digest()) != partition.digest:
        raise StoreError(f"{partition.path}: should be {partition.digest}, is {digest}", hint=_HINT)


def start_writing(out: BinaryIO, start: int, count: int) -> None:
    """Let the kernel begin to write these bytes to the disk, which is idle otherwise until somebody waits for it."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(out.fileno(), start, count, os.POSIX_FADV_DONTNEED)  # of bytes just written, it drops none


def copy_checked(partition: Partition, to: Path) -> None:
    """Copy a partition to a new file. Raises StoreError when its bytes are not its digest's."""
    with to.open("x+b", buffering=0) as out, Hasher(out.fileno()) as hasher:
        copy_partition(partition, out, lambda count: None, hasher)


_HINT = "the stored layer is damaged: remove it and build again"


def _open(path: AnyPath) -> BinaryIO:
    try:
        return open_regular(path, 0)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def _will_need(source: BinaryIO, start: int, count: int) -> None:
    """Ask the kernel to read ahead: without, copying within the kernel took up to twice as long."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(source.fileno(), start, count, os.POSIX_FADV_WILLNEED)


def _share(partition: Partition, source: BinaryIO, out: int, start: int) -> bool:
    """Let ``out`` have the blocks of the partition from ``start`` on; False where the file system cannot share them."""
    clone_range = array("q", [source.fileno(), partition.offset, partition.size, start])
    try:
        fcntl.ioctl(out, _FICLONERANGE, clone_range.tobytes())
    except OSError as error:
        if error.errno in FULL:
            raise
        return False
    return partition.size > 0  # a length of 0 means all of the source


def _copy_range(partition: Partition, source: BinaryIO, out: int, done: int, start: int, count: int) -> None:
    while count:
        copied = _copy_some(partition, source, out, partition.offset + done, start, count)
        if not copied:
            raise StoreError(f"{partition.path}: ends {partition.size - done} bytes early", hint=_HINT)
        done, start, count = done + copied, start + copied, count - copied


def _copy_some(partition: Partition, source: BinaryIO, out: int, offset: int, start: int, count: int) -> int:
    """Copy within the kernel, which shares blocks where the file system can; elsewhere through memory."""
    try:
        if copied := os.copy_file_range(source.fileno(), out, count, offset, start):
            return copied
    except OSError as error:
        if error.errno in FULL:
            raise
    try:
        data = os.pread(source.fileno(), count, offset)
    except OSError as error:
        raise StoreError(f"{partition.path}: cannot be read: {error.strerror}") from error
    return os.pwrite(out, data, start)
