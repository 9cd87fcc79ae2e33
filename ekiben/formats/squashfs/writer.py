"""Write a squashfs: equal entries give equal bytes, however many threads compress them."""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

import deflate

from ekiben.core.errors import StoreError
from ekiben.formats.layer import Entry, Xattrs, encode_name, sort_key
from ekiben.formats.squashfs import format as sq
from ekiben.formats.squashfs.format import Block, usable_cores

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ekiben.formats.squashfs.reuse import BlockReuse

EARLY = 32 << 20  # bytes after which what is written begins to go to the disk
_SAMPLE = 4096  # bytes of a block that are tried first: is it worth compressing?


@dataclass(slots=True, eq=False)
class _Inode:
    entry: Entry
    parent: _Inode | None
    number: int
    nlink: int = 1
    start: int = 0
    sizes: array[int] | None = None  # size words of a file's blocks, 0 for a hole
    fragment: int = sq.NONE
    offset: int = 0
    reference: int = 0  # metadata block << 16 | offset in it
    names: list[bytes] | None = None  # a directory's, with `children` beside it
    children: list[_Inode] | None = None


def _compress(block: Block, level: int = sq.LEVEL) -> bytes | bytearray:
    return deflate.zlib_compress(block, level)


def _is_dense(block: Block) -> bool:
    """Return whether a block is not worth compressing, by its middle. GPU code is compressed already: compressing it
    again takes half of the time of a PyTorch layer, and saves 0.3 %.
    """
    start = (len(block) - _SAMPLE) // 2
    return start > 0 and len(_compress(block[start : start + _SAMPLE])) > _SAMPLE * 0.95


class _BlockWriter:
    """Compresses blocks on threads and writes them in order; memory is bounded by jobs in flight."""

    def __init__(
        self, out: BinaryIO, block_size: int, threads: int, level: int, reuse: BlockReuse | None = None
    ) -> None:
        from concurrent.futures import ThreadPoolExecutor  # imported here: it brings logging with it

        self._out, self._reuse = out, reuse
        self._block_size, self._level = block_size, level
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="squashfs")
        self._in_flight = 2 * threads + 1
        self._jobs: deque[tuple[list[_Inode | None], Future[list[tuple[int, Block, bytes]]]]] = deque()
        self._owners: list[_Inode | None] = []
        self._batch: list[Block] = []
        self._batch_bytes = 0
        self._stored: dict[tuple[int, bytes], list[int]] = {}
        self.position = self._sent = out.tell()
        self.fragments: list[tuple[int, int]] = []

    def put(self, owner: _Inode | None, block: Block) -> None:
        """Write one block of a file; without an owner, a fragment block. An empty block is a hole."""
        self._owners.append(owner)
        self._batch.append(block)
        self._batch_bytes += len(block)
        if self._batch_bytes >= sq.BATCH:
            self._submit()

    def _submit(self) -> None:
        self._jobs.append((self._owners, self._pool.submit(self._compress_all, self._batch)))
        self._owners, self._batch, self._batch_bytes = [], [], 0
        while self._jobs and (len(self._jobs) > self._in_flight or self._jobs[0][1].done()):
            self._land()

    def _compress_all(self, blocks: list[Block]) -> list[tuple[int, Block, bytes]]:
        """Return the size word of each block, its stored bytes, and its key where it can be reused."""
        packed: list[tuple[int, Block, bytes]] = []
        for block in blocks:
            key, data = b"", block
            if block and not _is_dense(block):
                key, known = self._reuse.find(block) if self._reuse else (b"", None)
                data = known or _compress(block, self._level)
            if not block or len(data) < len(block):
                packed.append((len(data), data, key))
            else:
                packed.append((len(block) | sq.STORED_BLOCK, block, b""))
        return packed

    def _land(self) -> None:
        owners, job = self._jobs.popleft()
        for owner, (word, data, key) in zip(owners, job.result(), strict=True):
            if key and self._reuse:
                self._reuse.note(key, self.position, word)
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
        """Start writing back: the disk is idle during compression, and later readers would wait for it."""
        self._out.flush()
        # DONTNEED for bytes just written makes the kernel start writing them out.
        os.posix_fadvise(self._out.fileno(), self._sent, self.position - self._sent, os.POSIX_FADV_DONTNEED)
        self._sent = self.position

    def _claim(self, owner: _Inode, word: int) -> None:
        if owner.sizes is None:
            owner.start, owner.sizes = self.position, array("I")
        owner.sizes.append(word)

    def _deduplicate(self, inode: _Inode) -> None:
        """Reuse the blocks of an earlier identical file: equal sizes, then equal stored bytes."""
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
        done, size = 0, min(4096, length)  # most blocks that differ do so in the first bytes
        while done < length and self._read(one + done, size) == self._read(other + done, size):
            done, size = done + size, min(sq.BATCH, length - done - size)
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

    def __init__(self, level: int) -> None:
        self._level = level
        self._pending = bytearray()
        self._blocks = bytearray()
        self._starts: list[int] = []

    @property
    def position(self) -> tuple[int, int]:
        """Return the position of the next byte: the start of its block, and its offset in it."""
        return len(self._blocks), len(self._pending)

    def put(self, data: bytes) -> None:
        self._pending += data
        while len(self._pending) >= sq.METADATA_SIZE:
            self._flush(bytes(self._pending[: sq.METADATA_SIZE]))
            del self._pending[: sq.METADATA_SIZE]

    def _flush(self, block: bytes) -> None:
        self._starts.append(len(self._blocks))
        packed = _compress(block, self._level)
        if len(packed) < len(block):
            self._blocks += sq.HALF.pack(len(packed)) + packed
        else:
            self._blocks += sq.HALF.pack(len(block) | sq.STORED_METADATA) + block

    def finish(self) -> tuple[bytearray, list[int]]:
        """The blocks, and where each starts."""
        if self._pending:
            self._flush(bytes(self._pending))
        return self._blocks, self._starts


class SquashfsWriter:
    """A LayerWriter that writes squashfs to ``out``, an empty file open for writing and reading (``w+b``).

    Entries come in canonical order. ``level`` 0 stores everything as it is, so that the bytes are the same whatever
    library compresses. ``reuse``: blocks of a former version, whose bytes are taken; the bytes written are the same.
    Methods raise StoreError for what squashfs cannot hold, ValueError for a wrong order or size.
    """

    def __init__(
        self,
        out: BinaryIO,
        *,
        block_size: int = sq.BLOCK_SIZE,
        threads: int | None = None,
        epoch: int = 0,
        level: int = sq.LEVEL,
        reuse: BlockReuse | None = None,
    ) -> None:
        if not (out.readable() and out.seekable()):
            raise ValueError("a squashfs is written to a file open for reading too (w+b)")
        if block_size not in sq.BLOCK_SIZES:
            raise ValueError(f"squashfs block size {block_size}: must be a power of two from 4096 to 1048576")
        if reuse and (block_size, level) != (sq.BLOCK_SIZE, sq.LEVEL):
            raise ValueError("blocks are reused at the usual block size and level alone")
        self._out = out
        self._block_size = block_size
        self._epoch, self._level = epoch, level
        options = struct.pack("<IHH", sq.LEVEL, 15, 0)  # level, bits of the window, its default strategy
        out.write(bytes(sq.SUPERBLOCK.size) + sq.HALF.pack(len(options) | sq.STORED_METADATA) + options)
        self._blocks = _BlockWriter(out, block_size, threads or usable_cores(), level, reuse)
        self._ids: dict[int, int] = {}
        self._xattrs: dict[Xattrs, int] = {}
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
        """Begin an entry."""
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
            raise ValueError(f"layer entry {entry.path!r} has no directory before it")
        return self._open[-1]

    def _new_inode(self, entry: Entry, parent: _Inode | None) -> _Inode:
        if not (0 <= entry.mtime < 1 << 32):
            raise StoreError(f"{entry.path!r}: squashfs cannot hold the modification time {entry.mtime}")
        inode = _Inode(entry, parent, len(self._inodes) + 1)
        if entry.kind == "dir":
            inode.names, inode.children, inode.nlink = [], [], 2
            if parent is not None:
                parent.nlink += 1
        if entry.xattrs:
            self._xattrs.setdefault(entry.xattrs, len(self._xattrs))
        for owner in (entry.uid, entry.gid):
            self._ids.setdefault(owner, len(self._ids))
        self._inodes.append(inode)
        return inode

    def _name(self, parent: _Inode, entry: Entry, inode: _Inode) -> None:
        assert parent.names is not None and parent.children is not None
        name = encode_name(entry.path.rpartition("/")[2])
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
            index = bisect_left(names, name)
            if index == len(names) or names[index] != name:
                raise ValueError(f"hard link {entry.path!r} to {entry.target!r}, which is not before it")
            inode = children[index]
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
        """Write a part of the entry's content."""
        self._left -= len(chunk)
        if self._left < 0 or self._file is None:
            raise ValueError(f"more data than {self._file.entry.path if self._file else 'an entry'!r} announced")
        if self._small:
            self._fragment += chunk
            if not self._left:
                self._add_to_fragment(self._file)
        else:
            self._split(self._file, memoryview(chunk))
        if not self._left:
            self._file = None

    def _add_to_fragment(self, inode: _Inode) -> None:
        """Add a small file to the fragment block, unless an equal one has been added."""
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
        """Write the tables and the superblock."""
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
        """Write the inodes, a directory's after those of its entries, which its listing refers to."""
        inodes, listings = _MetadataWriter(self._level), _MetadataWriter(self._level)
        open_directories: list[_Inode] = []
        for inode in self._inodes:
            while open_directories and open_directories[-1] is not inode.parent:
                last = open_directories.pop()
                _append_inode(inodes, last, self._directory(last, listings))
            if inode.entry.kind == "dir":
                open_directories.append(inode)
            else:
                _append_inode(inodes, inode, self._leaf(inode))
        for last in reversed(open_directories):
            _append_inode(inodes, last, self._directory(last, listings))
        return inodes, listings

    def _head(self, inode: _Inode, extended: bool) -> bytes:
        entry = inode.entry
        kind = sq.TYPES[entry.kind] + (sq.EXTENDED if extended else 0)
        uid, gid = self._ids[entry.uid], self._ids[entry.gid]
        return sq.INODE.pack(kind, entry.mode & 0o7777, uid, gid, entry.mtime, inode.number)

    def _leaf(self, inode: _Inode) -> bytes:
        kind = inode.entry.kind
        if kind == "file":
            return self._regular(inode)
        body = sq.WORD.pack(inode.nlink)
        if kind == "symlink":
            target = encode_name(inode.entry.target)
            body += sq.WORD.pack(len(target)) + target
        elif kind == "whiteout":
            body += sq.WORD.pack(0)  # device 0:0
        return self._head(inode, extended=False) + body

    def _regular(self, inode: _Inode) -> bytes:
        size, sizes = inode.entry.size, inode.sizes or array("I")
        block_sizes = struct.pack(f"<{len(sizes)}I", *sizes)
        holes = self._holes(sizes, size)
        xattr = self._xattrs.get(inode.entry.xattrs, sq.NONE)
        if inode.nlink == 1 and not holes and xattr == sq.NONE and max(size, inode.start) < 1 << 32:
            return (
                self._head(inode, False)
                + sq.FILE_BODY.pack(inode.start, inode.fragment, inode.offset, size)
                + block_sizes
            )
        body = sq.LONG_FILE_BODY.pack(inode.start, size, holes, inode.nlink, inode.fragment, inode.offset, xattr)
        return self._head(inode, True) + body + block_sizes

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
        xattr = self._xattrs.get(inode.entry.xattrs, sq.NONE)
        if size <= 0xFFFF and not index and xattr == sq.NONE:
            return self._head(inode, False) + sq.DIR_BODY.pack(start, inode.nlink, size, offset, parent)
        body = sq.LONG_DIR_BODY.pack(inode.nlink, size, start, parent, len(index), offset, xattr)
        return self._head(inode, True) + body + b"".join(index)

    def _write_tables(self, inodes: _MetadataWriter, listings: _MetadataWriter) -> None:
        position = self._blocks.position
        parts: list[bytes] = []

        def append(data: bytes) -> int:
            nonlocal position
            parts.append(data)
            position += len(data)
            return position - len(data)

        def append_table(data: bytes) -> int:
            blocks = _MetadataWriter(self._level)
            blocks.put(data)
            packed, starts = blocks.finish()
            base = append(bytes(packed))
            return append(struct.pack(f"<{len(starts)}Q", *(base + start for start in starts)))

        inode_table = append(bytes(inodes.finish()[0]))
        directory_table = append(bytes(listings.finish()[0]))
        fragments = self._blocks.fragments
        fragment_table = append_table(b"".join(sq.FRAGMENT.pack(start, word, 0) for start, word in fragments))
        id_table = append_table(_numbers(f"{len(self._ids)}I", *self._ids))
        xattr_table = self._append_xattrs(append) if self._xattrs else sq.ABSENT
        flags = sq.FLAG_DUPLICATES | sq.FLAG_OPTIONS | (0 if self._xattrs else sq.FLAG_NO_XATTRS)
        superblock = sq.SUPERBLOCK.pack(
            *(sq.MAGIC, len(self._inodes), self._epoch, self._block_size, len(fragments)),
            *(sq.GZIP, self._block_size.bit_length() - 1),
            *(flags, len(self._ids), 4, 0),
            *(self._inodes[0].reference, position, id_table, xattr_table),
            *(inode_table, directory_table, fragment_table, sq.ABSENT),
        )
        self._out.seek(self._blocks.position)
        self._out.write(b"".join(parts) + bytes(-position % sq.PAD))
        self._out.truncate()  # deduplicated blocks may have reached further
        self._out.seek(0)
        self._out.write(superblock)
        self._out.flush()

    def _append_xattrs(self, append: Callable[[bytes], int]) -> int:
        """Names and values, each distinct set once, then the table of their positions.

        The kernel wants them last, with nothing between.
        """
        pairs, sets = _MetadataWriter(self._level), _MetadataWriter(self._level)
        for xattrs in self._xattrs:
            start, offset = pairs.position
            listed = sum(len(encode_name(name)) + 1 for name, _ in xattrs)
            sets.put(_numbers("Q2I", start << 16 | offset, len(xattrs), listed))
            for name, value in xattrs:
                pairs.put(_xattr_pair(name, value))
        first = append(bytes(pairs.finish()[0]))
        blocks, starts = sets.finish()
        base = append(bytes(blocks))
        positions = [base + start for start in starts]
        return append(_numbers(f"Q2I{len(positions)}Q", first, len(self._xattrs), 0, *positions))


def _xattr_pair(name: str, value: bytes) -> bytes:
    namespace = next(number for number, prefix in enumerate(sq.XATTR_PREFIXES) if name.startswith(prefix))
    rest = encode_name(name.removeprefix(sq.XATTR_PREFIXES[namespace]))
    return _numbers("2H", namespace, len(rest)) + rest + _numbers("I", len(value)) + value


def _numbers(form: str, *values: int) -> bytes:
    return struct.pack(f"<{form}", *values)


def _is_zero(block: Block) -> bool:
    return not block[0] and not block[-1] and bytes(block) == bytes(len(block))


def _append_inode(inodes: _MetadataWriter, inode: _Inode, data: bytes) -> None:
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
            index.append(sq.LIST_INDEX.pack(size, block, len(name) - 1) + name)
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
    parts = [sq.LIST_HEAD.pack(len(children) - 1, block, base)]
    for name, child in zip(names, children, strict=True):
        kind = sq.TYPES[child.entry.kind]
        parts.append(sq.LIST_ENTRY.pack(child.reference & 0xFFFF, child.number - base, kind, len(name) - 1) + name)
    return b"".join(parts)
