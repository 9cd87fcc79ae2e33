"""SHA256SUMS beside lock files: edits after locking are detected. `sha256sum -c` reads it, too."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from ekiben.core.checked import read_regular
from ekiben.core.command_name import command_name
from ekiben.core.errors import OR_SYNC, DefinitionError, NotLockedError
from ekiben.core.files import digest_of, read_source
from ekiben.spec.source_folders import SourceFolders

SUMS = "SHA256SUMS"
REQUIREMENTS = ("requirements.txt", "pyproject.toml")  # a user recipe's requirements; the first that exists


def format_sums(folder: Path, names: Iterable[str], texts: Mapping[Path, str]) -> str:
    """Return the lines for the files ``names`` of ``folder``, of which those in ``texts`` are about to be written."""
    lines = []
    for name in names:
        path = folder / name
        digest = digest_of(texts[path].encode() if path in texts else path)
        lines.append(f"{digest.removeprefix('sha256:')}  {name}\n")
    return "".join(lines)


def check_sums(folder: Path, *, hint: str) -> None:
    """Compare the files that SHA256SUMS names with it; a folder without one passes.

    Raises:
        NotLockedError: a file is missing, or was changed after it was locked.
        DefinitionError: a lock file was edited by hand.
    """
    problems, is_damaged = [], False
    for line in read_source(folder / SUMS, default="").splitlines():
        expected, _, name = line.partition("  ")
        path = folder / name
        if name.startswith("/") or ".." in name.split("/"):
            problems.append(f"{folder / SUMS}: {name!r:.200} is not a path below {folder}")
            is_damaged = True
            continue
        try:
            actual = hashlib.sha256(read_regular(path, follow=True)).hexdigest()
        except (OSError, ValueError):
            problems.append(f"{path}: was locked, and is gone")
            continue
        if actual != expected:
            is_damaged = is_damaged or path.suffix == ".lock"
            problems.append(
                f"{path}: {'was edited by hand' if path.suffix == '.lock' else 'was changed and not locked again'}"
            )
    if problems:
        kind = DefinitionError if is_damaged else NotLockedError
        raise kind("\n".join(problems), hint=hint)


def lock_hint(folder: Path) -> str:
    """Return what brings the locks of a recipe up to date."""
    return f"{command_name()} lock {shlex.quote(str(folder))} --keep{OR_SYNC}"


def check_recipe_locks(sources: SourceFolders, layer: str) -> None:
    """Check the locks of a recipe's own folder, whose top layer is ``layer``.

    Raises:
        DefinitionError: its layer installs a lock file that was never made, or one that is not as it was locked; or one
            of these files lies elsewhere.
    """
    folder = sources.folder
    for name in (SUMS, *REQUIREMENTS, f"images/{layer}.def", f"images/{layer}.lock"):
        sources.check(folder / name)
    definition, lock = folder / "images" / f"{layer}.def", folder / "images" / f"{layer}.lock"
    requirements = next((folder / name for name in REQUIREMENTS if (folder / name).is_file()), None)
    hint = lock_hint(folder)
    if (
        requirements
        and not lock.exists()
        and definition.is_file()
        and lock.name in read_source(definition, errors="replace")
    ):
        raise NotLockedError(f"{requirements}: is not locked: there is no {lock}", hint=hint)
    check_sums(folder, hint=hint)
