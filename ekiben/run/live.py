"""A recipe's scripts as they are on this machine, in place of those in its image: an edit needs no build."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ekiben.core.checked import read_regular
from ekiben.core.paths import RECIPE_HOME
from ekiben.core.process import run, which
from ekiben.spec.recipe import Recipe

VARIABLE = "EKIBEN_LIVE"  # tells a task that its scripts are not the image's, for its record
_PATIENCE = 30.0  # seconds
_MAX_INDEX = 1 << 30  # bytes of git's index


@dataclass(frozen=True, slots=True)
class LiveFiles:
    """What replaces files of an image.

    ``mounts``: path inside → path here; ``origin``: where they come from, to be recorded.
    """

    mounts: Mapping[str, Path]
    origin: str


def live_files(recipe: Recipe) -> LiveFiles:
    """Return the mounts that show a recipe's files of today at the paths where its image has them.

    Raises:
        DefinitionError: recipe.yaml names a file that is not there.
    """
    mounts = {f"{RECIPE_HOME}/{inside}".rstrip("/"): path for inside, path in _mounts(recipe.members())}
    return LiveFiles(mounts, _origin(recipe.folder))


@dataclass(frozen=True, slots=True)
class LiveCopy:
    """Files to be copied for jobs, so that a later edit changes none: path below /opt/ekiben/recipe → path here.

    ``origin``: where they come from, to be recorded.
    """

    files: Mapping[str, Path]
    origin: str


def live_copy(recipe: Recipe) -> LiveCopy:
    """Return what jobs get in place of the recipe's files in its image.

    Raises:
        DefinitionError: recipe.yaml names a file that is not there.
    """
    return LiveCopy(recipe.members(), _origin(recipe.folder))


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
    commit = _commit_of(folder) if which("git") else ""
    return f"{folder} at {commit}" if commit else str(folder)


def _commit_of(folder: Path) -> str:
    """Return the commit that is checked out, "" where git does not say.

    A folder that came as an archive has its own .git/config, and git runs what that names when it compares files:
    fsmonitor, filters. So they are compared in a repository of ours, which has the objects and the index of that one
    and none of its settings.
    """
    asked = ["--path-format=absolute", "--show-toplevel", "--git-common-dir", "--absolute-git-dir", "HEAD"]
    lines = _git("-C", str(folder), "rev-parse", *asked).stdout.splitlines()
    if len(lines) != len(asked) - 1:
        return ""
    top, shared, git_dir, commit = lines
    modes = _git("-C", str(folder), "config", "--type=bool", "--get", "core.fileMode").stdout.strip() or "true"
    with tempfile.TemporaryDirectory(prefix="ekiben-git-") as name:
        ours = Path(name)
        (ours / "refs").mkdir()
        (ours / "HEAD").write_text(f"{commit}\n", encoding="utf-8")
        is_sha256 = len(commit) == 64
        version = "1\n[extensions]\nobjectFormat = sha256" if is_sha256 else "0"
        settings = f"[core]\nfileMode = {modes}\nfsmonitor = false\nrepositoryFormatVersion = {version}\n"
        (ours / "config").write_text(settings, encoding="utf-8")
        try:
            index = Path(git_dir) / "index"
            changed = index.stat().st_mtime_ns
            (ours / "index").write_bytes(read_regular(index, max_size=_MAX_INDEX))
            os.utime(
                ours / "index", ns=(changed, changed)
            )  # git reads again what was written no earlier than its index
        except (OSError, ValueError):
            return ""
        environment = {
            "GIT_DIR": name,
            "GIT_WORK_TREE": top,
            "GIT_OBJECT_DIRECTORY": f"{shared}/objects",
            "GIT_INDEX_FILE": f"{name}/index",
        }
        _git("update-index", "-q", "--refresh", "--ignore-submodules", environment=environment)
        compare = ["diff-index", "--quiet", "--ignore-submodules=all", "HEAD", "--"]
        differs = _git(*compare, environment=environment).returncode
    return f"{commit[:12]}{'-dirty' if differs else ''}" if differs in (0, 1) else ""


def _git(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    # A pipe in the place of a file of .git would have git wait for ever.
    return run(["git", *arguments], check=False, env={**os.environ, **(environment or {})}, timeout=_PATIENCE)
