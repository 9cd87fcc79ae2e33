"""Check output files and folders before anything is built for them."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from ekiben.core.errors import UsageError

_KINDS = {
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFREG: "a file",
}


def check_output_file(path: Path, label: str = "") -> Path:
    """Return ``path``, its link resolved, when a regular file is there or can be made.

    The result replaces what is at ``path``: a device would be gone from the machine afterwards, and a link would no
    longer point to its file. ``label`` is how errors name the path; default: the path itself.

    Raises:
        UsageError: something else than a regular file is there, a link that another user made, or the folder is
            missing.
    """
    label = label or str(path)
    _check_link(path, label)
    kind = _kind(path, label)
    if kind == stat.S_IFDIR:
        raise UsageError(f"{label}: is a folder; name a file in it")
    if kind not in (None, stat.S_IFREG):
        raise UsageError(f"{label}: is {_KINDS.get(kind or 0, 'no file')}, and only a regular file can be replaced")
    path = path.resolve() if path.is_symlink() else path
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{label}: there is no folder {path.absolute().parent}; create it first")
    return path


def _check_link(path: Path, label: str) -> None:
    """Refuse another user's link in a shared folder: it could point to a file of this user."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (os.geteuid(), 0):
            raise UsageError(
                f"{label}: is a link that another user made, to {path.readlink()}; name the file itself, or remove the"
                " link"
            )


def check_output_folder(path: Path, label: str = "") -> Path:
    """Return ``path`` when a folder is there or can be made.

    Raises:
        UsageError: something else than a folder is there.
    """
    label = label or str(path)
    kind = _kind(path, label)
    if kind not in (None, stat.S_IFDIR):
        raise UsageError(f"{label}: is {_KINDS.get(kind or 0, 'no folder')}, and a folder is needed")
    return path


def _kind(path: Path, label: str) -> int | None:
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"{label}: {error.strerror}") from error
