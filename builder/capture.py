"""What a %post changed, as the layer's canonical members.

Executors hand over the changes in the form their overlay keeps them: the upper directory, or a tar of it, depth first, in
which a deletion is a character device 0:0 (overlayfs), a list of deleted paths (docker), and a directory that hides
what is below it is opaque. Here that becomes one form (see builder.layer), and the machine's noise is left out.
"""

from __future__ import annotations

import copy
import errno
import heapq
import os
import posixpath
import stat
import tarfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Protocol, cast

from builder.chain import File
from builder.errors import LayerError
from builder.layer import CHUNK, WHITEOUT_PREFIX, Entry, Kind, Member, read_chunks, sort_key

COMPARED = 64 << 20  # bytes: a larger file that was copied up is taken as changed

# Contents differ from run to run or from machine to machine, and no image needs them.
NOISE_BELOW = (
    "dev", "proc", "sys", "run", "tmp", "var/tmp", "root/.cache", "var/log", "var/lib/apt/lists", "var/cache/apt",
    "var/cache/debconf", "var/lib/systemd", ".singularity.d",
)  # fmt: skip
NOISE = (
    ".dockerenv", ".singularity.d", "singularity", "environment", "root/.cache", "etc/resolv.conf", "etc/hosts", "etc/hostname", "etc/machine-id",
    "etc/localtime", "var/lib/dbus/machine-id", "var/cache/ldconfig/aux-cache", "etc/apt/sources.list", "etc/.pwd.lock",
    "root/.bash_history", "root/.wget-hsts", "var/lib/dpkg/lock*", "var/lib/dpkg/triggers/Lock", "*/.wh..wh.*",
    "*.dist-info/uv_cache.json",
)  # fmt: skip


# Runtimes mount their own over these; an empty file is there to be mounted on.
PLACEHOLDERS = ("etc/hostname", "etc/hosts", "etc/machine-id", "etc/resolv.conf")


def is_noise(path: str) -> bool:
    if any(path.startswith(folder + "/") for folder in NOISE_BELOW):
        return True
    return any(fnmatchcase(path, pattern) for pattern in NOISE)


def without_noise(record: bytes) -> bytes:
    """A RECORD without uv's note on a wheel that came from a folder: when that file was made."""
    return b"".join(line for line in record.splitlines(keepends=True) if b".dist-info/uv_cache.json," not in line)


class Tree(Protocol):
    """One layer below, to look into without reading it whole (SquashfsReader)."""

    def lookup(self, path: str) -> Entry | None: ...
    def children(self, path: str) -> Sequence[Entry]: ...
    def read_file(self, path: str) -> bytes: ...


@dataclass(slots=True)
class Lower:
    """The merged view of the layers below, top first, by overlayfs' rules: directories merge, down to the first layer
    where the path is something else or a whiteout."""

    trees: Sequence[Tree]
    _merged: dict[str, tuple[Entry | None, Sequence[Tree]]] = field(default_factory=dict)

    def lookup(self, path: str) -> Entry | None:
        return self._merge(path)[0]

    def _merge(self, path: str) -> tuple[Entry | None, Sequence[Tree]]:
        """The entry, and for a directory the layers that it is merged from."""
        if path not in self._merged:
            among = self._merge(path.rpartition("/")[0])[1] if path else self.trees
            found: Entry | None = None
            parts: list[Tree] = []
            for tree in among:
                entry = tree.lookup(path)
                if entry is None:
                    continue
                if entry.kind != "dir":
                    found = found or (entry if entry.kind != "whiteout" else None)
                    break
                found = found or entry
                parts.append(tree)
            self._merged[path] = (found, parts)
        return self._merged[path]

    def read_file(self, path: str) -> bytes:
        """The content of a file that ``lookup`` found."""
        among = self._merge(path.rpartition("/")[0])[1]
        return next(tree.read_file(path) for tree in among if tree.lookup(path) is not None)

    def children(self, path: str) -> list[str]:
        names = {child.path for tree in self._merge(path)[1] for child in tree.children(path)}
        return sorted((name for name in names if self.lookup(name)), key=sort_key)


Read = Callable[[tarfile.TarInfo], Iterator[bytes]]  # the data of a file with data, each but once


def canonical(
    upper: IO[bytes] | Path, lower: Lower, *, epoch: int, deleted: Collection[str] = (), opaque: Collection[str] = ()
) -> Iterator[Member]:
    """The canonical members of an upper directory, or of a tar of one, which must come depth first and sorted.

    ``deleted`` and ``opaque`` are paths known beforehand, for overlays that don't mark them.
    Errors: LayerError for what no layer can hold, OSError for what cannot be read.
    """
    canon = _Canon(lower, epoch, deleted, opaque)
    if isinstance(upper, Path):
        return canon.ordered(_folder_infos(upper), _folder_reader(upper))
    return _tar_members(canon, upper)


def _tar_members(canon: _Canon, archive: IO[bytes]) -> Iterator[Member]:
    with tarfile.open(fileobj=cast(IO[bytes], _Forward(archive)), mode="r:") as tar:
        yield from canon.ordered(((_path_of(info), info) for info in tar), _tar_reader(tar))


def _path_of(info: tarfile.TarInfo) -> str:
    return info.name.removeprefix("./").strip("/")


def _tar_reader(tar: tarfile.TarFile) -> Read:
    def read(info: tarfile.TarInfo) -> Iterator[bytes]:
        assert tar.fileobj is not None
        tar.fileobj.seek(info.offset_data)  # what extractfile() does, but for two copies of every byte
        return read_chunks(tar.fileobj.read, info.size)

    return read


def _folder_infos(folder: Path) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """As a tar of ``folder`` would tell it, for who may read there: a program less, and a copy of every byte."""
    first_names: dict[int, str] = {}  # inode → the name under which its data comes
    device = folder.stat().st_dev

    def below(place: str, prefix: str) -> Iterator[tuple[str, tarfile.TarInfo]]:
        with os.scandir(place) as found:
            entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
        for entry in entries:
            path, seen = prefix + entry.name, entry.stat(follow_symlinks=False)
            if seen.st_dev != device or stat.S_ISSOCK(seen.st_mode):
                continue
            info = _folder_info(path, seen, first_names, entry.path)
            yield path, info
            if info.isdir():
                yield from below(entry.path, f"{path}/")

    return below(str(folder), "")


_TAR_TYPES = {stat.S_IFREG: tarfile.REGTYPE, stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE,
              stat.S_IFIFO: tarfile.FIFOTYPE, stat.S_IFCHR: tarfile.CHRTYPE, stat.S_IFBLK: tarfile.BLKTYPE}  # fmt: skip


def _folder_info(path: str, seen: os.stat_result, first_names: dict[int, str], place: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(path)
    info.type, info.mode = _TAR_TYPES[stat.S_IFMT(seen.st_mode)], stat.S_IMODE(seen.st_mode)
    info.uid, info.gid, info.mtime = seen.st_uid, seen.st_gid, seen.st_mtime_ns // 10**9
    if info.ischr() or info.isblk():  # a whiteout, most often; the kernel makes them all one inode's
        info.devmajor, info.devminor = os.major(seen.st_rdev), os.minor(seen.st_rdev)
    elif not info.isdir() and seen.st_nlink > 1 and (first := first_names.setdefault(seen.st_ino, path)) != path:
        info.type, info.linkname = tarfile.LNKTYPE, first
    elif info.isfile():
        info.size = seen.st_size
    elif info.issym():
        info.linkname = os.readlink(place)  # noqa: PTH115  a Path would tidy it up
    elif info.isdir():
        marks = [name for name in _attributes(place) if name.endswith(_OPAQUE_MARK)]
        info.pax_headers = {name: os.fsdecode(os.getxattr(place, name)) for name in marks}
    return info


def _attributes(place: str) -> list[str]:
    try:
        return os.listxattr(place)
    except OSError as error:
        if error.errno != errno.ENOTSUP:  # such a file system has no marks; any other failure might hide one
            raise
        return []


def _folder_reader(folder: Path) -> Read:
    def read(info: tarfile.TarInfo) -> Iterator[bytes]:
        with open(f"{folder}/{info.name}", "rb", buffering=0) as file:
            yield from read_chunks(file.read, info.size)

    return read


class _Canon:
    def __init__(
        self, lower: Lower, epoch: int, deleted: Collection[str], opaque: Collection[str], keep: Collection[str] = ()
    ) -> None:
        self.lower, self.epoch, self.keep = lower, epoch, keep
        self.opaque = set(opaque)
        self.gone: list[tuple[tuple[bytes, ...], str]] = []
        self.left_out: dict[
            str, str
        ] = {}  # a file that is below as it is → where its data stands in this layer, if anywhere
        self.waiting: list[Entry] = []  # directories on the way down, not written until something in them is
        for path in deleted:
            self.bury(path)

    def bury(self, path: str) -> None:
        if not is_noise(path) and self.lower.lookup(path):
            heapq.heappush(self.gone, (sort_key(path), path))

    def ordered(self, infos: Iterable[tuple[str, tarfile.TarInfo]], read: Read) -> Iterator[Member]:
        yield Entry("", "dir", 0o755, mtime=self.epoch), None
        for name in self.lower.children("") if "" in self.opaque else ():
            self.bury(name)
        for path, info in infos:
            if path not in ("", ".") and (path in self.keep or not is_noise(path)):
                yield from self.member(read, info, path)
        yield from self.whiteouts(None)

    def member(self, read: Read, info: tarfile.TarInfo, path: str) -> Iterator[Member]:
        yield from self.whiteouts(path)
        if info.ischr() and info.devmajor == info.devminor == 0:
            self.bury(path)
        elif path.endswith(("/.wh..opq", "/.wh..wh..opq")):  # fuse-overlayfs; told beforehand through ``opaque``
            return
        elif info.isdir():
            yield from self.directory(info, path)
        elif info.isfile():
            yield from self.file(read, info, path)
        elif info.islnk() and (target := info.linkname.removeprefix("./")) in self.left_out:
            yield from self.link_to_below(info, path, target)
        elif info.islnk() or info.issym() or info.isfifo():
            yield from self.descend(path)
            yield self.entry(info, path), None
        # Sockets and devices belong to a machine, not to an image.

    def entry(self, info: tarfile.TarInfo, path: str) -> Entry:
        target = info.linkname.removeprefix("./") if info.islnk() else info.linkname
        if info.islnk() and is_noise(target):
            raise LayerError(f"/{path} is a hard link to /{target}, which no layer keeps; copy the file instead")
        kind: Kind = "hardlink" if info.islnk() else "symlink" if info.issym() else "fifo" if info.isfifo() else "file"
        mode = 0o777 if kind == "symlink" else info.mode & 0o7777
        return Entry(path, kind, mode, info.uid, info.gid, min(int(info.mtime), self.epoch),
                     info.size if kind == "file" else 0, target)  # fmt: skip

    def file(self, read: Read, info: tarfile.TarInfo, path: str) -> Iterator[Member]:
        """A file, unless the overlay only copied it up: opened for writing, say, and left as it was."""
        entry, data = self.entry(info, path), read(info) if info.size else None
        if path.endswith(".dist-info/RECORD"):
            content = without_noise(b"".join(data or ()))
            entry, data = replace(entry, size=len(content)), iter([content]) if content else None
        if info.size <= COMPARED and (below := self.lower.lookup(path)) is not None and below == entry:
            content = b"".join(data or ())
            if content == self.lower.read_file(path):
                self.left_out[path] = path
                return
            data = iter([content]) if content else None
        yield from self.descend(path)
        yield entry, data

    def link_to_below(self, info: tarfile.TarInfo, path: str, target: str) -> Iterator[Member]:
        """Another name of a file that was left out, since it is below as it is: the first such name holds the data."""
        yield from self.descend(path)
        entry = self.entry(info, path)
        if (holder := self.left_out[target]) != target:
            yield replace(entry, target=holder), None
            return
        content = self.lower.read_file(target)
        self.left_out[target] = path
        yield replace(entry, kind="file", target="", size=len(content)), iter([content]) if content else None

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
            while self.gone and self.gone[0][1] == path:  # deleted, and in a folder made anew
                heapq.heappop(self.gone)
            if key != until:
                yield from self.descend(path)
                yield Entry(path, "whiteout", 0, mtime=self.epoch), None


class _Forward:
    """A pipe as something to seek in, forward only: tarfile's own way with pipes copies every byte thrice."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._position = stream, 0

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> int:
        while self._position < position and self.read(min(CHUNK, position - self._position)):
            pass
        return self._position

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._position += len(data)
        return data


_OPAQUE_MARK = ".overlay.opaque"  # an extended attribute, of trusted or user


def _says_opaque(info: tarfile.TarInfo) -> bool:
    return any(name.endswith(_OPAQUE_MARK) and value == "y" for name, value in info.pax_headers.items())


def file_members(files: Iterable[File], lower: Lower, *, epoch: int) -> Iterator[Member]:
    """The members of a layer made of files alone; directories that are there already keep what they are."""
    entries: dict[str, tuple[Entry, File | None]] = {"": (Entry("", "dir", 0o755, mtime=epoch), None)}
    for file in files:
        path = _real_path(file.destination.strip("/"), lower)
        if (there := lower.lookup(path)) is not None and there.kind == "dir":
            raise LayerError(f"%files: {file.destination} is a folder in the layers below; "
                             f"name the file in it: {file.destination}/<name>")  # fmt: skip
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


def _real_path(path: str, lower: Lower) -> str:
    """``path`` with the links among its folders followed, as tar does: /bin of today's systems is a link to /usr/bin."""
    done, left = "", path.split("/")
    for _ in range(255):
        if len(left) == 1:
            return f"{done}/{left[0]}".lstrip("/")
        name, *left = left
        step = posixpath.normpath(f"/{done}/{name}").lstrip("/")
        entry = lower.lookup(step)
        if entry is None or entry.kind == "dir":
            done = step
        elif entry.kind != "symlink":
            raise LayerError(f"%files: /{path}: /{step} is no folder in the layers below")
        elif entry.target.startswith("/"):
            done, left = "", [*entry.target.strip("/").split("/"), *left]
        else:
            left = [*entry.target.strip("/").split("/"), *left]
    raise LayerError(f"%files: /{path}: too many links on the way")


def _file_chunks(file: File) -> Iterator[bytes]:
    if file.source is None:
        yield file.content
        return
    with file.source.open("rb") as stream:
        yield from read_chunks(stream.read, file.size)


def unordered_members(
    archive: IO[bytes], spool: IO[bytes], lower: Lower, *, epoch: int, placeholders: bool = False
) -> Iterator[Member]:
    """The canonical members of a tar in any order, in the OCI form of deletions: spooled, then read in order.

    ``placeholders``: the tar is a whole root file system; what runtimes mount over is made an empty file.
    """
    while chunk := archive.read(CHUNK):
        spool.write(chunk)
    spool.seek(0)
    with tarfile.open(fileobj=spool, mode="r:") as tar:
        infos = {_path_of(info): info for info in tar}
        infos.pop("", None), infos.pop(".", None)
        _add_parents(infos, lower)  # a tar may name a deletion or a mark alone
        names = [(path, *path.rpartition("/")[::2]) for path in infos]
        opaque = {parent for _, parent, name in names if name == OPAQUE}
        deleted = {f"{parent}/{name[4:]}".lstrip("/") for _, parent, name in names
                   if name.startswith(WHITEOUT_PREFIX) and name != OPAQUE}  # fmt: skip
        for path, _, name in names:
            if name.startswith(WHITEOUT_PREFIX):
                del infos[path]
        opaque |= deleted & infos.keys()  # deleted and made anew: nothing of the old shows through
        if placeholders:
            infos |= {path: _regular(path) for path in PLACEHOLDERS}
        canon = _Canon(lower, epoch, deleted, opaque, keep=PLACEHOLDERS if placeholders else ())
        ordered = ((path, _first_name(infos, path)) for path in sorted(infos, key=sort_key))
        yield from canon.ordered(ordered, _tar_reader(tar))


OPAQUE = ".wh..wh..opq"


def _regular(path: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(path)
    info.mode = 0o644
    return info


def _add_parents(infos: dict[str, tarfile.TarInfo], lower: Lower) -> None:
    """Folders a tar takes for granted."""
    for path in list(infos):
        while (path := path.rpartition("/")[0]) and path not in infos:
            info = tarfile.TarInfo(path)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            if (below := lower.lookup(path)) is not None and below.kind == "dir":
                info.mode, info.uid, info.gid = below.mode, below.uid, below.gid
            infos[path] = info


def _first_name(infos: dict[str, tarfile.TarInfo], path: str) -> tarfile.TarInfo:
    """Of several names of one file the first in order carries the data, whichever the archive stored."""
    info = infos[path]
    if not info.islnk():
        return info
    stored = info.linkname.removeprefix("./").strip("/")
    if stored not in infos:
        raise LayerError(f"/{path} is a hard link to /{stored}, which the archive does not hold")
    holder = infos[stored]
    link = copy.copy(info)  # what is said of a file counts, not what is said of another name of it
    link.mode, link.uid, link.gid, link.mtime = holder.mode, holder.uid, holder.gid, holder.mtime
    if holder.islnk() or sort_key(stored) < sort_key(path):
        return link
    infos[path] = copy.copy(holder)
    link.linkname = path
    infos[stored] = link
    for other in infos.values():
        if other.islnk() and other.linkname.removeprefix("./").strip("/") == stored:
            other.linkname = path
    return infos[path]
