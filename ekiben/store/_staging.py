"""Writing to a store: temporary folders and files that are renamed, locks, permissions, errors.

A reader sees the old file or the new one, and a killed writer leaves nothing but a name in staging/, which says whose
it was and which the next writer removes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol

from ekiben.core.command_name import command_name
from ekiben.core.errors import StoreError
from ekiben.core.files import format_size, free_bytes, lacks_inodes, make_folders, reason_of
from ekiben.core.folder import Folder
from ekiben.core.inner_path import AnyPath, InnerPath
from ekiben.core.owner import Owner, is_abandoned, remove_lock

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

DEFERRED_REMOVAL_BYTES = 20e9  # free bytes above which temporary trees stay until the last layer of a build is made
_NEEDED = "needed"  # in a temporary folder: the cache keys of the layers that a running build needs


class Access(Protocol):
    """Access rights in a store, and their errors."""

    def prepare(self) -> None:
        """Make the folder that the store is in, or refuse it. Raises StoreError."""

    @property
    def folder(self) -> InnerPath:
        """Return the store's folder."""

    def readable(self, path: InnerPath) -> AnyPath:
        """Return ``path`` for readers of the store: a Path where no other user can replace it."""

    def make_folder(self, folder: InnerPath) -> None:
        """Make a folder with its parents. Idempotent. Raises StoreError, OSError."""

    def apply_permissions(self, handle: int, mode: int) -> None:
        """Give an open new file or folder its mode whatever the umask, and its group. Raises StoreError, OSError."""

    def is_abandoned(self, staging: Folder, name: str) -> bool:
        """Return whether an entry of staging/ belongs to no running process. Raises OSError."""

    def translated_errors(self) -> AbstractContextManager[None]:
        """Turn an OSError of the block into a StoreError that says what to do."""


class UserAccess:
    """A store of one user: modes are as given, and errors name --store."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, InnerPath.below(root, keep=False)

    def readable(self, path: InnerPath) -> AnyPath:
        """Return the path itself: the store is its user's."""
        return path.path

    def prepare(self) -> None:
        """Create the store's folder, closed to other users: its content runs with this user's rights."""
        if self.root.is_dir():
            return
        try:
            with self.translated_errors():
                make_folders(self.root.parent)
                with contextlib.suppress(FileExistsError):  # another process has just created it
                    self.root.mkdir(0o700)
        except FileNotFoundError as error:  # the parent has no folders, for example /proc
            raise StoreError(
                f"the store {self.root} cannot be written: {error.strerror}: {error.filename}",
                hint="give another folder with --store or EKIBEN_STORE",
            ) from error

    def make_folder(self, folder: InnerPath) -> None:
        """Make a folder with its parents."""
        for inner in folder.way():
            if not inner.is_folder():
                inner.make_folder(lambda handle: os.fchmod(handle, 0o755))

    def apply_permissions(self, handle: int, mode: int) -> None:
        """Set the mode of a file."""
        os.fchmod(handle, mode)

    def is_abandoned(self, staging: Folder, name: str) -> bool:
        """Return whether the process that made it has ended."""
        return is_abandoned(staging, name)

    @contextlib.contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Turn an OSError of the block into a StoreError that says what to do."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = free_bytes(self.root if self.root.exists() else Path(self.root.anchor))
                what = "inodes" if lacks_inodes(self.root) else "space"
                raise StoreError(
                    f"no {what} left in {self.root}: {format_size(free)} free ({reason_of(error, self.root)})",
                    hint=(
                        f"free space with `{command_name()} prune`, or give another folder with --store or EKIBEN_STORE"
                    ),
                ) from error
            if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
                raise StoreError(
                    f"the store {self.root} cannot be written: {error.strerror}: {error.filename}",
                    hint="give a folder of your own with --store or EKIBEN_STORE",
                ) from error
            raise


class StagingArea:
    """Temporary files and folders of a store, with its locks and the background work of a build."""

    def __init__(self, access: Access) -> None:
        self.root, self.folder, self.access = access.folder, access.folder / "staging", access
        self._owner = Owner(self.folder)
        self._pool: ThreadPoolExecutor | None = None
        self._running: list[Future[None]] = []
        self._finished: list[InnerPath] = []  # unused folders, removed once no script is running

    # -- files and folders

    def inner(self, path: Path) -> InnerPath:
        """Return a path of this store's as one below its folder."""
        return self.root / PurePosixPath(path.relative_to(self.root.path))

    @contextlib.contextmanager
    def temporary_folder(self) -> Iterator[InnerPath]:
        """Yield a folder of this process, removed afterwards."""
        with self._owner.active() as prefix:
            folder = self.folder / f"{prefix}{secrets.token_hex(4)}"
            with self.access.translated_errors():
                folder.new_folder(lambda handle: self.access.apply_permissions(handle, 0o700))
            try:
                with self.access.translated_errors():
                    yield folder
            finally:
                self._release(folder)

    def write(self, path: InnerPath, data: bytes) -> None:
        """Write a file atomically, without fsync: a record that a power failure leaves empty is not a record."""
        with self.access.translated_errors(), self._owner.active() as prefix:
            temporary = self.folder / f"{prefix}{secrets.token_hex(4)}"
            with path.new_file(temporary) as stream:
                stream.write(data)
                self.access.apply_permissions(stream.fileno(), 0o644)

    def probe(self) -> None:
        """Make a file and remove it. Raises StoreError when the store cannot be written."""
        with self.access.translated_errors(), self._owner.active() as prefix:
            probe = self.folder / f"{prefix}{secrets.token_hex(4)}"
            probe.create().close()
            probe.remove()

    def sweep(self) -> None:
        """Remove files and end children of dead processes."""
        with self.folder.open_folder() as staging:
            for name in staging.names():
                with contextlib.suppress(OSError):
                    if is_abandoned(staging, name):
                        from ekiben.core.process import end_orphans

                        end_orphans(name)
                    if self.access.is_abandoned(staging, name) and not remove_lock(staging, name):
                        staging.remove_tree(name)

    def sweep_process(self) -> None:
        """Remove this process's temporary files at its end, when Ctrl-C and SIGTERM are ignored."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(OSError), self.folder.open_folder() as staging:
            for name in staging.names():
                if self._owner.has_prefix(name):
                    staging.remove_tree(name)

    # -- claims of running builds

    @contextlib.contextmanager
    def announce(self, cache_keys: Iterable[str]) -> Iterator[None]:
        """Protect these layers, and all that is stored meanwhile, from prune() until the block ends."""
        with self.temporary_folder() as folder:
            with (folder / _NEEDED).new_file() as stream:
                stream.write("\n".join(cache_keys).encode())
                self.access.apply_permissions(stream.fileno(), 0o644)  # renamed only when all may read it
            yield

    def announced_keys(self) -> set[str]:
        """Return the cache keys of the layers that running builds and publishers need."""
        keys: set[str] = set()
        with contextlib.suppress(OSError), self.folder.open_folder() as staging:
            for folder in staging.folders():
                with contextlib.suppress(OSError, ValueError):  # it has just ended, or the file is not Ekiben's
                    keys |= set(folder.read(_NEEDED).decode(errors="replace").split())
        return keys

    def oldest_running(self, now: float) -> float:
        """Return when the oldest running build began, or ``now``: it may name younger blobs later."""
        with self.folder.open_folder() as staging:
            return min((folder.status().st_mtime for folder in staging.folders()), default=now)

    # -- background work

    @property
    def in_background(self) -> bool:
        """Return whether defer() returns immediately."""
        return self._pool is not None

    @contextlib.contextmanager
    def background(self) -> Iterator[None]:
        """Run deferred work on threads inside the block, and wait for it at the end; temporary trees go last."""
        from concurrent.futures import ThreadPoolExecutor  # imported here: it brings logging with it

        with ThreadPoolExecutor(2, thread_name_prefix="store") as self._pool:
            try:
                yield
            finally:
                running, self._pool, self._running = self._running, None, []
                self.remove_finished()
        for work in running:
            work.result()

    def defer(self, work: Callable[..., None], *arguments: Any) -> None:
        """Call ``work``: in the background where there is one, else now."""
        if self._pool is None:
            work(*arguments)
        else:
            self._running.append(self._pool.submit(work, *arguments))

    def remove_finished(self) -> None:
        """Start removing the temporary trees of finished layers, when no more script will run."""
        folders, self._finished = self._finished, []
        if folders:
            threading.Thread(target=_remove_all, args=(folders,), name="removal").start()

    def _release(self, folder: InnerPath) -> None:
        """Remove a folder, but in a build only after its last script where the disk has room: on ext4, above all, mass
        deletion slows file creation in the next layer."""
        if self._pool is None:
            folder.remove_tree()
        elif self.root.free_bytes() < DEFERRED_REMOVAL_BYTES:
            self.defer(_remove_all, [folder])
        else:
            self._finished.append(folder)

    @contextlib.contextmanager
    def lock(self, name: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Keep two processes from building the same. Optional: flock may be missing on NFS or Lustre."""
        try:
            handle = (self.root / "locks" / name).open_lock()
        except OSError:
            yield
            return
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError:
                pass
            yield
        finally:
            os.close(handle)


def _remove_all(folders: Iterable[InnerPath]) -> None:
    for folder in folders:
        folder.remove_tree()
