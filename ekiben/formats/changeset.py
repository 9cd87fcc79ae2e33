"""Turn the changes of a %post into the layer's canonical entries.

Executors give the changes in the form in which their overlay keeps them: the upper directory, or a tar of it, depth
first, in which a deletion is a character device 0:0 (overlayfs), a list of deleted paths (docker), and a directory that
hides what is below it is opaque. Here that becomes one form (see ekiben.formats.layer), without what differs between
machines.
"""

from __future__ import annotations

import copy
import heapq
import re
import stat
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Protocol, cast

from ekiben.core.errors import LayerError
from ekiben.formats.layer import (
    CHUNK,
    WHITEOUT_PREFIX,
    Entry,
    File,
    Kind,
    LayerEntry,
    Xattrs,
    decode_name,
    read_chunks,
    sort_key,
)
from ekiben.formats.left_out import ACLS, DEVICES, LeftOut
from ekiben.formats.placement import follow_links, resolve_destinations
from ekiben.formats.upper import Changes, Forward, Read, folder_infos, folder_reader, path_of, tar_reader
from ekiben.formats.xattrs import (
    COPIED_UP,
    OPAQUE_MARK,
    check_names,
    content_xattrs,
    from_pax,
    is_acl,
    to_pax,
)

COMPARED = 64 << 20  # bytes: a larger file that was copied up counts as changed

# Contents differ from run to run or from machine to machine, and no image needs them.
EXCLUDED_BELOW = (
    "dev",
    "proc",
    "sys",
    "run",
    "tmp",
    "var/tmp",
    "root/.cache",
    "var/log",
    "var/lib/apt/lists",
    "var/cache/apt",
    "var/cache/debconf",
    "var/lib/systemd",
    ".singularity.d",
)
# Of the scripts of the environment those that each image has of its runtime are left out.
_ENVIRONMENT_SCRIPT = re.compile(
    r"\.singularity\.d/env/(?!(?:01-base|10-docker|10-docker2singularity|90-environment|94-appsbase|95-apps|99-base"
    r"|99-runtimevars)\.sh$)[^/]*\.sh"
)
EXCLUDED = (
    ".dockerenv",
    ".singularity.d",
    "singularity",
    "environment",
    "root/.cache",
    "etc/resolv.conf",
    "etc/hosts",
    "etc/hostname",
    "etc/machine-id",
    "var/lib/dbus/machine-id",
    "var/cache/ldconfig/aux-cache",
    "etc/apt/sources.list",
    "etc/.pwd.lock",
    "root/.bash_history",
    "root/.wget-hsts",
    "var/lib/dpkg/lock*",
    "var/lib/dpkg/triggers/Lock",
    "*/.wh..wh.*",
    "*.dist-info/uv_cache.json",
)


# Runtimes mount their own over these; an empty file is there to be mounted on.
PLACEHOLDERS = ("etc/hostname", "etc/hosts", "etc/machine-id", "etc/resolv.conf")


def is_excluded(path: str) -> bool:
    """Return whether layers leave out this path."""
    if _ENVIRONMENT_SCRIPT.fullmatch(path):
        return False
    if any(path.startswith(folder + "/") for folder in EXCLUDED_BELOW):
        return True
    return any(fnmatchcase(path, pattern) for pattern in EXCLUDED)


def without_cache_note(record: bytes) -> bytes:
    """Return a RECORD without uv's note on a wheel that came from a folder: when that file was made."""
    return b"".join(line for line in record.splitlines(keepends=True) if b".dist-info/uv_cache.json," not in line)


class OverlayError(LayerError):
    """The engine's overlay does not support a script's change to a file of a layer below; another engine may."""


class Tree(Protocol):
    """One layer below, to look into without reading it whole (SquashfsReader)."""

    def lookup(self, path: str) -> Entry | None:
        """Return the entry of ``path``, or None."""

    def children(self, path: str) -> Sequence[Entry]:
        """Return the paths in a folder, sorted."""

    def read_file(self, path: str) -> bytes:
        """Return the content of a file."""

    def has_other_names(self, path: str) -> bool:
        """Return whether a file has several names (hard links)."""


@dataclass(slots=True)
class Lower:
    """The merged view of the layers below, top first, by overlayfs' rules: directories merge, down to the first layer
    where the path is something else or a whiteout."""

    trees: Sequence[Tree]
    _folders: dict[str, tuple[Entry | None, Sequence[Tree]]] = field(default_factory=dict)

    def lookup(self, path: str) -> Entry | None:
        """Return the entry at ``path`` in the layers below, or None."""
        return self._merge(path)[0]

    def _merge(self, path: str) -> tuple[Entry | None, Sequence[Tree]]:
        """Return the entry, and for a directory the layers that it is merged from."""
        if (known := self._folders.get(path)) is not None:
            return known
        among = self._merge(path.rpartition("/")[0])[1] if path else self.trees
        top: Entry | None = None
        parts: list[Tree] = []
        for tree in among:
            entry = tree.lookup(path)
            if entry is None:
                continue
            if entry.kind != "dir":
                top = top or (entry if entry.kind != "whiteout" else None)
                break
            top = top or entry
            parts.append(tree)
        if parts:
            self._folders[path] = top, parts
        return top, parts

    def read_file(self, path: str) -> bytes:
        """Return the content of a file that ``lookup`` found."""
        return self._holder(path).read_file(path)

    def has_other_names(self, path: str) -> bool:
        """Return whether a file that ``lookup`` returned has several names (hard links)."""
        return self._holder(path).has_other_names(path)

    def _holder(self, path: str) -> Tree:
        among = self._merge(path.rpartition("/")[0])[1]
        return next(tree for tree in among if tree.lookup(path) is not None)

    def children(self, path: str) -> list[str]:
        """Return the names in a folder of the layers below."""
        names = {child.path for tree in self._merge(path)[1] for child in tree.children(path)}
        return sorted((name for name in names if self.lookup(name)), key=sort_key)


def normalize(changes: Changes, lower: Lower, *, epoch: int, left_out: LeftOut | None = None) -> Iterator[LayerEntry]:
    """Yield the canonical entries of an upper directory; add the paths that no layer keeps to ``left_out``.

    Raises LayerError for what no layer can hold, OSError for what cannot be read.
    """
    if "" in changes.opaque:
        raise LayerError("the executor says that all of the layers below was removed; such a layer is not stored")
    normalizer = _Normalizer(lower, epoch, changes.deleted, changes.opaque, dropped=left_out)
    normalizer.setgid = {} if changes.is_fuse else None
    if isinstance(changes.upper, Path):
        return normalizer.ordered(folder_infos(changes.upper, changes.installed), folder_reader(changes.upper))
    return _tar_members(normalizer, changes.upper)


def refuse_total_removal(entries: Iterable[LayerEntry], lower: Lower) -> Iterator[LayerEntry]:
    """Yield ``entries``. Raises LayerError at the end when they leave nothing of the layers below."""
    left = {name for name in lower.children("") if not is_excluded(name)}
    had = bool(left)
    for entry, data in entries:
        if entry.kind == "whiteout":
            left.discard(entry.path)
        yield entry, data
    if had and not left:
        raise LayerError(
            "the layer removes all that is in the layers below, which no successful script does; it is not stored"
        )


def _tar_members(normalizer: _Normalizer, archive: IO[bytes]) -> Iterator[LayerEntry]:
    source = Forward(archive)
    try:
        with tarfile.open(
            fileobj=cast(IO[bytes], source), mode="r:", encoding="utf-8", errors="surrogateescape"
        ) as tar:
            yield from normalizer.ordered(((path_of(info), info) for info in tar), tar_reader(tar))
    except tarfile.TarError as error:
        raise LayerError(f"the tar of the script's changes cannot be read ({error}); GNU tar is needed") from error
    if not source.ended:  # tarfile does not notice a tar that ends between two files
        raise LayerError("the tar of the script's changes is truncated; nothing of it is stored")


_OVERLAY_MARKS = ("/.wh..opq", "/.wh..wh..opq")


def _unstorable(path: str) -> LayerError:
    return LayerError(
        f"/{path}: Docker and OCI take a name that begins with {WHITEOUT_PREFIX} for the removal of the rest of it; "
        "give the file another name"
    )


class _Normalizer:
    def __init__(
        self,
        lower: Lower,
        epoch: int,
        deleted: Collection[str],
        opaque: Collection[str],
        keep: Collection[str] = (),
        dropped: LeftOut | None = None,
    ) -> None:
        self.dropped = dropped or LeftOut()
        self.lower, self.epoch, self.keep = lower, epoch, keep
        self.opaque = set(opaque)
        self.gone: list[tuple[tuple[bytes, ...], str]] = []
        self.left_out: dict[
            str, str
        ] = {}  # a file that is unchanged below → the entry of this layer with its data, if any
        self.fifos: dict[str, Entry] = {}
        self.setgid: dict[str, int] | None = None  # with fuse-overlayfs: a setgid folder → its group
        self.waiting: list[Entry] = []  # directories on the way down, not written until something in them is
        for path in deleted:
            self.delete(path)

    def delete(self, path: str) -> None:
        if not is_excluded(path) and self.lower.lookup(path):
            heapq.heappush(self.gone, (sort_key(path), path))

    def ordered(self, infos: Iterable[tuple[str, tarfile.TarInfo]], read: Read) -> Iterator[LayerEntry]:
        yield Entry("", "dir", 0o755, mtime=self.epoch), None
        for name in self.lower.children("") if "" in self.opaque else ():
            self.delete(name)
        folders: list[tuple[str, tarfile.TarInfo]] = []  # only files of scripts are kept
        for path, info in infos:
            if path in (".singularity.d", ".singularity.d/env") and info.isdir():
                folders.append((path, info))
                continue
            if path.startswith(".singularity.d/env/") and not is_excluded(path):
                for folder, folder_info in folders:
                    yield from self.entries_of(read, folder_info, folder)
                folders.clear()
            if path == "etc/localtime" and _means_utc(info) and not self.lower.lookup(path):
                continue  # means the default, and Debian's packages create it
            if path not in ("", ".") and (path in self.keep or not is_excluded(path)):
                yield from self.entries_of(read, info, path)
            elif (
                path not in ("", ".")
                and not info.isdir()
                and not _is_whiteout(info)
                and not path.endswith(_OVERLAY_MARKS)
            ):
                self.dropped.add(path)
        yield from self.whiteouts(None)

    def entries_of(self, read: Read, info: tarfile.TarInfo, path: str) -> Iterator[LayerEntry]:
        yield from self.whiteouts(path)
        if path.rpartition("/")[2].startswith(WHITEOUT_PREFIX) and not path.endswith(_OVERLAY_MARKS):
            raise _unstorable(path)
        if any(is_acl(name) for name, _ in from_pax(info.pax_headers)):
            self.dropped.add(path, ACLS)
        if _is_whiteout(info):
            self.delete(path)
        elif path.endswith(_OVERLAY_MARKS):  # fuse-overlayfs; known beforehand through ``opaque``
            return
        elif info.isdir():
            yield from self.directory(info, path)
        elif info.isfile():
            yield from self.file(read, info, path)
        elif info.islnk() and (target := info.linkname.removeprefix("./")) in self.left_out:
            yield from self.link_to_below(info, path, target)
        elif info.islnk() and (first := self.fifos.get(info.linkname.removeprefix("./"))):
            yield from self.descend(path)
            yield replace(first, path=path), None
        elif info.islnk() or info.issym() or info.isfifo():
            yield from self.descend(path)
            entry = self.entry(info, path)
            if info.isfifo():
                self.fifos[path] = entry
            yield entry, None
        else:
            self.dropped.add(path, DEVICES)

    def entry(self, info: tarfile.TarInfo, path: str) -> Entry:
        target = info.linkname.removeprefix("./") if info.islnk() else info.linkname
        if info.islnk() and is_excluded(target):
            raise LayerError(f"/{path} is a hard link to /{target}, which no layer keeps; copy the file instead")
        kind: Kind = "hardlink" if info.islnk() else "symlink" if info.issym() else "fifo" if info.isfifo() else "file"
        mode = 0o777 if kind == "symlink" else info.mode & 0o7777
        return Entry(
            path,
            kind,
            mode,
            info.uid,
            info.gid,
            min(int(info.mtime), self.epoch),
            info.size if kind == "file" else 0,
            target,
            _xattrs(info, path) if kind == "file" else (),
        )

    def file(self, read: Read, info: tarfile.TarInfo, path: str) -> Iterator[LayerEntry]:
        """Yield a file, unless the overlay only copied it up without a change."""
        entry, data = self.entry(info, path), read(info) if info.size else None
        if self.setgid:
            self.check_group(entry, self.lower.lookup(path))
        if path.endswith(".dist-info/RECORD"):
            content = without_cache_note(b"".join(data or ()))
            entry, data = replace(entry, size=len(content)), iter([content]) if content else None
        if info.size <= COMPARED and (below := self.lower.lookup(path)) is not None and below == entry:
            content = b"".join(data or ())
            if content == self.lower.read_file(path):
                self.left_out[path] = path
                return
            data = iter([content]) if content else None
        if COPIED_UP in (marks := dict(from_pax(info.pax_headers))):
            data = self.check_names(entry, data, decode_name(marks[COPIED_UP].rstrip(b"\0")))
        yield from self.descend(path)
        yield entry, data

    def check_names(self, entry: Entry, data: Iterator[bytes] | None, origin: str) -> Iterator[bytes] | None:
        """fuse-overlayfs takes the names of one file for one another: what it changed may be another name than the
        script did.

        Raises OverlayError unless the file that was copied up is as it was, only under a new name; for a FIFO in any
        case.
        """
        below = self.lower.lookup(origin)
        if below is not None and below.kind == "fifo":
            raise OverlayError(
                f"/{entry.path} was a FIFO in a layer below, /{origin}: fuse-overlayfs made it an empty file",
                hint="build with --engine buildah or podman, or as root; or let the script create it again",
            )
        if below is None or below.kind != "file" or not self.lower.has_other_names(origin):
            return data
        if entry.size <= COMPARED and replace(below, path=entry.path) == entry:
            content = b"".join(data or ())
            if content == self.lower.read_file(origin):
                return iter([content]) if content else None
        raise OverlayError(
            f"/{origin} is one of several names of a file in a layer below (hard links), and its content, owner or mode"
            " was changed: fuse-overlayfs may have changed another name than the script did",
            hint=(
                "build with --engine buildah or podman, or as root; or let the script replace the file: "
                f"cp -p /{origin} /{origin}.new && mv /{origin}.new /{origin}"
            ),
        )

    def link_to_below(self, info: tarfile.TarInfo, path: str, target: str) -> Iterator[LayerEntry]:
        """A hard link of a file that is unchanged below and was omitted: the first such name gets the data."""
        yield from self.descend(path)
        entry = self.entry(info, path)
        if (holder := self.left_out[target]) != target:
            yield replace(entry, target=holder), None
            return
        content, below = self.lower.read_file(target), self.lower.lookup(target)
        self.left_out[target] = path
        entry = replace(entry, kind="file", target="", size=len(content), xattrs=below.xattrs if below else ())
        yield entry, iter([content]) if content else None

    def directory(self, info: tarfile.TarInfo, path: str) -> Iterator[LayerEntry]:
        entry = Entry(path, "dir", info.mode & 0o7777, info.uid, info.gid, self.epoch, xattrs=_xattrs(info, path))
        below = self.lower.lookup(path)
        if self.setgid is not None:
            entry = self.with_setgid(entry, below)
            self.check_group(entry, below)
        hides = path in self.opaque or path.rpartition("/")[0] in self.opaque or _marks_opaque(info)
        if below and below.kind == "dir" and hides:
            self.opaque.add(path)
            for child in self.lower.children(path):
                self.delete(child)
        if below and replace(below, mtime=self.epoch) == entry:
            self.waiting = [*self.parents_of(path), entry]  # unchanged: written only if something inside is
        else:
            yield from self.descend(path)
            yield entry, None
            self.waiting = []

    def with_setgid(self, entry: Entry, below: Entry | None) -> Entry:
        """Return a folder with its setgid and setuid bits below, which fuse-overlayfs loses when it copies it up."""
        restored = replace(entry, mode=entry.mode | (below.mode & (stat.S_ISGID | stat.S_ISUID) if below else 0))
        if below is not None and replace(below, mtime=entry.mtime) == restored:
            entry = restored
        if self.setgid is not None and entry.mode & stat.S_ISGID:
            self.setgid[entry.path] = entry.gid
        return entry

    def check_group(self, entry: Entry, below: Entry | None) -> None:
        """Raise OverlayError for a new path in a setgid folder that has not its group, or a folder without the bit:
        fuse-overlayfs does not always inherit them."""
        group = (self.setgid or {}).get(entry.path.rpartition("/")[0])
        if group is None or below is not None:
            return
        if entry.gid == group and (entry.kind != "dir" or entry.mode & stat.S_ISGID):
            return
        raise OverlayError(
            f"/{entry.path} was made in a folder that is setgid, and has not its group: fuse-overlayfs does not always"
            " hand it down",
            hint=(
                "build with --engine buildah or podman, or as root; or let the script set it: "
                f"chgrp {group} /{entry.path}"
            )
            + f" && chmod g+s /{entry.path}" * (entry.kind == "dir"),
        )

    def parents_of(self, path: str) -> list[Entry]:
        return [entry for entry in self.waiting if path.startswith(entry.path + "/")]

    def descend(self, path: str) -> Iterator[LayerEntry]:
        """Yield the directories above ``path`` that were not written yet."""
        for entry in self.parents_of(path):
            yield entry, None
        self.waiting = []

    def whiteouts(self, before: str | None) -> Iterator[LayerEntry]:
        """Yield deletions that sort before the current path; that of the path itself is dropped: it exists again."""
        until = sort_key(before) if before is not None else None
        while self.gone and (until is None or self.gone[0][0] <= until):
            key, path = heapq.heappop(self.gone)
            while self.gone and self.gone[0][1] == path:  # deleted, and in a folder made again
                heapq.heappop(self.gone)
            if key != until:
                yield from self.descend(path)
                yield Entry(path, "whiteout", 0, mtime=self.epoch), None


def _is_whiteout(info: tarfile.TarInfo) -> bool:
    return info.ischr() and info.devmajor == info.devminor == 0


def _means_utc(info: tarfile.TarInfo) -> bool:
    return info.issym() and info.linkname.endswith(("/zoneinfo/Etc/UTC", "/zoneinfo/UTC"))


def _marks_opaque(info: tarfile.TarInfo) -> bool:
    return any(name.endswith(OPAQUE_MARK) and value == "y" for name, value in info.pax_headers.items())


def _xattrs(info: tarfile.TarInfo, path: str) -> Xattrs:
    xattrs = content_xattrs(from_pax(info.pax_headers))
    check_names(path, xattrs)
    return xattrs


def file_entries(files: Iterable[File], lower: Lower, *, epoch: int) -> Iterator[LayerEntry]:
    """Yield the entries of a layer made of files alone; directories of the layers below keep owner and mode.

    Raises LayerError when a destination is a directory, or below what is none.
    """
    entries: dict[str, tuple[Entry, File | None]] = {"": (Entry("", "dir", 0o755, mtime=epoch), None)}
    for file in resolve_destinations(files, lower):
        path = file.destination.strip("/")
        if any(name.startswith(WHITEOUT_PREFIX) for name in path.split("/")):
            raise _unstorable(path)
        parent = path.rpartition("/")[0]
        while parent and parent not in entries:
            below = lower.lookup(parent)
            is_directory = below is not None and below.kind == "dir"
            entries[parent] = (
                replace(below, mtime=epoch) if is_directory and below else Entry(parent, "dir", 0o755, mtime=epoch),
                None,
            )
            parent = parent.rpartition("/")[0]
        if file.is_folder:
            entries.setdefault(path, (Entry(path, "dir", 0o755, mtime=epoch), None))
        else:
            entries[path] = (Entry(path, "file", file.mode, mtime=epoch, size=file.size), file)
    for path in sorted(entries, key=sort_key):
        entry, source = entries[path]
        yield entry, _file_chunks(source) if source and entry.size else None


def _file_chunks(file: File) -> Iterator[bytes]:
    with file.open() as stream:
        yield from read_chunks(stream.read, file.size)


def unordered_entries(
    archive: IO[bytes], spool: IO[bytes], lower: Lower, *, epoch: int, placeholders: bool = False
) -> Iterator[LayerEntry]:
    """Yield the canonical entries of a tar in any order, with deletions in their OCI form: spooled, then read in order.

    ``placeholders``: the tar is a whole root file system; what runtimes mount over is made an empty file.
    """
    while chunk := archive.read(CHUNK):
        spool.write(chunk)
    spool.seek(0)
    with tarfile.open(fileobj=spool, mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
        infos = {path_of(info): info for info in tar}
        infos.pop("", None), infos.pop(".", None)
        placed = follow_links(infos, lower)
        infos = {placed[path]: _linked(info, placed) for path, info in infos.items()}
        if placeholders:
            infos |= {path: _regular(path) for path in PLACEHOLDERS}
        _add_parents(infos, lower)  # a tar may contain a deletion or a mark without its folder
        names = [(path, *path.rpartition("/")[::2]) for path in infos]
        opaque = {parent for _, parent, name in names if name == OPAQUE}
        deleted = {
            f"{parent}/{name[4:]}".lstrip("/")
            for _, parent, name in names
            if name.startswith(WHITEOUT_PREFIX) and name != OPAQUE
        }
        for path, _, name in names:
            if name.startswith(WHITEOUT_PREFIX):
                del infos[path]
        opaque |= deleted & infos.keys()  # deleted and made again: nothing of the old shows through
        normalizer = _Normalizer(lower, epoch, deleted, opaque, keep=PLACEHOLDERS if placeholders else ())
        links = _names_by_target(infos)
        ordered = ((path, _first_name(infos, links, path)) for path in sorted(infos, key=sort_key))
        yield from normalizer.ordered(ordered, tar_reader(tar))


OPAQUE = ".wh..wh..opq"


def _linked(info: tarfile.TarInfo, placed: Mapping[str, str]) -> tarfile.TarInfo:
    if info.islnk():
        target = info.linkname.removeprefix("./").strip("/")
        info.linkname = placed.get(target, target)
    return info


def _regular(path: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(path)
    info.mode = 0o644
    return info


def _add_parents(infos: dict[str, tarfile.TarInfo], lower: Lower) -> None:
    """Parent folders that a tar does not list."""
    for path in list(infos):
        while (path := path.rpartition("/")[0]) and path not in infos:
            info = tarfile.TarInfo(path)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            if (below := lower.lookup(path)) is not None and below.kind == "dir":
                info.mode, info.uid, info.gid, info.pax_headers = below.mode, below.uid, below.gid, to_pax(below.xattrs)
            infos[path] = info


def _names_by_target(infos: Mapping[str, tarfile.TarInfo]) -> dict[str, list[str]]:
    """Return the hard links of an archive by their targets."""
    names: dict[str, list[str]] = {}
    for path, info in infos.items():
        if info.islnk():
            names.setdefault(info.linkname.removeprefix("./").strip("/"), []).append(path)
    return names


def _first_name(infos: dict[str, tarfile.TarInfo], names: dict[str, list[str]], path: str) -> tarfile.TarInfo:
    """Give the data of a file to the first of its names in order, whichever the archive stored."""
    info = infos[path]
    if not info.islnk():
        return info
    stored = info.linkname.removeprefix("./").strip("/")
    if stored not in infos:
        raise LayerError(f"/{path} is a hard link to /{stored}, which the archive does not hold")
    holder = infos[stored]
    link = copy.copy(info)  # the metadata of the file itself are used, not those of another name of it
    link.mode, link.uid, link.gid, link.mtime = holder.mode, holder.uid, holder.gid, holder.mtime
    if holder.islnk() or sort_key(stored) < sort_key(path):
        return link
    infos[path] = copy.copy(holder)
    link.linkname = path
    infos[stored] = link
    for other in names.pop(stored):
        if other != path:
            infos[other].linkname = path
    return infos[path]
