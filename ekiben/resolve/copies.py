"""Resolve lines of %files on this machine: files, folders and patterns, as `cp -Lr` copies them."""

from __future__ import annotations

import glob
import os
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ekiben.core.errors import DefinitionError, nearest
from ekiben.formats.layer import File
from ekiben.resolve.graph import StageCopy
from ekiben.resolve.keys import mode_of
from ekiben.spec.definition import Copy, Definition
from ekiben.spec.name_confusion import find_confusion
from ekiben.spec.source_folders import SourceFolders
from ekiben.spec.stack import lock_for


def copied_files(definition: Definition, copy: Copy, folders: SourceFolders, arch: str = "amd64") -> list[File]:
    """Return the files of one line of %files; of a lock file, that of ``arch``.

    Links are followed within ``folders``.

    Raises DefinitionError for what is not there, lies elsewhere, is neither file nor folder, or is a lock file that
    confuses two packages.
    """
    where = f"{definition.path}:{copy.line}: %files {copy.source}"
    files: list[File] = []
    sources = _matches(definition, copy, folders, where)
    for source in sources:
        for file in _source_files(source, copy, folders, where, several=len(sources) > 1):
            if file.source is None:
                files.append(file)
                continue
            path = lock_for(file.source, arch) if file.source.suffix == ".lock" else file.source
            files.append(replace(file, source=path, real=folders.check_file(path, where)))
    for file in files:
        if file.source and file.source.suffix in (".lock", ".in") and (confusion := find_confusion(file.text())):
            raise DefinitionError(f"{file.source}: {confusion}")
    return files


def file_inputs(files: Sequence[File]) -> dict[str, Any]:
    """Return the inputs of a key for files; with a source's name where it may become a part of the path."""
    names = {file.target: file.name for file in files if file.name and file.name_counts}
    entries = [[file.destination + "/" * file.is_folder, file.mode, file.sha256()] for file in files]
    return {"files": entries, **({"names": sorted(names.items())} if names else {})}


def copy_inputs(copies: Sequence[StageCopy]) -> dict[str, Any]:
    """Return the inputs of a key that come from build stages; empty without build stages."""
    return {"from": [[item.stage.cache_key, item.source, item.destination] for item in copies]} if copies else {}


def _matches(definition: Definition, copy: Copy, folders: SourceFolders, where: str) -> list[Path]:
    """Return the file or folder of this name; else the matches of the pattern, as a shell expands it."""
    source = definition.root / copy.source
    if "\0" in copy.source:
        raise DefinitionError(f"{where!r}: no file can have this name")
    if os.path.lexists(source) and not source.exists():
        raise DefinitionError(f"{where}: a link to {source.readlink()}, which does not exist")
    if source.exists():
        return [source]
    if glob.has_magic(copy.source):
        _check_pattern(definition.root, copy.source, folders, where)
        names = sorted(glob.glob(copy.source, root_dir=definition.root), key=os.fsencode)  # noqa: PTH207  Path.glob takes hidden files
        if names:
            return [definition.root / name for name in names]
        raise DefinitionError(f"{where}: nothing under {definition.root} matches")
    folders.check(source.parent, where)  # its names are printed
    close = source.parent.iterdir() if source.parent.is_dir() else []
    raise DefinitionError(
        f"{where}: no such file under {definition.root}." + nearest(source.name, (path.name for path in close))
    )


def _check_pattern(root: Path, pattern: str, folders: SourceFolders, where: str) -> None:
    """Check each folder in which the pattern has to look, before it looks there.

    Raises DefinitionError for one that lies elsewhere, OSError for one that cannot be read: glob() leaves out what
    would match there.
    """
    names = pattern.split("/")
    for number, name in enumerate(names):
        above = "/".join(names[:number])
        if glob.has_magic(name):
            for folder in glob.glob(above or ".", root_dir=root):  # noqa: PTH207  as below
                if (root / folder).is_dir():
                    folders.check(root / folder, where)
                    next((root / folder).iterdir(), None)


def _source_files(source: Path, copy: Copy, folders: SourceFolders, where: str, *, several: bool) -> Iterator[File]:
    """Return the files of one source. ``several``: the pattern matches several sources, copied into a folder."""
    if not source.is_dir():
        _check_kind(source, where)
    folders.check(source, where)
    is_implicit = copy.destination == posixpath.normpath("/" + copy.source.strip("/"))  # no destination was given
    target = copy.destination
    if is_implicit:
        target = posixpath.join(posixpath.dirname(target), source.name)
    elif several or target.endswith("/"):
        target = f"{target.rstrip('/')}/{source.name}"
    is_name = not (several or copy.destination.endswith("/")) or is_implicit
    is_folder = source.is_dir()
    suffixes = {Path(target).suffix, source.suffix}
    # A renamed file (a.py as b.py) has no folder as destination, and its name is in no key.
    may_go_into = is_name and (is_folder or source.name == Path(target).name or len(suffixes) > 1 or suffixes == {""})
    common = {
        "line": copy.line,
        "target": target,
        "name": source.name if may_go_into else "",
        "name_counts": source.name != Path(target).name,
    }
    if not is_folder:
        yield File(target, mode_of(source), source, **common)  # type: ignore[arg-type]
        return
    for inside, path in _below(source, folders, where, [os.path.realpath(source)]):
        destination = f"{target.rstrip('/')}/{inside}".rstrip("/")
        if path is None:
            yield File(destination, 0o755, is_folder=True, **common)  # type: ignore[arg-type]
        else:
            yield File(destination, mode_of(path), path, **common)  # type: ignore[arg-type]


def _below(
    folder: Path, folders: SourceFolders, where: str, above: Sequence[str], prefix: str = ""
) -> Iterator[tuple[str, Path | None]]:
    """Path below the folder → the file, or None for a folder in which nothing is; but for bytecode."""
    is_empty = True
    for path in sorted(folder.iterdir(), key=lambda path: os.fsencode(path.name)):
        if path.name == "__pycache__":
            continue
        is_empty = False
        if path.is_dir():
            real = os.path.realpath(path)
            if real in above:
                raise DefinitionError(f"{where}: {path} is a link to a folder that it is in")
            folders.check(path, where)
            yield from _below(path, folders, where, [*above, real], f"{prefix}{path.name}/")
        else:
            _check_kind(path, where)
            yield f"{prefix}{path.name}", path
    if is_empty:
        yield prefix.rstrip("/"), None


def _check_kind(path: Path, where: str) -> None:
    if path.is_file():
        return
    if not path.exists():
        raise DefinitionError(f"{where}: {path} is a link to {path.readlink()}, which does not exist")
    raise DefinitionError(f"{where}: {path} is neither a file nor a folder; only these are copied")
