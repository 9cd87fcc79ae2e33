"""A partial download next to its final name, in a folder that others may write; a later process resumes it.

It lies in a folder of its own, with mode 0700 and a random name, under another random name: nobody else can put a link
or a file there, whatever they do to the folders above. The names are recorded in the user's store, for the next
process. Nothing is reached through a name that somebody else could know, and all of it through open folders.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ekiben.core.checked import Fields
from ekiben.core.errors import StoreError
from ekiben.core.files import reason_of
from ekiben.core.folder import Folder
from ekiben.store import Store

_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(slots=True)
class Partial:
    """``stream`` is the open file; ``had``: the bytes that an earlier process wrote."""

    stream: BinaryIO
    parent: Folder
    folder: Folder
    name: str
    had: int = field(init=False)
    is_finished: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.had = os.fstat(self.stream.fileno()).st_size

    @property
    def path(self) -> Path:
        """Return a path of the open file itself, for what reads one."""
        return Path(f"/proc/self/fd/{self.stream.fileno()}")

    def finish(self, name: str, mode: int) -> None:
        """Give the file its mode and its name in the folder above. Raises OSError."""
        self.stream.flush()
        os.fchmod(self.stream.fileno(), mode)
        self.folder.move(self.name, name, self.parent)
        self.is_finished = True

    def remove(self) -> None:
        """Remove the file and its folder: an empty one, for another may have this name by now. Raises OSError."""
        if not self.is_finished:
            self.folder.remove(self.name)
        with contextlib.suppress(OSError):
            os.rmdir(self.folder.path.name, dir_fd=self.parent.handle)

    def discard(self) -> None:
        """Empty the file, which is removed then."""
        self.stream.seek(0)
        self.stream.truncate()

    @property
    def is_empty(self) -> bool:
        """Return whether the file is empty, and nothing can be resumed."""
        self.stream.flush()
        return os.fstat(self.stream.fileno()).st_size == 0


@contextlib.contextmanager
def partial_file(out: Path, digest: str, store: Store) -> Iterator[Partial]:
    """Yield the file that will be ``out``, resumed where an earlier process stopped; it is kept when the block raises.


    Of two processes for one ``out``, the second begins another file. Raises StoreError.
    """
    record = _record_name(out)
    try:
        with Folder.open(out.absolute().parent) as parent, contextlib.ExitStack() as stack:
            partial, may_record = _resume(parent, store, record, digest, stack)
            if partial is None and may_record:
                # Recorded before it is made: the next process finds it after a kill at any moment.
                names = _new_names(out)
                if may_record := _record(store, record, *names, digest):
                    with contextlib.suppress(FileNotFoundError):  # another process locked it first
                        partial = stack.enter_context(_begin(parent, *names))
                    may_record = partial is not None
            if partial is None:
                partial = stack.enter_context(_begin(parent, *_new_names(out)))
            try:
                yield partial
            finally:
                if partial.is_finished or partial.is_empty or not may_record:
                    partial.remove()
                    if may_record and (store.check(record) or {}).get("file") == partial.name:
                        store.drop_check(record)
    except OSError as error:
        raise StoreError(
            f"{out} cannot be written: {reason_of(error, out)}", hint="choose another path with -o"
        ) from error


def remove_empty_folder(out: Path, store: Store) -> None:
    """Remove the folder of a process that was killed when ``out`` had its name already."""
    record = _record_name(out)
    with (
        contextlib.suppress(OSError, ValueError, StoreError),  # nothing is recorded, or the file was removed
        Folder.open(out.absolute().parent) as parent,
    ):
        known = Fields.of(store.check(record))
        with parent.folder(known.text("folder")) as folder:
            if _is_private(folder) and not folder.lexists(known.basename("file")):
                os.rmdir(folder.path.name, dir_fd=parent.handle)
                store.drop_check(record)


def _record_name(out: Path) -> str:
    return f"pull-{hashlib.sha256(os.fsencode(out.absolute())).hexdigest()[:32]}"


def _new_names(out: Path) -> tuple[str, str]:
    """Return random names of a folder and of a file in it."""
    return f".{out.name[:200]}.{secrets.token_hex(8)}", secrets.token_hex(16)


@contextlib.contextmanager
def _begin(parent: Folder, folder_name: str, file_name: str) -> Iterator[Partial]:
    """Make the folder and the file, and lock it. Raises FileNotFoundError when another process, which read the names
    in the record, removed the folder or locked the file before this one did.
    """
    os.mkdir(folder_name, 0o700, dir_fd=parent.handle)
    with parent.folder(folder_name) as folder:
        if not _is_private(folder):
            raise StoreError(f"{folder.path} was exchanged while it was made", hint="choose another path with -o")
        with _open(folder, file_name, os.O_CREAT | os.O_EXCL) as stream:
            if not _lock(stream) or not folder.lexists(file_name):
                raise FileNotFoundError(errno.ENOENT, "another process has it", str(folder.path / file_name))
            yield Partial(stream, parent, folder, file_name)


def _resume(
    parent: Folder, store: Store, record: str, digest: str, stack: contextlib.ExitStack
) -> tuple[Partial | None, bool]:
    """Return the recorded file if it exists, with this digest and not in use; and whether a new one may be recorded."""
    try:
        known = Fields.of(store.check(record))
        folder_name, file_name, known_digest = known.text("folder"), known.basename("file"), known.digest("digest")
        folder = stack.enter_context(parent.folder(folder_name))
        if not _is_private(folder):
            return None, True
        if not folder.lexists(file_name):  # killed before the file was created, or after it was renamed
            with contextlib.suppress(OSError):
                os.rmdir(folder_name, dir_fd=parent.handle)
            return None, True
        stream = stack.enter_context(_open(folder, file_name, 0))
    except (OSError, ValueError, StoreError):  # nothing is recorded, or the file was removed
        return None, True
    if not _lock(stream):
        return None, False
    if not folder.lexists(file_name):  # it was renamed after the check
        return None, True
    partial = Partial(stream, parent, folder, file_name)
    if known_digest != digest:
        partial.remove()
        return None, True
    return partial, True


def _open(folder: Folder, name: str, flags: int) -> BinaryIO:
    """Open a file of a private folder, where nobody else puts links, pipes or devices. Raises OSError."""
    return open(os.open(name, _OPEN | flags, 0o600, dir_fd=folder.handle), "r+b")


def _record(store: Store, record: str, folder_name: str, file_name: str, digest: str) -> bool:
    """Record the names; False where the store cannot be written, and nothing is resumed."""
    try:
        store.open_for_writing()
        store.put_check(record, {"folder": folder_name, "file": file_name, "digest": digest})
    except (StoreError, OSError):
        return False
    return True


def _is_private(folder: Folder) -> bool:
    """Return whether this user owns the folder, and nobody else may create an entry in it."""
    status = folder.status()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _lock(stream: BinaryIO) -> bool:
    """Return whether no other process writes to the file. Without locks, its digest decides."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
