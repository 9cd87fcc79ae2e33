"""Rewrite the last layer of a SIF in its file: an edited script costs its bytes, not a copy of all layers.

The file has no name while it is changed: it is renamed aside, and back when it is complete and on the disk. So after a
kill, or a power failure, its name has the old image, the new one, or no file. A write lease (fcntl(2), F_SETLEASE)
keeps others from opening it meanwhile, and is refused while anybody has it open: a running image, above all.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ekiben.core.errors import StoreError
from ekiben.core.files import abandoned_files, open_existing, temporary_name
from ekiben.formats.partition import Partition, read_partition
from ekiben.formats.sif import DEFFILE, Descriptor, SifHeader, SifInfo, lay_out, leading_bytes, read_sif, sif_id

# File systems of one machine, which have leases and rename atomically.
LOCAL = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "tmpfs", "xfs", "zfs"})
MAX_REWRITTEN = 1 << 28  # bytes: the kernel lets others open the file 45 s after they asked
_MARK = "rewrite"


class RewriteRefused(Exception):
    """The file has to be written anew; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A checked SIF at ``path`` whose layers but the last are those of ``partitions``; ``seen``: its state then."""

    path: Path
    partitions: Sequence[Partition]
    header: SifHeader
    seen: tuple[int, ...]

    def run(self) -> None:
        """Make the file the SIF that write_sif() would write.

        Raises RewriteRefused when it is as it was; StoreError when the last layer cannot be read or the file not be
        written: then there is no file.
        """
        layout = lay_out(self.partitions, self.header)
        last = layout[-1]
        new_last = b"".join(read_partition(self.partitions[-1]))
        head = leading_bytes(layout, self.header)
        with _open_alone(self.path, self.seen) as file, _aside(self.path, file) as aside:
            try:
                file.write(head.ljust(layout[len(self.header.objects)].offset, b"\0"))
                file.seek(last.offset)
                file.write(new_last)
                file.truncate(last.offset + last.size)
                os.fdatasync(file.fileno())
            except BaseException as error:
                with contextlib.suppress(OSError):
                    aside.unlink()
                error.add_note(f"{self.path} was being rewritten, and is gone; the same command writes it again")
                raise


def check_rewrite(path: Path, partitions: Sequence[Partition], header: SifHeader, *, is_noted: bool) -> Rewrite:
    """Return the rewriting of the SIF at ``path``; nothing is changed.

    ``is_noted``: its bytes were compared with its header's id, and the file has not changed since. Otherwise the layers
    that stay are read and hashed. Raises RewriteRefused when the file, its file system or its layers do not permit it;
    StoreError, OSError when it cannot be read.
    """
    with _open_writable(path) as file:
        seen = _state(file)
        _refuse_file(file)
        info = read_sif(path)
        layout = lay_out(partitions, header)
        kept = layout[len(header.objects) : -1]
        _refuse_layout(info, kept, layout[-1])
        digests = [item.digest for item in partitions[:-1]]
        if not (is_noted and _old_digests_are(path, info, digests)):
            for item, digest in zip(kept, digests, strict=True):
                if _digest_in(path, item) != digest:
                    raise RewriteRefused(f"its data object {item.number} is another layer")
        if _state(file) != seen:
            raise RewriteRefused("it is being written by another process")
    return Rewrite(path, partitions, header, seen)


def was_killed(path: Path) -> bool:
    """Return whether a killed process had renamed the SIF at ``path`` aside, and no file is there now."""
    return not os.path.lexists(path) and any(f".{_MARK}" in left.name for left in abandoned_files(path))


def _open_writable(path: Path) -> BinaryIO:
    try:
        return open_existing(path)
    except OSError as error:
        raise RewriteRefused(f"it cannot be written: {error.strerror}") from error


def _refuse_file(file: BinaryIO) -> None:
    status = os.fstat(file.fileno())
    if status.st_nlink != 1:
        raise RewriteRefused(f"the file has {status.st_nlink} names (hard links), and all would change")
    if status.st_uid != os.geteuid():
        raise RewriteRefused("the file is another user's")
    kind = _file_system(file)
    if kind not in LOCAL:
        raise RewriteRefused(f"its file system is {kind or 'unknown'}, and others may have it open on other machines")


def _refuse_layout(info: SifInfo, kept: Sequence[Descriptor], last: Descriptor) -> None:
    if not kept:
        raise RewriteRefused("it has one layer alone")
    if last.size > MAX_REWRITTEN:
        raise RewriteRefused(f"its last layer has more than {MAX_REWRITTEN >> 20} MiB")
    old = {(item.offset, item.size, item.partition_type) for item in info.layers}
    if any((item.offset, item.size, item.partition_type) not in old for item in kept):
        raise RewriteRefused("more layers than the last differ")


def _old_digests_are(path: Path, info: SifInfo, digests: Sequence[str]) -> bool:
    """Return whether the id of the SIF at ``path`` promises these digests for its layers but the last.

    The id is the hash of all digests and of the definition file; what differs is small, and read.
    """
    deffile = next((item for item in info.descriptors if item.data_type == DEFFILE), None)
    below = len(info.layers) - 1 - len(digests)  # 1 where the users are a partition
    if deffile is None or deffile.size > 1 << 20 or below not in (0, 1) or info.layers[-1].size > MAX_REWRITTEN:
        return False
    users = [_digest_in(path, item) for item in info.layers[:below]]
    text = b"".join(read_partition(Partition(path, deffile.offset, deffile.size, ""))).decode(
        "utf-8", "surrogateescape"
    )
    return sif_id([*users, *digests, _digest_in(path, info.layers[-1])], text) == info.id


def _digest_in(path: Path, item: Descriptor) -> str:
    sha = hashlib.sha256()
    for data in read_partition(Partition(path, item.offset, item.size, "")):
        sha.update(data)
    return f"sha256:{sha.hexdigest()}"


def _state(file: BinaryIO) -> tuple[int, ...]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _file_system(file: BinaryIO) -> str:
    """Return the type of the file system that the file is on, as /proc/self/mountinfo has it; "" where it has none."""
    number = ""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/self/fdinfo/{file.fileno()}").read_text(encoding="utf-8").splitlines():
            number = line.split()[1] if line.startswith("mnt_id:") else number
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.split()[0] == number:
                return line.split(" - ")[1].split()[0]
    return ""


@contextlib.contextmanager
def _open_alone(path: Path, seen: tuple[int, ...]) -> Iterator[BinaryIO]:
    """Yield the file for writing, with a write lease. Raises RewriteRefused where somebody else has it open."""
    with _open_writable(path) as file:
        if _state(file) != seen:
            raise RewriteRefused("it was changed while the tests ran")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the next command knows whether its writer lives
            # The kernel signals when somebody opens the file; SIGIO, its default, would end this process.
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            raise RewriteRefused("somebody has it open: the image is running") from error
        try:
            yield file
        finally:
            with contextlib.suppress(OSError):
                fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)


@contextlib.contextmanager
def _aside(path: Path, file: BinaryIO) -> Iterator[Path]:
    """Rename the file aside, and back when the block ends without an exception; both are on the disk afterwards.

    Raises RewriteRefused when it is as it was; StoreError for an OSError of the block.
    """
    aside = temporary_name(path, f"{secrets.token_hex(4)}.{_MARK}")
    try:
        os.rename(path, aside)
        status = os.fstat(file.fileno())
        if not os.path.samestat(status, os.lstat(aside)) or status.st_nlink != 1:
            raise RewriteRefused("it was exchanged meanwhile")
        if fcntl.fcntl(file, fcntl.F_GETLEASE) != fcntl.F_WRLCK:
            raise RewriteRefused("somebody opens it: the image is being started")
        _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.rename(aside, path)
        raise
    try:
        yield aside
        os.rename(aside, path)
    except OSError as error:
        raise StoreError(
            f"{path} could not be rewritten, and is gone: {error.strerror}", hint="build it again"
        ) from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
