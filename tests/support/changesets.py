"""Layers, and what a script changed in them as each kind of overlay keeps it."""

from __future__ import annotations

import io
import os
import random
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from ekiben.formats.changeset import Lower, file_entries, normalize, unordered_entries
from ekiben.formats.layer import Entry, File, LayerEntry, Xattrs, sort_key, write_entries
from ekiben.formats.squashfs.reader import SquashfsReader, merged_layer
from ekiben.formats.squashfs.writer import SquashfsWriter
from ekiben.formats.upper import Changes
from ekiben.formats.xattrs import to_pax

EPOCH = 1_700_000_000
Content = tuple[Entry, bytes]
Tree = dict[str, Content]


def d(path: str, mode: int = 0o755, *, uid: int = 0, gid: int = 0) -> Content:
    return Entry(path, "dir", mode, uid, gid, EPOCH), b""


def f(path: str, data: bytes = b"", mode: int = 0o644, mtime: int = 5) -> Content:
    return Entry(path, "file", mode, mtime=mtime, size=len(data)), data


def link(path: str, target: str) -> Content:
    return Entry(path, "symlink", 0o777, mtime=5, target=target), b""


def tree(*items: Content) -> Tree:
    return {entry.path: (entry, data) for entry, data in (d(""), *items)}


def sent(files: Mapping[str, Content]) -> Iterator[LayerEntry]:
    for path in sorted(files, key=sort_key):
        entry, data = files[path]
        yield entry, [data] if data else None


def drained(members: Iterable[LayerEntry]) -> list[Content]:
    """Checked on the way as every sink would: the order, and the sizes."""

    class Nothing:
        def add(self, entry: Entry) -> None:
            found.append((entry, b""))

        def write(self, chunk: bytes) -> None:
            found[-1] = (found[-1][0], found[-1][1] + chunk)

        def close(self) -> None:
            pass

    found: list[Content] = []
    write_entries(members, Nothing())
    return found


class Layers:
    """Real squashfs layers in a folder, and what they look like stacked."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack, self.readers = folder, stack, list[SquashfsReader]()

    def push(self, members: Iterable[LayerEntry]) -> None:
        path = self._folder / f"{len(self.readers)}.squashfs"
        with path.open("w+b") as out:
            write_entries(members, SquashfsWriter(out, epoch=EPOCH))
        self.readers.append(SquashfsReader(self._stack.enter_context(path.open("rb"))))

    @property
    def lower(self) -> Lower:
        return Lower(self.readers[::-1])

    def merged(self) -> Tree:
        return {entry.path: (entry, data) for entry, data in drained(merged_layer(self.readers))}


@dataclass
class Upper:
    """``made``: what is there; ``deleted``: what hides; ``opaque``: folders made again, which hide what was in them."""

    made: Tree = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    opaque: set[str] = field(default_factory=set)
    links: dict[str, str] = field(default_factory=dict)


def folder(upper: Upper, lower: Lower) -> Iterator[LayerEntry]:
    """The upper directory itself, as the kernel's overlay keeps it: its whiteouts are names of one inode."""
    with TemporaryDirectory() as outer:
        upper_dir, whiteout = f"{outer}/upper", f"{outer}/whiteout"
        os.mknod(whiteout, stat.S_IFCHR, os.makedev(0, 0))
        Path(upper_dir).mkdir(0o755)
        for path in sorted([*upper.made, *upper.deleted, *upper.links], key=sort_key):
            if path in upper.made:
                lay_out(f"{upper_dir}/{path}", *upper.made[path])
            else:
                os.link(f"{upper_dir}/{upper.links[path]}" if path in upper.links else whiteout, f"{upper_dir}/{path}")
        for path in upper.opaque:
            os.setxattr(f"{upper_dir}/{path}", "trusted.overlay.opaque", b"y")
        for path, (entry, _) in sorted(upper.made.items(), reverse=True):  # a folder's time when all is in it
            os.utime(f"{upper_dir}/{path}", (entry.mtime, entry.mtime), follow_symlinks=False)
        yield from normalize(Changes(Path(upper_dir)), lower, epoch=EPOCH)


def lay_out(destination: str, entry: Entry, data: bytes) -> None:
    if entry.kind == "dir":
        Path(destination).mkdir(exist_ok=not entry.path)
    elif entry.kind == "file":
        Path(destination).write_bytes(data)
    elif entry.kind == "symlink":
        Path(destination).symlink_to(entry.target)
    os.chown(destination, entry.uid, entry.gid, follow_symlinks=False)
    if entry.kind != "symlink":
        Path(destination).chmod(entry.mode)
    for name, value in entry.xattrs:
        os.setxattr(destination, name, value)


BASE = tree(
    d("etc"),
    f("etc/conf", b"1"),
    f("etc/passwd", b"root"),
    d("opt", 0o750, uid=7),
    d("opt/a"),
    d("opt/a/b"),
    f("opt/a/b/c", b"c"),
    f("opt/a/x", b"x"),
    f("opt/z", b"z"),
    d("usr"),
    d("usr/bin"),
    f("usr/bin/tool", b"tool", 0o755),
    link("bin", "usr/bin"),
)
CAPABILITY = bytes.fromhex("01000002c0200000000000000000000000000000")
XATTRS: Xattrs = (("security.capability", CAPABILITY), ("user.empty", b""), ("user.note", b"a\0=\n\xff"))


def files(base: Layers, *destinations: str) -> list[Content]:
    return drained(file_entries([File(name, 0o644, content=b"x") for name in destinations], base.lower, epoch=EPOCH))


def tar_info(entry: Entry, prefix: str = "./") -> tarfile.TarInfo:
    info = tarfile.TarInfo(prefix + entry.path)
    kinds = {
        "dir": tarfile.DIRTYPE,
        "file": tarfile.REGTYPE,
        "symlink": tarfile.SYMTYPE,
        "fifo": tarfile.FIFOTYPE,
        "hardlink": tarfile.LNKTYPE,
        "whiteout": tarfile.CHRTYPE,
    }
    info.type, info.mode, info.uid, info.gid = kinds[entry.kind], entry.mode, entry.uid, entry.gid
    info.mtime, info.size, info.linkname = entry.mtime, entry.size, entry.target
    info.pax_headers = to_pax(entry.xattrs)
    return info


def tar(infos: Iterable[tuple[tarfile.TarInfo, bytes]]) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as archive:
        for info, data in infos:
            archive.addfile(info, io.BytesIO(data))
    out.seek(0)
    return out


def in_order(
    upper: Upper, opaque: Callable[[tarfile.TarInfo], None] = lambda info: None, whiteouts: bool = True, marks: str = ""
) -> io.BytesIO:
    """Depth first and sorted, as GNU tar --sort=name writes an upper directory."""
    files: dict[str, Content] = dict(upper.made)
    for path in upper.deleted if whiteouts else ():
        files[path] = Entry(path, "whiteout", 0), b""
    for path in upper.opaque if marks else ():
        files[f"{path}/{marks}"] = Entry(f"{path}/{marks}", "file", 0), b""
    for path, target in upper.links.items():
        files[path] = Entry(path, "hardlink", 0o644, mtime=5, target="./" + target), b""
    infos = []
    for path in sorted(files, key=sort_key):
        entry, data = files[path]
        info = tar_info(entry)
        if path in upper.opaque:
            opaque(info)
        infos.append((info, data))
    return tar([(tar_info(Entry("", "dir")), b""), *infos])


def _says_opaque(info: tarfile.TarInfo) -> None:
    info.pax_headers = {"SCHILY.xattr.trusted.overlay.opaque": "y"}


def overlayfs(upper: Upper, lower: Lower) -> Iterator[LayerEntry]:
    return normalize(Changes(in_order(upper, _says_opaque)), lower, epoch=EPOCH)


def fuse_overlayfs(upper: Upper, lower: Lower) -> Iterator[LayerEntry]:
    return normalize(Changes(in_order(upper, marks=".wh..opq"), opaque=upper.opaque), lower, epoch=EPOCH)


def docker(upper: Upper, lower: Lower) -> Iterator[LayerEntry]:
    archive = in_order(upper, whiteouts=False)
    return normalize(Changes(archive, deleted=upper.deleted, opaque=upper.opaque), lower, epoch=EPOCH)


def oci(upper: Upper, lower: Lower, rng: random.Random | None = None) -> Iterator[LayerEntry]:
    """A registry's layer: any order, deletions as .wh. files, folders perhaps left out when they are unchanged."""
    infos = [(tar_info(entry, ""), data) for entry, data in upper.made.values()]
    for path in [*upper.deleted, *(f"{folder}/.wh..opq" for folder in upper.opaque)]:
        head, slash, name = path.rpartition("/")
        infos.append((tarfile.TarInfo(f"{head}{slash}.wh.{name}"), b""))
    infos += [(tar_info(Entry(path, "hardlink", target=target), ""), b"") for path, target in upper.links.items()]
    if rng:
        rng.shuffle(infos)
    return unordered_entries(tar(infos), io.BytesIO(), lower, epoch=EPOCH)


SHAPES = {"overlayfs": overlayfs, "fuse-overlayfs": fuse_overlayfs, "docker": docker, "oci": oci}


def same_in_all_shapes(upper: Upper, lower: Lower) -> list[Content]:
    found = {name: drained(shape(upper, lower)) for name, shape in SHAPES.items()}
    for name, members in found.items():
        assert members == found["overlayfs"], name
    return found["overlayfs"]
