"""A store that many users read and some write, on a file system many machines see.

Its layers are those of the SIFs that were published beside it, each byte written once: a layer is found by a link to a
SIF that has it, ``layers/<hex of its digest>/<offset>-<size>-<the SIF's name>``, and is gone with the last one.
Everything else is as in any store (ekiben/store/store.py).

What keeps it right is rename and nothing else: no lock (flock may be absent on NFS and Lustre), no database, no server.
Only the names of temporary files in staging/ say by a lock, where there is one, whether their writer lives
(ekiben/core/owner.py). A blob, a record or a link appears whole or not at all; two writers of the same thing write the
same bytes; what is removed is first moved to trash/, so that a job that has it open keeps it, on NFS too.

Who may do what is what the folder itself says, whatever anyone's umask and whatever group a login began with: its group
and its mode are given to everything below it, files without the right to write. `chgrp lab DIR; chmod 2775 DIR` lets a
group publish, `chmod 2755 DIR` its owner alone.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import grp
import os
import pwd
import re
import secrets
import shlex
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

from ekiben.core.checked import is_digest
from ekiben.core.command_name import command_name
from ekiben.core.errors import StoreError
from ekiben.core.files import format_size, lacks_inodes, reason_of
from ekiben.core.folder import Folder
from ekiben.core.inner_path import AnyPath, InnerPath
from ekiben.core.owner import is_abandoned
from ekiben.formats.partition import Partition
from ekiben.formats.sif import read_sif
from ekiben.store._records import StoredLayer
from ekiben.store.store import Store

STORE, IMAGES, TRASH = "store", "images", "trash"
_LAYERS = "layers"
_ATTEMPTS = 5
_EXCHANGED = (errno.ENOTDIR, errno.ELOOP, errno.ESTALE)  # error of opening a link as a folder
_DIGITS = 15  # digits of a time in seconds; anyone may choose the name
_LEFT = (
    7 * 86400
)  # seconds after which a folder in staging/ counts as abandoned: its process may run on another machine


@dataclass(frozen=True, slots=True)
class Policy:
    """Permissions of everything below ``folder``: its group, its mode for folders, its readers for files."""

    folder: InnerPath
    group: int
    mode: int

    @classmethod
    def of(cls, folder: InnerPath) -> Policy:
        """Read a folder's policy. Raises OSError."""
        status = folder.status()
        return cls(folder, status.st_gid, stat.S_IMODE(status.st_mode) | stat.S_ISGID)

    def apply_permissions(self, handle: int, mode: int) -> None:
        """Give an open new file the folder's group and ``mode`` as far as the folder itself is readable; a folder gets
        its mode.

        Raises StoreError when the user may not give files to that group, OSError.
        """
        status = os.fstat(handle)
        if status.st_gid != self.group:
            try:
                os.fchown(handle, -1, self.group)
            except PermissionError as error:
                raise StoreError(
                    f"{self.folder} belongs to the group {group_name(self.group)}, and this login may not give files to"
                    f" it: it is in {', '.join(map(group_name, sorted({os.getegid(), *os.getgroups()})))}",
                    hint=(
                        f"run `newgrp {group_name(self.group)}` (or log in again, when you were added just now), then"
                        " repeat the command"
                    ),
                ) from error
        readers = 0o700 | (0o050 if self.mode & 0o050 == 0o050 else 0) | (0o005 if self.mode & 0o005 == 0o005 else 0)
        os.fchmod(handle, self.mode if stat.S_ISDIR(status.st_mode) else mode & 0o555 & readers)

    def make_folder(self, folder: InnerPath) -> None:
        """Create a folder, renamed once its mode is set: other users may write into it immediately.

        Idempotent.
        """
        if folder.link_target() is not None:
            raise StoreError(
                f"{folder} is a link; Ekiben does not write through links", hint="remove it, or publish elsewhere"
            )
        if not folder.is_folder():
            folder.make_folder(lambda handle: self.apply_permissions(handle, 0))

    def apply_to(self, path: InnerPath, mode: int) -> None:
        """Give a file or a folder what apply_permissions() gives. Raises OSError for a link."""
        path.change(lambda handle: self.apply_permissions(handle, mode))


def group_name(number: int) -> str:
    """Return a group's name, or its number where it has none."""
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def user_name(number: int) -> str:
    """Return a user's name, or the number where there is none."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


class SharedAccess:
    """Access to a shared store: new files get its folder's group and mode. Errors name the folder."""

    def __init__(self, shared_dir: Path) -> None:
        self.shared_dir, self.shared = shared_dir, InnerPath.below(shared_dir)
        self.folder = self.shared / STORE
        self._policy: Policy | None = None

    @property
    def policy(self) -> Policy:
        """Return the folder's group and mode, read once."""
        if self._policy is None:
            self._policy = Policy.of(self.shared)
        return self._policy

    def readable(self, path: InnerPath) -> AnyPath:
        """Return the path as it is: other users may exchange what is there."""
        return path

    def make_folder(self, folder: InnerPath) -> None:
        """Create a folder of the shared folder's group and mode, with its parents."""
        for inner in folder.way():
            self.policy.make_folder(inner)

    def apply_permissions(self, handle: int, mode: int) -> None:
        """Give an open file the shared folder's group and mode."""
        self.policy.apply_permissions(handle, mode)

    def is_abandoned(self, staging: Folder, name: str) -> bool:
        """Return whether a dead process of this user and host created it, or anyone a week ago. Raises OSError."""
        status = staging.status(name)
        return status.st_mtime < time.time() - _LEFT or (status.st_uid == os.geteuid() and is_abandoned(staging, name))

    @contextlib.contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Turn an OSError of the block into a StoreError that says what to do."""
        try:
            yield
        except OSError as error:
            where = error.filename2 or error.filename or self.shared_dir
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = ""
                with contextlib.suppress(OSError):
                    free = f"; {format_size(self.shared.free_bytes())} free"
                what = "inodes" if lacks_inodes(self.shared_dir) else "space"
                whose = f", of the group {group_name(self.policy.group)}" if error.errno == errno.EDQUOT else ""
                raise StoreError(
                    f"no {what} left in {self.shared_dir}: {reason_of(error, self.shared_dir)}{whose}{free}; nothing"
                    " there was changed",
                    hint=f"free space with `{command_name()} prune --in {shlex.quote(str(self.shared_dir))}`",
                ) from error
            if error.errno in _EXCHANGED and self.shared_dir in Path(where).parents:
                raise StoreError(
                    f"{where} was replaced by a link or a different file while this command ran ({error.strerror})",
                    hint=(
                        f"another user who may write in {self.shared_dir} did that; no link was followed: ask who it"
                        " was, then repeat the command"
                    ),
                ) from error
            if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENOENT):
                raise StoreError(
                    f"{self.shared_dir} cannot be written: {error.strerror}: {where}",
                    hint="give a folder whose parent is there and in which you may write",
                ) from error
            raise

    def prepare(self) -> None:
        """Create the folder, readable for all and written by its owner; refuse one that cannot be used."""
        shared_dir = self.shared_dir
        with self.translated_errors():
            if not shared_dir.is_dir():
                if os.path.lexists(shared_dir):
                    status = "a link that points to no folder" if shared_dir.is_symlink() else "a file"
                    raise StoreError(
                        f"{shared_dir} is {status}; publish into a folder",
                        hint="give an existing folder, or a new name, which is created",
                    )
                new = InnerPath.below(shared_dir.parent) / shared_dir.name
                new.make_folder(lambda handle: os.fchmod(handle, 0o2755))
        self._refuse_unusable()
        with self.translated_errors():
            for inner in (STORE, IMAGES, TRASH, f"{STORE}/{_LAYERS}"):
                self.policy.make_folder(self.shared / inner)

    def _refuse_unusable(self) -> None:
        policy, mine = self.policy, {os.getegid(), *os.getgroups()}
        if not self.shared.is_writable():
            self._refuse_access()
        if policy.mode & 0o050 != 0o050:
            raise StoreError(
                f"{self.shared_dir} is closed to its group ({group_name(policy.group)}), which could not read"
                " published images",
                hint=(
                    f"chmod 2750 {self.shared_dir} (its group may read), or chmod 2755 {self.shared_dir} (everyone may)"
                ),
            )
        if os.geteuid() and policy.group not in mine and not self.shared.status().st_mode & stat.S_ISGID:
            with self.shared.open_folder() as folder:
                policy.apply_permissions(folder.handle, 0)  # its error has a hint

    def _refuse_access(self) -> NoReturn:
        status = self.shared.status()
        group, owner = group_name(status.st_gid), user_name(status.st_uid)
        whose = f"it is {owner}'s, group {group}, {stat.filemode(status.st_mode)}"
        is_in_group = getpass.getuser() in _members(status.st_gid)
        if status.st_mode & 0o020 and is_in_group:
            hint = (
                f"you are in the group {group}, and this login does not have it yet: run `newgrp {group}`, then repeat"
                " the command"
            )
        elif status.st_mode & 0o020:
            hint = f"ask to be added to the group {group}"
        else:
            hint = (
                f"ask {owner}: chmod 2775 {self.shared_dir} lets the group {group} publish; or give a folder of"
                " your own"
            )
        raise StoreError(f"you may not publish in {self.shared_dir}: {whose}", hint=hint)


class SharedStore(Store):
    """The store in ``DIR/store``, whose layers lie in the SIFs of ``DIR/images``. Reading needs no right to write."""

    def __init__(self, shared_dir: Path) -> None:
        self.shared_dir, self._access = shared_dir, SharedAccess(shared_dir)
        self.folder = self._access.shared
        super().__init__(
            shared_dir / STORE,
            access=self._access,
            locate=self._locate,
            version="2 shared",
            replace_hint="publish to a new folder",
        )

    @property
    def policy(self) -> Policy:
        """Return the group and mode that everything below the folder gets."""
        return self._access.policy

    def translated_errors(self) -> AbstractContextManager[None]:
        """Turn an OSError of the block into a StoreError that says what to do."""
        return self._access.translated_errors()

    def apply_permissions(self, handle: int, mode: int) -> None:
        """Give an open new file or folder its mode whatever the umask, and the folder's group."""
        self.policy.apply_permissions(handle, mode)

    def announced_keys(self) -> set[str]:
        """Return the cache keys of the layers that running publishers need."""
        return self.staging_area.announced_keys()

    @contextlib.contextmanager
    def new_folder(self) -> Iterator[InnerPath]:
        """Yield a temporary folder in the shared folder, removed afterwards."""
        with self.staging_area.temporary_folder() as folder:
            yield folder

    def _locate(self, digest: str) -> Partition | None:
        for link in self._links(digest):
            with contextlib.suppress(OSError, ValueError):  # ValueError: a file that is not one of ours
                start, length, _ = link.name.split("-", 2)
                offset, size = int(start[:_DIGITS]), int(length[:_DIGITS])
                sif = self._image_file(link)
                if sif and min(offset, size) >= 0 and sif.status().st_size >= offset + size:
                    return Partition(sif, offset, size, digest)
        return None

    def _image_file(self, link: InnerPath, target: str | None = None) -> InnerPath | None:
        """Return the file below images/ that a link of layers/ names, or would with ``target``; None without one."""
        target = target or link.link_target()
        inner = PurePosixPath(os.path.normpath(PurePosixPath(*link.parts[:-1], target or "/")))
        return path if inner.parts[0] == IMAGES and (path := self.folder / inner).is_regular() else None

    def _links(self, digest: str) -> list[InnerPath]:
        """Return the links, the newest first: it is pruned last, and a damaged one moves behind."""
        layer = self._layers / digest[7:]
        try:
            with layer.open_folder() as folder:
                links = [(folder.status(name).st_mtime, name) for name in folder.names() if not name.startswith(".")]
        except OSError:  # there is none, or prune is removing it
            return []
        return [layer / name for _, name in sorted(links, reverse=True)]

    @property
    def _layers(self) -> InnerPath:
        return self.folder / STORE / _LAYERS

    def put_layers(self, sif: InnerPath, layers: Sequence[StoredLayer]) -> None:
        """Register these layers as stored in ``sif``, a published file. Idempotent."""
        for layer, partition in zip(layers, read_sif(sif).layers[-len(layers) :], strict=True):
            folder = self._layers / layer.digest[7:]
            target = os.path.relpath(PurePosixPath(*sif.parts), PurePosixPath(*folder.parts))
            for _ in range(_ATTEMPTS):
                self.policy.make_folder(folder)
                with contextlib.suppress(FileExistsError, FileNotFoundError):  # prune may remove an empty folder
                    (folder / f"{partition.offset}-{partition.size}-{sif.name}").new_link(target)
                if self.find(layer.digest):
                    break
            self.put_layer(layer)

    def drop_dangling(self) -> None:
        """Remove links to SIFs that are gone, and keys of layers that no SIF has any more."""
        with self.translated_errors():
            for folder in self._layers.entries():
                for link in self._links(f"sha256:{folder.name}") if is_digest(f"sha256:{folder.name}") else ():
                    # Another prune or a publisher is running.
                    with contextlib.suppress(FileNotFoundError, FileExistsError):
                        if not self._image_file(link):
                            target = link.link_target()
                            link.remove()
                            if target and self._image_file(link, target):  # it was published again between the two
                                link.new_link(target)
                with contextlib.suppress(OSError):
                    if not folder.name.startswith(".") or folder.status().st_mtime < time.time() - _LEFT:
                        folder.remove_folder()  # a name with a dot is temporary
            for key in self.records.names("keys"):
                layer = self.records.layer(key)
                if layer and self.find(layer.digest) is None and key not in self.announced_keys():
                    self.records.drop("keys", key)
                    if self.find(layer.digest):  # it was published again between the two
                        self.put_layer(layer)

    def write_file(self, path: InnerPath, data: bytes, mode: int = 0o444) -> None:
        """Write a small file that is not a blob atomically. Raises OSError."""
        with path.new_file() as stream:
            stream.write(data)
            self.apply_permissions(stream.fileno(), mode)

    def discard(self, path: InnerPath) -> None:
        """Move a path to trash/; its grace period begins now."""
        path.move(self.folder / TRASH / f"{int(time.time())}__{secrets.token_hex(4)}__{path.name}")

    def empty_trash(self, older_than: float, *, dry_run: bool) -> int:
        """Remove what was discarded more than ``older_than`` seconds ago. Returns bytes."""
        total = 0
        with (self.folder / TRASH).open_folder() as trash:
            for name in trash.names():
                when = name.partition("__")[0]
                with contextlib.suppress(FileNotFoundError):
                    if when.isdecimal() and int(when[:_DIGITS]) <= time.time() - older_than:
                        total += trash.status(name).st_size
                        if not dry_run:
                            trash.remove_tree(name)
        return total

    def knows_last_use(self) -> bool:
        """Return whether the file system records when a file was read."""
        with self.folder.open_folder() as folder:
            return not os.fstatvfs(folder.handle).f_flag & os.ST_NOATIME

    def last_use(self, status: os.stat_result) -> float:
        """Return when a file was read or written last, as far as the file system knows."""
        return max(status.st_mtime, status.st_atime if self.knows_last_use() else 0)

    def restore(self, path: InnerPath) -> None:
        """Move a path back out of trash/, where nothing has taken its name."""
        for aside in (self.folder / TRASH).entries():
            if re.fullmatch(rf"[^_]+__[^_]+__{re.escape(path.name)}", aside.name) and not path.lexists():
                with contextlib.suppress(FileNotFoundError):
                    aside.move(path)


def _members(group: int) -> list[str]:
    try:
        entry = grp.getgrgid(group)
    except KeyError:
        return []
    return [*entry.gr_mem, *(item.pw_name for item in pwd.getpwall() if item.pw_gid == group)]


def open_shared(shared_dir: Path) -> SharedStore:
    """Open a shared store for reading. Raises StoreError when nothing was published there."""
    folder = InnerPath.below(shared_dir)
    try:
        exists = _exists(folder / STORE / "version")
    except OSError as error:
        raise StoreError(f"the shared store {shared_dir} cannot be read: {error.strerror}", hint=_hint()) from error
    if not exists:
        missing = "it is a file" if shared_dir.exists() else "there is no such folder"
        reason = "nothing was published there yet" if shared_dir.is_dir() else missing
        raise StoreError(f"no shared store in {shared_dir}: {reason}", hint=_hint())
    return SharedStore(shared_dir)


def _exists(version: InnerPath) -> bool:
    try:
        return bool(version.status())
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        if version.outermost.path.is_dir():  # then it is store/ that is a link or a file
            raise
        return False


def _hint() -> str:
    return (
        f"name the folder that `{command_name()} publish --to` filled: --shared, EKIBEN_SHARED or `shared:` in"
        " config.yaml; set EKIBEN_SHARED= to use none"
    )
