"""Read a squashfs of Ekiben's or of mksquashfs, and several as the one tree that they are when stacked."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import deflate
import zstandard

from ekiben.core.errors import StoreError
from ekiben.core.files import open_regular
from ekiben.formats.layer import Entry, LayerEntry, Xattrs, decode_name, sort_key
from ekiben.formats.squashfs import format as sq
from ekiben.formats.squashfs._stream import (
    BlockLoad,
    FragmentCut,
    PathInode,
    StoredInode,
    entry_of,
    name_links,
    overlay,
    stream_entries,
)
from ekiben.formats.xattrs import content_xattrs

CACHED_METADATA = 1024
_MAX_READ = 2 << 30  # bytes
CACHED_LISTINGS = 64  # folders in the cache: the parents of a path, and some more


def compression(path: Path, offset: int = 0) -> str | None:
    """Return the name of the method by which the squashfs at ``offset`` is compressed. Raises OSError."""
    with open_regular(path) as file:
        superblock = os.pread(file.fileno(), 22, offset)
    return sq.COMPRESSIONS.get(int.from_bytes(superblock[20:], "little"))


class UnknownCompression(StoreError):
    """A squashfs that kernels may read, and SquashfsReader does not."""


class SquashfsReader:
    """Reads the squashfs that starts at ``offset`` of ``file``, ours or mksquashfs' (zstd, gzip).

    Of extended attributes, those that are no content are skipped (see ekiben.formats.xattrs). Devices other than
    whiteouts, and sockets, are skipped. Methods raise StoreError that says what is damaged and where.
    """

    def __init__(self, file: BinaryIO, offset: int = 0) -> None:
        self._descriptor = file.fileno()
        self._offset = offset
        self._name = str(getattr(file, "name", "squashfs"))
        self._file = file  # keeps the descriptor open
        self._metadata: dict[int, tuple[bytes, int]] = {}
        self._listings: dict[tuple[int, int, int], dict[bytes, int]] = {}
        self._known_xattrs: dict[int, Xattrs] = {}
        self._contexts = threading.local()
        fields = sq.SUPERBLOCK.unpack(self._read(0, sq.SUPERBLOCK.size))
        magic, _, self.epoch, self.block_size, self._fragment_count, compression, _, _, self._id_count, major, minor = (
            fields[:11]
        )
        self._root, self.size, self._id_table, self._xattr_table, self._inode_table, self._directory_table = fields[
            11:17
        ]
        self._fragment_table = fields[17]
        if magic != sq.MAGIC:
            raise self.damaged("this is not a squashfs: no magic number")
        if (major, minor) != (4, 0) or self.block_size not in sq.BLOCK_SIZES:
            raise self.damaged(f"squashfs {major}.{minor} with blocks of {self.block_size} bytes is not supported")
        if compression not in (sq.GZIP, sq.ZSTD):
            name = sq.COMPRESSIONS.get(compression, f"method {compression}")
            message = f"{self._where()}: compressed with {name}; only zstd and gzip can be read"
            raise UnknownCompression(message)
        self._is_zstd = compression == sq.ZSTD

    def damaged(self, what: str) -> StoreError:
        """Return an error that names the damage and its position."""
        return StoreError(f"{self._where()}: {what}")

    def _where(self) -> str:
        return f"{self._name}: squashfs" + (f" at byte {self._offset}" if self._offset else "")

    # -- queries

    def lookup(self, path: str) -> Entry | None:
        """Return the entry at ``path``, without following links; every name of a hard link is a file."""
        inode = self._find(path)
        return entry_of(path, inode) if inode is not None and inode.is_kept else None

    @property
    def has_xattrs(self) -> bool:
        """Return whether the file system has a table of extended attributes."""
        return bool(self._xattr_table != sq.ABSENT)

    def has_other_names(self, path: str) -> bool:
        """Return whether ``path`` is a file with several names (hard links)."""
        inode = self._find(path)
        return inode is not None and inode.kind != sq.DIR and inode.nlink > 1

    def children(self, path: str) -> list[Entry]:
        """Return the entries of a directory; none when ``path`` is not one."""
        inode = self._find(path)
        if inode is None or inode.kind != sq.DIR:
            return []
        here = PathInode(sort_key(path), path, inode, self)
        return [entry_of(node.path, node.inode) for node in self._children(here) if node.inode.is_kept]

    def read_file(self, path: str, max_size: int | None = None) -> bytes:
        """Return a file's content. Raises StoreError when it is not there, or has more than ``max_size`` bytes."""
        most = _MAX_READ if max_size is None else max_size
        inode = self._find(path)
        if inode is None or inode.kind != sq.FILE:
            raise StoreError(f"{self._name}: no file {path!r} in this image")
        if inode.size > most:  # a sparse file of 60 GB needs only 45 kB in the archive
            raise self.damaged(f"file {path!r} has {inode.size} bytes, more than the {most} that are read at most")
        data = b"".join(load.run() for load in self._loads(inode))
        if inode.fragment == sq.NONE:
            return data
        return data + self._cut(inode).of(self._fragment_load(inode.fragment).run())

    def open_file(self, path: str) -> SquashfsFile:
        """Open a file for random access: only the requested blocks are read."""
        inode = self._find(path)
        if inode is None or inode.kind != sq.FILE:
            raise StoreError(f"{self._name}: no file {path!r} in this image")
        cut = None if inode.fragment == sq.NONE else self._cut(inode).of(self._fragment_load(inode.fragment).run())
        return SquashfsFile(inode.size, self.block_size, list(self._loads(inode)), cut or b"")

    def entries(self) -> Iterator[Entry]:
        """Yield all entries in canonical order, without reading file data."""
        return (entry for entry, _ in name_links(self.walk()))

    def contents(self) -> Iterator[LayerEntry]:
        """Yield all entries in canonical order with their data, decompressed ahead on threads."""
        return stream_entries(name_links(self.walk()))

    def walk(self) -> Iterator[PathInode]:
        """Yield every path with its inode, in canonical order."""
        seen: set[tuple[int, int]] = set()
        stack: list[Iterator[PathInode]] = [iter([PathInode((), "", self._inode(self._root), self)])]
        while stack:
            node = next(stack[-1], None)
            if node is None:
                stack.pop()
            elif node.inode.is_kept:
                yield node
                if node.inode.kind == sq.DIR:
                    listing = (node.inode.number, node.inode.start << 16 | node.inode.offset)
                    if listing in seen:
                        raise self.damaged(f"directory {node.path!r} is listed twice")
                    seen.add(listing)
                    stack.append(self._children(node))

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
        if zstandard.frame_content_size(data) > limit:  # decompress() trusts this size, whatever the limit
            raise zstandard.ZstdError(f"more than {limit} bytes")
        context: zstandard.ZstdDecompressor | None = getattr(self._contexts, "zstd", None)
        if context is None:
            context = self._contexts.zstd = zstandard.ZstdDecompressor()
        return context.decompress(data, max_output_size=limit)

    def read_block(self, position: int, word: int, size: int, exact: bool) -> bytes:
        """Return a data block of ``size`` bytes (at most, unless ``exact``) from its position and size word."""
        if not word:
            return bytes(size)
        stored = word & (sq.STORED_BLOCK - 1)
        if stored > self.block_size or word >= sq.STORED_BLOCK << 1:
            raise self.damaged(f"block at {position} claims {word} bytes")
        data = self._read(position, stored)
        if not word & sq.STORED_BLOCK:
            data = self._decompress(data, size, position)
        if exact and len(data) != size:
            raise self.damaged(f"block at {position} holds {len(data)} bytes, not {size}")
        return data

    def _block(self, start: int) -> tuple[bytes, int]:
        """Return the metadata block at ``start``, and the start of the next."""
        cached = self._metadata.get(start)
        if cached is not None:
            return cached
        (word,) = sq.HALF.unpack(self._read(start, 2))
        size = word & (sq.STORED_METADATA - 1)
        if not 0 < size <= sq.METADATA_SIZE:
            raise self.damaged(f"metadata block at {start} claims {size} bytes")
        data = self._read(start + 2, size)
        if not word & sq.STORED_METADATA:
            data = self._decompress(data, sq.METADATA_SIZE, start)
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
        blocks = -(-count * record.size // sq.METADATA_SIZE)
        starts = struct.unpack(f"<{blocks}Q", self._read(index, 8 * blocks))
        data = b"".join(self._block(start)[0] for start in starts)
        if len(data) < count * record.size:
            raise self.damaged(f"table at {index} holds no {count} records")
        return list(record.iter_unpack(data[: count * record.size]))

    @cached_property
    def _ids(self) -> list[int]:
        return [number for (number,) in self._table(self._id_table, self._id_count, sq.WORD)]

    @cached_property
    def _fragments(self) -> list[tuple[int, ...]]:
        return self._table(self._fragment_table, self._fragment_count, sq.FRAGMENT)

    @cached_property
    def _xattr_sets(self) -> tuple[int, list[tuple[int, ...]]]:
        """Return the starts of names and values, and the table of the sets."""
        start, count, _ = sq.XATTR_HEADER.unpack(self._read(self._xattr_table, sq.XATTR_HEADER.size))
        if count > self.size:
            raise self.damaged(f"the table of extended attributes claims {count} sets")
        return start, self._table(self._xattr_table + sq.XATTR_HEADER.size, count, sq.XATTR_SET)

    def _xattrs(self, number: int) -> Xattrs:
        """Return the attributes of one set that are content."""
        if number == sq.NONE or self._xattr_table == sq.ABSENT:
            return ()
        if number not in self._known_xattrs:
            first, sets = self._xattr_sets
            if number >= len(sets):
                raise self.damaged(f"set {number} of {len(sets)} sets of extended attributes is referred to")
            self._known_xattrs[number] = content_xattrs(self._xattr_pairs(first, *sets[number][:2]))
        return self._known_xattrs[number]

    def _xattr_pairs(self, first: int, reference: int, count: int) -> Iterator[tuple[str, bytes]]:
        start, offset = first + (reference >> 16), reference & 0xFFFF
        for _ in range(count):
            head, start, offset = self._take(start, offset, sq.XATTR_NAME.size)
            kind, length = sq.XATTR_NAME.unpack(head)
            namespace = kind & ~sq.XATTR_ELSEWHERE
            if namespace >= len(sq.XATTR_PREFIXES):
                raise self.damaged(f"an extended attribute is of the unknown namespace {kind}")
            name, start, offset = self._take(start, offset, length)
            value, start, offset = self._xattr_value(start, offset)
            if kind & sq.XATTR_ELSEWHERE:
                (elsewhere,) = sq.LONG.unpack(value[: sq.LONG.size].ljust(sq.LONG.size, b"\0"))
                value = self._xattr_value(first + (elsewhere >> 16), elsewhere & 0xFFFF)[0]
            yield sq.XATTR_PREFIXES[namespace] + decode_name(name), value

    def _xattr_value(self, start: int, offset: int) -> tuple[bytes, int, int]:
        size, start, offset = self._take(start, offset, sq.WORD.size)
        (length,) = sq.WORD.unpack(size)
        if length > sq.XATTR_SIZE:
            raise self.damaged(f"an extended attribute claims {length} bytes")
        return self._take(start, offset, length)

    # -- inodes and directories

    def _inode(self, reference: int) -> StoredInode:
        start, offset = self._inode_table + (reference >> 16), reference & 0xFFFF
        head, start, offset = self._take(start, offset, sq.INODE.size)
        kind, mode, uid, gid, mtime, number = sq.INODE.unpack(head)
        if max(uid, gid) >= len(self._ids):
            raise self.damaged(f"inode {number} has an unknown owner")
        known = (mode & 0o7777, self._ids[uid], self._ids[gid], mtime, number)
        if kind in (sq.DIR, sq.DIR + sq.EXTENDED):
            return self._directory_inode(kind, known, start, offset)
        if kind in (sq.FILE, sq.FILE + sq.EXTENDED):
            return self._file_inode(kind, known, start, offset)
        if not sq.DIR < kind <= sq.SOCKET + sq.EXTENDED:
            raise self.damaged(f"inode {number} is of the unknown type {kind}")
        kind = (kind - 1) % sq.EXTENDED + 1
        if kind in (sq.FIFO, sq.SOCKET):
            return StoredInode(kind, *known, nlink=sq.WORD.unpack(self._take(start, offset, sq.WORD.size)[0])[0])
        body, start, offset = self._take(start, offset, sq.PAIR.size)
        nlink, value = sq.PAIR.unpack(body)
        if kind != sq.SYMLINK:
            return StoredInode(kind, *known, nlink=nlink, device=value)
        if value > 0xFFFF:
            raise self.damaged(f"inode {number}: a symbolic link of {value} bytes")
        return StoredInode(kind, *known, nlink=nlink, target=self._take(start, offset, value)[0])

    def _directory_inode(
        self, kind: int, known: tuple[int, int, int, int, int], start: int, offset: int
    ) -> StoredInode:
        xattr = sq.NONE
        if kind == sq.DIR:
            block, nlink, size, list_offset, _ = sq.DIR_BODY.unpack(self._take(start, offset, sq.DIR_BODY.size)[0])
        else:
            nlink, size, block, _, _, list_offset, xattr = sq.LONG_DIR_BODY.unpack(
                self._take(start, offset, sq.LONG_DIR_BODY.size)[0]
            )
        xattrs = self._xattrs(xattr)
        return StoredInode(sq.DIR, *known, nlink=nlink, size=size, start=block, offset=list_offset, xattrs=xattrs)

    def _file_inode(self, kind: int, known: tuple[int, int, int, int, int], start: int, offset: int) -> StoredInode:
        nlink, xattr = 1, sq.NONE
        if kind == sq.FILE:
            body, start, offset = self._take(start, offset, sq.FILE_BODY.size)
            position, fragment, tail_offset, size = sq.FILE_BODY.unpack(body)
        else:
            body, start, offset = self._take(start, offset, sq.LONG_FILE_BODY.size)
            position, size, _, nlink, fragment, tail_offset, xattr = sq.LONG_FILE_BODY.unpack(body)
        if fragment != sq.NONE and fragment >= self._fragment_count:
            raise self.damaged(f"inode {known[4]} wants fragment {fragment} of {self._fragment_count}")
        fragment = fragment if size % self.block_size else sq.NONE  # no tail
        count = size // self.block_size if fragment != sq.NONE else -(-size // self.block_size)
        sizes: tuple[int, ...] = ()
        if count:
            if count > self._directory_table - self._inode_table << 10:  # more than any compression ratio allows
                raise self.damaged(f"inode {known[4]} claims {size} bytes")
            sizes = struct.unpack(f"<{count}I", self._take(start, offset, 4 * count)[0])
        xattrs = self._xattrs(xattr)
        return StoredInode(sq.FILE, *known, nlink, size, position, fragment, tail_offset, sizes, xattrs=xattrs)

    def _listing(self, inode: StoredInode) -> Iterator[tuple[bytes, int]]:
        """Return a directory's names with the references of their inodes."""
        left, start, offset = inode.size - 3, self._directory_table + inode.start, inode.offset
        while left > 0:
            head, start, offset = self._take(start, offset, sq.LIST_HEAD.size)
            count, block, _ = sq.LIST_HEAD.unpack(head)
            left -= sq.LIST_HEAD.size
            if count >= 256:
                raise self.damaged(f"directory inode {inode.number}: a run of {count + 1} entries")
            for _ in range(count + 1):
                fixed, start, offset = self._take(start, offset, sq.LIST_ENTRY.size)
                inode_offset, _, _, length = sq.LIST_ENTRY.unpack(fixed)
                if length >= 256:
                    raise self.damaged(f"directory inode {inode.number}: a name of {length + 1} bytes")
                name, start, offset = self._take(start, offset, length + 1)
                left -= sq.LIST_ENTRY.size + length + 1
                yield name, block << 16 | inode_offset
        if left < 0 and inode.size:  # an empty listing may have size 0 or 3
            raise self.damaged(f"directory inode {inode.number}: its listing is longer than it says")

    def _references(self, inode: StoredInode) -> dict[bytes, int]:
        """Return a directory's listing by name. It is kept: looking up all paths of a folder reads it once."""
        listing = inode.start, inode.offset, inode.size  # an empty one starts at the same offset as another
        references = self._listings.pop(listing, None)
        if references is None:
            references = {}
            for name, reference in self._listing(inode):
                references.setdefault(name, reference)
            if len(self._listings) >= CACHED_LISTINGS:
                del self._listings[next(iter(self._listings))]
        self._listings[listing] = references  # moved to the end: least recently used folders are dropped first
        return references

    def _children(self, folder: PathInode) -> Iterator[PathInode]:
        listing = list(self._listing(folder.inode))
        prefix = folder.path + "/" if folder.path else ""
        last = b""
        for name, reference in listing:
            if name <= last or name in (b".", b"..") or b"/" in name or b"\0" in name:
                raise self.damaged(f"directory {folder.path!r} lists {name!r} behind {last!r}")
            last = name
            yield PathInode((*folder.order, name), prefix + decode_name(name), self._inode(reference), self)

    def _find(self, path: str) -> StoredInode | None:
        inode = self._inode(self._root)
        for name in sort_key(path):
            if inode.kind != sq.DIR:
                return None
            reference = self._references(inode).get(name)
            if reference is None:
                return None
            inode = self._inode(reference)
        return inode

    # -- data

    def _loads(self, inode: StoredInode) -> Iterator[BlockLoad]:
        position, left = inode.start, inode.size
        for word in inode.sizes:
            yield BlockLoad(self, position, word, min(left, self.block_size))
            position += word & (sq.STORED_BLOCK - 1)
            left -= self.block_size

    def _cut(self, inode: StoredInode) -> FragmentCut:
        return FragmentCut(self, (id(self), inode.fragment), inode.offset, inode.size % self.block_size)

    def _fragment_load(self, number: int, evict: tuple[int, int] | None = None) -> BlockLoad:
        position, word, _ = self._fragments[number]
        return BlockLoad(self, position, word, self.block_size, (id(self), number), evict)


class SquashfsFile:
    """One file of an image. ``read_at`` keeps the block it read last: reading forwards decompresses each block once."""

    def __init__(self, size: int, block_size: int, loads: list[BlockLoad], tail: bytes) -> None:
        self.size, self._block_size, self._loads, self._tail = size, block_size, loads, tail
        self._last: tuple[int, bytes] = (-1, b"")

    def read_at(self, offset: int, size: int) -> bytes:
        """Return ``size`` bytes from ``offset``; fewer where the file ends."""
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


def merged_layer(layers: Sequence[SquashfsReader]) -> Iterator[LayerEntry]:
    """Yield one layer that looks like all of ``layers`` stacked, bottom first; whiteouts are applied and gone."""
    return stream_entries(name_links(overlay(layers)))


def merged_entries(layers: Sequence[SquashfsReader]) -> Iterator[Entry]:
    """Yield the same without data: the entries of ``layers`` stacked."""
    return (entry for entry, _ in name_links(overlay(layers)))
