"""Random trees read by unsquashfs and the kernel, and random edits of them through the kernel's overlay."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import given as for_all

from ekiben.formats.changeset import Lower, normalize
from ekiben.formats.layer import Xattrs, decode_name, write_entries
from ekiben.formats.squashfs.reader import SquashfsReader, merged_layer
from ekiben.formats.squashfs.writer import SquashfsWriter
from ekiben.formats.upper import Changes
from ekiben.formats.xattrs import content_xattrs
from support.random_edits import Edit, edits, script
from support.random_trees import Read, Tree, stored, trees

pytestmark = pytest.mark.covers("ekiben/formats")


slow = settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
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
        entries[path] = (first.kind, first.mode, first.uid, first.gid, first.mtime, shown, first.xattrs)
    return entries


def on_disk(root: Path, with_xattrs: bool = True) -> Seen:
    entries: Seen = {}
    for location in (root, *root.rglob("*")):
        path = str(location.relative_to(root))
        entries["" if path == "." else path] = look_at(location, with_xattrs)
    return entries


def look_at(location: Path, with_xattrs: bool) -> tuple[object, ...]:
    seen = location.lstat()
    kind = {
        stat.S_IFDIR: "dir",
        stat.S_IFREG: "file",
        stat.S_IFLNK: "symlink",
        stat.S_IFIFO: "fifo",
        stat.S_IFCHR: "whiteout",
    }[stat.S_IFMT(seen.st_mode)]
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
            folders = f"lowerdir={location}/lower,upperdir={location}/upper,workdir={location}/work"
            options = f"{folders},index=off,metacopy=off,redirect_dir=off"
            subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, location / "merged"], check=True)
            try:
                subprocess.run(
                    ["/bin/sh", "-c", script(steps)], cwd=location / "merged", check=True, capture_output=True
                )
                after = without_times(on_disk(location / "merged"))
            finally:
                subprocess.run(["umount", location / "merged"], check=True)
            with (location / "layer").open("w+b") as out:
                write_entries(
                    normalize(Changes(location / "upper"), Lower(readers[::-1]), epoch=2**31), SquashfsWriter(out)
                )
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
