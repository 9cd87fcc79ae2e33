"""A store that many users read and some write, on a file system many machines see.

Its layers are those of the SIFs that were published beside it, each byte written once: a layer is found by a link to a SIF
that has it, ``layers/<hex of its digest>/<offset>-<size>-<the SIF's name>``, and is gone with the last one. Everything else
is as in any store (builder/store.py).

What keeps it right is rename and nothing else: no lock (flock may be absent on NFS and Lustre), no database, no server.
A blob, a record or a link appears whole or not at all; two writers of the same thing write the same bytes; what is removed
is first moved aside, so that a job that has it open keeps it, on NFS too.

Who may do what is what the folder itself says, whatever anyone's umask and whatever group a login began with: its group and
its mode are given to everything below it, files without the right to write. `chgrp lab DIR; chmod 2775 DIR` lets a group
publish, `chmod 2755 DIR` its owner alone.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import grp
import os
import pwd
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from builder.errors import StoreError
from builder.sif import Partition, read_sif
from builder.store import Store, StoredLayer, remove_tree

STORE, IMAGES, TRASH = "store", "images", "trash"
_LAYERS = "layers"
_ATTEMPTS = 5
_LEFT = 7 * 86400  # seconds after which a folder in staging/ is nobody's: its machine may be another one


@dataclass(frozen=True, slots=True)
class Policy:
    """What everything below ``folder`` gets: its group, its mode for folders, its readers for files."""

    folder: Path
    group: int
    mode: int

    @classmethod
    def of(cls, folder: Path) -> Policy:
        found = folder.stat()
        return cls(folder, found.st_gid, stat.S_IMODE(found.st_mode) | stat.S_ISGID)

    def settle(self, path: Path, mode: int) -> None:
        """``mode`` less what the folder's own readers may not; folders are as it is. Errors: StoreError, OSError."""
        found = path.lstat()
        if found.st_gid != self.group:
            try:
                os.chown(path, -1, self.group)
            except PermissionError as error:
                raise StoreError(
                    f"{self.folder} belongs to the group {group_name(self.group)}, and this login may not give files to it: "
                    f"it is in {', '.join(map(group_name, sorted({os.getegid(), *os.getgroups()})))}",
                    hint=f"`newgrp {group_name(self.group)}` (or a new login, when you were added to it just now), and again",
                ) from error
        readers = 0o700 | (0o050 if self.mode & 0o050 == 0o050 else 0) | (0o005 if self.mode & 0o005 == 0o005 else 0)
        path.chmod(self.mode if stat.S_ISDIR(found.st_mode) else mode & 0o555 & readers)

    def make_folder(self, folder: Path) -> None:
        """Idempotent. It takes its name when it has its mode: others may be about to write into it."""
        if folder.is_dir():
            return
        temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        temporary.mkdir()
        try:
            self.settle(temporary, 0)
            temporary.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not folder.is_dir():
                raise
        finally:
            with contextlib.suppress(OSError):
                temporary.rmdir()


def group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


class SharedStore(Store):
    """``DIR/store``. Reading needs no rights but reading; writing follows the folder's policy. Errors: StoreError."""

    version, elsewhere = "2 shared", "publish to a new folder"  # its layers are in SIFs

    def __init__(self, place: Path) -> None:
        self.place = place
        self._policy: Policy | None = None
        super().__init__(place / STORE)

    @property
    def policy(self) -> Policy:
        if self._policy is None:
            self._policy = Policy.of(self.place)
        return self._policy

    def open_for_writing(self) -> None:
        """Also makes the folder itself, readable for all and written by its owner, when its parent is there."""
        with self.translated_errors():
            if not self.place.is_dir():
                if os.path.lexists(self.place):
                    found = "a link that leads to no folder" if self.place.is_symlink() else "a file"
                    raise StoreError(f"{self.place} is {found}, and what is published goes into a folder",
                                     hint="give a folder that is there, or a new name for one to be made")  # fmt: skip
                self.place.mkdir()
                self.place.chmod(0o2755)
        self._refuse_unusable()
        with self.translated_errors():
            for name in (STORE, IMAGES, TRASH):
                self.policy.make_folder(self.place / name)
        super().open_for_writing()
        with self.translated_errors():
            self._make_folder(self.root / _LAYERS)

    def _own(self, digest: str) -> Partition | None:
        if found := super()._own(digest):
            return found
        for link in self._links(digest):
            offset, size, _ = link.name.split("-", 2)
            with contextlib.suppress(OSError, ValueError):
                if link.stat().st_size >= int(offset) + int(size):
                    target = Path(os.path.normpath(link.parent / link.readlink()))
                    return Partition(target, int(offset), int(size), digest)
        return None

    def _links(self, digest: str) -> list[Path]:
        """The newest first: it is the last to be pruned, and a damaged one gets behind."""
        try:
            found = [(path.lstat().st_mtime, path) for path in (self.root / _LAYERS / digest[7:]).iterdir()]
        except OSError:  # there is none, or prune is at work
            return []
        return [path for _, path in sorted(found, reverse=True) if not path.name.startswith(".")]

    def put_layers(self, sif: Path, layers: Sequence[StoredLayer]) -> None:
        """From now on, whoever looks for these layers finds them in ``sif``, a published file of them. Idempotent."""
        for layer, part in zip(layers, read_sif(sif).layers, strict=True):
            folder = self.root / _LAYERS / layer.digest[7:]
            target = os.path.relpath(sif, folder)
            for _ in range(_ATTEMPTS):
                self.policy.make_folder(folder)
                with contextlib.suppress(FileExistsError, FileNotFoundError):  # prune may remove an empty folder
                    (folder / f"{part.offset}-{part.size}-{sif.name}").symlink_to(target)
                if self.find(layer.digest):
                    break
            self.put_layer(layer)

    def drop_dangling(self) -> None:
        """Links to SIFs that are gone, and keys of layers that no SIF has any more."""
        with self.translated_errors():
            for folder in (self.root / _LAYERS).iterdir():
                for link in self._links(f"sha256:{folder.name}"):
                    with contextlib.suppress(
                        FileNotFoundError, FileExistsError
                    ):  # another prune is at work, or a publisher
                        if not link.exists():
                            target = link.readlink()
                            link.unlink()
                            if (folder / target).exists():  # it was published again between the two
                                link.symlink_to(target)
                with contextlib.suppress(OSError):
                    if not folder.name.startswith(".") or folder.stat().st_mtime < time.time() - _LEFT:
                        folder.rmdir()  # one with a dot is about to get its name
            for path in self._list("keys"):
                record = self._read(f"keys/{path.name}")
                if record and self.find(record["digest"]) is None and path.stem not in self.announced_keys():
                    path.unlink(missing_ok=True)
                    if self.find(record["digest"]):
                        self.put_layer(StoredLayer(**record))

    def _refuse_unusable(self) -> None:
        policy, mine = self.policy, {os.getegid(), *os.getgroups()}
        if not os.access(self.place, os.W_OK | os.X_OK):
            self._refuse_access()
        if policy.mode & 0o050 != 0o050:
            raise StoreError(
                f"{self.place} is closed to its group ({group_name(policy.group)}): nobody would find what is published there",
                hint=f"chmod 2750 {self.place} (its group may read), or chmod 2755 {self.place} (everyone may)",
            )
        if os.geteuid() and policy.group not in mine and not self.place.stat().st_mode & stat.S_ISGID:
            policy.settle(self.place, 0)  # says what to do

    def _refuse_access(self) -> NoReturn:
        found = self.place.stat()
        group, owner = group_name(found.st_gid), user_name(found.st_uid)
        whose = f"it is {owner}'s, group {group}, {stat.filemode(found.st_mode)}"
        member = getpass.getuser() in _members(found.st_gid)
        if found.st_mode & 0o020 and member:
            hint = f"you are in the group {group}, but this login began before that or without it: `newgrp {group}`, and again"
        elif found.st_mode & 0o020:
            hint = f"ask for a place in the group {group}"
        else:
            hint = f"ask {owner}: chmod 2775 {self.place} lets the group {group} publish; or give a folder of your own"
        raise StoreError(f"no permission to publish in {self.place}: {whose}", hint=hint)

    def settle(self, path: Path, mode: int) -> None:
        self.policy.settle(path, mode)

    def write_file(self, path: Path, data: bytes, mode: int = 0o444) -> None:
        """A small file that is no blob, whole or not at all."""
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            with temporary.open("xb") as stream:
                stream.write(data)
            self.settle(temporary, mode)
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _make_folder(self, folder: Path) -> None:
        inside = folder.relative_to(self.place)
        for part in reversed([inside, *inside.parents]):
            self.policy.make_folder(self.place / part)

    @contextlib.contextmanager
    def translated_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename2 or error.filename or self.place
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = ""
                with contextlib.suppress(OSError):
                    free = f"; {shutil.disk_usage(self.place).free / 1e9:.1f} GB free"
                whose = f", of the group {group_name(self.policy.group)}" if error.errno == errno.EDQUOT else ""
                raise StoreError(
                    f"no room in {self.place}: {error.strerror}{whose}{free}; what was there before is as it was",
                    hint=f"make room with `build.py prune --in {self.place}`",
                ) from error
            if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENOENT):
                raise StoreError(
                    f"{self.place} cannot be written: {error.strerror}: {where}",
                    hint="give a folder whose parent is there and in which you may write",
                ) from error
            raise

    def _sweep(self) -> None:
        """What one's own dead processes on this host left, and what anyone left a week ago."""
        mine = os.geteuid()
        old = time.time() - _LEFT
        for left in (self.root / "staging").iterdir():
            with contextlib.suppress(OSError):
                found = left.lstat()
                if found.st_mtime < old or (found.st_uid == mine and self._is_dead(left.name)):
                    remove_tree(left) if left.is_dir() else left.unlink()

    def discard(self, path: Path) -> None:
        """Move to trash/; its time there begins now."""
        path.rename(self.place / TRASH / f"{int(time.time())}__{secrets.token_hex(4)}__{path.name}")

    def empty_trash(self, older_than: float, *, dry_run: bool) -> int:
        """Remove what was moved aside ``older_than`` seconds ago. Returns bytes."""
        total = 0
        for path in (self.place / TRASH).iterdir():
            when = path.name.partition("__")[0]
            with contextlib.suppress(FileNotFoundError):
                if when.isdigit() and int(when) <= time.time() - older_than:
                    total += path.lstat().st_size
                    if not dry_run:
                        remove_tree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        return total

    def knows_last_use(self) -> bool:
        """Whether reading a file leaves a trace here."""
        return not os.statvfs(self.place).f_flag & os.ST_NOATIME

    def last_use(self, found: os.stat_result) -> float:
        return max(found.st_mtime, found.st_atime if self.knows_last_use() else 0)

    def restore(self, path: Path) -> None:
        """Out of trash/ again, where nothing has taken its place."""
        for aside in (self.place / TRASH).glob(f"*__*__{path.name}"):
            if not path.exists():
                with contextlib.suppress(FileNotFoundError):
                    aside.rename(path)


def _members(group: int) -> list[str]:
    try:
        found = grp.getgrgid(group)
    except KeyError:
        return []
    return [*found.gr_mem, *(item.pw_name for item in pwd.getpwall() if item.pw_gid == group)]


def open_shared(place: Path) -> SharedStore:
    """For reading. Errors: StoreError when nothing was published there."""
    try:
        there = (place / STORE / "version").exists()
    except OSError as error:
        raise StoreError(f"the shared store {place} cannot be read: {error.strerror}", hint=_HINT) from error
    if not there:
        missing = "it is a file" if place.exists() else "there is no such folder"
        said = "nothing was published there yet" if place.is_dir() else missing
        raise StoreError(f"no shared store in {place}: {said}", hint=_HINT)
    return SharedStore(place)


_HINT = (
    "name the folder that `build.py publish --to` filled; for builds --shared, EKIBEN_SHARED or config.yaml does it, "
    "and EKIBEN_SHARED= goes without"
)
