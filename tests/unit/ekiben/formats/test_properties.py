"""Random trees through every reader of squashfs, random edits of them through the kernel's overlay: nothing is lost on the way."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import given as for_all
from hypothesis import strategies as st

from ekiben.formats.changeset import Lower, normalize
from ekiben.formats.layer import Entry, LayerEntry, Xattrs, decode_name, sort_key, write_entries
from ekiben.formats.squashfs._stream import name_links, stream_entries
from ekiben.formats.squashfs.reader import SquashfsReader, merged_layer
from ekiben.formats.squashfs.writer import SquashfsWriter
from ekiben.formats.tar import DigestWriter, tar_entries, tar_stream
from ekiben.formats.xattrs import content_xattrs
from support.random_edits import Edit, edits, script

EPOCH = 1_700_000_000
Tree = dict[str, tuple[Entry, bytes]]

fast = settings(max_examples=30, deadline=None, derandomize=True)
slow = settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

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
        kind = draw(st.sampled_from(["dir", "dir", "file", "file", "file", "symlink", "fifo", "whiteout", "hardlink"]))
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
            path, "file" if kind == "hardlink" else kind, draw(st.sampled_from([0, 0o644, 0o4755, 0o1777, 0o2750])) if kind != "symlink" else 0o777,
            draw(numbers), draw(numbers), draw(st.sampled_from([0, 5, 2**31 - 1])), len(data),
            decode_name(draw(names)) if kind == "symlink" else "", xattrs,
        )  # fmt: skip
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


@fast
@for_all(trees())
def test_what_is_written_is_read_back(tree: Tree) -> None:
    read, digest = Read(), DigestWriter()
    with stored(tree) as (file, diff_id):
        write_entries(stream_entries(name_links(SquashfsReader(file).walk())), read, digest)  # type: ignore[arg-type]
    assert read.tree == tree
    assert digest.diff_id == diff_id


@fast
@for_all(trees())
def test_a_layers_tar_is_read_back(tree: Tree) -> None:
    read = Read()
    with tempfile.TemporaryFile() as archive:
        archive.writelines(tar_stream(members(tree)))
        archive.seek(0)
        write_entries(tar_entries(archive), read)
    assert {path: (entry.xattrs, data) for path, (entry, data) in read.tree.items()} == {
        path: (entry.xattrs, data) for path, (entry, data) in tree.items()
    }


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts, and makes owners and devices")


@as_root
@slow
@for_all(trees())
def test_unsquashfs_and_the_kernel_read_the_same(tree: Tree) -> None:
    with stored(tree) as (file, _), tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["unsquashfs", "-quiet", "-n", "-d", f"{folder}/out", file.name], check=True, capture_output=True
        )
        assert on_disk(Path(folder, "out")) == expected_on_disk(tree)
        mounted = Path(folder, "mounted")
        mounted.mkdir()
        subprocess.run(["mount", "-t", "squashfs", "-o", "ro,loop", file.name, mounted], check=True)
        try:
            has_xattrs = any(entry.xattrs for entry, _ in tree.values())  # without, the kernel says that it knows none
            assert on_disk(mounted, has_xattrs) == expected_on_disk(tree)
        finally:
            subprocess.run(["umount", mounted], check=True)


Seen = dict[str, tuple[object, ...]]


def expected_on_disk(tree: Tree) -> Seen:
    entries: Seen = {}
    for path, (entry, data) in tree.items():
        first, content = tree[entry.target] if entry.kind == "hardlink" else (entry, data)
        shown = content if first.kind == "file" else first.target
        entries[path] = (
            first.kind,
            first.mode,
            first.uid,
            first.gid,
            first.mtime,
            shown,
            first.xattrs,
        )
    return entries


def on_disk(root: Path, with_xattrs: bool = True) -> Seen:
    entries: Seen = {}
    for location in (root, *root.rglob("*")):
        path = str(location.relative_to(root))
        entries["" if path == "." else path] = look_at(location, with_xattrs)
    return entries


def look_at(location: Path, with_xattrs: bool) -> tuple[object, ...]:
    seen = location.lstat()
    kind = {stat.S_IFDIR: "dir", stat.S_IFREG: "file", stat.S_IFLNK: "symlink", stat.S_IFIFO: "fifo",
            stat.S_IFCHR: "whiteout"}[stat.S_IFMT(seen.st_mode)]  # fmt: skip
    shown: object = ""
    if kind == "file":
        shown = location.read_bytes()
    if kind == "symlink":
        shown = os.readlink(location)  # noqa: PTH115  a Path would tidy it up
    xattrs: Xattrs = ()
    if kind in ("dir", "file") and with_xattrs:
        xattrs = content_xattrs(
            (decode_name(os.fsencode(name)), os.getxattr(location, name)) for name in os.listxattr(location)
        )
    return kind, stat.S_IMODE(seen.st_mode), seen.st_uid, seen.st_gid, int(seen.st_mtime), shown, xattrs


# ------------------------------------------------------------------------------------------------------- edits of a tree


@as_root
@slow
@for_all(edits, edits, edits)
def test_edits_on_the_kernels_overlay_are_the_layer(first: list[Edit], second: list[Edit], third: list[Edit]) -> None:
    """A layer of what each of three scripts changed: stacked they are the tree that the last script saw."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        readers: list[SquashfsReader] = []
        for number, steps in enumerate((first, second, third)):
            location = Path(folder, str(number))
            for name in ("lower", "upper", "work", "merged"):
                (location / name).mkdir(parents=True)
            if readers:
                unpack(readers, location / "lower")
            options = f"lowerdir={location}/lower,upperdir={location}/upper,workdir={location}/work,index=off,metacopy=off,redirect_dir=off"
            subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, location / "merged"], check=True)
            try:
                subprocess.run(
                    ["/bin/sh", "-c", script(steps)], cwd=location / "merged", check=True, capture_output=True
                )
                after = without_times(on_disk(location / "merged"))
            finally:
                subprocess.run(["umount", location / "merged"], check=True)
            with (location / "layer").open("w+b") as out:
                write_entries(normalize(location / "upper", Lower(readers[::-1]), epoch=2**31), SquashfsWriter(out))
            readers.append(SquashfsReader(stack.enter_context((location / "layer").open("rb"))))
            read = Read()
            write_entries(merged_layer(readers), read)
            assert without_times(expected_on_disk(read.tree)) == after


def unpack(readers: list[SquashfsReader], folder: Path) -> None:
    """The stacked layers as a folder for the next overlay to lie on."""
    with tempfile.NamedTemporaryFile(suffix=".squashfs") as file:
        write_entries(merged_layer(readers), SquashfsWriter(file))  # type: ignore[arg-type]
        subprocess.run(["unsquashfs", "-quiet", "-n", "-f", "-d", folder, file.name], check=True, capture_output=True)


def without_times(seen: Seen) -> Seen:
    """A folder's time is the epoch in a layer."""
    return {path: (*value[:4], *value[5:]) if value[0] == "dir" else value for path, value in seen.items()}
