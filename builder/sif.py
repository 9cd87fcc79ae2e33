"""SIF files, written and read without Apptainer: a header, a table of descriptors, then the data they point at.

The first layer is the primary system partition, the others are overlay partitions of the same group (Apptainer leaves
out overlay partitions whose group differs). The format: https://github.com/apptainer/sif/blob/main/pkg/sif/sif.go
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shlex
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from builder.errors import StoreError
from builder.files import free_bytes

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

LAUNCH = b"#!/usr/bin/env run-singularity\n"
MAGIC = b"SIF_MAGIC\0"
VERSION = b"01\0"
HEADER = struct.Struct("<32s10s3s3s16s8q")  # launch, magic, version, arch, id, times, descriptors, data
DESCRIPTOR = struct.Struct("<i?3I3q2q2q128s384s")  # type, used, ids, extent, times, owners, name, extra
PARTITION_EXTRA = struct.Struct("<2i3s")  # file system, partition type, arch
SIGNATURE_EXTRA = struct.Struct("<i256s")  # hash, the signer's fingerprint
SIGNED_HEADER = struct.Struct("<32s10s3s16s")  # what signatures cover of it: launch, magic, version, id
SIGNED_DESCRIPTOR = struct.Struct("<i?2I4q128s384s")  # type, used, ids, size, created, owners, name, extra
DESCRIPTORS_AT = 4096
DESCRIPTOR_COUNT = 48
DATA_AT = DESCRIPTORS_AT + DESCRIPTOR_COUNT * DESCRIPTOR.size
PAGE = 4096  # partitions are mounted in place
COPY = 1 << 20
_AHEAD = 1 << 24  # bytes: how far ahead of the copy the disk is asked
_BEHIND = 1 << 28  # bytes

DEFFILE, PARTITION, SIGNATURE = 0x4001, 0x4004, 0x4005
NO_GROUP = 0xF000_0000
GROUP = 0xF000_0001  # group 1, as every SIF of Apptainer has it
SQUASHFS = 1
PRIMARY, OVERLAY = 2, 4
HASHES = {"sha256": 1, "sha384": 2, "sha512": 3}
ARCHITECTURES = {"amd64": b"02\0", "arm64": b"04\0", "ppc64le": b"06\0"}
FS_IOC_RESVSP = 0x40305828  # linux/falloc.h
SPACE = struct.Struct("@2h2qiI16x")  # type, whence, start, length, two that nobody reads
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True)
class Partition:
    """A squashfs, ``size`` bytes at ``offset`` of ``path``; ``digest`` is theirs: ``sha256:`` and 64 hex digits.

    ``is_checked``: they were compared with it, and the file has not been written to since.
    """

    path: Path
    offset: int
    size: int
    digest: str
    is_checked: bool = False


@dataclass(frozen=True, slots=True)
class Signature:
    """What becomes a SIF's signature object: a clear-signed message(), by whom (a fingerprint in hex), over which hash."""

    data: bytes
    fingerprint: str
    hash: str


@dataclass(frozen=True, slots=True)
class Descriptor:
    """One piece of a SIF. ``file_system`` and ``part_type`` are 0 where it is no partition; ``link`` is 0, or the object or
    group that a signature is of; ``extra`` is what its kind has to say, ``row`` all of it as it stands in the file.
    """

    number: int
    data_type: int
    group: int
    offset: int
    size: int
    name: str
    file_system: int = 0
    part_type: int = 0
    link: int = 0
    extra: bytes = b""
    row: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class SifInfo:
    id: str
    arch: str
    created: int
    descriptors: tuple[Descriptor, ...]
    head: bytes = field(default=b"", repr=False)

    @property
    def layers(self) -> tuple[Descriptor, ...]:
        """The squashfs partitions as they are stacked, bottom first."""
        squashfs = [item for item in self.descriptors if item.data_type == PARTITION and item.file_system == SQUASHFS]
        primary = [item for item in squashfs if item.part_type == PRIMARY]
        return (*primary, *(item for item in squashfs if item.part_type == OVERLAY))


def sif_id(digests: Sequence[str], deffile: str) -> str:
    """The UUID of the SIF with these partitions: equal ids promise equal files."""
    content = json.dumps(["ekiben sif 1", list(digests), deffile])
    digest = bytearray(hashlib.sha256(content.encode()).digest()[:16])
    digest[6], digest[8] = digest[6] & 0x0F | 0x50, digest[8] & 0x3F | 0x80  # version 5, of RFC 9562's variant
    return _uuid_text(digest)


# Python's uuid asks what machine this is, which takes as long as reading a recipe.
def _uuid_text(data: bytes | bytearray) -> str:
    digits = data.hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _uuid_bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("-", ""))


# ---------------------------------------------------------------------------------------------------------- writing


def write_sif(
    out: Path,
    partitions: Sequence[Partition],
    *,
    id: str,
    deffile: str,
    arch: str,
    epoch: int,
    on_bytes: Callable[[int], None] = lambda _: None,
    whole: hashlib._Hash | None = None,
    signature: Signature | None = None,
) -> None:
    """A SIF at ``out``, there only when it is whole; ``on_bytes`` hears how many bytes each step copied.

    ``whole`` takes all bytes of the file, in order, as they are read back while the rest is copied. ``signature`` is that of
    signed_message() with the same arguments.
    Errors: StoreError for a partition whose bytes are not its digest's, and for a full disk.
    """
    most = DESCRIPTOR_COUNT - 1 - bool(signature)
    if not 0 < len(partitions) <= most:
        raise StoreError(f"{out}: a SIF holds 1 to {most} layers, not {len(partitions)}", hint="make it --flat")
    definition = deffile.encode("utf-8", "surrogateescape")
    descriptors = _lay_out(partitions, definition, signature)
    size = descriptors[-1].offset + descriptors[-1].size
    with _new_file(out, size) as file:
        file.write(_head(descriptors, _uuid_bytes(id), _arch_code(arch), epoch))
        file.seek(descriptors[0].offset)
        file.write(definition)
        with contextlib.ExitStack() as stack:
            each = stack.enter_context(_Hasher(file.fileno()))
            all_of_it = stack.enter_context(_Hasher(file.fileno(), whole)) if whole is not None else None
            end = 0
            for partition, descriptor in zip(partitions, descriptors[1:], strict=False):
                if file.seek(descriptor.offset) > os.fstat(file.fileno()).st_size:
                    file.truncate(descriptor.offset)  # what lies between is there to be read
                if all_of_it:
                    all_of_it.take(end, descriptor.offset)
                copy_partition(partition, file, on_bytes, None if partition.is_checked else each, all_of_it)
                end = descriptor.offset + descriptor.size
            if signature:
                file.seek(end)
                file.write(signature.data)
                if all_of_it:
                    all_of_it.take(end, size)


def signed_message(partitions: Sequence[Partition], *, id: str, deffile: str, arch: str, epoch: int) -> bytes:
    """What a signature of the SIF that write_sif() would write has to sign: known before the file is there."""
    definition = deffile.encode("utf-8", "surrogateescape")
    descriptors = _lay_out(partitions, definition)
    table = _head(descriptors, _uuid_bytes(id), _arch_code(arch), epoch)
    digests = ["sha256:" + hashlib.sha256(definition).hexdigest(), *(item.digest for item in partitions)]
    rows = [table[at : at + DESCRIPTOR.size] for at in range(DESCRIPTORS_AT, len(table), DESCRIPTOR.size)]
    objects = [{"relativeId": number, "descriptorDigest": _sha256(signed_descriptor(row, number)), "objectDigest": digest}
               for number, (row, digest) in enumerate(zip(rows, digests, strict=True))]  # fmt: skip
    message = {"version": 1, "header": {"digest": _sha256(signed_header(table))}, "objects": objects}
    return json.dumps(message, separators=(",", ":")).encode()


def signed_header(head: bytes) -> bytes:
    """The fields of a header that a signature covers."""
    launch, magic, version, _, id = HEADER.unpack_from(head)[:5]
    return SIGNED_HEADER.pack(launch, magic, version, id)


def signed_descriptor(row: bytes, relative: int) -> bytes:
    """The fields of a descriptor that a signature covers; ``relative`` is its number less that of its group's first."""
    data_type, used, _, _, link, _, size, _, created, _, uid, gid, name, extra = DESCRIPTOR.unpack(row)
    return SIGNED_DESCRIPTOR.pack(data_type, used, relative, link, size, created, uid, gid, name, extra)


def _sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


class SifBytes:
    """The bytes of the SIF that write_sif() would write, without the file. ``read(offset)`` gives them from there on."""

    def __init__(
        self, partitions: Sequence[Partition], *, id: str, deffile: str, arch: str, epoch: int, signature: Signature | None = None
    ) -> None:  # fmt: skip
        definition = deffile.encode("utf-8", "surrogateescape")
        self._partitions, self._descriptors = partitions, _lay_out(partitions, definition, signature)
        self._tail = signature.data if signature else b""
        self._head = (
            _head(self._descriptors, _uuid_bytes(id), _arch_code(arch), epoch).ljust(DATA_AT, b"\0") + definition
        )
        self.id, self.size = id, self._descriptors[-1].offset + self._descriptors[-1].size

    def read(self, offset: int) -> Iterator[bytes]:
        """Errors: StoreError when a partition ends early."""
        if head := self._head[offset:]:
            yield head
        end = len(self._head)
        for partition, descriptor in zip(self._partitions, self._descriptors[1:], strict=False):
            if offset < descriptor.offset:
                yield bytes(descriptor.offset - max(offset, end))
            end = descriptor.offset + descriptor.size
            if offset < end:
                yield from read_partition(partition, max(0, offset - descriptor.offset))
        if tail := self._tail[max(0, offset - end) :]:
            yield tail


def read_partition(partition: Partition, start: int = 0) -> Iterator[bytes]:
    """Its bytes from ``start`` on. Errors: StoreError when it ends early."""
    with _opened(partition.path) as source:
        source.seek(partition.offset + start)
        while start < partition.size:
            data = source.read(min(COPY, partition.size - start))
            if not data:
                raise StoreError(f"{partition.path}: ends {partition.size - start} bytes early", hint=_HINT)
            start += len(data)
            yield data


def _arch_code(arch: str) -> bytes:
    if arch not in ARCHITECTURES:
        raise StoreError(f"a SIF cannot be made for {arch!r}; known: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[arch]


def _lay_out(
    partitions: Sequence[Partition], definition: bytes, signature: Signature | None = None
) -> list[Descriptor]:
    descriptors = [Descriptor(1, DEFFILE, GROUP, DATA_AT, len(definition), "")]
    end = DATA_AT + len(definition)
    for number, partition in enumerate(partitions, 2):
        start = -(-end // PAGE) * PAGE
        part_type = PRIMARY if number == 2 else OVERLAY
        descriptors.append(Descriptor(number, PARTITION, GROUP, start, partition.size, "", SQUASHFS, part_type))
        end = start + partition.size
    if signature:
        extra = SIGNATURE_EXTRA.pack(HASHES[signature.hash], bytes.fromhex(signature.fingerprint))
        number, size = len(descriptors) + 1, len(signature.data)
        descriptors.append(Descriptor(number, SIGNATURE, NO_GROUP, end, size, "", link=GROUP, extra=extra))
    return descriptors


def _head(descriptors: Sequence[Descriptor], id: bytes, arch: bytes, epoch: int) -> bytes:
    end = DATA_AT
    table = b""
    for item in descriptors:
        extra = item.extra
        if item.data_type == PARTITION:
            extra = PARTITION_EXTRA.pack(item.file_system, item.part_type, arch)
        padded = item.offset + item.size - end
        table += DESCRIPTOR.pack(
            *(item.data_type, True, item.number, item.group, item.link, item.offset, item.size, padded),
            *(epoch, epoch, 0, 0, item.name.encode(), extra),
        )
        end = item.offset + item.size
    header = HEADER.pack(
        *(LAUNCH, MAGIC, VERSION, arch, id, epoch, epoch),
        *(DESCRIPTOR_COUNT - len(descriptors), DESCRIPTOR_COUNT, DESCRIPTORS_AT, DATA_AT - DESCRIPTORS_AT),
        *(DATA_AT, end - DATA_AT),
    )
    return header.ljust(DESCRIPTORS_AT, b"\0") + table


@contextlib.contextmanager
def _new_file(out: Path, size: int) -> Iterator[BinaryIO]:
    """A temporary file beside ``out`` that takes its name at the end, or is gone."""
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        if free_bytes(out.parent) < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with open(temporary, "x+b", buffering=0, opener=_executable) as file:
            _reserve(file, size)
            yield file
        # No fsync, a third of the time: what a power failure cuts short read_sif finds, and it is made again.
        os.rename(temporary, out)
    except OSError as error:
        hint = "make room, or choose another place with -o" if error.errno in _FULL else None
        raise StoreError(
            f"{out} cannot be written: {error.strerror}; it takes {_gigabytes(size)}", hint=hint
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _reserve(file: BinaryIO, size: int) -> None:
    """Room for ``size`` bytes, beyond the end of the file. Errors: none; where it cannot be had it is found as it is written.

    ext4 waits, when a file takes another one's name, until all of it is on its way to the disk, but for what has its place there:
    that took half of the time. ioctl: fallocate(2)'s other door, which Python can open.
    """
    with contextlib.suppress(OSError):
        fcntl.ioctl(file, FS_IOC_RESVSP, SPACE.pack(0, os.SEEK_SET, 0, size, 0, 0))


def _executable(path: str, flags: int) -> int:
    return os.open(path, flags, 0o777)  # less the umask: a SIF starts with a launch line


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


class _Hasher:
    """A thread that hashes what has arrived in ``file``: a bad copy is found as surely as a bad source."""

    def __init__(self, file: int, digest: hashlib._Hash | None = None) -> None:
        from concurrent.futures import ThreadPoolExecutor  # late: it brings logging with it

        self._file, self._digest, self._buffer = file, digest or hashlib.sha256(), memoryview(bytearray(COPY))
        self._pool: ThreadPoolExecutor = ThreadPoolExecutor(1, thread_name_prefix="sha256")
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> _Hasher:
        return self

    def __exit__(self, *failure: object) -> None:
        self._pool.shutdown(cancel_futures=failure[0] is not None)
        if failure[0] is None:
            self._wait_for_all_but(0)

    def take(self, start: int, end: int) -> None:
        """These bytes come next. Waits while more than _BEHIND of them are not hashed: what it reads should still be in memory."""
        for at in range(start, end, COPY):
            self._wait_for_all_but(_BEHIND // COPY)
            self._waiting.append(self._pool.submit(self._hash, at, min(COPY, end - at)))

    def _wait_for_all_but(self, count: int) -> None:
        while len(self._waiting) > count:
            self._waiting.popleft().result()

    def digest(self) -> str:
        """Of what was taken since the last time."""
        self._wait_for_all_but(0)
        found, self._digest = "sha256:" + self._digest.hexdigest(), hashlib.sha256()
        return found

    def _hash(self, start: int, count: int) -> None:
        buffer = self._buffer[:count]
        while buffer:
            got = os.preadv(self._file, [buffer], start)
            if not got:
                raise OSError(errno.EIO, "what was written cannot be read back")
            self._digest.update(buffer[:got])
            buffer, start = buffer[got:], start + got


def copy_partition(
    partition: Partition, out: BinaryIO, on_bytes: Callable[[int], None],
    own: _Hasher | None = None, whole: _Hasher | None = None,
) -> None:  # fmt: skip
    """Copy to where ``out`` stands, while the hashers follow; the digest of its own one is to be the partition's."""
    hashers = [hasher for hasher in (own, whole) if hasher]
    start = out.tell()
    with _opened(partition.path) as source:
        for done in range(0, partition.size, COPY):
            count = min(COPY, partition.size - done)
            _will_need(source, partition.offset + done + _AHEAD, COPY)
            _copy_range(partition, source, out.fileno(), done, start + done, count)
            for hasher in hashers:
                hasher.take(start + done, start + done + count)
            on_bytes(count)
    if own and (found := own.digest()) != partition.digest:
        raise StoreError(f"{partition.path}: should be {partition.digest}, is {found}", hint=_HINT)


def copy_checked(partition: Partition, to: Path) -> None:
    """As a new file. Errors: StoreError when its bytes are not its digest's."""
    with to.open("x+b", buffering=0) as out, _Hasher(out.fileno()) as own:
        copy_partition(partition, out, lambda count: None, own)


_HINT = "the stored layer is damaged: remove it and build again"


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def _will_need(source: BinaryIO, start: int, count: int) -> None:
    """Of what is not in memory: unasked, copying within the kernel took up to twice as long."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(source.fileno(), start, count, os.POSIX_FADV_WILLNEED)


def _copy_range(partition: Partition, source: BinaryIO, out: int, done: int, start: int, count: int) -> None:
    while count:
        copied = _copy_some(partition, source, out, partition.offset + done, start, count)
        if not copied:
            raise StoreError(f"{partition.path}: ends {partition.size - done} bytes early", hint=_HINT)
        done, start, count = done + copied, start + copied, count - copied


def _copy_some(partition: Partition, source: BinaryIO, out: int, offset: int, start: int, count: int) -> int:
    """In the kernel, which shares the blocks where the file system can; where it can't, through our own hands."""
    try:
        if copied := os.copy_file_range(source.fileno(), out, count, offset, start):
            return copied
    except OSError as error:
        if error.errno in _FULL:
            raise
    try:
        data = os.pread(source.fileno(), count, offset)
    except OSError as error:
        raise StoreError(f"{partition.path}: cannot be read: {error.strerror}") from error
    return os.pwrite(out, data, start)


# ---------------------------------------------------------------------------------------------------------- reading


def read_sif(path: Path) -> SifInfo:
    """What a SIF says about itself, from its first 32 KiB. Errors: StoreError when it is no whole SIF."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEADER.size)
            if len(head) != HEADER.size or head[32:42] != MAGIC:
                raise StoreError(f"{path}: not a SIF file")
            fields = HEADER.unpack(head)
            table = _read_table(path, file, *fields[8:11])
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    descriptors = tuple(_descriptor(row) for row in table if row[4])
    for item in descriptors:
        if item.offset < 0 or item.size < 0 or item.offset + item.size > size:
            raise StoreError(f"{path}: not whole: data object {item.number} ends behind the file's {size} bytes")
    arch = next((name for name, code in ARCHITECTURES.items() if code == fields[3]), "unknown")
    return SifInfo(_uuid_text(fields[4]), arch, fields[5], descriptors, head)


def _read_table(path: Path, file: BinaryIO, total: int, offset: int, length: int) -> list[bytes]:
    if not (0 <= total <= 1 << 16 and 0 < offset < 1 << 40 and length == total * DESCRIPTOR.size):
        raise StoreError(f"{path}: its header does not fit a SIF's: {total} descriptors in {length} bytes at {offset}")
    file.seek(offset)
    table = file.read(length)
    if len(table) != length:
        raise StoreError(f"{path}: not whole: {length} bytes of descriptors wanted at {offset}, {len(table)} there")
    return [table[start : start + DESCRIPTOR.size] for start in range(0, length, DESCRIPTOR.size)]


def _descriptor(row: bytes) -> Descriptor:
    data_type, _, number, group, link, offset, size, _, _, _, _, _, name, extra = DESCRIPTOR.unpack(row)
    file_system, part_type, _ = PARTITION_EXTRA.unpack_from(extra) if data_type == PARTITION else (0, 0, b"")
    said = name.rstrip(b"\0").decode(errors="replace")
    return Descriptor(number, data_type, group, offset, size, said, file_system, part_type, link, extra, row)


# --------------------------------------------------------------------------------------- what runtimes look for inside


def runtime_files(
    environment: Mapping[str, str], runscript: str, test: str, labels: Mapping[str, str], deffile: str
) -> dict[str, tuple[int, bytes]]:
    """/.singularity.d of an image: path → (mode, content). Values of ``environment`` are taken as they stand."""
    exports = "".join(f"export {name}={shlex.quote(_checked(name, value))}\n" for name, value in environment.items())
    scripts = {
        "actions/exec": _ENTER + 'exec "$@"\n',
        "actions/run": _ENTER + 'exec /.singularity.d/runscript "$@"\n',
        "actions/shell": _ENTER + _SHELL,
        "actions/start": "kill -CONT 1\n" + _ENTER,  # the runtime waits for this signal
        "actions/test": _ENTER + 'exec /.singularity.d/test "$@"\n',
        "env/90-environment.sh": exports,
        "env/99-base.sh": _BASE,
        "runscript": runscript,
        "test": test,
    }
    files = {name: (0o755, _script(text)) for name, text in scripts.items()}
    files["labels.json"] = 0o644, json.dumps(dict(labels), indent=1, sort_keys=True).encode() + b"\n"
    files["Singularity"] = 0o644, deffile.encode("utf-8", "surrogateescape")
    return {f".singularity.d/{name}": file for name, file in sorted(files.items())}


def _checked(name: str, value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{name!r} is no name for an environment variable")
    return value


def _script(text: str) -> bytes:
    text = text if text.startswith("#!") else "#!/bin/sh\n" + text
    return (text if text.endswith("\n") else text + "\n").encode("utf-8", "surrogateescape")


_ENTER = """\
for script in /.singularity.d/env/*.sh; do
    if [ -f "$script" ]; then . "$script"; fi
done
"""

_SHELL = """\
for shell in "${SINGULARITY_SHELL:-}" /bin/bash /bin/sh; do
    if [ -x "$shell" ]; then exec "$shell" "$@"; fi
done
echo "this image has no shell" >&2
exit 1
"""

# --nv puts the driver's libraries into /.singularity.d/libs. The other variables carry the
# user's APPTAINERENV_PREPEND_PATH, APPTAINERENV_APPEND_PATH and APPTAINERENV_PATH.
_BASE = """\
LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/.singularity.d/libs"
PATH="${SING_USER_DEFINED_PREPEND_PATH:+$SING_USER_DEFINED_PREPEND_PATH:}$PATH"
PATH="$PATH${SING_USER_DEFINED_APPEND_PATH:+:$SING_USER_DEFINED_APPEND_PATH}"
PATH="${SING_USER_DEFINED_PATH:-$PATH}"
unset SING_USER_DEFINED_PREPEND_PATH SING_USER_DEFINED_APPEND_PATH SING_USER_DEFINED_PATH
export LD_LIBRARY_PATH PATH
"""
