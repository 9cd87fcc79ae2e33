"""A recipe's scripts as they are on this machine, instead of those in its image: an edit needs no build."""

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

VARIABLE = "EKIBEN_LIVE"  # for the task's record: its scripts are not the image's
_PATIENCE = 30.0  # seconds
_MAX_INDEX = 1 << 30  # bytes of git's index


@dataclass(frozen=True, slots=True)
class LiveFiles:
    """Files of a recipe, and the paths in the image that they replace.

    ``mounts``: path inside → path here; ``origin``: where they come from, to be recorded.
    """

    mounts: Mapping[str, Path]
    origin: str


def live_files(recipe: Recipe) -> LiveFiles:
    """Return the mounts of a recipe's current files at their paths in the image.

    Raises:
        DefinitionError: recipe.yaml names a file that is not there.
    """
    mounts = {f"{RECIPE_HOME}/{inside}".rstrip("/"): path for inside, path in _mounts(recipe.members())}
    return LiveFiles(mounts, _origin(recipe.folder))


@dataclass(frozen=True, slots=True)
class LiveCopy:
    """Copies of files for jobs, which later edits do not change: path below /opt/ekiben/recipe → path here.

    ``origin``: where they come from, to be recorded.
    """

    files: Mapping[str, Path]
    origin: str


def live_copy(recipe: Recipe) -> LiveCopy:
    """Return the files that jobs get instead of the recipe's files in its image.

    Raises:
        DefinitionError: recipe.yaml names a file that is not there.
    """
    return LiveCopy(recipe.members(), _origin(recipe.folder))


def _mounts(members: Mapping[str, Path]) -> Iterator[tuple[str, Path]]:
    """Yield the fewest mounts that cover ``members``: a folder, where all of it comes from one folder here."""
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
    """Return the folder that has ``path`` at ``inside``; None where the names differ."""
    count = len(inside.parts)
    return Path(*path.parts[:-count]) if path.parts[-count:] == inside.parts else None


def _origin(folder: Path) -> str:
    """Return a folder and, where git knows it, the commit, with ``-dirty`` where files differ from it."""
    commit = _commit_of(folder) if which("git") else ""
    return f"{folder} at {commit}" if commit else str(folder)


def _commit_of(folder: Path) -> str:
    """Return the commit that is checked out, "" if git does not know it.

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
            os.utime(ours / "index", ns=(changed, changed))  # git re-reads files that are not older than its index
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
    # A pipe instead of a file of .git would have git wait for ever.
    return run(["git", *arguments], check=False, env={**os.environ, **(environment or {})}, timeout=_PATIENCE)
