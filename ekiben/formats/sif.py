"""SIF files, written and read without Apptainer: a header, a table of descriptors, then the data they point at.

The first layer is the primary system partition, the others are overlay partitions of the same group (Apptainer leaves
out overlay partitions whose group differs). Where layers above the first one change users or groups, the primary
partition is a small one with these alone, below all layers (see ekiben/formats/users.py). The format:
https://github.com/apptainer/sif/blob/main/pkg/sif/sif.go
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ekiben.core.errors import StoreError
from ekiben.core.files import digest_of, format_size, free_bytes, new_file, open_regular, reason_of
from ekiben.core.inner_path import AnyPath, InnerPath
from ekiben.formats.partition import FULL, Hasher, Partition, copy_partition, read_partition

LAUNCH = b"#!/usr/bin/env run-singularity\n"
MAGIC = b"SIF_MAGIC\0"
VERSION = b"01\0"
HEADER = struct.Struct("<32s10s3s3s16s8q")  # launch, magic, version, arch, id, times, descriptors, data
DESCRIPTOR = struct.Struct("<i?3I3q2q2q128s384s")  # type, used, ids, extent, times, owners, name, extra
PARTITION_EXTRA = struct.Struct("<2i3s")  # file system, partition type, arch
SIGNATURE_EXTRA = struct.Struct("<i256s")  # hash, the signer's fingerprint
SIGNED_HEADER = struct.Struct("<32s10s3s16s")  # fields that signatures cover: launch, magic, version, id
SIGNED_DESCRIPTOR = struct.Struct("<i?2I4q128s384s")  # type, used, ids, size, created, owners, name, extra
DESCRIPTORS_AT = 4096
DESCRIPTOR_COUNT = 48
DATA_AT = DESCRIPTORS_AT + DESCRIPTOR_COUNT * DESCRIPTOR.size
# Partitions are mounted from the file, at page boundaries, which are 64 KiB on some arm64 machines. A partition right
# behind the table would make the kernel read ahead in larger windows at each cold start.
PAGE = 65536

DEFFILE, PARTITION, SIGNATURE = 0x4001, 0x4004, 0x4005
NO_GROUP = 0xF000_0000
GROUP = 0xF000_0001  # group 1, as every SIF of Apptainer has it
SQUASHFS = 1
SQUASHFS_MAGIC = b"hsqs"
PRIMARY, OVERLAY = 2, 4
USERS = "users"  # name of the primary partition that is not a layer
HASHES = {"sha256": 1, "sha384": 2, "sha512": 3}
ARCHITECTURES = {"amd64": b"02\0", "arm64": b"04\0", "ppc64le": b"06\0"}
FS_IOC_RESVSP = 0x40305828  # linux/falloc.h
SPACE = struct.Struct("@2h2qiI16x")  # type, whence, start, length, two unused


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature of a SIF: a clear-signed signed_message(), the signer's fingerprint in hex, its hash algorithm."""

    data: bytes
    fingerprint: str
    hash: str


@dataclass(frozen=True, slots=True)
class Descriptor:
    """One data object of a SIF. ``file_system`` and ``partition_type`` are 0 where it is no partition; ``link`` is 0,
    or the object or group that a signature is of; ``extra`` depends on the type, ``raw`` is all of the descriptor as it
    is in the file.
    """

    number: int
    data_type: int
    group: int
    offset: int
    size: int
    name: str
    file_system: int = 0
    partition_type: int = 0
    link: int = 0
    extra: bytes = b""
    raw: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class SifInfo:
    """The header of a SIF; ``created``: seconds since 1970; ``head``: the bytes of its header."""

    id: str
    arch: str
    created: int
    descriptors: tuple[Descriptor, ...]
    head: bytes = field(default=b"", repr=False)

    @property
    def table_at(self) -> int:
        """Return where the table of descriptors begins."""
        return int(HEADER.unpack(self.head)[9])

    @property
    def layers(self) -> tuple[Descriptor, ...]:
        """Return the squashfs partitions as they are stacked, bottom first."""
        squashfs = [item for item in self.descriptors if item.data_type == PARTITION and item.file_system == SQUASHFS]
        primary = [item for item in squashfs if item.partition_type == PRIMARY]
        return (*primary, *(item for item in squashfs if item.partition_type == OVERLAY))


@dataclass(frozen=True, slots=True)
class SifHeader:
    """The header of a SIF without its layers: a UUID, a definition file, an architecture, a time stamp.

    Equal ids promise equal files. ``arch`` is one of ARCHITECTURES; ``epoch``: seconds since 1970; ``users``: the
    squashfs of users_partition(), or nothing.
    """

    id: str
    deffile: str
    arch: str
    epoch: int
    users: bytes = b""

    @property
    def objects(self) -> tuple[bytes, ...]:
        """Return the data objects before the layers: the definition file, and the users where they are a partition."""
        return self.deffile.encode("utf-8", "surrogateescape"), *([self.users] if self.users else [])


def sif_header(digests: Sequence[str], deffile: str, arch: str, epoch: int, users: bytes = b"") -> SifHeader:
    """Return the header of the SIF with these layers, by their digests."""
    return SifHeader(sif_id([*([digest_of(users)] if users else []), *digests], deffile), deffile, arch, epoch, users)


def sif_id(digests: Sequence[str], deffile: str) -> str:
    """Return the UUID of the SIF with these partitions: equal ids promise equal files."""
    import uuid  # imported here: it brings platform with it

    content = json.dumps(["ekiben sif 2", list(digests), deffile])
    return str(uuid.UUID(bytes=hashlib.sha256(content.encode()).digest()[:16], version=5))


# ---------------------------------------------------------------------------------------------------------- writing


def write_sif(
    out: AnyPath,
    partitions: Sequence[Partition],
    header: SifHeader,
    *,
    on_bytes: Callable[[int], None] = lambda _: None,
    file_hash: hashlib._Hash | None = None,
    signature: Signature | None = None,
) -> None:
    """Write a SIF to ``out`` atomically: see new_sif()."""
    with new_sif(out, partitions, header, on_bytes=on_bytes, file_hash=file_hash, signature=signature):
        pass


@contextlib.contextmanager
def new_sif(
    out: AnyPath,
    partitions: Sequence[Partition],
    header: SifHeader,
    *,
    on_bytes: Callable[[int], None] = lambda _: None,
    file_hash: hashlib._Hash | None = None,
    signature: Signature | None = None,
) -> Iterator[Path]:
    """Write a SIF, yield its path, and replace ``out`` by it when the block ends without an exception.

    Of an InnerPath the path is that of ``out``: nothing opens the file by it.

    ``on_bytes`` is called with the number of bytes that each step copied. ``file_hash`` takes all bytes of the file, in
    order, as they are read back, and is complete when the block has ended. ``signature`` is that of signed_message()
    with the same arguments. Raises StoreError when a partition's bytes are not its digest's, and when ``out`` cannot be
    written.
    """
    most = DESCRIPTOR_COUNT - len(header.objects) - bool(signature)
    if not 0 < len(partitions) <= most:
        raise StoreError(f"{out}: a SIF holds 1 to {most} layers, not {len(partitions)}", hint="use --squash")
    descriptors = lay_out(partitions, header, signature)
    size = descriptors[-1].offset + descriptors[-1].size
    with _new_sif(out, size) as file:
        file.write(leading_bytes(descriptors, header))
        with contextlib.ExitStack() as stack:
            each = stack.enter_context(Hasher(file.fileno()))
            all_of_it = stack.enter_context(Hasher(file.fileno(), file_hash)) if file_hash is not None else None
            end = 0
            for partition, descriptor in zip(partitions, descriptors[len(header.objects) :], strict=False):
                if file.seek(descriptor.offset) > os.fstat(file.fileno()).st_size:
                    file.truncate(descriptor.offset)  # data between the objects is still readable
                if all_of_it:
                    all_of_it.take(end, descriptor.offset)
                copy_partition(
                    *(partition, file, on_bytes, None if partition.is_checked else each, all_of_it),
                    flush=isinstance(out, InnerPath),  # publishing waits for the disk, an export does not
                )
                end = descriptor.offset + descriptor.size
            if signature:
                file.seek(end)
                file.write(signature.data)
                if all_of_it:
                    all_of_it.take(end, size)
            yield Path(str(out) if isinstance(out, InnerPath) else file.name)


def signed_message(partitions: Sequence[Partition], header: SifHeader) -> bytes:
    """Return the text to sign for the SIF that write_sif() would write, before the file exists."""
    table = _head(lay_out(partitions, header), header)
    digests = [*map(digest_of, header.objects), *(item.digest for item in partitions)]
    raw_descriptors = [table[at : at + DESCRIPTOR.size] for at in range(DESCRIPTORS_AT, len(table), DESCRIPTOR.size)]
    objects = [
        {"relativeId": number, "descriptorDigest": digest_of(signed_descriptor(raw, number)), "objectDigest": digest}
        for number, (raw, digest) in enumerate(zip(raw_descriptors, digests, strict=True))
    ]
    message = {"version": 1, "header": {"digest": digest_of(signed_header(table))}, "objects": objects}
    return json.dumps(message, separators=(",", ":")).encode()


def message_of_group(info: SifInfo, group: int, object_digest: Callable[[Descriptor], str]) -> bytes:
    """Return what a signature of a group of a SIF has to sign, whoever made the file."""
    objects = sorted((item for item in info.descriptors if item.group == group), key=lambda item: item.number)
    numbered = [(item.number - objects[0].number, item) for item in objects]
    signed = [
        {
            "relativeId": number,
            "descriptorDigest": digest_of(signed_descriptor(item.raw, number)),
            "objectDigest": object_digest(item),
        }
        for number, item in numbered
    ]
    message = {"version": 1, "header": {"digest": digest_of(signed_header(info.head))}, "objects": signed}
    return json.dumps(message, separators=(",", ":")).encode()


def add_signatures(path: Path, out: Path, signatures: Mapping[int, Signature]) -> None:
    """Write a SIF with further signatures, of these groups, to ``out``, which may be ``path``.

    Raises StoreError when its table of data objects is full, and when ``out`` cannot be written.
    """
    info = read_sif(path)
    try:
        with open_regular(path, 0) as source:
            size = os.fstat(source.fileno()).st_size
            head, table = _with_signatures(path, source, info, size, signatures)
            with _new_sif(out, size + sum(len(item.data) for item in signatures.values())) as file:
                copy_partition(Partition(path, 0, size, ""), file, lambda _: None)
                file.seek(size)
                file.write(b"".join(item.data for item in signatures.values()))
                for at, data in ((0, head), (info.table_at, table)):
                    file.seek(at)
                    file.write(data)
    except struct.error as error:
        raise StoreError(f"{path}: its header is not that of a SIF, and cannot be written again") from error
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def _with_signatures(
    path: Path, source: BinaryIO, info: SifInfo, size: int, signatures: Mapping[int, Signature]
) -> tuple[bytes, bytes]:
    """Return the header and the table of a SIF of ``size`` bytes to which ``signatures`` are appended."""
    *fields, free, total, at, length, data_at, _ = HEADER.unpack(info.head)
    table = _read_table(path, source, total, at, length)
    slots = [number for number, raw in enumerate(table) if not raw[4]]
    if len(slots) < len(signatures):
        raise StoreError(f"{path}: its table of {total} data objects is full", hint="build it again, and sign that")
    number = max((item.number for item in info.descriptors), default=0)
    for slot, (group, signature) in zip(slots, signatures.items(), strict=False):
        number += 1
        item = _signature_descriptor(number, group, size, signature)
        table[slot] = _raw_descriptor(item, item.size, info.created, item.extra)
        size += item.size
    head = _raw_header(*fields, free - len(signatures), total, at, length, data_at, size - data_at)
    return head, b"".join(table)


def signed_header(head: bytes) -> bytes:
    """Return the fields of a header that a signature covers."""
    launch, magic, version, _, id = HEADER.unpack_from(head)[:5]
    return SIGNED_HEADER.pack(launch, magic, version, id)


def signed_descriptor(raw: bytes, relative: int) -> bytes:
    """Return the signed fields of a descriptor; ``relative`` is its number less that of its group's first."""
    data_type, used, _, _, link, _, size, _, created, _, uid, gid, name, extra = DESCRIPTOR.unpack(raw)
    return SIGNED_DESCRIPTOR.pack(data_type, used, relative, link, size, created, uid, gid, name, extra)


class SifBytes:
    """The bytes of the SIF that write_sif() would write, without the file."""

    def __init__(self, partitions: Sequence[Partition], header: SifHeader, signature: Signature | None = None) -> None:
        descriptors = lay_out(partitions, header, signature)
        self._partitions, self._descriptors = partitions, descriptors[len(header.objects) :]
        self._tail = signature.data if signature else b""
        self._head = leading_bytes(descriptors, header)
        self.id, self.size = header.id, descriptors[-1].offset + descriptors[-1].size

    def read(self, offset: int) -> Iterator[bytes]:
        """Yield the bytes from ``offset`` on. Raises StoreError when a partition ends early."""
        if head := self._head[offset:]:
            yield head
        end = len(self._head)
        for partition, descriptor in zip(self._partitions, self._descriptors, strict=False):
            if offset < descriptor.offset:
                yield bytes(descriptor.offset - max(offset, end))
            end = descriptor.offset + descriptor.size
            if offset < end:
                yield from read_partition(partition, max(0, offset - descriptor.offset))
        if tail := self._tail[max(0, offset - end) :]:
            yield tail


def _arch_code(arch: str) -> bytes:
    if arch not in ARCHITECTURES:
        raise StoreError(f"a SIF cannot be made for {arch!r}; known: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[arch]


def lay_out(partitions: Sequence[Partition], header: SifHeader, signature: Signature | None = None) -> list[Descriptor]:
    """Return the data objects of the SIF: where each lies, and its size."""
    definition, *users = map(len, header.objects)
    descriptors = [Descriptor(1, DEFFILE, GROUP, DATA_AT, definition, "")]
    end = DATA_AT + definition
    named = [*((USERS, size) for size in users), *(("", partition.size) for partition in partitions)]
    for number, (name, size) in enumerate(named, 2):
        start = -(-end // PAGE) * PAGE
        partition_type = PRIMARY if number == 2 else OVERLAY
        descriptors.append(Descriptor(number, PARTITION, GROUP, start, size, name, SQUASHFS, partition_type))
        end = start + size
    if signature:
        descriptors.append(_signature_descriptor(len(descriptors) + 1, GROUP, end, signature))
    return descriptors


def _signature_descriptor(number: int, group: int, offset: int, signature: Signature) -> Descriptor:
    extra = SIGNATURE_EXTRA.pack(HASHES[signature.hash], bytes.fromhex(signature.fingerprint))
    return Descriptor(number, SIGNATURE, NO_GROUP, offset, len(signature.data), "", link=group, extra=extra)


def _raw_descriptor(item: Descriptor, padded: int, time: int, extra: bytes) -> bytes:
    """Return a descriptor as it is in a file; ``padded``: its bytes with the gap before it."""
    return DESCRIPTOR.pack(
        *(item.data_type, True, item.number, item.group, item.link, item.offset, item.size, padded),
        *(time, time, 0, 0, item.name.encode(), extra),
    )


def _raw_header(*fields: bytes | int) -> bytes:
    return HEADER.pack(*fields)


def leading_bytes(descriptors: Sequence[Descriptor], header: SifHeader) -> bytes:
    """Return all bytes before the layers."""
    data = _head(descriptors, header)
    for item, content in zip(descriptors, header.objects, strict=False):
        data = data.ljust(item.offset, b"\0") + content
    return data


def _head(descriptors: Sequence[Descriptor], sif_header: SifHeader) -> bytes:
    """Return the file's first bytes: its header and the table of descriptors."""
    import uuid  # late, see sif_id()

    id, arch, epoch = uuid.UUID(sif_header.id).bytes, _arch_code(sif_header.arch), sif_header.epoch
    end = DATA_AT
    table = b""
    for item in descriptors:
        extra = item.extra
        if item.data_type == PARTITION:
            extra = PARTITION_EXTRA.pack(item.file_system, item.partition_type, arch)
        table += _raw_descriptor(item, item.offset + item.size - end, epoch, extra)
        end = item.offset + item.size
    header = _raw_header(
        *(LAUNCH, MAGIC, VERSION, arch, id, epoch, epoch),
        *(DESCRIPTOR_COUNT - len(descriptors), DESCRIPTOR_COUNT, DESCRIPTORS_AT, DATA_AT - DESCRIPTORS_AT),
        *(DATA_AT, end - DATA_AT),
    )
    return header.ljust(DESCRIPTORS_AT, b"\0") + table


@contextlib.contextmanager
def _new_sif(out: AnyPath, size: int) -> Iterator[BinaryIO]:
    """Yield a file of ``size`` bytes to be, that replaces ``out`` at the end. Raises StoreError."""
    try:
        if free_bytes(out.parent) < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        # Executable: a SIF starts with a launch line. No fsync, a third of the time: read_sif detects a file
        # that a power failure truncated, and it is written again.
        new = out.new_file() if isinstance(out, InnerPath) else new_file(out, mode=0o777, obey_umask=True, buffering=0)
        with new as file:
            _reserve(file, size)
            yield file
    except OSError as error:
        hint = "make room, or choose another disk with -o" if error.errno in FULL else None
        raise StoreError(
            f"{out} cannot be written: {reason_of(error, Path(str(out)))}; it needs {format_size(size)}", hint=hint
        ) from error


def _reserve(file: BinaryIO, size: int) -> None:
    """Reserve ``size`` bytes beyond the end of the file, where the file system can; else a full disk shows on writing.

    When a file is renamed over another one, ext4 waits until all blocks without a reservation are written: that took
    half of the time. ioctl: the variant of fallocate(2) that Python can call.
    """
    with contextlib.suppress(OSError):
        fcntl.ioctl(file, FS_IOC_RESVSP, SPACE.pack(0, os.SEEK_SET, 0, size, 0, 0))


# ---------------------------------------------------------------------------------------------------------- reading


def read_sif(path: AnyPath) -> SifInfo:
    """Read a SIF's header and metadata, from its first 32 KiB. Raises StoreError when it is not a complete SIF."""
    import uuid  # late, see sif_id()

    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEADER.size)
            if len(head) != HEADER.size or head[32:42] != MAGIC:
                raise StoreError(f"{path}: not a SIF file")
            fields = HEADER.unpack(head)
            table = _read_table(path, file, *fields[8:11])
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    descriptors = tuple(_descriptor(raw) for raw in table if raw[4])
    for item in descriptors:
        if item.offset < 0 or item.size < 0 or item.offset + item.size > size:
            raise StoreError(f"{path}: truncated: data object {item.number} ends behind the file's {size} bytes")
    arch = next((name for name, code in ARCHITECTURES.items() if code == fields[3]), "unknown")
    return SifInfo(str(uuid.UUID(bytes=fields[4])), arch, fields[5], descriptors, head)


def read_runnable_sif(path: AnyPath) -> SifInfo:
    """Read the header of a SIF, and the first bytes of its partitions, as far as no runtime starts a file that lacks
    them.

    Raises StoreError when it is not a complete SIF, has no primary partition, or one without the file system that it
    should be.
    """
    info = read_sif(path)
    partitions = [item for item in info.descriptors if item.data_type == PARTITION]
    if not any(item.partition_type == PRIMARY for item in partitions):
        raise StoreError(f"{path}: there is no image in this SIF: it has no primary partition")
    try:
        with open_regular(path) as file:
            for item in info.layers:
                if os.pread(file.fileno(), len(SQUASHFS_MAGIC), item.offset) != SQUASHFS_MAGIC:
                    raise StoreError(f"{path}: damaged: data object {item.number} is not a squashfs")
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    return info


def difference(path: AnyPath, partitions: Sequence[Partition], header: SifHeader) -> str:
    """Read all of a SIF and return where it differs from write_sif()'s output, but for signatures; "" when nowhere.

    Raises StoreError when it is not a complete SIF.
    """
    info = read_sif(path)
    layout = lay_out(partitions, header)
    table = _head(layout, header)
    if _fixed_fields(info.head) != _fixed_fields(table[: HEADER.size]):
        return "its header differs"
    objects = [item for item in info.descriptors if item.data_type != SIGNATURE]
    raw_descriptors = [table[at : at + DESCRIPTOR.size] for at in range(DESCRIPTORS_AT, len(table), DESCRIPTOR.size)]
    if [item.raw for item in objects] != raw_descriptors:
        return "its table of data objects differs"
    digests = [*map(digest_of, header.objects), *(item.digest for item in partitions)]
    for item, digest in zip(objects, digests, strict=True):
        sha = hashlib.sha256()
        for data in read_partition(Partition(path, item.offset, item.size, digest)):
            sha.update(data)
        if f"sha256:{sha.hexdigest()}" != digest:
            return f"data object {item.number} is damaged: it should be {digest}, and is sha256:{sha.hexdigest()}"
    return _difference_between(path, info, table)


def _difference_between(path: AnyPath, info: SifInfo, table: bytes) -> str:
    """Return which bytes outside the data objects differ from write_sif()'s output: nobody reads them, but equal files
    are promised.

    Of a signed file only those before the end of the last layer, and not what the signature changes in the header and
    the table.
    """
    objects = [item for item in info.descriptors if item.data_type != SIGNATURE]
    signed = len(objects) < len(info.descriptors)
    fields = slice(8, 12) if signed else slice(6, None)
    if HEADER.unpack(info.head)[fields] != HEADER.unpack(table[: HEADER.size])[fields]:
        return "its header differs"
    spans = [(item.offset, item.offset + item.size) for item in objects]
    gaps = [
        (HEADER.size, DESCRIPTORS_AT),
        *((end, start) for (_, end), (start, _) in itertools.pairwise([(0, DATA_AT), *spans])),
    ]
    if not signed:
        gaps.append((len(table), DATA_AT))
    with open_regular(path) as file:
        for start, end in gaps:
            file.seek(start)
            if any(file.read(max(0, end - start))):
                return f"the bytes from {start} to {end}, which belong to no data object, are not zero"
        size = file.seek(0, os.SEEK_END)
    if not signed and size != spans[-1][1]:
        return f"it has {size} bytes instead of {spans[-1][1]}"
    return ""


def _fixed_fields(head: bytes) -> tuple[bytes | int, ...]:
    """Return the fields of a header that a signature does not change."""
    return HEADER.unpack(head)[:6]


def _read_table(path: AnyPath, file: BinaryIO, total: int, offset: int, length: int) -> list[bytes]:
    if not (0 <= total <= 1 << 16 and 0 < offset < 1 << 40 and length == total * DESCRIPTOR.size):
        raise StoreError(f"{path}: its header is not that of a SIF: {total} descriptors in {length} bytes at {offset}")
    file.seek(offset)
    table = file.read(length)
    if len(table) != length:
        raise StoreError(f"{path}: truncated: {len(table)} of {length} bytes of descriptors at {offset}")
    return [table[start : start + DESCRIPTOR.size] for start in range(0, length, DESCRIPTOR.size)]


def _descriptor(raw: bytes) -> Descriptor:
    data_type, _, number, group, link, offset, size, _, _, _, _, _, name, extra = DESCRIPTOR.unpack(raw)
    file_system, partition_type, _ = PARTITION_EXTRA.unpack_from(extra) if data_type == PARTITION else (0, 0, b"")
    label = name.rstrip(b"\0").decode(errors="replace")
    return Descriptor(number, data_type, group, offset, size, label, file_system, partition_type, link, extra, raw)
