"""A squashfs in a file, or as a part of one: read, copied, and compared with its digest on the way."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
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
    """A thread that hashes the bytes in ``file``: it detects a bad copy as well as a bad source."""

    def __init__(self, file: int, digest: hashlib._Hash | None = None) -> None:
        from concurrent.futures import ThreadPoolExecutor  # imported here: it brings logging with it

        self._file, self._digest, self._buffer = file, digest or hashlib.sha256(), memoryview(bytearray(COPY))
        self._pool: ThreadPoolExecutor = ThreadPoolExecutor(1, thread_name_prefix="sha256")
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> Hasher:
        return self

    def __exit__(self, *failure: object) -> None:
        self._pool.shutdown(cancel_futures=failure[0] is not None)
        if failure[0] is None:
            self._wait_for_all_but(0)

    def take(self, start: int, end: int) -> None:
        """Hash the next bytes.

        Waits while more than _MAX_UNHASHED are not hashed: what it reads should still be in memory.
        """
        for at in range(start, end, COPY):
            self._wait_for_all_but(_MAX_UNHASHED // COPY)
            self._waiting.append(self._pool.submit(self._hash, at, min(COPY, end - at)))

    def _wait_for_all_but(self, count: int) -> None:
        while len(self._waiting) > count:
            self._waiting.popleft().result()

    def digest(self) -> str:
        """Return the digest of the bytes since the last call."""
        self._wait_for_all_but(0)
        digest, self._digest = "sha256:" + self._digest.hexdigest(), hashlib.sha256()
        return digest

    def _hash(self, start: int, count: int) -> None:
        buffer = self._buffer[:count]
        while buffer:
            got = os.preadv(self._file, [buffer], start)
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
) -> None:
    """Copy a partition to the position of ``out`` while the hashers read what was written.

    ``partition_hasher`` hashes this partition alone, and its digest is compared; ``file_hasher`` all of the file.
    Raises StoreError when the digest is not the partition's.
    """
    hashers = [hasher for hasher in (partition_hasher, file_hasher) if hasher]
    start = out.tell()
    with _open(partition.path) as source:
        for done in range(0, partition.size, COPY):
            count = min(COPY, partition.size - done)
            _will_need(source, partition.offset + done + _AHEAD, COPY)
            _copy_range(partition, source, out.fileno(), done, start + done, count)
            for hasher in hashers:
                hasher.take(start + done, start + done + count)
            on_bytes(count)
    if partition_hasher and (digest := partition_hasher.digest()) != partition.digest:
        raise StoreError(f"{partition.path}: should be {partition.digest}, is {digest}", hint=_HINT)


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
