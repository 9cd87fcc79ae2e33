"""Write several files atomically: all of the new ones exist, or none."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ekiben.core.errors import EkibenError, UsageError
from ekiben.core.files import new_file, reason_of

_PREFIX, _SUFFIX = ".ekiben-", ".part"
_YOUNG = 1  # seconds, in which a new folder gets its lock


def is_vacant(path: Path) -> bool:
    """Return whether nothing is at ``path``, or an empty folder, after removing what killed writers left there.

    Raises OSError.
    """
    if not path.is_dir():
        return not os.path.lexists(path)
    _remove_abandoned(path)
    return not any(path.iterdir())


@contextlib.contextmanager
def new_folder(path: Path, *, error: type[EkibenError] = UsageError) -> Iterator[Path]:
    """Yield an empty folder whose content is at ``path``, which is_vacant(), when the block ends without an exception.

    Else nothing new is there, nor a parent of it. A folder that is at ``path`` stays the same one. Raises ``error``,
    which names ``path``, for an OSError of the block or of its end.
    """
    with new_parents(path, error=error):
        outer = path if path.is_dir() else path.parent
        _remove_abandoned(outer)
        temporary, lock = outer / f"{_PREFIX}{secrets.token_hex(4)}{_SUFFIX}", -1
        try:
            temporary.mkdir()
            lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # a file system without locks: it is not removed
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield temporary
            if outer == path:
                _move_entries(temporary, path)
            else:
                temporary.rename(path)
        except OSError as failure:
            # Before the new files are removed, which would free inodes.
            _raise_translated(failure, path, error)
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            if lock >= 0:
                os.close(lock)


@contextlib.contextmanager
def new_parents(path: Path, *, error: type[EkibenError] = UsageError) -> Iterator[None]:
    """Create the parent folders of ``path``; they are removed when the block raises.

    Raises ``error`` for an OSError, naming ``path``.
    """
    if blocking := next((folder for folder in path.parents if folder.exists() and not folder.is_dir()), None):
        raise error(f"{path} cannot be written: {blocking} is not a folder")
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as failure:
        for folder in missing:  # the innermost first
            with contextlib.suppress(OSError):
                folder.rmdir()
        if isinstance(failure, OSError):
            _raise_translated(failure, path, error)
        raise


def _raise_translated(failure: OSError, path: Path, error: type[EkibenError]) -> None:
    if _concerns(failure, path):
        raise error(f"{path} cannot be written: {reason_of(failure, path)}") from failure


def _concerns(failure: OSError, path: Path) -> bool:
    """Return whether writing ``path`` failed, rather than reading its source."""
    if not isinstance(failure.filename, str):
        return True
    failed = Path(failure.filename)
    return failed in (path, *path.parents) or any(name.startswith(_PREFIX) for name in failed.parts)


def write_files(files: Mapping[Path, str | Iterable[bytes]], *, error: type[EkibenError] = UsageError) -> None:
    """Write files that are renamed when all of them are complete; text is encoded as UTF-8.

    Raises ``error`` when one cannot be written.
    """
    path = Path()
    try:
        with contextlib.ExitStack() as stack:
            for path, content in files.items():
                stream = stack.enter_context(new_file(path))
                stream.writelines([content.encode()] if isinstance(content, str) else content)
                stream.flush()
    except OSError as failure:
        raise error(f"{path} cannot be written: {reason_of(failure, path)}") from failure


def _move_entries(source: Path, target: Path) -> None:
    renamed: list[str] = []
    try:
        for name in sorted(path.name for path in source.iterdir()):
            if os.path.lexists(target / name):
                raise FileExistsError(errno.EEXIST, f"{name} was written there meanwhile")
            (source / name).rename(target / name)
            renamed.append(name)
    except BaseException:
        for name in renamed:
            (target / name).rename(source / name)
        raise


def _remove_abandoned(folder: Path) -> None:
    """Remove what killed processes of this user left in ``folder``: the writer of a folder holds a lock on it."""
    for left in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            handle = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                status = os.fstat(handle)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if status.st_uid == os.geteuid() and time.time() - status.st_ctime > _YOUNG:
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(handle)
