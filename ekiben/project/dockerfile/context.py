"""COPY and ADD of local files: which files of the build context, and where they go."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ekiben.core.files import open_regular
from ekiben.project.dockerfile.ignore import Ignore
from ekiben.project.dockerfile.pattern import copy_pattern
from ekiben.spec.source_folders import follow

FOLDER = "context"  # in the recipe: the files that COPY and ADD name
_ARCHIVES = ((0, b"\x1f\x8b"), (0, b"BZh"), (0, b"\xfd7zXZ\x00"), (257, b"ustar"))
_GROUP_WRITE = 0o022  # a clone's umask decides about these bits


@dataclass(frozen=True, slots=True)
class Item:
    """A file, folder or link below a source; ``inside`` is its path there, "" for the source itself."""

    inside: str
    path: Path

    @property
    def mode(self) -> int:
        """Return the permission bits that are kept."""
        return stat.S_IMODE(self.path.lstat().st_mode) & ~_GROUP_WRITE

    @property
    def is_link(self) -> bool:
        """Return whether it is a symbolic link below a folder that is copied."""
        return bool(self.inside) and self.path.is_symlink()


@dataclass(frozen=True, slots=True)
class Source:
    """A source of COPY: its path in the context, and what is in it; ``is_folder``: its content is copied."""

    path: str
    is_folder: bool
    items: tuple[Item, ...]


@dataclass(slots=True)
class BuildContext:
    """``used`` are the files of the recipe's context/: path there → file, None for a folder."""

    root: Path
    ignore: Ignore
    used: dict[str, Path | None] = field(default_factory=dict)

    def find(self, source: str) -> list[Source]:
        """Return what a source names; a pattern may match nothing.

        Raises ValueError where there is nothing, or it points out of the context.
        """
        cleaned = posixpath.normpath("/" + source.lstrip("/")).lstrip("/")
        if any(letter in cleaned for letter in "*?[\\"):
            pattern, depth = copy_pattern(cleaned), cleaned.count("/")
            paths = [path for path in self._paths("", depth) if pattern.matches(path)]
        elif self._has(cleaned):
            paths = [cleaned]
        else:
            is_out = self.ignore.patterns and os.path.lexists(self.root / cleaned)
            raise ValueError(
                f"{source} is left out by .dockerignore" if is_out else f"nothing in {self.root} is called {source}"
            )
        return [self._source(path) for path in sorted(paths, key=os.fsencode)]

    def _paths(self, folder: str, depth: int) -> Iterator[str]:
        """Yield the paths with ``depth`` folders above them."""
        for name in self._names(folder):
            path = f"{folder}{name}"
            if depth == 0:
                if self._has(path):
                    yield path
            elif (self.root / path).is_dir():
                yield from self._paths(f"{path}/", depth - 1)

    def _names(self, folder: str) -> list[str]:
        return sorted(os.listdir(self.root / folder), key=os.fsencode)  # noqa: PTH208  names alone

    def _has(self, path: str) -> bool:
        if not os.path.lexists(self.root / path):
            return False
        return not self.ignore.leaves_out(path) or (self.ignore.has_exceptions and any(self._below(path, "")))

    def _source(self, path: str) -> Source:
        real = follow(self.root / path)
        if not real.is_relative_to(follow(self.root)):
            raise ValueError(f"{path} points out of the build context, to {real}")
        if not real.exists():
            raise ValueError(f"{path} is a link to {real}, which does not exist")
        if not real.is_dir():
            self._check(path, real)
            return Source(path, False, (Item("", real),))
        return Source(path, True, tuple(self._below(path, "")))

    def _below(self, path: str, prefix: str) -> Iterator[Item]:
        inside = f"{path}/" if path else ""
        for name in self._names(inside + prefix):
            item = Item(prefix + name, self.root / inside / prefix / name)
            is_folder = item.path.is_dir() and not item.path.is_symlink()
            is_out = self.ignore.leaves_out(f"{inside}{item.inside}")
            if is_folder and (not is_out or self.ignore.has_exceptions):
                below = [*self._below(path, f"{item.inside}/")]
                if not is_out or below:
                    yield item
                yield from below
            elif not is_folder and not is_out:
                if not item.path.is_symlink():
                    self._check(f"{inside}{item.inside}", item.path)
                yield item

    def _check(self, path: str, real: Path) -> None:
        if not real.is_file():
            raise ValueError(f"{path} is neither a file, a folder nor a link; leave it out with .dockerignore")
        if "\n" in path or "{{" in path:
            raise ValueError(f"{path!r}: a definition file cannot name this file; rename it")

    def take(self, source: Source) -> None:
        """Note the source's files as files of the recipe."""
        if not source.is_folder:
            self.used[source.path] = source.items[0].path
            return
        self.used.setdefault(source.path, None)
        for item in source.items:
            inside = f"{source.path}/{item.inside}".lstrip("/")
            if item.is_link:
                continue
            self.used[inside] = None if item.path.is_dir() else item.path


def is_archive(path: Path) -> bool:
    """Return whether ADD unpacks a file. Raises OSError."""
    with open_regular(path) as stream:
        head = stream.read(300)
    return any(head[at:].startswith(mark) for at, mark in _ARCHIVES)
