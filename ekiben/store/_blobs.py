"""The blobs of one store: files named by their digest, and layers that lie in other files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from ekiben.core.checked import is_digest
from ekiben.core.errors import CorruptBlob, StoreError
from ekiben.core.files import digest_of, open_regular
from ekiben.core.inner_path import AnyPath, InnerPath
from ekiben.formats.partition import Partition, read_partition
from ekiben.store._staging import StagingArea


class Blobs:
    """``blobs/`` of a store. ``locate`` finds a layer that is a part of another file."""

    def __init__(self, staging: StagingArea, locate: Callable[[str], Partition | None] = lambda digest: None) -> None:
        self.root, self._staging, self._locate = staging.root, staging, locate
        self._just_written: set[str] = set()  # written by the current build, and not yet read back

    def path(self, digest: str) -> InnerPath:
        """Return where the blob is, or would be, as a file of its own.

        Raises StoreError when ``digest`` is not one: it may come from a record that somebody else wrote, and the path
        is opened, renamed to and removed.
        """
        if not is_digest(digest):
            raise StoreError(f"{digest!r:.80} is not a digest: sha256: and 64 hex digits")
        return self.root / "blobs/sha256" / digest.removeprefix("sha256:")

    def find(self, digest: str) -> Partition | None:
        """Return where the blob's bytes are, unchecked."""
        path = self.path(digest)
        try:
            size = path.status().st_size
        except OSError:
            return self._locate(digest)
        return Partition(self._staging.access.readable(path), 0, size, digest)

    def all(self) -> list[tuple[str, os.stat_result]]:
        """Return digest and status of every blob that is a file of its own."""
        blobs = list[tuple[str, os.stat_result]]()
        with (self.root / "blobs/sha256").open_folder() as folder:
            for name in folder.names():
                if is_digest(digest := f"sha256:{name}"):
                    with contextlib.suppress(OSError):
                        blobs.append((digest, folder.status(name)))
        return blobs

    def put(self, data: bytes) -> str:
        """Store small data, replace a damaged blob, and return its digest. Idempotent."""
        digest = digest_of(data)
        stored = None
        with contextlib.suppress(OSError, ValueError):
            stored = self.path(digest).read(max_size=len(data))
        if stored != data:
            self._staging.write(self.path(digest), data)
        return digest

    def put_file(self, path: InnerPath, digest: str) -> None:
        """Take a finished file from staging/ as a blob, its digest just computed. Idempotent."""
        access, deferred = self._staging.access, self._staging.in_background
        path.change(lambda handle: access.apply_permissions(handle, 0o444))
        with access.translated_errors():
            if not deferred:
                path.change(os.fsync)
            path.move(self.path(digest))
        if deferred:
            self._just_written.add(digest)
            self._staging.defer(self._sync_blob, digest)

    def _sync_blob(self, digest: str) -> None:
        """Write a blob to the disk, and only then note it as checked: after a power failure it is read again."""
        path = self.path(digest)
        with self._staging.access.translated_errors():
            path.change(os.fsync)
            self._staging.write(self._memo(digest), identity(path).encode())

    @contextlib.contextmanager
    def trust_written(self) -> Iterator[None]:
        """Let check() trust, inside the block, blobs that were put in it."""
        try:
            yield
        finally:
            self._just_written = set()

    def check(self, digest: str, partition: Partition | None, *, again: bool = False) -> None:
        """Read all of a blob and compare; one unchanged on disk since its last check is read only if ``again``.

        Raises CorruptBlob when its bytes are not its digest's, StoreError when it cannot be read.
        """
        if digest in self._just_written and not again:
            return
        path: AnyPath = partition.path if partition else self.path(digest)
        memo = self._memo(digest)
        try:
            seen = identity(path)
            if not again and _read_or_nothing(memo) == seen.encode():
                return
            import hashlib

            sha = hashlib.sha256()
            for data in read_partition(partition or Partition(path, 0, self.path(digest).status().st_size, digest)):
                sha.update(data)
        except OSError as error:
            raise StoreError(f"blob {digest} cannot be read: {path}: {error.strerror}") from error
        if f"sha256:{sha.hexdigest()}" != digest:
            raise CorruptBlob(digest, path)
        if self.root.is_writable():
            with contextlib.suppress(StoreError):  # a full disk: it is read again
                self._staging.write(memo, seen.encode())

    def drop(self, digest: str) -> None:
        """Remove a blob with what was noted of it."""
        with self._staging.access.translated_errors():
            requirements = self.root / "checks" / f"facts-{digest[7:]}.json"
            for path in (self.path(digest), self._memo(digest), requirements, self._index(digest)):
                path.remove(missing_ok=True)

    def put_index(self, digest: str, index: bytes) -> None:
        """Keep the index of the blocks of a squashfs blob, for its next version."""
        with contextlib.suppress(StoreError):  # a full disk: the next version is compressed
            self._staging.write(self._index(digest), index)

    def index(self, digest: str, max_size: int) -> bytes:
        """Return the index of the blocks of a blob; b"" where there is none."""
        with contextlib.suppress(OSError, ValueError):
            return self._index(digest).read(max_size=max_size)
        return b""

    def _index(self, digest: str) -> InnerPath:
        return self.root / "checks" / f"blocks-{digest[7:]}"

    def _memo(self, digest: str) -> InnerPath:
        return self.root / "checks" / digest[7:]


def _read_or_nothing(path: InnerPath) -> bytes:
    try:
        return path.read()
    except (OSError, ValueError):
        return b""


def identity(path: AnyPath) -> str:
    """Return size, inode and times, which change with the file: its ctime cannot be set back. Raises OSError."""
    with open_regular(path) as file:
        stat = os.fstat(file.fileno())
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"
