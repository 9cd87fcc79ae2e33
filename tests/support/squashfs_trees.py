"""Trees of files for squashfs, written and read back."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ekiben.core.errors import StoreError
from ekiben.formats.layer import Entry, LayerEntry, sort_key, write_entries
from ekiben.formats.squashfs.format import BLOCK_SIZE, SUPERBLOCK
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.formats.squashfs.writer import SquashfsWriter, _BlockWriter
from ekiben.formats.tar import DigestWriter

Tree = dict[str, tuple[Entry, bytes]]
WEIRD_NAMES = ["a b", "new\nline", "ünï", "\udcff\udc80", "-rf", ".wh.not", "x" * 255, "'\"\\", "日本", "\x01", "~"]
SIZES = [0, 1, 4095, 4096, 4097, 2 * 4096, 3 * 4096 + 1, 70_000]


def tree(*entries: Entry | tuple[Entry, bytes]) -> Tree:
    """Entries by path, with their data; the root directory comes by itself."""
    pairs = [item if isinstance(item, tuple) else (item, b"") for item in (Entry("", "dir"), *entries)]
    return {entry.path: (entry, data) for entry, data in pairs}


def members(files: Tree, chunk: int = 1 << 20) -> Iterator[LayerEntry]:
    for path in sorted(files, key=sort_key):
        entry, data = files[path]
        yield entry, [data[at : at + chunk] for at in range(0, len(data), chunk)] if data else None


def write(path: Path, files: Tree, *, chunk: int = 1 << 20, **options: Any) -> str:
    """Write a squashfs; the diff_id of what went in."""
    digest = DigestWriter()
    with path.open("w+b") as out:
        write_entries(members(files, chunk), SquashfsWriter(out, **options), digest)
    return digest.diff_id


def read(path: Path) -> tuple[str, Tree]:
    """The diff_id and the content of what comes out."""
    digest, found = DigestWriter(), Contents()
    with path.open("rb") as stream:
        write_entries(SquashfsReader(stream).contents(), digest, found)
    return digest.diff_id, found.tree


class Contents:
    def __init__(self) -> None:
        self.tree: Tree = {}
        self._last = ""

    def add(self, entry: Entry) -> None:
        self._last = entry.path
        self.tree[entry.path] = entry, b""

    def write(self, chunk: bytes) -> None:
        entry, data = self.tree[self._last]
        self.tree[self._last] = entry, data + chunk

    def close(self) -> None:
        pass


def random_tree(seed: int) -> Tree:
    choose = random.Random(seed)
    files = tree()
    folders = [""]
    for number in range(choose.randrange(1, 300)):
        parent = choose.choice(folders[-20:])
        name = choose.choice([*WEIRD_NAMES, f"n{number}", f"{number:04}"])
        path = f"{parent}/{name}" if parent else name
        if path in files or len(path) > 3000:
            continue
        kind: Any = choose.choice(["dir", "dir", "file", "file", "file", "file", "symlink", "fifo", "whiteout"])
        owner = {"uid": choose.choice([0, 1, 65_536, 4_000_000_000]), "gid": choose.choice([0, 5, 2**31])}
        mode, mtime = choose.choice([0, 0o644, 0o4755, 0o1777, 0o2750]), choose.choice([0, 2**31 - 1])
        common: dict[str, Any] = {"mode": mode, "mtime": mtime, **owner}
        if kind == "dir":
            folders.append(path)
        if kind == "file":
            size = choose.choice(SIZES)
            data = choose.choice([bytes(size), choose.randbytes(size), (b"text %d " % number * size)[:size]])
            files[path] = Entry(path, "file", **common, size=size), data
        else:
            target = choose.choice(["/x", "../" * 50, "\udcfe"]) if kind == "symlink" else ""
            files[path] = Entry(path, kind, **common, target=target), b""
    return with_hard_links(with_xattrs(files, random.Random(seed)), choose)


def with_xattrs(files: Tree, choose: random.Random) -> Tree:
    """A few sets of them, on files and folders."""
    sets = [
        tuple(
            (f"user.{name}", choose.randbytes(choose.choice([0, 1, 300]))) for name in "abc"[: choose.randrange(1, 4)]
        )
        for _ in range(3)
    ] + [(("security.capability", bytes.fromhex("01000002c0200000000000000000000000000000")),)]
    holders = [path for path, (entry, _) in files.items() if entry.kind in ("file", "dir")]
    for path in choose.sample(holders, len(holders) // 4):
        entry, data = files[path]
        files[path] = replace(entry, xattrs=choose.choice(sets)), data
    return files


def with_hard_links(files: Tree, choose: random.Random) -> Tree:
    firsts = [path for path, (entry, _) in files.items() if entry.kind in ("file", "symlink", "fifo")]
    for path in choose.sample(firsts, min(len(firsts), 10)):
        entry, _ = files[path]
        other = path + "~link" if len(path.rpartition("/")[2].encode(errors="surrogateescape")) < 200 else ""
        if other and other not in files and sort_key(path) < sort_key(other):
            link = Entry(other, "hardlink", entry.mode, entry.uid, entry.gid, entry.mtime, target=path)
            files[other] = link, b""
    return files


def requires_program(tool: str) -> str:
    found = shutil.which(tool)
    if not found:
        pytest.skip(f"{tool} is not installed (tests/services.sh install)")
    return found


def noticed_damage(path: Path, good: bytes, *, seed: str) -> int:
    """Read 400 damaged copies of the squashfs ``good``, and return for how many that was an error; never another
    one.
    """
    choose = random.Random(seed)
    table = SUPERBLOCK.unpack_from(good)[15]  # the inode table: damage there and behind is what misleads a reader
    noticed = 0
    for attempt in range(400):
        data = bytearray(good)
        for _ in range(choose.randrange(1, 4)):
            start = choose.choice([0, 96, table])
            data[choose.randrange(start, 96 if not start else len(data))] = choose.randrange(256)
        if attempt % 10 == 0:
            del data[choose.randrange(len(data)) :]
        noticed += is_noticed(path, bytes(data))
    return noticed


def is_noticed(path: Path, data: bytes) -> bool:
    path.write_bytes(data)
    try:
        read(path)
    except (StoreError, ValueError) as error:
        assert isinstance(error, StoreError), error
        assert str(path) in str(error)
        return True
    return False


def write_beyond_four_gibibytes(path: Path) -> tuple[Entry, str, bytes]:
    """Write a large file and one at a high position: a hole in the image stands for 5 GiB of other data.

    Returns the large file's entry, and the name and data of the other.
    """
    big = Entry("big", "file", size=(5 << 30) + 1)
    late = random.Random(0).randbytes(2 * BLOCK_SIZE)
    with path.open("w+b") as out:
        writer = SquashfsWriter(out)
        blocks: _BlockWriter = writer._blocks
        blocks.position = 5 << 30
        out.seek(blocks.position)
        zeros = [bytes(1 << 20)] * 5120 + [b"\0"]
        write_entries([(Entry("", "dir"), None), (big, zeros), (Entry("late", "file", size=len(late)), [late])], writer)
    return big, "late", late
