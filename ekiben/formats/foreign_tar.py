"""Tars of other programs: layers of a registry's images. They are checked before their entries become a layer's."""

from __future__ import annotations

import errno
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ekiben.core.checked import shorten
from ekiben.core.files import format_size
from ekiben.formats.layer import CHUNK

_MAX_PATH = 4096  # bytes; of Linux, like the next
_MAX_NAME = 255
_MAX_DEPTH = 200  # levels of folders
_MAX_ENTRIES = 1_000_000
_MAX_ID = 2**32 - 1
_MAX_TIME = 2**33  # seconds; the year 2242


def unpacked_limit(packed: int) -> int:
    """Return the limit for unpacking ``packed`` bytes: bombs unpack to a thousand times, layers to ten times."""
    return max(1 << 30, packed * 100)


def spool_tar(archive: IO[bytes], spool: IO[bytes], *, limit: int) -> None:
    """Copy a tar to ``spool``, with sparse files written out.

    Raises ValueError where it is damaged or has more than ``limit`` bytes.
    """
    left = limit
    while chunk := archive.read(CHUNK):
        left -= len(chunk)
        if left < 0:
            raise ValueError(f"it unpacks to more than {format_size(limit)}")
        spool.write(chunk)
    is_sparse = False
    for info in _entries(spool):
        is_sparse |= info.issparse()
        left -= info.size if info.issparse() else 0
        if left < 0:
            raise ValueError(f"it unpacks to more than {format_size(limit)}: {shorten(info.name)} has holes")
    if is_sparse:
        _write_out(spool)


def _entries(spool: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    size = spool.seek(0, os.SEEK_END)
    spool.seek(0)
    try:
        with tarfile.open(fileobj=spool, mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
            for number, info in enumerate(tar):
                if number == _MAX_ENTRIES:
                    raise ValueError(f"it has more than {_MAX_ENTRIES} entries")
                _check(info)
                yield info
            end = tar.offset
    except (tarfile.TarError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # no file reaches that far
            raise
        raise ValueError("an entry has an impossible size") from error
    spool.seek(min(end, size))
    if end > size or spool.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile treats both as the end
        raise ValueError(f"it breaks off, or is damaged, at byte {min(end, size)}")


def _check(info: tarfile.TarInfo) -> None:
    """Raise ValueError for an entry that no file system holds."""
    path, link = (name.encode("utf-8", "surrogateescape") for name in (info.name, info.linkname))
    names = path.split(b"/")
    reasons = {
        "its name goes upwards": b".." in names,
        "its name has a NUL": b"\0" in path or b"\0" in link,
        "its name is too long": len(path) > _MAX_PATH or max(map(len, names)) > _MAX_NAME or len(names) > _MAX_DEPTH,
        "its link is too long": len(link) > _MAX_PATH,
        "its size is impossible": info.size < 0,
        "its owner is impossible": not (0 <= info.uid <= _MAX_ID and 0 <= info.gid <= _MAX_ID),
        "its time is impossible": not -_MAX_TIME <= info.mtime <= _MAX_TIME,
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), None):
        raise ValueError(f"the entry {shorten(info.name)} cannot be in a layer: {reason}")


def _write_out(spool: IO[bytes]) -> None:
    """Replace the tar by one with plain files where it has sparse ones."""
    import tempfile

    with tempfile.TemporaryFile(dir=Path(spool.name).parent) as plain:
        spool.seek(0)
        with (
            tarfile.open(fileobj=spool, mode="r:", encoding="utf-8", errors="surrogateescape") as tar,
            tarfile.open(
                fileobj=plain, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
            ) as out,
        ):
            for info in tar:
                data = tar.extractfile(info) if info.isreg() else None
                if info.issparse():
                    info.type, info.sparse = tarfile.REGTYPE, None
                    info.pax_headers = {
                        name: value for name, value in info.pax_headers.items() if not name.startswith("GNU.sparse.")
                    }
                out.addfile(info, data)
        plain.seek(0)
        spool.seek(0)
        spool.truncate()
        while chunk := plain.read(CHUNK):
            spool.write(chunk)
