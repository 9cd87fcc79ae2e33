"""Squashfs 4.0 in Python: how a layer is stored, once.

The OCI tar of a layer is not kept: it is poured again from here, bit for bit. Equal entries give equal bytes, however
many threads compress them. The format: https://dr-emann.github.io/squashfs/ and Linux, fs/squashfs/squashfs_fs.h.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import struct
import threading
from array import array
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import deflate
import zstandard

from builder.errors import StoreError
from builder.layer import Entry, Kind, Member, Sink, pour, sort_key

if TYPE_CHECKING:
    from concurrent.futures import Future

Order = tuple[bytes, ...]
Block = bytes | bytearray | memoryview

MAGIC = 0x73717368
METADATA_SIZE = 8192
# Measured on lora-opencalm's 4.8 GB, with ISA-L's gzip: 0.6 % larger than with 256 KiB, and its packages are imported a fifth sooner
# (a page of a library that is wanted unpacks less that is not); 32 KiB is 1 % larger still and no faster.
BLOCK_SIZE = 1 << 16
ABSENT = 0xFFFF_FFFF_FFFF_FFFF  # a table that is not there
NONE = 0xFFFF_FFFF  # no fragment, no xattr
STORED_BLOCK = 1 << 24  # in a block's size word: not compressed
STORED_METADATA = 1 << 15
PAD = 4096  # loop devices are made of whole pages

DIR, FILE, SYMLINK, BLOCK_DEVICE, CHAR_DEVICE, FIFO, SOCKET = range(1, 8)
EXTENDED = 7  # added to the type of an inode in its long form

FLAG_DUPLICATES, FLAG_NO_XATTRS, FLAG_OPTIONS = 0x40, 0x200, 0x400

SUPERBLOCK = struct.Struct("<5I6H8Q")
INODE = struct.Struct("<4H2I")  # type, mode, uid index, gid index, mtime, inode number
DIR_BODY = struct.Struct("<2I2HI")  # listing start, nlink, listing size + 3, listing offset, parent
LONG_DIR_BODY = struct.Struct("<4I2HI")  # nlink, size + 3, start, parent, index count, offset, xattr
FILE_BODY = struct.Struct("<4I")  # start, fragment, offset in fragment, size
LONG_FILE_BODY = struct.Struct("<3Q4I")  # start, size, sparse bytes, nlink, fragment, offset, xattr
PAIR = struct.Struct("<2I")
WORD = struct.Struct("<I")
HALF = struct.Struct("<H")
LIST_HEAD = struct.Struct("<3I")  # entries - 1, their inodes' metadata block, base inode number
LIST_ENTRY = struct.Struct("<HhHH")  # inode offset, inode number - base, type, name length - 1
LIST_INDEX = struct.Struct("<3I")  # offset in listing, metadata block, name length - 1
FRAGMENT = struct.Struct("<Q2I")  # position, size word, unused

EARLY = 32 << 20  # bytes after which what is written begins to go to the disk
BATCH = 1 << 20  # bytes handed to a worker at once: large enough that a job's Python cost does not show
CACHED_FRAGMENTS = 16
CACHED_METADATA = 1024

COMPRESSIONS = {1: "gzip", 2: "lzma", 3: "lzo", 4: "xz", 5: "lz4", 6: "zstd"}
GZIP, ZSTD = 1, 6
# What we write: SingularityCE runs nothing that is compressed with zstd, and every kernel reads this. libdeflate's, since its bytes
# are no matter of the processor; level 2 would be 1 % smaller and take a fifth longer.
_LEVEL = 1
_SAMPLE = 4096  # bytes of a block that tell whether it is worth compressing
_TYPES: dict[Kind, int] = {"dir": DIR, "file": FILE, "symlink": SYMLINK, "fifo": FIFO, "whiteout": CHAR_DEVICE}
_KINDS: dict[int, Kind] = {DIR: "dir", FILE: "file", SYMLINK: "symlink", FIFO: "fifo", CHAR_DEVICE: "whiteout"}


def _usable_cores() -> int:
    return min(len(os.sched_getaffinity(0)), 16)


# ---------------------------------------------------------------------------------------------------------- writing


@dataclass(slots=True, eq=False)
class _Inode:
    entry: Entry
    parent: _Inode | None
    number: int
    nlink: int = 1
    start: int = 0
    sizes: array[int] | None = None  # size words of a file's blocks, 0 for a hole
    fragment: int = NONE
    offset: int = 0
    reference: int = 0  # metadata block << 16 | offset in it
    names: list[bytes] | None = None  # a directory's, with `children` beside it
    children: list[_Inode] | None = None


def _compress(block: Block) -> bytes | bytearray:
    return deflate.zlib_compress(block, _LEVEL)


def _is_dense(block: Block) -> bool:
    """Whether a block is not worth compressing, by what lies in its middle. GPU code is compressed already: trying all of it
    takes half the time that a PyTorch layer's compression takes, to gain 0.3 %."""
    start = (len(block) - _SAMPLE) // 2
    return start > 0 and len(_compress(block[start : start + _SAMPLE])) > _SAMPLE * 0.95


class _BlockWriter:
    """Compresses blocks on threads and writes them in the order they came; memory is bounded by jobs in flight."""

    def __init__(self, out: BinaryIO, block_size: int, threads: int) -> None:
        from concurrent.futures import ThreadPoolExecutor  # late: it brings logging with it

        self._out = out
        self._block_size = block_size
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="squashfs")
        self._in_flight = 2 * threads + 1
        self._jobs: deque[tuple[list[_Inode | None], Future[list[tuple[int, Block]]]]] = deque()
        self._owners: list[_Inode | None] = []
        self._batch: list[Block] = []
        self._batch_bytes = 0
        self._stored: dict[tuple[int, bytes], list[int]] = {}
        self.position = self._sent = out.tell()
        self.fragments: list[tuple[int, int]] = []

    def put(self, owner: _Inode | None, block: Block) -> None:
        """One block of a file; of no owner: a fragment block. An empty block is a hole."""
        self._owners.append(owner)
        self._batch.append(block)
        self._batch_bytes += len(block)
        if self._batch_bytes >= BATCH:
            self._submit()

    def _submit(self) -> None:
        self._jobs.append((self._owners, self._pool.submit(self._compress_all, self._batch)))
        self._owners, self._batch, self._batch_bytes = [], [], 0
        while self._jobs and (len(self._jobs) > self._in_flight or self._jobs[0][1].done()):
            self._land()

    def _compress_all(self, blocks: list[Block]) -> list[tuple[int, Block]]:
        packed: list[tuple[int, Block]] = []
        for block in blocks:
            data = block if not block or _is_dense(block) else _compress(block)
            is_smaller = not block or len(data) < len(block)
            packed.append((len(data), data) if is_smaller else (len(block) | STORED_BLOCK, block))
        return packed

    def _land(self) -> None:
        owners, job = self._jobs.popleft()
        for owner, (word, data) in zip(owners, job.result(), strict=True):
            if owner is None:
                self.fragments.append((self.position, word))
            else:
                self._claim(owner, word)
            self._out.write(data)
            self.position += len(data)
            if owner is not None:
                self._deduplicate(owner)
        if self.position - self._sent >= EARLY:
            self._send()

    def _send(self) -> None:
        """The disk is idle while we compress; who mounts the file or waits for it to be stored would have to wait for all of it."""
        self._out.flush()
        # To be read no more, says this; what it does to bytes just written is to begin writing them out.
        os.posix_fadvise(self._out.fileno(), self._sent, self.position - self._sent, os.POSIX_FADV_DONTNEED)
        self._sent = self.position

    def _claim(self, owner: _Inode, word: int) -> None:
        if owner.sizes is None:
            owner.start, owner.sizes = self.position, array("I")
        owner.sizes.append(word)

    def _deduplicate(self, inode: _Inode) -> None:
        """Take a whole file's blocks back when an earlier one has the same: equal sizes, then equal stored bytes."""
        assert inode.sizes is not None
        if len(inode.sizes) * self._block_size < inode.entry.size:
            return
        length = self.position - inode.start
        if not length:
            return
        starts = self._stored.setdefault((inode.entry.size, inode.sizes.tobytes()), [])
        earlier = next((start for start in starts if self._same(start, inode.start, length)), None)
        if earlier is None:
            starts.append(inode.start)
        else:
            inode.start, self.position = earlier, inode.start
        self._out.seek(self.position)

    def _same(self, one: int, other: int, length: int) -> bool:
        done, size = 0, min(4096, length)  # most that differ do so at once
        while done < length and self._read(one + done, size) == self._read(other + done, size):
            done, size = done + size, min(BATCH, length - done - size)
        return done == length

    def _read(self, position: int, size: int) -> bytes:
        self._out.seek(position)
        return self._out.read(size)

    def close(self) -> None:
        if self._batch:
            self._submit()
        while self._jobs:
            self._land()
        self._pool.shutdown()


class _MetadataWriter:
    """A run of metadata blocks: 8 KiB each before compression."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._blocks = bytearray()
        self._starts: list[int] = []

    @property
    def position(self) -> tuple[int, int]:
        """Where the next byte goes: start of its block, offset in it."""
        return len(self._blocks), len(self._pending)

    def put(self, data: bytes) -> None:
        self._pending += data
        while len(self._pending) >= METADATA_SIZE:
            self._flush(bytes(self._pending[:METADATA_SIZE]))
            del self._pending[:METADATA_SIZE]

    def _flush(self, block: bytes) -> None:
        self._starts.append(len(self._blocks))
        packed = _compress(block)
        if len(packed) < len(block):
            self._blocks += HALF.pack(len(packed)) + packed
        else:
            self._blocks += HALF.pack(len(block) | STORED_METADATA) + block

    def finish(self) -> tuple[bytearray, list[int]]:
        """The blocks, and where each starts."""
        if self._pending:
            self._flush(bytes(self._pending))
        return self._blocks, self._starts


class SquashfsWriter:
    """A layer sink that writes squashfs to ``out``, an empty file open for writing and reading (``w+b``).

    Entries come in canonical order. Errors: StoreError for what squashfs cannot hold, ValueError for a wrong order or
    size.
    """

    def __init__(
        self,
        out: BinaryIO,
        *,
        block_size: int = BLOCK_SIZE,
        threads: int | None = None,
        epoch: int = 0,
    ) -> None:
        if not (out.readable() and out.seekable()):
            raise ValueError("a squashfs is written to a file open for reading too (w+b)")
        if block_size not in _block_sizes():
            raise ValueError(f"squashfs block size {block_size}: must be a power of two from 4096 to 1048576")
        self._out = out
        self._block_size = block_size
        self._epoch = epoch
        options = struct.pack("<IHH", _LEVEL, 15, 0)  # level, bits of the window, its default strategy
        out.write(bytes(SUPERBLOCK.size) + HALF.pack(len(options) | STORED_METADATA) + options)
        self._blocks = _BlockWriter(out, block_size, threads or _usable_cores())
        self._ids: dict[int, int] = {}
        self._inodes: list[_Inode] = []
        self._open: list[_Inode] = []  # the directories from the root to the last entry's
        self._file: _Inode | None = None
        self._left = 0
        self._small = False
        self._partial = bytearray()
        self._fragment = bytearray()
        self._fragments = 0
        self._packed: dict[bytes, _Inode] = {}  # small files by digest

    # -- entries

    def add(self, entry: Entry) -> None:
        self._check_complete()
        parent = self._enter(entry)
        inode = self._hard_link(entry) if entry.kind == "hardlink" else self._new_inode(entry, parent)
        if parent is not None:
            self._name(parent, entry, inode)
        if entry.kind == "dir":
            self._open.append(inode)
        elif entry.kind == "file" and entry.size:
            self._begin(inode)

    def _enter(self, entry: Entry) -> _Inode | None:
        if not entry.path:
            if self._inodes or entry.kind != "dir":
                raise ValueError("a layer starts with its root directory, once")
            return None
        parent = entry.path.rpartition("/")[0]
        while self._open and self._open[-1].entry.path != parent:
            self._open.pop()
        if not self._open:
            raise ValueError(f"layer entry {entry.path!r} comes without its directory")
        return self._open[-1]

    def _new_inode(self, entry: Entry, parent: _Inode | None) -> _Inode:
        if not (0 <= entry.mtime < 1 << 32):
            raise StoreError(f"{entry.path!r}: squashfs cannot hold the modification time {entry.mtime}")
        inode = _Inode(entry, parent, len(self._inodes) + 1)
        if entry.kind == "dir":
            inode.names, inode.children, inode.nlink = [], [], 2
            if parent is not None:
                parent.nlink += 1
        for owner in (entry.uid, entry.gid):
            self._ids.setdefault(owner, len(self._ids))
        self._inodes.append(inode)
        return inode

    def _name(self, parent: _Inode, entry: Entry, inode: _Inode) -> None:
        assert parent.names is not None and parent.children is not None
        name = os.fsencode(entry.path.rpartition("/")[2])
        if parent.names and name <= parent.names[-1]:
            raise ValueError(f"layer entries out of order: {entry.path!r}")
        if not 0 < len(name) < 256:
            raise StoreError(f"{entry.path!r}: a file name has at most 255 bytes, this one {len(name)}")
        parent.names.append(name)
        parent.children.append(inode)

    def _hard_link(self, entry: Entry) -> _Inode:
        inode = self._inodes[0]
        for name in sort_key(entry.target):
            names, children = inode.names or [], inode.children or []
            place = bisect_left(names, name)
            if place == len(names) or names[place] != name:
                raise ValueError(f"hard link {entry.path!r} to {entry.target!r}, which did not come before it")
            inode = children[place]
        if inode.names is not None:
            raise ValueError(f"hard link {entry.path!r} to the directory {entry.target!r}")
        inode.nlink += 1
        return inode

    # -- data

    def _begin(self, inode: _Inode) -> None:
        self._file, self._left = inode, inode.entry.size
        self._small = self._left < self._block_size
        if self._small:
            if len(self._fragment) + self._left > self._block_size:
                self._flush_fragment()
            inode.fragment, inode.offset = self._fragments, len(self._fragment)

    def write(self, chunk: bytes) -> None:
        self._left -= len(chunk)
        if self._left < 0 or self._file is None:
            raise ValueError(f"more data than {self._file.entry.path if self._file else 'an entry'!r} announced")
        if self._small:
            self._fragment += chunk
            if not self._left:
                self._pack(self._file)
        else:
            self._split(self._file, memoryview(chunk))
        if not self._left:
            self._file = None

    def _pack(self, inode: _Inode) -> None:
        """A small file that came before is not kept twice."""
        digest = hashlib.sha256(memoryview(self._fragment)[inode.offset :]).digest()
        earlier = self._packed.setdefault(digest, inode)
        if earlier is not inode:
            del self._fragment[inode.offset :]
            inode.fragment, inode.offset = earlier.fragment, earlier.offset

    def _split(self, inode: _Inode, data: memoryview) -> None:
        if self._partial:
            missing = self._block_size - len(self._partial)
            self._partial += data[:missing]
            data = data[missing:]
            if len(self._partial) == self._block_size:
                self._put_partial(inode)
        while len(data) >= self._block_size:
            block, data = data[: self._block_size], data[self._block_size :]
            self._blocks.put(inode, b"" if _is_zero(block) else block)
        self._partial += data
        if self._partial and not self._left:
            self._put_partial(inode)

    def _put_partial(self, inode: _Inode) -> None:
        self._blocks.put(inode, b"" if _is_zero(self._partial) else self._partial)
        self._partial = bytearray()

    def _flush_fragment(self) -> None:
        if self._fragment:
            self._blocks.put(None, self._fragment)
            self._fragment = bytearray()
            self._fragments += 1

    def _check_complete(self) -> None:
        if self._file is not None:
            raise ValueError(f"{self._file.entry.path!r}: {self._left} bytes of {self._file.entry.size} are missing")

    # -- tables

    def close(self) -> None:
        self._check_complete()
        if not self._inodes:
            raise ValueError("a layer has at least its root directory")
        if len(self._ids) > 0xFFFF:
            raise StoreError(f"{len(self._ids)} different owners; squashfs holds 65535")
        self._flush_fragment()
        self._blocks.close()
        inodes, listings = self._write_inodes()
        self._write_tables(inodes, listings)

    def _write_inodes(self) -> tuple[_MetadataWriter, _MetadataWriter]:
        """A directory's inode comes after all it holds, since its listing says where their inodes are."""
        inodes, listings = _MetadataWriter(), _MetadataWriter()
        opened: list[_Inode] = []
        for inode in self._inodes:
            while opened and opened[-1] is not inode.parent:
                last = opened.pop()
                _place(inodes, last, self._directory(last, listings))
            if inode.entry.kind == "dir":
                opened.append(inode)
            else:
                _place(inodes, inode, self._leaf(inode))
        for last in reversed(opened):
            _place(inodes, last, self._directory(last, listings))
        return inodes, listings

    def _head(self, inode: _Inode, extended: bool) -> bytes:
        entry = inode.entry
        kind = _TYPES[entry.kind] + (EXTENDED if extended else 0)
        uid, gid = self._ids[entry.uid], self._ids[entry.gid]
        return INODE.pack(kind, entry.mode & 0o7777, uid, gid, entry.mtime, inode.number)

    def _leaf(self, inode: _Inode) -> bytes:
        kind = inode.entry.kind
        if kind == "file":
            return self._regular(inode)
        body = WORD.pack(inode.nlink)
        if kind == "symlink":
            target = os.fsencode(inode.entry.target)
            body += WORD.pack(len(target)) + target
        elif kind == "whiteout":
            body += WORD.pack(0)  # device 0:0
        return self._head(inode, extended=False) + body

    def _regular(self, inode: _Inode) -> bytes:
        size, sizes = inode.entry.size, inode.sizes or array("I")
        words = struct.pack(f"<{len(sizes)}I", *sizes)
        holes = self._holes(sizes, size)
        if inode.nlink == 1 and not holes and max(size, inode.start) < 1 << 32:
            return self._head(inode, False) + FILE_BODY.pack(inode.start, inode.fragment, inode.offset, size) + words
        body = LONG_FILE_BODY.pack(inode.start, size, holes, inode.nlink, inode.fragment, inode.offset, NONE)
        return self._head(inode, True) + body + words

    def _holes(self, sizes: array[int], size: int) -> int:
        holes = sizes.count(0) * self._block_size
        if holes and not sizes[-1]:
            holes -= -size % self._block_size  # the last block may be short
        return holes

    def _directory(self, inode: _Inode, listings: _MetadataWriter) -> bytes:
        start, offset = listings.position
        size, index = _put_listing(inode, listings)
        parent = inode.parent.number if inode.parent else len(self._inodes) + 1
        size += 3  # "." and "..", which are not stored
        if size <= 0xFFFF and not index:
            return self._head(inode, False) + DIR_BODY.pack(start, inode.nlink, size, offset, parent)
        body = LONG_DIR_BODY.pack(inode.nlink, size, start, parent, len(index), offset, NONE)
        return self._head(inode, True) + body + b"".join(index)

    def _write_tables(self, inodes: _MetadataWriter, listings: _MetadataWriter) -> None:
        position = self._blocks.position
        parts: list[bytes] = []

        def place(data: bytes) -> int:
            nonlocal position
            parts.append(data)
            position += len(data)
            return position - len(data)

        def place_table(data: bytes) -> int:
            blocks = _MetadataWriter()
            blocks.put(data)
            packed, starts = blocks.finish()
            base = place(bytes(packed))
            return place(struct.pack(f"<{len(starts)}Q", *(base + start for start in starts)))

        inode_table = place(bytes(inodes.finish()[0]))
        directory_table = place(bytes(listings.finish()[0]))
        fragments = self._blocks.fragments
        fragment_table = place_table(b"".join(FRAGMENT.pack(start, word, 0) for start, word in fragments))
        id_table = place_table(struct.pack(f"<{len(self._ids)}I", *self._ids))
        superblock = SUPERBLOCK.pack(
            *(MAGIC, len(self._inodes), self._epoch, self._block_size, len(fragments)),
            *(GZIP, self._block_size.bit_length() - 1),
            *(FLAG_DUPLICATES | FLAG_NO_XATTRS | FLAG_OPTIONS, len(self._ids), 4, 0),
            *(self._inodes[0].reference, position, id_table, ABSENT),
            *(inode_table, directory_table, fragment_table, ABSENT),
        )
        self._out.seek(self._blocks.position)
        self._out.write(b"".join(parts) + bytes(-position % PAD))
        self._out.truncate()  # what deduplication took back may reach further
        self._out.seek(0)
        self._out.write(superblock)
        self._out.flush()


def _block_sizes() -> tuple[int, ...]:
    return tuple(1 << bits for bits in range(12, 21))


def _is_zero(block: Block) -> bool:
    return not block[0] and not block[-1] and bytes(block) == bytes(len(block))


def _place(inodes: _MetadataWriter, inode: _Inode, data: bytes) -> None:
    start, offset = inodes.position
    inode.reference = start << 16 | offset
    inodes.put(data)


def _put_listing(inode: _Inode, listings: _MetadataWriter) -> tuple[int, list[bytes]]:
    """Write a directory's listing. Its size, and the index the kernel uses to skip into a long one."""
    assert inode.names is not None and inode.children is not None
    size, index = 0, []
    last_block = listings.position[0]
    for first, end in _runs(inode.children):
        block = listings.position[0]
        if block != last_block:
            name = inode.names[first]
            index.append(LIST_INDEX.pack(size, block, len(name) - 1) + name)
            last_block = block
        run = _encode_run(inode.names[first:end], inode.children[first:end])
        listings.put(run)
        size += len(run)
    return size, index


def _runs(children: list[_Inode]) -> Iterator[tuple[int, int]]:
    """Up to 256 children under one header: inodes in one metadata block, inode numbers within 16 bits."""
    first = 0
    while first < len(children):
        block, base = children[first].reference >> 16, children[first].number
        end = first + 1
        while end < len(children) and end - first < 256:
            child = children[end]
            if child.reference >> 16 != block or not -0x8000 <= child.number - base <= 0x7FFF:
                break
            end += 1
        yield first, end
        first = end


def _encode_run(names: list[bytes], children: list[_Inode]) -> bytes:
    block, base = children[0].reference >> 16, children[0].number
    parts = [LIST_HEAD.pack(len(children) - 1, block, base)]
    for name, child in zip(names, children, strict=True):
        kind = _TYPES[child.entry.kind]
        parts.append(LIST_ENTRY.pack(child.reference & 0xFFFF, child.number - base, kind, len(name) - 1) + name)
    return b"".join(parts)


# ---------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class _Stored:
    """An inode as read. ``start`` and ``offset``: of a file's blocks and tail, or of a directory's listing."""

    kind: int
    mode: int
    uid: int
    gid: int
    mtime: int
    number: int
    nlink: int = 1
    size: int = 0
    start: int = 0
    fragment: int = NONE
    offset: int = 0
    sizes: tuple[int, ...] = ()
    target: bytes = b""
    device: int = 0

    @property
    def is_kept(self) -> bool:
        """Devices other than the whiteout and sockets are no part of a layer."""
        return self.kind in _KINDS and not self.device


@dataclass(frozen=True, slots=True)
class _Found:
    """A path of an image, before hard links are told apart."""

    order: Order
    path: str
    inode: _Stored
    reader: SquashfsReader


@dataclass(frozen=True, slots=True)
class _Load:
    """One stored block to read and decompress; a fragment block is kept under its key for the cuts that follow."""

    reader: SquashfsReader
    position: int
    word: int
    size: int
    key: tuple[int, int] | None = None
    evict: tuple[int, int] | None = None

    def run(self) -> bytes:
        return self.reader.read_block(self.position, self.word, self.size, exact=self.key is None)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A small file out of a fragment block that was loaded before."""

    reader: SquashfsReader
    key: tuple[int, int]
    offset: int
    size: int

    def of(self, fragment: bytes) -> bytes:
        data = fragment[self.offset : self.offset + self.size]
        if len(data) != self.size:
            raise self.reader.damaged(f"fragment {self.key[1]} holds no {self.size} bytes at {self.offset}")
        return data


def compression(path: Path, offset: int = 0) -> str | None:
    """Of the squashfs there. Errors: OSError."""
    with path.open("rb") as file:
        found = os.pread(file.fileno(), 22, offset)
    return COMPRESSIONS.get(int.from_bytes(found[20:], "little"))


class SquashfsReader:
    """Reads the squashfs that starts at ``offset`` of ``file``, ours or mksquashfs' (zstd, gzip; xattrs are ignored).

    Devices other than whiteouts, and sockets, are passed over. Errors: StoreError that says what is damaged and where.
    """

    def __init__(self, file: BinaryIO, offset: int = 0) -> None:
        self._descriptor = file.fileno()
        self._offset = offset
        self._name = str(getattr(file, "name", "squashfs"))
        self._file = file  # keeps the descriptor open
        self._metadata: dict[int, tuple[bytes, int]] = {}
        self._contexts = threading.local()
        fields = SUPERBLOCK.unpack(self._read(0, SUPERBLOCK.size))
        magic, _, self.epoch, self.block_size, self._fragment_count, compression, _, _, self._id_count, major, minor = (
            fields[:11]
        )
        self._root, self.size, self._id_table, _, self._inode_table, self._directory_table, self._fragment_table, _ = (
            fields[11:]
        )
        if magic != MAGIC:
            raise self.damaged("this is not a squashfs: no magic number")
        if (major, minor) != (4, 0) or self.block_size not in _block_sizes():
            raise self.damaged(f"squashfs {major}.{minor} with blocks of {self.block_size} bytes is not supported")
        if compression not in (GZIP, ZSTD):
            name = COMPRESSIONS.get(compression, f"method {compression}")
            raise self.damaged(f"compressed with {name}; only zstd and gzip can be read")
        self._is_zstd = compression == ZSTD

    def damaged(self, what: str) -> StoreError:
        where = f" at byte {self._offset}" if self._offset else ""
        return StoreError(f"{self._name}: squashfs{where}: {what}")

    # -- what callers ask

    def lookup(self, path: str) -> Entry | None:
        """The entry at ``path``; symbolic links on the way are not followed, and any name of a hard link is a file."""
        inode = self._find(path)
        return _entry(path, inode) if inode is not None and inode.is_kept else None

    def children(self, path: str) -> list[Entry]:
        """The entries right below a directory; none when ``path`` is not one."""
        inode = self._find(path)
        if inode is None or inode.kind != DIR:
            return []
        here = _Found(sort_key(path), path, inode, self)
        return [_entry(found.path, found.inode) for found in self._children(here) if found.inode.is_kept]

    def read_file(self, path: str) -> bytes:
        inode = self._find(path)
        if inode is None or inode.kind != FILE:
            raise StoreError(f"{self._name}: no file {path!r} in this image")
        data = b"".join(load.run() for load in self._loads(inode))
        if inode.fragment == NONE:
            return data
        return data + self._cut(inode).of(self._fragment_load(inode.fragment).run())

    def open_file(self, path: str) -> SquashfsFile:
        """A file to read here and there: of a library of gigabytes, the few blocks that are asked for."""
        inode = self._find(path)
        if inode is None or inode.kind != FILE:
            raise StoreError(f"{self._name}: no file {path!r} in this image")
        cut = None if inode.fragment == NONE else self._cut(inode).of(self._fragment_load(inode.fragment).run())
        return SquashfsFile(inode.size, self.block_size, list(self._loads(inode)), cut or b"")

    def entries(self) -> Iterator[Entry]:
        """All entries in canonical order, without reading file data."""
        return (entry for entry, _ in _name_links(self.walk()))

    def members(self) -> Iterator[Member]:
        """All entries in canonical order with their data, decompressed ahead on threads."""
        return _stream(_name_links(self.walk()))

    def walk(self) -> Iterator[_Found]:
        seen: set[tuple[int, int]] = set()
        stack: list[Iterator[_Found]] = [iter([_Found((), "", self._inode(self._root), self)])]
        while stack:
            found = next(stack[-1], None)
            if found is None:
                stack.pop()
            elif found.inode.is_kept:
                yield found
                if found.inode.kind == DIR:
                    listing = (found.inode.number, found.inode.start << 16 | found.inode.offset)
                    if listing in seen:
                        raise self.damaged(f"directory {found.path!r} is listed twice")
                    seen.add(listing)
                    stack.append(self._children(found))

    # -- raw reads

    def _read(self, position: int, size: int) -> bytes:
        """``size`` bytes at ``position`` of the image; safe from any thread."""
        try:
            data = os.pread(self._descriptor, size, self._offset + position)
        except (OSError, OverflowError) as error:
            raise self.damaged(f"cannot read {size} bytes at {position}: {error}") from error
        if len(data) != size:
            raise self.damaged(f"ends early: {size} bytes wanted at {position}, {len(data)} there")
        return data

    def _decompress(self, data: bytes, limit: int, position: int) -> bytes:
        try:
            unpacked = self._unzstd(data, limit) if self._is_zstd else bytes(deflate.zlib_decompress(data, limit))
        except (zstandard.ZstdError, deflate.DeflateError, MemoryError) as error:
            raise self.damaged(f"block at {position} does not decompress: {error}") from error
        return unpacked

    def _unzstd(self, data: bytes, limit: int) -> bytes:
        if zstandard.frame_content_size(data) > limit:  # believed by decompress(), whatever the limit
            raise zstandard.ZstdError(f"more than {limit} bytes")
        context: zstandard.ZstdDecompressor | None = getattr(self._contexts, "zstd", None)
        if context is None:
            context = self._contexts.zstd = zstandard.ZstdDecompressor()
        return context.decompress(data, max_output_size=limit)

    def read_block(self, position: int, word: int, size: int, exact: bool) -> bytes:
        """A data block of ``size`` bytes (at most, unless ``exact``) from its position and size word."""
        if not word:
            return bytes(size)
        stored = word & (STORED_BLOCK - 1)
        if stored > self.block_size or word >= STORED_BLOCK << 1:
            raise self.damaged(f"block at {position} claims {word} bytes")
        data = self._read(position, stored)
        if not word & STORED_BLOCK:
            data = self._decompress(data, size, position)
        if exact and len(data) != size:
            raise self.damaged(f"block at {position} holds {len(data)} bytes, not {size}")
        return data

    def _block(self, start: int) -> tuple[bytes, int]:
        """The metadata block at ``start``, and where the next begins."""
        cached = self._metadata.get(start)
        if cached is not None:
            return cached
        (word,) = HALF.unpack(self._read(start, 2))
        size = word & (STORED_METADATA - 1)
        if not 0 < size <= METADATA_SIZE:
            raise self.damaged(f"metadata block at {start} claims {size} bytes")
        data = self._read(start + 2, size)
        if not word & STORED_METADATA:
            data = self._decompress(data, METADATA_SIZE, start)
        if len(self._metadata) >= CACHED_METADATA:
            del self._metadata[next(iter(self._metadata))]
        self._metadata[start] = data, start + 2 + size
        return self._metadata[start]

    def _take(self, start: int, offset: int, size: int) -> tuple[bytes, int, int]:
        """``size`` bytes of metadata, and the position behind them."""
        block, following = self._block(start)
        if offset + size <= len(block):
            return block[offset : offset + size], start, offset + size
        if offset > len(block):
            raise self.damaged(f"no byte {offset} in the metadata block at {start}")
        parts, left, position = [block[offset:]], size - (len(block) - offset), start
        while left:
            position = following
            block, following = self._block(position)
            parts.append(block[:left])
            left -= len(parts[-1])
        return b"".join(parts), position, len(parts[-1])

    def _table(self, index: int, count: int, record: struct.Struct) -> list[tuple[int, ...]]:
        if not count:
            return []
        blocks = -(-count * record.size // METADATA_SIZE)
        starts = struct.unpack(f"<{blocks}Q", self._read(index, 8 * blocks))
        data = b"".join(self._block(start)[0] for start in starts)
        if len(data) < count * record.size:
            raise self.damaged(f"table at {index} holds no {count} records")
        return list(record.iter_unpack(data[: count * record.size]))

    @cached_property
    def _ids(self) -> list[int]:
        return [number for (number,) in self._table(self._id_table, self._id_count, WORD)]

    @cached_property
    def _fragments(self) -> list[tuple[int, ...]]:
        return self._table(self._fragment_table, self._fragment_count, FRAGMENT)

    # -- inodes and directories

    def _inode(self, reference: int) -> _Stored:
        start, offset = self._inode_table + (reference >> 16), reference & 0xFFFF
        head, start, offset = self._take(start, offset, INODE.size)
        kind, mode, uid, gid, mtime, number = INODE.unpack(head)
        if max(uid, gid) >= len(self._ids):
            raise self.damaged(f"inode {number} has an unknown owner")
        known = (mode & 0o7777, self._ids[uid], self._ids[gid], mtime, number)
        if kind in (DIR, DIR + EXTENDED):
            return self._directory_inode(kind, known, start, offset)
        if kind in (FILE, FILE + EXTENDED):
            return self._file_inode(kind, known, start, offset)
        if not DIR < kind <= SOCKET + EXTENDED:
            raise self.damaged(f"inode {number} is of the unknown type {kind}")
        kind = (kind - 1) % EXTENDED + 1
        if kind in (FIFO, SOCKET):
            return _Stored(kind, *known, nlink=WORD.unpack(self._take(start, offset, WORD.size)[0])[0])
        body, start, offset = self._take(start, offset, PAIR.size)
        nlink, value = PAIR.unpack(body)
        if kind != SYMLINK:
            return _Stored(kind, *known, nlink=nlink, device=value)
        if value > 0xFFFF:
            raise self.damaged(f"inode {number}: a symbolic link of {value} bytes")
        return _Stored(kind, *known, nlink=nlink, target=self._take(start, offset, value)[0])

    def _directory_inode(self, kind: int, known: tuple[int, int, int, int, int], start: int, offset: int) -> _Stored:
        if kind == DIR:
            block, nlink, size, place, _ = DIR_BODY.unpack(self._take(start, offset, DIR_BODY.size)[0])
        else:
            nlink, size, block, _, _, place, _ = LONG_DIR_BODY.unpack(self._take(start, offset, LONG_DIR_BODY.size)[0])
        return _Stored(DIR, *known, nlink=nlink, size=size, start=block, offset=place)

    def _file_inode(self, kind: int, known: tuple[int, int, int, int, int], start: int, offset: int) -> _Stored:
        nlink = 1
        if kind == FILE:
            body, start, offset = self._take(start, offset, FILE_BODY.size)
            position, fragment, place, size = FILE_BODY.unpack(body)
        else:
            body, start, offset = self._take(start, offset, LONG_FILE_BODY.size)
            position, size, _, nlink, fragment, place, _ = LONG_FILE_BODY.unpack(body)
        if fragment != NONE and fragment >= self._fragment_count:
            raise self.damaged(f"inode {known[4]} wants fragment {fragment} of {self._fragment_count}")
        fragment = fragment if size % self.block_size else NONE  # no tail
        count = size // self.block_size if fragment != NONE else -(-size // self.block_size)
        sizes: tuple[int, ...] = ()
        if count:
            if count > self._directory_table - self._inode_table << 10:  # what no compression can hold
                raise self.damaged(f"inode {known[4]} claims {size} bytes")
            sizes = struct.unpack(f"<{count}I", self._take(start, offset, 4 * count)[0])
        return _Stored(FILE, *known, nlink, size, position, fragment, place, sizes)

    def _listing(self, inode: _Stored) -> Iterator[tuple[bytes, int]]:
        """A directory's names with the references of their inodes."""
        left, start, offset = inode.size - 3, self._directory_table + inode.start, inode.offset
        while left > 0:
            head, start, offset = self._take(start, offset, LIST_HEAD.size)
            count, block, _ = LIST_HEAD.unpack(head)
            left -= LIST_HEAD.size
            if count >= 256:
                raise self.damaged(f"directory inode {inode.number}: a run of {count + 1} entries")
            for _ in range(count + 1):
                fixed, start, offset = self._take(start, offset, LIST_ENTRY.size)
                place, _, _, length = LIST_ENTRY.unpack(fixed)
                if length >= 256:
                    raise self.damaged(f"directory inode {inode.number}: a name of {length + 1} bytes")
                name, start, offset = self._take(start, offset, length + 1)
                left -= LIST_ENTRY.size + length + 1
                yield name, block << 16 | place
        if left < 0 and inode.size:  # an empty listing may have size 0 or 3
            raise self.damaged(f"directory inode {inode.number}: its listing is longer than it says")

    def _children(self, found: _Found) -> Iterator[_Found]:
        listing = list(self._listing(found.inode))
        prefix = found.path + "/" if found.path else ""
        last = b""
        for name, reference in listing:
            if name <= last or name in (b".", b"..") or b"/" in name or b"\0" in name:
                raise self.damaged(f"directory {found.path!r} lists {name!r} behind {last!r}")
            last = name
            yield _Found((*found.order, name), prefix + os.fsdecode(name), self._inode(reference), self)

    def _find(self, path: str) -> _Stored | None:
        inode = self._inode(self._root)
        for part in sort_key(path):
            if inode.kind != DIR:
                return None
            reference = next((reference for name, reference in self._listing(inode) if name == part), None)
            if reference is None:
                return None
            inode = self._inode(reference)
        return inode

    # -- data

    def _loads(self, inode: _Stored) -> Iterator[_Load]:
        position, left = inode.start, inode.size
        for word in inode.sizes:
            yield _Load(self, position, word, min(left, self.block_size))
            position += word & (STORED_BLOCK - 1)
            left -= self.block_size

    def _cut(self, inode: _Stored) -> _Cut:
        return _Cut(self, (id(self), inode.fragment), inode.offset, inode.size % self.block_size)

    def _fragment_load(self, number: int, evict: tuple[int, int] | None = None) -> _Load:
        position, word, _ = self._fragments[number]
        return _Load(self, position, word, self.block_size, (id(self), number), evict)


class SquashfsFile:
    """One file of an image. ``read_at`` keeps the block it read last: reading forwards decompresses each block once."""

    def __init__(self, size: int, block_size: int, loads: list[_Load], tail: bytes) -> None:
        self.size, self._block_size, self._loads, self._tail = size, block_size, loads, tail
        self._last: tuple[int, bytes] = (-1, b"")

    def read_at(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset``; fewer where the file ends."""
        parts, end = [], min(offset + size, self.size)
        while offset < end:
            number, inside = divmod(offset, self._block_size)
            parts.append(self._block(number)[inside : inside + end - offset])
            offset += len(parts[-1])
        return b"".join(parts)

    def _block(self, number: int) -> bytes:
        if number == len(self._loads):
            return self._tail
        if self._last[0] != number:
            self._last = number, self._loads[number].run()
        return self._last[1]


def _entry(path: str, inode: _Stored) -> Entry:
    return Entry(
        path,
        _KINDS[inode.kind],
        inode.mode,
        inode.uid,
        inode.gid,
        inode.mtime,
        inode.size if inode.kind == FILE else 0,
        os.fsdecode(inode.target),
    )


def _name_links(walk: Iterable[_Found]) -> Iterator[tuple[Entry, _Found]]:
    """Of several names of one inode, the first in order is the file and the others point at it."""
    names: dict[tuple[int, int], str] = {}
    for found in walk:
        inode, entry = found.inode, _entry(found.path, found.inode)
        if inode.nlink > 1 and inode.kind not in (DIR, CHAR_DEVICE):
            first = names.setdefault((id(found.reader), inode.number), found.path)
            if first != found.path:
                entry = Entry(found.path, "hardlink", inode.mode, inode.uid, inode.gid, inode.mtime, 0, first)
        yield entry, found


_Step = Entry | _Load | _Cut


def _steps(named: Iterable[tuple[Entry, _Found]]) -> Iterator[_Step]:
    """What to do, in order: an entry, then the loads and the cut its data is made of."""
    fragments: OrderedDict[tuple[int, int], None] = OrderedDict()
    for entry, found in named:
        yield entry
        if entry.kind != "file" or not entry.size:
            continue
        reader, inode = found.reader, found.inode
        yield from reader._loads(inode)
        if inode.fragment == NONE:
            continue
        cut = reader._cut(inode)
        if cut.key not in fragments:
            evict = fragments.popitem(last=False)[0] if len(fragments) >= CACHED_FRAGMENTS else None
            yield reader._fragment_load(inode.fragment, evict)
            fragments[cut.key] = None
        fragments.move_to_end(cut.key)
        yield cut


def _run(steps: list[_Step]) -> list[tuple[_Step, bytes]]:
    return [(step, step.run() if isinstance(step, _Load) else b"") for step in steps]


def _ahead(steps: Iterator[_Step], threads: int) -> Iterator[tuple[_Step, bytes]]:
    """Steps with what they loaded, some megabytes ahead of the caller."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(threads, thread_name_prefix="squashfs") as pool:
        jobs: deque[Future[list[tuple[_Step, bytes]]]] = deque()
        for batch in _batches(steps):
            jobs.append(pool.submit(_run, batch))
            if len(jobs) > 2 * threads:
                yield from jobs.popleft().result()
        while jobs:
            yield from jobs.popleft().result()


def _batches(steps: Iterator[_Step]) -> Iterator[list[_Step]]:
    batch: list[_Step] = []
    size = 0
    for step in steps:
        batch.append(step)
        size += step.size if isinstance(step, _Load) else 256
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def _stream(named: Iterable[tuple[Entry, _Found]]) -> Iterator[Member]:
    steps = _ahead(_steps(named), _usable_cores())
    fragments: dict[tuple[int, int], bytes] = {}

    def chunks(size: int) -> Iterator[bytes]:
        while size > 0:
            step, data = next(steps)
            if isinstance(step, _Cut):
                data = step.of(fragments[step.key])
            elif isinstance(step, _Load) and step.key:
                fragments[step.key] = data
                if step.evict:
                    del fragments[step.evict]
                continue
            size -= len(data)
            yield data

    for entry, _ in steps:
        assert isinstance(entry, Entry)
        if entry.kind != "file" or not entry.size:
            yield entry, None
            continue
        data = chunks(entry.size)
        yield entry, data
        deque(data, maxlen=0)  # what the caller did not want


# --------------------------------------------------------------------------------------------------------- flattening


def merged_members(layers: Sequence[SquashfsReader]) -> Iterator[Member]:
    """One layer that looks like all of ``layers`` stacked, bottom first; whiteouts are applied and gone."""
    return _stream(_name_links(_overlay(layers)))


def merged_entries(layers: Sequence[SquashfsReader]) -> Iterator[Entry]:
    """The same without data: what is there when ``layers`` are stacked."""
    return (entry for entry, _ in _name_links(_overlay(layers)))


def write_flat(layers: Sequence[SquashfsReader], sink: Sink) -> None:
    pour(merged_members(layers), sink)


def _overlay(layers: Sequence[SquashfsReader]) -> Iterator[_Found]:
    """overlayfs' rules: the top layer's entry counts, directories merge, anything else ends what lies below it."""
    height = {id(layer): place for place, layer in enumerate(layers)}
    walks = [layer.walk() for layer in layers]
    last: Order | None = None
    covers: list[tuple[Order, int]] = []  # below this path, layers under this height are hidden
    for found in heapq.merge(*walks, key=lambda found: (found.order, -height[id(found.reader)])):
        while covers and found.order[: len(covers[-1][0])] != covers[-1][0]:
            covers.pop()
        layer = height[id(found.reader)]
        if covers and layer < covers[-1][1]:
            continue
        if found.inode.kind != DIR:
            covers.append((found.order, layer))
        if found.order != last and found.inode.kind != CHAR_DEVICE:
            yield found
        last = found.order
