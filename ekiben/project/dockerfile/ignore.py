""".dockerignore: which files of a build context are left out.

The rules are those of https://docs.docker.com/build/concepts/context/#dockerignore-files
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from pathlib import Path

from ekiben.core.errors import DefinitionError
from ekiben.core.files import read_source
from ekiben.project.dockerfile.pattern import Pattern, ignore_pattern


@dataclass(frozen=True, slots=True)
class Ignore:
    """Patterns in their order; the last one that matches decides."""

    patterns: tuple[tuple[Pattern, bool], ...] = ()

    def leaves_out(self, path: str) -> bool:
        """Return whether the file or folder ``path``, relative to the context, is left out."""
        above = [path]
        while "/" in above[-1]:
            above.append(above[-1].rpartition("/")[0])
        is_out = False
        for pattern, leaves_out in self.patterns:
            if is_out != leaves_out and any(pattern.matches(piece) for piece in above):
                is_out = leaves_out
        return is_out

    @property
    def has_exceptions(self) -> bool:
        """Return whether a folder that is left out may have files that are not."""
        return any(not leaves_out for _, leaves_out in self.patterns)


def read_ignore(dockerfile: Path) -> Ignore:
    """Read DOCKERFILE.dockerignore, or .dockerignore beside it. Raises DefinitionError for a wrong pattern."""
    named = dockerfile.with_name(dockerfile.name + ".dockerignore")
    path = named if named.is_file() else dockerfile.with_name(".dockerignore")
    text = read_source(path, default="") if path.is_file() else ""
    patterns = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        if line.startswith("#") or not (pattern := line.strip()):
            continue
        leaves_out = not pattern.startswith("!")
        pattern = pattern.removeprefix("!").strip()
        pattern = posixpath.normpath(pattern).lstrip("/") if pattern else ""
        if pattern in ("", "."):
            continue
        try:
            patterns.append((ignore_pattern(pattern), leaves_out))
        except ValueError as error:
            raise DefinitionError(f"{path}:{number}: {line}: {error}; write it as in Go's filepath.Match") from error
    return Ignore(tuple(patterns))
