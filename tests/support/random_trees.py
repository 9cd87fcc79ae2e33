"""Strategies of hypothesis for a layer's tree, and its squashfs."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from hypothesis import strategies as st

from ekiben.formats.layer import Entry, LayerEntry, Xattrs, decode_name, sort_key, write_entries
from ekiben.formats.squashfs.writer import SquashfsWriter
from ekiben.formats.tar import DigestWriter
from ekiben.formats.xattrs import content_xattrs

EPOCH = 1_700_000_000
Tree = dict[str, tuple[Entry, bytes]]
names = st.one_of(
    st.binary(min_size=1, max_size=3).filter(lambda name: not set(name) & {0, 47} and name not in (b".", b"..")),
    st.sampled_from([b"x" * 255, b"new\nline", b"-rf", "日本".encode(), b"\xff\x80", b"a"]),
)
numbers = st.sampled_from([0, 1, 5, 65_536, 2**31, 2**32 - 2])
sizes = st.sampled_from([0, 1, 4095, 4096, 4097, 8192, 70_000])
attribute_names = st.sampled_from(["a", "note", "日本", "x" * 240, "with space"])
values = st.one_of(st.binary(max_size=3), st.sampled_from([b"", b"\0", b"=\n", b"\xff", b"v" * 3000]))
attributes = st.dictionaries(attribute_names.map("user.{}".format), values, max_size=2)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """A layer as normalize() yields it."""
    files: Tree = {"": (Entry("", "dir", mtime=EPOCH), b"")}
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.sampled_from(sorted(path for path, (entry, _) in files.items() if entry.kind == "dir")))
        path = f"{parent}/{decode_name(draw(names))}".lstrip("/")
        if path in files or path.rpartition("/")[2].startswith(".wh."):
            continue
        kind: Any = draw(
            st.sampled_from(["dir", "dir", "file", "file", "file", "symlink", "fifo", "whiteout", "hardlink"])
        )
        earlier = sorted(
            entries
            for entries, (entry, _) in files.items()
            if entry.kind == "file" and sort_key(entries) < sort_key(path)
        )
        if kind == "hardlink" and earlier:
            target = draw(st.sampled_from(earlier))
            other = files[target][0]
            files[path] = Entry(path, "hardlink", other.mode, other.uid, other.gid, other.mtime, target=target), b""
            continue
        data = b""
        if kind in ("file", "hardlink"):
            size = draw(sizes)
            data = draw(
                st.sampled_from([bytes(size), (b"%d " % len(files) * size)[:size], random.Random(size).randbytes(size)])
            )
        xattrs: Xattrs = content_xattrs(draw(attributes).items()) if kind in ("dir", "file", "hardlink") else ()
        entry = Entry(
            path,
            "file" if kind == "hardlink" else kind,
            draw(st.sampled_from([0, 0o644, 0o4755, 0o1777, 0o2750])) if kind != "symlink" else 0o777,
            draw(numbers),
            draw(numbers),
            draw(st.sampled_from([0, 5, 2**31 - 1])),
            len(data),
            decode_name(draw(names)) if kind == "symlink" else "",
            xattrs,
        )
        files[path] = entry, data
    return files


def members(tree: Tree) -> Iterator[LayerEntry]:
    for path in sorted(tree, key=sort_key):
        entry, data = tree[path]
        yield entry, [data] if data else None


class Read:
    """Takes a layer in."""

    def __init__(self) -> None:
        self.tree: Tree = {}

    def add(self, entry: Entry) -> None:
        self.tree[entry.path] = entry, b""
        self._last = entry

    def write(self, chunk: bytes) -> None:
        self.tree[self._last.path] = self._last, self.tree[self._last.path][1] + chunk

    def close(self) -> None:
        pass


@contextmanager
def stored(tree: Tree) -> Iterator[tuple[IO[bytes], str]]:
    """The squashfs of a tree, and its diff_id."""
    digest = DigestWriter()
    with tempfile.NamedTemporaryFile(suffix=".squashfs") as file:
        write_entries(members(tree), digest, SquashfsWriter(file, block_size=4096, epoch=EPOCH))  # type: ignore[arg-type]
        yield file, digest.diff_id
