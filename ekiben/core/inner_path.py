"""Paths below a folder that other users may write, and the files that are read there and elsewhere alike.

Other users who may write a folder can exchange any name in it for a link at any time. So what lies below such a folder
has no path of its own: each operation walks from the descriptor of the outermost folder, which a user named, and
follows no link. Only that folder is opened by its path, once; the names above it belong to whom the user trusts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import total_ordering
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeAlias

from ekiben.core.checked import MAX_JSON
from ekiben.core.folder import Folder


class Outermost:
    """The folder ``path`` that a user names. Links in ``path`` are followed.

    ``keep``: it is opened when it is first needed and stays open, so that nobody exchanges it; else it is opened again
    each time, and its file system can be unmounted.
    """

    def __init__(self, path: Path, *, keep: bool = True) -> None:
        self.path, self._keep = path, keep
        self._open: Folder | None = None

    def folder(self, *names: str) -> Folder:
        """Open the folder ``names`` below it, step by step. Raises OSError, NotADirectoryError for a link."""
        if not self._keep:
            with Folder.open(self.path) as folder:
                return folder.folder(*names)
        if self._open is None or self._open.status().st_nlink == 0:  # removed: the user may have created it again
            self._open = Folder.open(self.path)
        return self._open.folder(*names)


@total_ordering
@dataclass(frozen=True, slots=True)
class InnerPath:
    """A path below an open folder. Each operation walks to it from the folder's descriptor, and follows no link.

    It is not an os.PathLike: nothing else can open it. ``path`` is for messages, and for programs that want
    one.
    """

    outermost: Outermost
    parts: tuple[str, ...] = ()

    def __truediv__(self, inner: str | PurePosixPath) -> InnerPath:
        return InnerPath(self.outermost, (*self.parts, *PurePosixPath(inner).parts))

    def __lt__(self, other: InnerPath) -> bool:
        return self.parts < other.parts

    def __str__(self) -> str:
        return str(self.path)

    @property
    def path(self) -> Path:
        """Return the path as text has it."""
        return self.outermost.path.joinpath(*self.parts)

    @property
    def name(self) -> str:
        """Return the last part; of the outermost folder, its name."""
        return self.parts[-1] if self.parts else self.outermost.path.name

    @classmethod
    def below(cls, path: Path, *, keep: bool = True) -> InnerPath:
        """Return the folder ``path``, which a user names, for paths below it; ``keep``: see Outermost."""
        return cls(Outermost(path, keep=keep))

    @property
    def parent(self) -> InnerPath:
        """Return the folder that it is an entry of."""
        return InnerPath(self.outermost, self.parts[:-1])

    def with_name(self, name: str) -> InnerPath:
        """Return the entry ``name`` of the same folder."""
        return self.parent / name

    def open_folder(self) -> Folder:
        """Open the folder at this path. Raises OSError, NotADirectoryError where a link is on the way."""
        return self.outermost.folder(*self.parts)

    def status(self) -> os.stat_result:
        """Return the status of the entry, not of a link's target. Raises OSError."""
        if not self.parts:
            with self.open_folder() as folder:
                return folder.status()
        with self.parent.open_folder() as folder:
            return folder.status(self.name)

    def lexists(self) -> bool:
        """Return whether there is an entry, also for a dangling link; False where its folder is none."""
        return self._mode() != 0

    def is_regular(self) -> bool:
        """Return whether it is a regular file and no link."""
        return stat.S_ISREG(self._mode())

    def is_folder(self) -> bool:
        """Return whether it is a folder and no link."""
        return stat.S_ISDIR(self._mode())

    def _mode(self) -> int:
        try:
            return self.status().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def way(self) -> list[InnerPath]:
        """Return the folders from the first below the outermost to this one."""
        return [InnerPath(self.outermost, self.parts[:end]) for end in range(1, len(self.parts) + 1)]

    def free_bytes(self) -> int:
        """Return how many bytes an ordinary user may still write in the folder at this path. Raises OSError."""
        with self.open_folder() as folder:
            stats = os.fstatvfs(folder.handle)
        return stats.f_bavail * stats.f_frsize

    def is_writable(self) -> bool:
        """Return whether this user may make files in the folder at this path."""
        try:
            with self.open_folder() as folder:
                return os.access(".", os.W_OK | os.X_OK, dir_fd=folder.handle)
        except OSError:
            return False

    def entries(self) -> list[InnerPath]:
        """Return the entries of the folder at this path, sorted by name. Raises OSError."""
        with self.open_folder() as folder:
            return [self / name for name in folder.names()]

    def open_file(self, buffering: int = 0) -> BinaryIO:
        """Open a regular file for reading. Raises OSError for a link, a pipe, a device."""
        with self.parent.open_folder() as folder:
            return folder.open_file(self.name, buffering)

    def read(self, *, max_size: int = MAX_JSON) -> bytes:
        """Read a regular file. Raises OSError; ValueError for a file above ``max_size`` bytes."""
        with self.parent.open_folder() as folder:
            return folder.read(self.name, max_size=max_size)

    def create(self, mode: int = 0o600) -> BinaryIO:
        """Make a file here: see Folder.create()."""
        with self.parent.open_folder() as folder:
            return folder.create(self.name, mode)

    @contextlib.contextmanager
    def new_file(self, temporary: InnerPath | None = None) -> Iterator[BinaryIO]:
        """Yield a file that gets this path when the block ends without an exception; ``temporary`` until then: see
        Folder.
        """
        until = temporary or self.with_name(f".{self.name}.{secrets.token_hex(4)}")
        with (
            self.parent.open_folder() as folder,
            until.parent.open_folder() as within,
            folder.new_file(self.name, within=within, temporary=until.name) as stream,
        ):
            yield stream

    def open_lock(self) -> int:
        """Return the handle of a file to lock: see Folder.open_lock()."""
        with self.parent.open_folder() as folder:
            return folder.open_lock(self.name)

    def new_folder(self, give: Callable[[int], None] | None = None) -> None:
        """Make a folder here: see Folder.new_folder()."""
        with self.parent.open_folder() as folder:
            folder.new_folder(self.name, give)

    def make_folder(self, give: Callable[[int], None]) -> None:
        """Make a folder here: see Folder.make_folder()."""
        with self.parent.open_folder() as folder:
            folder.make_folder(self.name, give)

    def change(self, give: Callable[[int], None]) -> None:
        """Call ``give`` with a descriptor of what is here: see Folder.change()."""
        with self.parent.open_folder() as folder:
            folder.change(self.name, give)

    def move(self, new: InnerPath) -> None:
        """Move the entry on the same file system, and replace an existing one. Raises OSError."""
        with self.parent.open_folder() as folder, new.parent.open_folder() as into:
            folder.move(self.name, new.name, into)

    def new_link(self, target: str) -> None:
        """Make a link here. Raises FileExistsError, OSError."""
        with self.parent.open_folder() as folder:
            folder.new_link(self.name, target)

    def link(self, target: str) -> None:
        """Point a link here to ``target``: see Folder.link()."""
        with self.parent.open_folder() as folder:
            folder.link(self.name, target)

    def link_target(self) -> str | None:
        """Return the target of the link at this path; None where there is none."""
        with contextlib.suppress(OSError), self.parent.open_folder() as folder:
            return folder.link_target(self.name)
        return None

    def remove(self, *, missing_ok: bool = False) -> None:
        """Remove a file or a link. Raises OSError."""
        with contextlib.suppress(*([FileNotFoundError] if missing_ok else [])), self.parent.open_folder() as folder:
            folder.remove(self.name)

    def remove_folder(self) -> None:
        """Remove an empty folder. Raises OSError."""
        with self.parent.open_folder() as folder:
            folder.remove_folder(self.name)

    def remove_tree(self) -> int:
        """Remove the entry with all that is below it: see Folder.remove_tree()."""
        with contextlib.suppress(OSError), self.parent.open_folder() as folder:
            return folder.remove_tree(self.name)
        return 0


AnyPath: TypeAlias = Path | InnerPath  # a path of the user's, or below a folder that others may write


def program_files(paths: Iterable[AnyPath], stack: contextlib.ExitStack) -> tuple[list[Path], list[int]]:
    """Return the paths by which a program opens files, and the descriptors that it has to inherit for that.

    An InnerPath is opened until ``stack`` ends, so that the program gets the file that was there, whatever has its name
    by then. Raises OSError.
    """
    names, handles = list[Path](), list[int]()
    for path in paths:
        if isinstance(path, InnerPath):
            handles.append(stack.enter_context(path.open_file()).fileno())
            path = Path(f"/proc/self/fd/{handles[-1]}")
        names.append(path)
    return names, handles
