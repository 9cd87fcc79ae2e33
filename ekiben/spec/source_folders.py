"""Folders that a recipe may read files from: its folder, Ekiben's, and those that the user includes.

A recipe may come from elsewhere, with links in it: to a key in the user's home, or to /proc/self/environ. What they
lead to would get into an image, which others may read. So each path is followed to its end, over all links, before a
byte is read or shown.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from ekiben.core.decisions import log_decision
from ekiben.core.errors import DefinitionError, UsageError
from ekiben.core.files import format_size
from ekiben.core.paths import PROJECT_ROOT

_SHIPPED = (PROJECT_ROOT / "images", PROJECT_ROOT / "entrypoints")
_FILE_URL = re.compile(r"file:(?://(?:localhost)?)?(/.*)", re.DOTALL)
_ELSEWHERE = re.compile(r"[A-Za-z0-9][\w+.@-]*:")  # a URL, or ssh's HOST:PATH
_MAX_FILE = 4 << 30  # bytes of one file that goes into an image


@dataclass(frozen=True)  # no slots: cached_property
class SourceFolders:
    """``folder`` is the recipe's; ``included`` are files and folders beside it that the user allows."""

    folder: Path
    included: tuple[Path, ...] = ()

    def check(self, path: Path, named_in: str = "") -> Path:
        """Return ``path`` with all links resolved; the file need not exist.

        Raises DefinitionError, which begins with ``named_in``, when that lies elsewhere.
        """
        real = follow(path)
        if not self.is_outside(real):
            return real
        if any(real.is_relative_to(follow(item)) for item in self.included):
            log_decision(f"file {path}", real, "outside the recipe's folder, allowed by --include")
            return real
        target = "is" if Path(os.path.abspath(path)) == real else f"points to {real},"
        raise DefinitionError(
            f"{named_in}{': ' if named_in else ''}{path} {target} outside the recipe's folder {self.folder}",
            hint=(
                "it is private, and an image would publish it: remove it from the recipe"
                if _is_private(real)
                else f"to include it: --include {shlex.quote(str(real))}"
            ),
        )

    def check_file(self, path: Path, named_in: str = "") -> Path:
        """Do the same for a file that goes into an image.

        Raises DefinitionError also when it is not a file, or a huge one.
        """
        real = self.check(path, named_in)
        where = f"{named_in}: " if named_in else ""
        try:
            status = real.stat()
        except OSError as error:
            raise DefinitionError(f"{where}{path}: cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise DefinitionError(f"{where}{path} is not a regular file")
        if status.st_size > _MAX_FILE:
            raise DefinitionError(
                f"{where}{path} has {format_size(status.st_size)}, more than the {format_size(_MAX_FILE)} of a recipe's"
                " file",
                hint="leave it out of the image and show its folder where the image runs: --bind",
            )
        return real

    def is_outside(self, real: Path) -> bool:
        """Return whether a path without links is neither in the recipe's folder nor among Ekiben's own."""
        return not any(real.is_relative_to(folder) for folder in self._inside)

    @functools.cached_property
    def _inside(self) -> list[Path]:
        return [follow(folder) for folder in (self.folder, *_SHIPPED)]


def _is_private(path: Path) -> bool:
    """Return whether users other than its owner cannot read it: a key, a password."""
    try:
        return not path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
    except OSError as error:
        return isinstance(error, PermissionError)


def follow(path: Path) -> Path:
    """Return ``path`` with all links resolved.

    Raises DefinitionError for a name that no file can have.
    """
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError) as error:  # a NUL
        raise DefinitionError(f"{str(path)!r:.200} cannot be a path: {error}") from error


def local_path(location: str) -> Path | None:
    """Return the path that an index, or a repository, is at on this machine; None for one elsewhere."""
    if match := _FILE_URL.fullmatch(location):
        return Path(unquote(match[1]))
    return None if _ELSEWHERE.match(location) else Path(location)


def included_paths(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Return the values of --include as absolute paths. Raises UsageError for one that is not there."""
    included = tuple(paths)
    for path in included:
        if not path.exists():
            raise UsageError(f"--include {path}: no such file or folder")
        if not (path.is_file() or path.is_dir()):
            raise UsageError(f"--include {path}: is neither a file nor a folder")
    return tuple(path.absolute() for path in included)
