"""A folder of a recipe with a Python project, as one archive whose bytes depend on its files alone.

Where git tracks files there, these are all; else every file but those that tools write beside sources. The repository's
own settings start no program: it may come from elsewhere.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Protocol

from ekiben.core.decisions import log_decision
from ekiben.core.errors import DefinitionError
from ekiben.core.files import format_size, open_regular, tree_paths
from ekiben.core.process import run, which
from ekiben.spec.source_folders import follow

_MAX_SIZE = 1 << 30  # bytes of all files
_MAX_FILES = 20_000
_EPOCH = 315619200  # 1980-01-02, which a ZIP file can hold in each time zone
_NEVER = {".git", ".hg", ".svn", "__pycache__"}
_WRITTEN = {  # by tools, beside sources
    *(".venv", "venv", ".tox", ".nox", ".eggs", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints"),
    "node_modules",
}
_OUTPUTS = {"build", "dist"}  # of a build, at the top
_OF_RECIPE = {"recipe.yaml", "recipe.schema.json", "SHA256SUMS", "bases.lock"}  # what says how its image is built
_LOCKED = (".def", ".lock", ".sources.json")  # of its images/
_GIT = (
    *("git", "--no-optional-locks", "--no-pager", "-c", "core.fsmonitor=false", "-c", "core.untrackedCache=false"),
    *("-c", "protocol.allow=never", "-c", "safe.directory=*"),
)


class _Sink(Protocol):
    def write(self, data: bytes, /) -> object: ...


class _Digest:
    """A file that keeps the hash of what is written."""

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes, /) -> int:
        self.sha256.update(data)
        return len(data)


@dataclass(frozen=True, slots=True)
class SourceTree:
    """The files below ``folder``, a path without links, by their paths below it; ``untracked`` are left out."""

    folder: Path
    files: tuple[str, ...]
    untracked: tuple[str, ...] = ()

    def digest(self) -> str:
        """Return the SHA-256 of the archive, in hex. Raises DefinitionError for what cannot be in one."""
        sink = _Digest()
        self.write(sink)
        return sink.sha256.hexdigest()

    def write(self, out: _Sink) -> None:
        """Write the archive: a tar with one folder. Raises DefinitionError for what cannot be in one."""
        size = 0
        for name in self.files:
            path = self.folder / name
            try:
                status = path.lstat()
                info = tarfile.TarInfo(f"source/{name}")
                info.mtime = _EPOCH
                if stat.S_ISLNK(status.st_mode):
                    info.type, info.linkname, info.mode = tarfile.SYMTYPE, self._target(path), 0o777
                    out.write(_header(info))
                    continue
                if not stat.S_ISREG(status.st_mode):
                    raise DefinitionError(f"{path}: is not a regular file; remove it, or leave it out with .gitignore")
                with open_regular(path) as stream:
                    info.size = os.fstat(stream.fileno()).st_size
                    info.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
                    if (size := size + info.size) > _MAX_SIZE:
                        raise self._too_large(f"more than {format_size(_MAX_SIZE)}")
                    out.write(_header(info))
                    _copy(stream, out, info.size, path)
            except OSError as error:
                raise DefinitionError(f"{path}: cannot be read: {error.strerror or error}") from error
        out.write(bytes(2 * tarfile.BLOCKSIZE))

    def _target(self, path: Path) -> str:
        target = str(path.readlink())
        if target.startswith("/") or not follow(path).is_relative_to(self.folder):
            raise DefinitionError(
                f"{path}: points to {target}, outside the package's folder {self.folder}",
                hint="put the file itself there: what lies elsewhere would get into the image",
            )
        return target

    def _too_large(self, what: str) -> DefinitionError:
        return DefinitionError(
            f"{self.folder}: a package of {what} is not built",
            hint="put the package into a folder of its own, or let git track its sources alone",
        )


def read_tree(folder: Path) -> SourceTree:
    """Return the files of a package's folder. Raises DefinitionError when they are too many, or cannot be read."""
    folder = follow(folder)
    tracked = [name for name in _ask_git(folder, "--cached") if os.path.lexists(folder / name)]
    is_recipe = (folder / "recipe.yaml").is_file()
    names = tracked
    untracked: list[str] = []
    if tracked:
        log_decision(f"files of {folder}", f"{len(tracked)}", "tracked by git")
        listed = _ask_git(folder, "--others", "--exclude-standard")
        untracked = [name for name in listed if not _is_written(name) and not (is_recipe and _is_recipes(name))]
    else:
        names = [name for name in _walk(folder) if not _is_written(name)]
        log_decision(f"files of {folder}", f"{len(names)}", "git tracks none there")
    kept = sorted(name for name in names if not _NEVER & {*name.split("/")} and not (is_recipe and _is_recipes(name)))
    tree = SourceTree(folder, tuple(kept), tuple(sorted(untracked)))
    if len(kept) > _MAX_FILES:
        raise tree._too_large(f"more than {_MAX_FILES} files")
    return tree


def _is_written(name: str) -> bool:
    """Return whether tools write this path beside sources."""
    first, *rest = names = name.split("/")
    return (
        bool((_NEVER | _WRITTEN) & {*names})
        or (first in _OUTPUTS and bool(rest))
        or name.endswith((".pyc", ".pyo"))
        or any(item.endswith(".egg-info") for item in names)
    )


def _is_recipes(name: str) -> bool:
    """Return whether a path of a recipe's folder says how the image is built, or is an image."""
    path = PurePosixPath(name)
    if path.parts[0] == "images":
        return name.endswith(_LOCKED) or path.parts[1:2] == ("stacks",)
    return len(path.parts) == 1 and (name in _OF_RECIPE or name.endswith((".sif", ".bundle")))


def _walk(folder: Path) -> Iterator[str]:
    try:
        for path in tree_paths(folder):
            if path.is_symlink() or not path.is_dir():
                yield path.relative_to(folder).as_posix()
    except OSError as error:
        raise DefinitionError(f"{error.filename or folder}: cannot be read: {error.strerror}") from error


def _ask_git(folder: Path, *options: str) -> list[str]:
    """Return the paths that `git ls-files` prints; none where there is no repository, or no git."""
    if which("git") is None:
        return []
    done = run([*_GIT, "-C", folder, "ls-files", "-z", *options], check=False, env=_git_environment())
    return [name for name in done.stdout.split("\0") if name] if done.returncode == 0 else []


def _git_environment() -> dict[str, str]:
    """Return an environment that names no other repository, and no settings of the user's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return {**kept, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_NO_LAZY_FETCH": "1"}


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _copy(stream: IO[bytes], out: _Sink, size: int, path: Path) -> None:
    left = size
    while left and (chunk := stream.read(min(left, io.DEFAULT_BUFFER_SIZE * 16))):
        out.write(chunk)
        left -= len(chunk)
    if left:
        raise DefinitionError(f"{path}: was shortened while it was read")
    out.write(bytes(-size % tarfile.BLOCKSIZE))
