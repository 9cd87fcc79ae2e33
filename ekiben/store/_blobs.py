"""The blobs of one store: files named by their digest, and layers that lie in other files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ekiben.core.checked import is_digest
from ekiben.core.errors import CorruptBlob, StoreError
from ekiben.core.files import digest_of
from ekiben.core.folder import Folder
from ekiben.formats.partition import Partition, read_partition
from ekiben.store._staging import StagingArea, stat_or_none


class Blobs:
    """``blobs/`` below ``root``. ``locate`` finds a layer that is a part of another file."""

    def __init__(
        self, root: Path, staging: StagingArea, locate: Callable[[str], Partition | None] = lambda digest: None
    ) -> None:
        self.root, self._staging, self._locate = root, staging, locate
        self._just_written: set[str] = set()  # by the build at hand, and not yet checked by reading

    def path(self, digest: str) -> Path:
        """Return where the blob is, or would be, as a file of its own.

        Raises StoreError when ``digest`` is not one: it may come from a record that somebody else wrote, and the path is opened,
        renamed to and removed.
        """
        if not is_digest(digest):
            raise StoreError(f"{digest!r:.80} is not a digest: sha256: and 64 hex digits")
        return self.root / "blobs/sha256" / digest.removeprefix("sha256:")

    def find(self, digest: str) -> Partition | None:
        """Return where the blob's bytes are, unchecked."""
        path = self.path(digest)
        if stat := stat_or_none(path):
            return Partition(path, 0, stat.st_size, digest)
        return self._locate(digest)

    def all(self) -> list[tuple[str, os.stat_result]]:
        """Return digest and stat of every blob that is a file of its own."""
        blobs = ((f"sha256:{path.name}", stat_or_none(path)) for path in sorted((self.root / "blobs/sha256").iterdir()))
        return [(digest, stat) for digest, stat in blobs if stat and is_digest(digest)]

    def put(self, data: bytes) -> str:
        """Store small data, also in the place of a damaged blob, and return its digest. Idempotent."""
        digest = digest_of(data)
        stored = None
        with contextlib.suppress(OSError):
            stored = self.path(digest).read_bytes()
        if stored != data:
            self._staging.write(self.path(digest), data)
        return digest

    def put_file(self, path: Path, digest: str) -> None:
        """Take a finished file from staging/ as a blob, its digest just computed. Idempotent."""
        access, deferred = self._staging.access, self._staging.in_background
        with Folder.open(path.parent) as folder:
            folder.change(path.name, lambda handle: access.apply_permissions(handle, 0o444))
        with access.translated_errors():
            if not deferred:
                _sync(path)
            path.rename(self.path(digest))
        if deferred:
            self._just_written.add(digest)
            self._staging.defer(self._sync_blob, digest)

    def _sync_blob(self, digest: str) -> None:
        """Bring a blob onto the disk, and only then note it as checked: what a power failure cuts short is read again."""
        path = self.path(digest)
        with self._staging.access.translated_errors():
            _sync(path)
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
        path, memo = partition.path if partition else self.path(digest), self._memo(digest)
        try:
            seen = identity(path)
            if not again and memo.exists() and memo.read_bytes() == seen.encode():
                return
            import hashlib

            sha = hashlib.sha256()
            for data in read_partition(partition or Partition(path, 0, path.stat().st_size, digest)):
                sha.update(data)
        except OSError as error:
            raise StoreError(f"blob {digest} cannot be read: {path}: {error.strerror}") from error
        if f"sha256:{sha.hexdigest()}" != digest:
            raise CorruptBlob(digest, path)
        if os.access(self.root, os.W_OK):
            with contextlib.suppress(StoreError):  # a full disk: it is read again
                self._staging.write(memo, seen.encode())

    def drop(self, digest: str) -> None:
        """Remove a blob with what was noted of it."""
        with self._staging.access.translated_errors():
            self.path(digest).unlink(missing_ok=True)
            self._memo(digest).unlink(missing_ok=True)
            (self.root / "checks" / f"facts-{digest[7:]}.json").unlink(missing_ok=True)

    def _memo(self, digest: str) -> Path:
        return self.root / "checks" / digest[7:]


def identity(path: Path) -> str:
    """Return what changes when the file does: whoever sets its mtime back cannot set its ctime. Raises OSError."""
    stat = path.stat()
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _sync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
