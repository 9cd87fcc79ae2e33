"""A recipe's scripts as they are on this machine, in place of those in its image: an edit needs no build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ekiben.core.paths import RECIPE_HOME
from ekiben.core.process import run, which
from ekiben.spec.recipe import Recipe

VARIABLE = "EKIBEN_LIVE"  # tells a task that its scripts are not the image's, for its record


@dataclass(frozen=True, slots=True)
class LiveFiles:
    """What replaces files of an image. ``mounts``: path inside → path here; ``origin``: where they come from, to be recorded."""

    mounts: Mapping[str, Path]
    origin: str


def live_files(recipe: Recipe) -> LiveFiles:
    """Return the mounts that show a recipe's files of today at the paths where its image has them.

    Raises:
        DefinitionError: recipe.yaml names a file that is not there.
    """
    mounts = {f"{RECIPE_HOME}/{inside}".rstrip("/"): path for inside, path in _mounts(recipe.members())}
    return LiveFiles(mounts, _origin(recipe.folder))


def _mounts(members: Mapping[str, Path]) -> Iterator[tuple[str, Path]]:
    """Yield the fewest folders and files that show ``members``: a folder where all in it comes from one folder here."""
    if "" in members:  # a file
        yield "", members[""]
        return
    roots = {_root(path, PurePosixPath(inside)) for inside, path in members.items()}
    if len(roots) == 1 and (root := roots.pop()):
        yield "", root
        return
    for first in sorted({inside.partition("/")[0] for inside in members}):
        below = {
            inside.partition("/")[2]: path for inside, path in members.items() if inside.partition("/")[0] == first
        }
        for inside, path in _mounts(below):
            yield f"{first}/{inside}".rstrip("/"), path


def _root(path: Path, inside: PurePosixPath) -> Path | None:
    """Return the folder that has ``path`` at ``inside``; None where its names differ."""
    count = len(inside.parts)
    return Path(*path.parts[:-count]) if path.parts[-count:] == inside.parts else None


def _origin(folder: Path) -> str:
    """Return a folder and, where git knows it, the commit, with ``-dirty`` where files differ from it."""
    if which("git"):
        done = run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"], check=False
        )
        if done.returncode == 0:
            return f"{folder} at {done.stdout.strip()}"
    return str(folder)
