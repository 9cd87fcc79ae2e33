"""A folder that other users may write, held by a descriptor.

Between looking at a path and acting on it, whoever may write a folder on the way can exchange any of its names for a
link. So a folder is opened once, and every operation names one entry of it, relative to the descriptor: openat,
fstatat, mkdirat, renameat, linkat, symlinkat, readlinkat, unlinkat, which every Linux has. No link is ever followed. A
file is opened without waiting, as a pipe would have it, and looked at before a byte of it is read or its mode is
changed. Modes and groups are given to open files only.

What a racing colleague can still do: an entry may be gone, or be another file, which is checked like any other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from ekiben.core.checked import MAX_JSON

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Folder:
    """An open folder; ``path`` is for messages and for programs that want one.

    Close it, or use it in a with statement.
    """

    def __init__(self, handle: int, path: Path) -> None:
        self.handle, self.path = handle, path

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the folder that a user names: links on the way are the user's. Raises OSError."""
        return cls(os.open(path, _FOLDER & ~os.O_NOFOLLOW), path)

    def __enter__(self) -> Self:
        return self

    def __del__(self) -> None:
        self.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.handle >= 0:
            # Reset first: after a signal in between, a second close would close another file that has the number by
            # then.
            handle, self.handle = self.handle, -1
            os.close(handle)

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Let an OSError of the block name the path. Raises ValueError for a name that points out of the folder."""
        if not name or name in (".", "..") or "/" in name or "\0" in name:
            raise ValueError(f"{name!r:.80} is not the name of an entry of a folder")
        try:
            yield
        except OSError as error:
            error.filename = str(self.path / name)
            raise

    def status(self, name: str = "") -> os.stat_result:
        """Return the status of an entry, not of a link's target; of the folder itself without a name.

        Raises OSError.
        """
        if not name:
            return os.fstat(self.handle)
        with self._named(name):
            return os.stat(name, dir_fd=self.handle, follow_symlinks=False)

    def lexists(self, name: str) -> bool:
        """Return whether there is an entry of this name, also for a dangling link."""
        with contextlib.suppress(FileNotFoundError):
            self.status(name)
            return True
        return False

    def names(self) -> list[str]:
        """Return the names of all entries, sorted. Raises OSError."""
        return sorted(os.listdir(self.handle))  # noqa: PTH208  # a descriptor has no path

    # -- folders

    def folder(self, *names: str) -> Folder:
        """Open a folder below this one, step by step. Raises OSError, NotADirectoryError for a link."""
        inner = Folder(os.dup(self.handle), self.path)
        for name in names:
            with inner, inner._named(name):
                try:
                    inner = Folder(os.open(name, _FOLDER, dir_fd=inner.handle), inner.path / name)
                except NotADirectoryError as error:
                    if inner.link_target(name) is not None:
                        error.strerror = "it is a link"
                    raise
        return inner

    def folders(self) -> Iterator[Folder]:
        """Yield the folders in this one, sorted by name, each open until the next: no links."""
        for name in self.names():
            with contextlib.ExitStack() as stack:
                try:
                    inner = stack.enter_context(self.folder(name))
                except OSError:  # a file, a link, or a folder that is gone or not readable
                    continue
                yield inner

    def new_folder(self, name: str, give: Callable[[int], None] | None = None) -> None:
        """Make a folder under its name: private until ``give`` has given its descriptor a mode, or as the umask has it.

        Raises FileExistsError, OSError.
        """
        with self._named(name):
            os.mkdir(name, 0o700 if give else 0o777, dir_fd=self.handle)
        if give:
            self.change(name, give)

    def make_folder(self, name: str, give: Callable[[int], None]) -> None:
        """Create a folder, renamed once ``give`` has set its descriptor's mode and group. Idempotent.

        Raises OSError, also where a link or a file has the name.
        """
        temporary = f".{name}.{secrets.token_hex(4)}"
        try:
            self.new_folder(temporary, give)
            self.move(temporary, name)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            if not self.is_folder(name):  # the temporary name means nothing to a user
                reason = "it is a file" if self.link_target(name) is None else "it is a link"
                raise NotADirectoryError(errno.ENOTDIR, reason, str(self.path / name)) from error
        finally:
            with contextlib.suppress(OSError):
                os.rmdir(temporary, dir_fd=self.handle)

    def change(self, name: str, give: Callable[[int], None]) -> None:
        """Call ``give`` with a descriptor of a file or a folder. Raises OSError for what is neither, a link, say.

        A file with a second name is refused, too: the other may lie elsewhere. One that was replaced in the meantime
        has no name left.
        """
        with self._named(name):
            handle = os.open(name, os.O_RDONLY | _FILE, dir_fd=self.handle)
        try:
            status = os.fstat(handle)
            if not stat.S_ISDIR(status.st_mode) and not (stat.S_ISREG(status.st_mode) and status.st_nlink <= 1):
                raise OSError(errno.EPERM, "it is not a file of its own", str(self.path / name))
            give(handle)
        finally:
            os.close(handle)

    def is_folder(self, name: str) -> bool:
        """Return whether an entry is a folder and no link."""
        with contextlib.suppress(FileNotFoundError):
            return stat.S_ISDIR(self.status(name).st_mode)
        return False

    # -- files

    def open_file(self, name: str, buffering: int = 0) -> BinaryIO:
        """Open a regular file for reading. Raises OSError: ELOOP for a link, EINVAL for a pipe or a device."""
        with self._named(name):
            try:
                handle = os.open(name, os.O_RDONLY | _FILE, dir_fd=self.handle)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    error.strerror = "it is a link"
                raise
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file", str(self.path / name))
            return open(handle, "rb", buffering)
        except BaseException:
            os.close(handle)
            raise

    def read(self, name: str, *, max_size: int = MAX_JSON) -> bytes:
        """Read a regular file. Raises OSError; ValueError for a file above ``max_size`` bytes."""
        with self.open_file(name) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > max_size:
                raise ValueError(f"has {size} bytes, more than {max_size}")
            return stream.read(size)

    def create(self, name: str, mode: int = 0o600) -> BinaryIO:
        """Make a file of this mode, less the umask, and open it for writing and reading, unbuffered.

        Raises FileExistsError, OSError.
        """
        with self._named(name):
            handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE, mode, dir_fd=self.handle)
        return open(handle, "w+b", 0)

    @contextlib.contextmanager
    def new_file(self, name: str, *, within: Folder | None = None, temporary: str = "") -> Iterator[BinaryIO]:
        """Yield a file, private until its mode is changed, that gets ``name`` when the block ends without an exception.

        within: the folder of the same file system, by default this one, where it is called ``temporary`` until then.
        Raises OSError, also when the temporary name is a different file by then.
        """
        source, temporary = within or self, temporary or f".{name}.{secrets.token_hex(4)}"
        stream = source.create(temporary)
        try:
            with stream:
                yield stream
                if not os.path.samestat(os.fstat(stream.fileno()), source.status(temporary)):
                    raise OSError(errno.ESTALE, "a different file has this name now", str(source.path / temporary))
                source.move(temporary, name, self)
        finally:
            with contextlib.suppress(OSError):
                source.remove(temporary)

    def open_lock(self, name: str) -> int:
        """Return the handle of a lock file, which is created if missing.

        Raises OSError, also for a link or a pipe.
        """
        with self._named(name):
            handle = os.open(name, os.O_RDWR | os.O_CREAT | _FILE, 0o600, dir_fd=self.handle)
            if stat.S_ISREG(os.fstat(handle).st_mode):
                return handle
            os.close(handle)
            raise OSError(errno.EINVAL, "it is not a regular file")

    def move(self, name: str, new: str, into: Folder | None = None) -> None:
        """Rename an entry, and replace an existing one. Raises OSError."""
        with self._named(name), (into or self)._named(new):
            os.rename(name, new, src_dir_fd=self.handle, dst_dir_fd=(into or self).handle)

    # -- links

    def link_target(self, name: str) -> str | None:
        """Return the target of a link; None where there is none."""
        try:
            with self._named(name):
                return os.readlink(name, dir_fd=self.handle)
        except OSError:
            return None

    def new_link(self, name: str, target: str) -> None:
        """Make a link. Raises FileExistsError, OSError."""
        with self._named(name):
            os.symlink(target, name, dir_fd=self.handle)

    def link(self, name: str, target: str) -> None:
        """Point the link ``name`` to ``target``, atomically. Raises OSError."""
        temporary = f".{name}.{secrets.token_hex(4)}"
        self.new_link(temporary, target)
        try:
            self.move(temporary, name)
        finally:
            with contextlib.suppress(OSError):
                self.remove(temporary)

    # -- removal

    def remove(self, name: str) -> None:
        """Remove a file or a link. Raises OSError."""
        with self._named(name):
            os.unlink(name, dir_fd=self.handle)

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder. Raises OSError."""
        with self._named(name):
            os.rmdir(name, dir_fd=self.handle)

    def remove_tree(self, name: str) -> int:
        """Remove an entry with all that is below it, but nothing in a folder where something is mounted.

        Returns the bytes of its files. What cannot be removed stays. Any depth takes two descriptors: folders move up
        first.
        """
        with contextlib.suppress(OSError):
            status = self.status(name)
            if not stat.S_ISDIR(status.st_mode):
                self.remove(name)
                return status.st_size
            with self.folder(name) as top:
                size = _empty(top) if top.is_same_mount(self) else 0
            os.rmdir(name, dir_fd=self.handle)
            return size
        return 0

    def is_same_mount(self, other: Folder) -> bool:
        """Return whether nothing is mounted at this folder or between the two."""
        return _mount_of(self.handle) == _mount_of(other.handle)


def _empty(top: Folder) -> int:
    """Remove what is in a folder, and return the bytes of its files."""
    size = _remove_files(top)
    while folders := top.names():
        removed = 0
        for name in folders:
            with contextlib.suppress(OSError), top.folder(name) as inner:
                if not inner.is_same_mount(top):
                    continue
                with contextlib.suppress(OSError):  # another's
                    os.fchmod(inner.handle, 0o700)
                size += _remove_files(inner)
                for deeper in inner.names():
                    with contextlib.suppress(OSError):  # a mount point, or another user's
                        inner.move(deeper, secrets.token_hex(8), top)
                os.rmdir(name, dir_fd=top.handle)
                removed += 1
        if not removed:
            break
    return size


def _remove_files(folder: Folder) -> int:
    size = 0
    for name in folder.names():
        with contextlib.suppress(OSError):
            status = folder.status(name)
            if not stat.S_ISDIR(status.st_mode):
                folder.remove(name)
                size += status.st_size
    return size


def _mount_of(handle: int) -> tuple[int, bytes]:
    """Return a mount's identity, also among mounts of one file system where /proc is mounted (Linux 3.15)."""
    mount = b""
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{handle}", "rb") as lines:
        mount = next((line for line in lines if line.startswith(b"mnt_id:")), b"")
    return os.fstat(handle).st_dev, mount
