"""What a %post changed, as the layer's canonical members.

Executors hand over the changes in the form their overlay keeps them: a tar of the upper directory, depth first, in
which a deletion is a character device 0:0 (overlayfs), a list of deleted paths (docker), and a directory that hides
what is below it is opaque. Here that becomes one form (see builder.layer), and the machine's noise is left out.
"""

from __future__ import annotations

import heapq
import tarfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import IO, Protocol

from builder.chain import File
from builder.errors import LayerError
from builder.layer import CHUNK, Entry, Kind, Member, read_chunks, sort_key

BUILD_MOUNT = "run/ekiben"  # everything that is there only while a layer is built

# Contents differ from run to run or from machine to machine, and no image needs them.
NOISE_BELOW = (
    "dev", "proc", "sys", "run", "tmp", "var/tmp", "root/.cache", "var/log", "var/lib/apt/lists", "var/cache/apt",
    "var/cache/debconf", "var/lib/systemd", ".singularity.d",
)  # fmt: skip
NOISE = (
    ".dockerenv", ".singularity.d", "singularity", "environment", "root/.cache", "etc/resolv.conf", "etc/hosts", "etc/hostname", "etc/machine-id",
    "etc/localtime", "var/lib/dbus/machine-id", "var/cache/ldconfig/aux-cache", "etc/apt/sources.list", "etc/.pwd.lock",
    "root/.bash_history", "root/.wget-hsts", "var/lib/dpkg/lock*", "var/lib/dpkg/triggers/Lock", "*/.wh..wh.*",
)  # fmt: skip


# Runtimes mount their own over these; an empty file is there to be mounted on.
PLACEHOLDERS = ("etc/hostname", "etc/hosts", "etc/machine-id", "etc/resolv.conf")


def is_noise(path: str) -> bool:
    if any(path.startswith(folder + "/") for folder in NOISE_BELOW):
        return True
    return any(fnmatchcase(path, pattern) for pattern in NOISE)


class Tree(Protocol):
    """One layer below, to look into without reading it whole (SquashfsReader)."""

    def lookup(self, path: str) -> Entry | None: ...
    def children(self, path: str) -> Sequence[Entry]: ...


@dataclass(slots=True)
class Lower:
    """The merged view of the layers below, top first."""

    trees: Sequence[Tree]
    _seen: dict[str, Entry | None] = field(default_factory=dict)

    def lookup(self, path: str) -> Entry | None:
        if path not in self._seen:
            self._seen[path] = self._lookup(path)
        return self._seen[path]

    def _lookup(self, path: str) -> Entry | None:
        parent = path.rpartition("/")[0]
        if path and ((above := self.lookup(parent)) is None or above.kind != "dir"):
            return None
        for tree in self.trees:
            if (entry := tree.lookup(path)) is not None:
                return None if entry.kind == "whiteout" else entry
        return None

    def children(self, path: str) -> list[str]:
        names: set[str] = set()
        for tree in self.trees:
            if (entry := tree.lookup(path)) is not None and entry.kind == "dir":
                names |= {child.path for child in tree.children(path)}
        return sorted((name for name in names if self.lookup(name)), key=sort_key)


def canonical(
    archive: IO[bytes], lower: Lower, *, epoch: int, deleted: Collection[str] = (), opaque: Collection[str] = ()
) -> Iterator[Member]:
    """The canonical members of an upper directory's tar, which must come depth first and sorted.

    ``deleted`` and ``opaque`` are paths known beforehand, for overlays that don't mark them in the tar.
    Errors: LayerError for what no layer can hold.
    """
    return _Canon(lower, epoch, deleted, opaque).members(archive)


class _Canon:
    def __init__(self, lower: Lower, epoch: int, deleted: Collection[str], opaque: Collection[str]) -> None:
        self.lower, self.epoch = lower, epoch
        self.opaque = set(opaque)
        self.gone: list[tuple[tuple[bytes, ...], str]] = []
        self.waiting: list[Entry] = []  # directories on the way down, not written until something in them is
        for path in deleted:
            self.bury(path)

    def bury(self, path: str) -> None:
        if not is_noise(path) and self.lower.lookup(path):
            heapq.heappush(self.gone, (sort_key(path), path))

    def members(self, archive: IO[bytes]) -> Iterator[Member]:
        yield Entry("", "dir", 0o755, mtime=self.epoch), None
        with tarfile.open(fileobj=archive, mode="r|", bufsize=CHUNK) as tar:
            for info in tar:
                path = info.name.removeprefix("./").strip("/")
                path = "" if path == "." else path
                if path and not is_noise(path):
                    yield from self.member(tar, info, path)
        yield from self.whiteouts(None)

    def member(self, tar: tarfile.TarFile, info: tarfile.TarInfo, path: str) -> Iterator[Member]:
        yield from self.whiteouts(path)
        if info.ischr() and info.devmajor == info.devminor == 0:
            self.bury(path)
        elif path.endswith(("/.wh..opq", "/.wh..wh..opq")):  # fuse-overlayfs; told beforehand through ``opaque``
            return
        elif info.isdir():
            yield from self.directory(info, path)
        elif info.isfile() or info.islnk() or info.issym() or info.isfifo():
            yield from self.descend(path)
            yield self.entry(info, path), self.data(tar, info)
        # Sockets and devices belong to a machine, not to an image.

    def entry(self, info: tarfile.TarInfo, path: str) -> Entry:
        target = info.linkname.removeprefix("./") if info.islnk() else info.linkname
        if info.islnk() and is_noise(target):
            raise LayerError(f"/{path} is a hard link to /{target}, which no layer keeps; copy the file instead")
        kind: Kind = "hardlink" if info.islnk() else "symlink" if info.issym() else "fifo" if info.isfifo() else "file"
        mode = 0o777 if kind == "symlink" else info.mode & 0o7777
        return Entry(path, kind, mode, info.uid, info.gid, min(int(info.mtime), self.epoch),
                     info.size if kind == "file" else 0, target)  # fmt: skip

    def data(self, tar: tarfile.TarFile, info: tarfile.TarInfo) -> Iterator[bytes] | None:
        if not info.isfile() or not info.size:
            return None
        stream = tar.extractfile(info)
        assert stream is not None
        return read_chunks(stream.read, info.size)

    def directory(self, info: tarfile.TarInfo, path: str) -> Iterator[Member]:
        entry = Entry(path, "dir", info.mode & 0o7777, info.uid, info.gid, self.epoch)
        below = self.lower.lookup(path)
        hides = path in self.opaque or path.rpartition("/")[0] in self.opaque or _says_opaque(info)
        if below and below.kind == "dir" and hides:
            self.opaque.add(path)
            for child in self.lower.children(path):
                self.bury(child)
        if below and replace(below, mtime=self.epoch) == entry:
            self.waiting = [*self.parents_of(path), entry]  # unchanged: written only if something inside is
        else:
            yield from self.descend(path)
            yield entry, None
            self.waiting = []

    def parents_of(self, path: str) -> list[Entry]:
        return [entry for entry in self.waiting if path.startswith(entry.path + "/")]

    def descend(self, path: str) -> Iterator[Member]:
        """The directories on the way to ``path`` that were held back."""
        for entry in self.parents_of(path):
            yield entry, None
        self.waiting = []

    def whiteouts(self, before: str | None) -> Iterator[Member]:
        """Deletions that sort before the path at hand; one for that very path was made anew, and is none."""
        until = sort_key(before) if before is not None else None
        while self.gone and (until is None or self.gone[0][0] <= until):
            key, path = heapq.heappop(self.gone)
            if key != until:
                yield from self.descend(path)
                yield Entry(path, "whiteout", 0, mtime=self.epoch), None


def _says_opaque(info: tarfile.TarInfo) -> bool:
    return any(name.endswith("overlay.opaque") and value == "y" for name, value in info.pax_headers.items())


def file_members(files: Iterable[File], lower: Lower, *, epoch: int) -> Iterator[Member]:
    """The members of a layer made of files alone; directories that are there already keep what they are."""
    entries: dict[str, tuple[Entry, File | None]] = {"": (Entry("", "dir", 0o755, mtime=epoch), None)}
    for file in files:
        path = file.destination.strip("/")
        parent = path.rpartition("/")[0]
        while parent and parent not in entries:
            below = lower.lookup(parent)
            is_there = below is not None and below.kind == "dir"
            entries[parent] = (
                replace(below, mtime=epoch) if is_there and below else Entry(parent, "dir", 0o755, mtime=epoch),
                None,
            )
            parent = parent.rpartition("/")[0]
        entries[path] = (Entry(path, "file", file.mode, mtime=epoch, size=file.size), file)
    for path in sorted(entries, key=sort_key):
        entry, made_of = entries[path]
        yield entry, _file_chunks(made_of) if made_of and entry.size else None


def _file_chunks(file: File) -> Iterator[bytes]:
    if file.source is None:
        yield file.content
        return
    with file.source.open("rb") as stream:
        yield from read_chunks(stream.read, file.size)


def root_members(archive: IO[bytes], spool: IO[bytes], *, epoch: int) -> Iterator[Member]:
    """The members of a whole root file system's tar, whatever its order: spooled, then read in canonical order."""
    while chunk := archive.read(CHUNK):
        spool.write(chunk)
    spool.seek(0)
    with tarfile.open(fileobj=spool, mode="r:") as tar:
        infos = {info.name.removeprefix("./").strip("/"): info for info in tar}
        for name in ("", ".", *PLACEHOLDERS):
            infos.pop(name, None)
        first: dict[str, str] = {}  # a hard link's stored name → the name that comes first in order
        yield Entry("", "dir", 0o755, mtime=epoch), None
        for path in sorted({*infos, *PLACEHOLDERS}, key=sort_key):
            if path in PLACEHOLDERS:
                yield Entry(path, "file", 0o644, mtime=epoch), None
                continue
            if is_noise(path):
                continue
            info = infos[path]
            mtime = epoch if info.isdir() else min(int(info.mtime), epoch)
            if info.isdir():
                yield Entry(path, "dir", info.mode & 0o7777, info.uid, info.gid, mtime), None
            elif info.issym():
                yield Entry(path, "symlink", 0o777, info.uid, info.gid, mtime, 0, info.linkname), None
            elif info.isfile() or info.islnk():
                stored = info.linkname.removeprefix("./").strip("/") if info.islnk() else path
                if stored in first:
                    yield Entry(path, "hardlink", info.mode & 0o7777, info.uid, info.gid, mtime, 0, first[stored]), None
                    continue
                first[stored] = path
                holder = infos[stored]
                stream = tar.extractfile(holder)
                assert stream is not None
                entry = Entry(path, "file", holder.mode & 0o7777, holder.uid, holder.gid, mtime, holder.size)
                yield entry, read_chunks(stream.read, holder.size) if holder.size else None
