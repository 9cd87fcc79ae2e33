"""The entries of one or several squashfs layers as a stream, with file data that threads decompress ahead of the
reader.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ekiben.formats.layer import Entry, LayerEntry, Xattrs, decode_name
from ekiben.formats.squashfs import format as sq
from ekiben.formats.squashfs.format import usable_cores

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ekiben.formats.squashfs.reader import SquashfsReader

Order = tuple[bytes, ...]
CACHED_FRAGMENTS = 16


@dataclass(frozen=True, slots=True)
class StoredInode:
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
    fragment: int = sq.NONE
    offset: int = 0
    sizes: tuple[int, ...] = ()
    target: bytes = b""
    device: int = 0
    xattrs: Xattrs = ()

    @property
    def is_kept(self) -> bool:
        """Devices other than the whiteout and sockets are not part of a layer."""
        return self.kind in sq.KINDS and not self.device


@dataclass(frozen=True, slots=True)
class PathInode:
    """A path of an image, before hard links are resolved."""

    order: Order
    path: str
    inode: StoredInode
    reader: SquashfsReader


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """One stored block to read and decompress; a fragment block is kept under its key for the cuts that follow."""

    reader: SquashfsReader
    position: int
    word: int
    size: int
    key: tuple[int, int] | None = None
    evict: tuple[int, int] | None = None

    def run(self) -> bytes:
        """Read and decompress the block."""
        return self.reader.read_block(self.position, self.word, self.size, exact=self.key is None)


@dataclass(frozen=True, slots=True)
class FragmentCut:
    """A small file out of a fragment block that was loaded before."""

    reader: SquashfsReader
    key: tuple[int, int]
    offset: int
    size: int

    def of(self, fragment: bytes) -> bytes:
        """Return the file's bytes in its fragment block. Raises StoreError when they are not there."""
        data = fragment[self.offset : self.offset + self.size]
        if len(data) != self.size:
            raise self.reader.damaged(f"fragment {self.key[1]} holds no {self.size} bytes at {self.offset}")
        return data


def entry_of(path: str, inode: StoredInode) -> Entry:
    """Return an inode as a layer's entry."""
    return Entry(
        path,
        sq.KINDS[inode.kind],
        inode.mode,
        inode.uid,
        inode.gid,
        inode.mtime,
        inode.size if inode.kind == sq.FILE else 0,
        decode_name(inode.target),
        inode.xattrs,
    )


def name_links(walk: Iterable[PathInode]) -> Iterator[tuple[Entry, PathInode]]:
    """Make the first of several names of one inode the file, and the others hard links to it."""
    names: dict[tuple[int, int], str] = {}
    for node in walk:
        inode, entry = node.inode, entry_of(node.path, node.inode)
        if inode.nlink > 1 and inode.kind not in (sq.DIR, sq.CHAR_DEVICE):
            first = names.setdefault((id(node.reader), inode.number), node.path)
            if first != node.path:
                entry = Entry(node.path, "hardlink", inode.mode, inode.uid, inode.gid, inode.mtime, 0, first)
        yield entry, node


_Step = Entry | BlockLoad | FragmentCut


def _steps(named: Iterable[tuple[Entry, PathInode]]) -> Iterator[_Step]:
    """Yield the steps in order: an entry, then the loads and the cut that its data consist of."""
    fragments: OrderedDict[tuple[int, int], None] = OrderedDict()
    for entry, node in named:
        yield entry
        if entry.kind != "file" or not entry.size:
            continue
        reader, inode = node.reader, node.inode
        yield from reader._loads(inode)
        if inode.fragment == sq.NONE:
            continue
        cut = reader._cut(inode)
        if cut.key not in fragments:
            evict = fragments.popitem(last=False)[0] if len(fragments) >= CACHED_FRAGMENTS else None
            yield reader._fragment_load(inode.fragment, evict)
            fragments[cut.key] = None
        fragments.move_to_end(cut.key)
        yield cut


def _run(steps: list[_Step]) -> list[tuple[_Step, bytes]]:
    return [(step, step.run() if isinstance(step, BlockLoad) else b"") for step in steps]


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
        size += step.size if isinstance(step, BlockLoad) else 256
        if size >= sq.BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def stream_entries(named: Iterable[tuple[Entry, PathInode]]) -> Iterator[LayerEntry]:
    """Yield entries with their data, which several threads decompress ahead."""
    steps = _ahead(_steps(named), usable_cores())
    fragments: dict[tuple[int, int], bytes] = {}

    def chunks(size: int) -> Iterator[bytes]:
        while size > 0:
            step, data = next(steps)
            if isinstance(step, FragmentCut):
                data = step.of(fragments[step.key])
            elif isinstance(step, BlockLoad) and step.key:
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
        deque(data, maxlen=0)  # data that the caller skipped


def overlay(layers: Sequence[SquashfsReader]) -> Iterator[PathInode]:
    """Merge layers as overlayfs does: the top entry wins, directories merge, other entries hide those below."""
    height = {id(layer): index for index, layer in enumerate(layers)}
    walks = [layer.walk() for layer in layers]
    last: Order | None = None
    covers: list[tuple[Order, int]] = []  # below this path, layers under this height are hidden
    for node in heapq.merge(*walks, key=lambda node: (node.order, -height[id(node.reader)])):
        while covers and node.order[: len(covers[-1][0])] != covers[-1][0]:
            covers.pop()
        layer = height[id(node.reader)]
        if covers and layer < covers[-1][1]:
            continue
        if node.inode.kind != sq.DIR:
            covers.append((node.order, layer))
        if node.order != last and node.inode.kind != sq.CHAR_DEVICE:
            yield node
        last = node.order
