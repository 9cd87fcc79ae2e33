"""Destinations of %files, as `cp -r` has them: below an existing folder, or under the given name."""

from __future__ import annotations

import contextlib
import itertools
import posixpath
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from ekiben.core.errors import LayerError
from ekiben.formats.layer import Entry, File


class Below(Protocol):
    """The layers below, merged."""

    def lookup(self, path: str) -> Entry | None:
        """Return the entry at a path."""


def resolve_destinations(files: Iterable[File], lower: Below) -> list[File]:
    """Return ``files`` with the paths that they have on ``lower``; empty folders that are there are left out.

    Raises LayerError when a file would replace a folder, or stand below what is none; when a build stage's folder goes
    to where one is, or one of its files to where another line's does.
    """
    placed: list[File] = []
    folders: set[str] = set()  # destinations of earlier lines

    def is_folder(path: str) -> bool:
        return path in folders or ((entry := lower.lookup(path)) is not None and entry.kind == "dir")

    for line, group in itertools.groupby(files, key=lambda file: (file.line, file.target)):
        members, target = list(group), line[1]
        base, goes_into = target, False
        if target and members[0].name and is_folder(real_path(target.strip("/"), lower, follow_last=True)):
            base, goes_into = f"{target.rstrip('/')}/{members[0].name}", True
            if members[0].stage:  # COPY of a rendered Dockerfile would copy one into the other
                raise LayerError(
                    f"%files from {members[0].stage}: {target} is a folder in the layers below; name where the stage's "
                    f"folder goes: {base}"
                )
        resolved = []
        for file in members:
            destination = base + file.destination[len(target) :] if goes_into else file.destination
            path = real_path(destination.strip("/"), lower, follow_last=bool(file.line))
            if is_folder(path):
                if file.is_folder:
                    continue
                raise LayerError(
                    f"%files: {destination} is a folder in the layers below; name the file in it: {destination}/<name>"
                )
            if file.is_folder and lower.lookup(path) is not None:
                raise LayerError(
                    f"%files: {destination} is not a folder in the layers below, and a folder cannot replace it"
                )
            resolved.append(replace(file, destination=f"/{path}"))
        placed += resolved
        folders |= {parent for file in resolved for parent in _parents(file.destination[1:])}
        folders |= {file.destination[1:] for file in resolved if file.is_folder}
    _refuse_two_sources(placed)
    return placed


def _refuse_two_sources(placed: Iterable[File]) -> None:
    """Apptainer copies files of stages first, whatever the order of the lines: nothing may depend on it."""
    stages = {file.destination: file.stage for file in placed if file.stage}
    stages |= {f"/{parent}": stage for path, stage in list(stages.items()) for parent in _parents(path[1:])}
    for file in placed:
        if not file.stage and not file.is_folder and file.destination in stages:
            raise LayerError(
                f"%files and %files from {stages[file.destination]} both write {file.destination}; leave one"
            )


def _parents(path: str) -> Iterable[str]:
    while path := path.rpartition("/")[0]:
        yield path


def follow_links(paths: Iterable[str], lower: Below) -> dict[str, str]:
    """Return the destination of each path of a tar; unnamed folders that are links below are followed."""
    named, placed = set(paths), dict[str, str]()
    for path in named:
        names = path.split("/")
        tops = ("/".join(names[:length]) for length in range(1, len(names)))
        top = next((parent for parent in tops if parent in named), path)
        placed[path] = path
        with contextlib.suppress(LayerError):  # below a file: it is replaced
            placed[path] = real_path(top, lower) + path[len(top) :]
    return placed


def real_path(path: str, lower: Below, *, follow_last: bool = False) -> str:
    """Return ``path`` with the links among its folders followed, as tar does: /bin of today's systems is a link to
    /usr/bin.

    ``follow_last``: and the link that it is itself, as cp does. Raises LayerError for what is below no folder.
    """
    done, left = "", path.split("/")
    for _ in range(255):
        if len(left) == 1 and not follow_last:
            return f"{done}/{left[0]}".lstrip("/")
        if not left:
            return done
        name, *left = left
        step = posixpath.normpath(f"/{done}/{name}").lstrip("/")
        entry = lower.lookup(step)
        if entry is None or entry.kind == "dir" or (not left and entry.kind != "symlink"):
            done = step
        elif entry.kind != "symlink":
            raise LayerError(f"%files: /{path}: /{step} is not a folder in the layers below")
        elif entry.target.startswith("/"):
            done, left = "", [*entry.target.strip("/").split("/"), *left]
        else:
            left = [*entry.target.strip("/").split("/"), *left]
    raise LayerError(f"%files: /{path}: too many links on the way")
