"""An upper directory as a stream of tar entries, which say of each path what it is: from the folder itself, or from a
tar of it.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ekiben.formats.layer import CHUNK, decode_name, encode_name, read_chunks
from ekiben.formats.xattrs import COPIED_UP, OPAQUE_MARK, is_acl, is_content, to_pax


@dataclass(frozen=True, slots=True)
class Changes:
    """What a job changed: the overlay's upper directory, or a tar of it (depth first, sorted) where we may not read it.

    ``deleted`` and ``opaque`` are paths known beforehand, for overlays that do not mark them. ``is_fuse``: the overlay
    was fuse-overlayfs. ``installed``: when root installed all of it, but for files of
    time 0, whatever the folder itself shows.
    """

    upper: Path | IO[bytes]
    deleted: Collection[str] = ()
    opaque: Collection[str] = ()
    is_fuse: bool = False
    installed: int | None = None


Read = Callable[[tarfile.TarInfo], Iterator[bytes]]  # the data of a file with data, each but once


def path_of(info: tarfile.TarInfo) -> str:
    """Return the path of a member of the tar."""
    return info.name.removeprefix("./").strip("/")


def tar_reader(tar: tarfile.TarFile) -> Read:
    """Return a function that reads a member's content."""

    def read(info: tarfile.TarInfo) -> Iterator[bytes]:
        assert tar.fileobj is not None
        tar.fileobj.seek(info.offset_data)  # as extractfile(), without copying every byte twice
        return read_chunks(tar.fileobj.read, info.size)

    return read


def folder_infos(folder: Path, installed: int | None = None) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """Yield the entries of ``folder`` as a tar of it has them, without the program and the copy of every byte.

    ``installed``: see Changes.
    """
    first_names: dict[int, str] = {}  # inode → the name under which its data comes
    device = folder.stat().st_dev

    def below(location: bytes, prefix: str) -> Iterator[tuple[str, tarfile.TarInfo]]:
        with os.scandir(location) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
        for entry in entries:
            path, seen = prefix + decode_name(entry.name), entry.stat(follow_symlinks=False)
            if seen.st_dev != device or stat.S_ISSOCK(seen.st_mode):
                continue
            info = _folder_info(path, seen, first_names, entry.path)
            if installed is not None:
                info.uid = info.gid = 0
                info.mtime = installed if info.mtime else 0
            yield path, info
            if info.isdir():
                yield from below(entry.path, f"{path}/")

    return below(os.fsencode(folder), "")


_TAR_TYPES = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
}


def _folder_info(path: str, seen: os.stat_result, first_names: dict[int, str], location: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(path)
    info.type, info.mode = _TAR_TYPES[stat.S_IFMT(seen.st_mode)], stat.S_IMODE(seen.st_mode)
    info.uid, info.gid, info.mtime = seen.st_uid, seen.st_gid, seen.st_mtime_ns // 10**9
    if info.ischr() or info.isblk():  # a whiteout, most often; the kernel makes them all one inode's
        info.devmajor, info.devminor = os.major(seen.st_rdev), os.minor(seen.st_rdev)
    # GNU tar, with which other executors read, knows other names of files and links only: two names of a FIFO are two
    # FIFOs.
    elif (
        not info.isdir()
        and not info.isfifo()
        and seen.st_nlink > 1
        and (first := first_names.setdefault(seen.st_ino, path)) != path
    ):
        info.type, info.linkname = tarfile.LNKTYPE, first
    elif info.isfile():
        info.size = seen.st_size
        info.pax_headers = _attributes(location)
    elif info.issym():
        info.linkname = decode_name(os.readlink(location))  # noqa: PTH115  a Path would tidy it up
    elif info.isdir():
        info.pax_headers = _attributes(location)
    return info


def _attributes(location: bytes) -> dict[str, str]:
    """Return extended attributes that are content or marks of overlays, as pax records."""
    try:
        names = os.listxattr(location)
    except OSError as error:
        if error.errno != errno.ENOTSUP:  # such a file system has no opaque marks; another error might hide one
            raise
        return {}
    kept = [
        name for name in names if is_content(name) or is_acl(name) or name == COPIED_UP or name.endswith(OPAQUE_MARK)
    ]
    return to_pax((name, os.getxattr(location, name)) for name in kept)


def folder_reader(folder: Path) -> Read:
    """Return a function that reads the content of a file of ``folder``."""

    def read(info: tarfile.TarInfo) -> Iterator[bytes]:
        with open(b"%b/%b" % (os.fsencode(folder), encode_name(info.name)), "rb", buffering=0) as file:
            yield from read_chunks(file.read, info.size)

    return read


class Forward:
    """A pipe as something to seek in, forward only: tarfile's own way with pipes copies every byte thrice."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._position = stream, 0
        self.ended = False  # whether the last read ended with the zero block of a tar

    def tell(self) -> int:
        """Return the position in the input."""
        return self._position

    def seek(self, position: int) -> int:
        """Skip forward to an offset."""
        while self._position < position and self.read(min(CHUNK, position - self._position)):
            pass
        return self._position

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        data = self._stream.read(size)
        self._position += len(data)
        self.ended = len(data) == tarfile.BLOCKSIZE and not data.strip(b"\0")
        return data
