""".dockerignore: which files of a build context are left out.

The rules are those of https://docs.docker.com/build/concepts/context/#dockerignore-files
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from pathlib import Path

from ekiben.core.errors import DefinitionError
from ekiben.core.files import read_source


@dataclass(frozen=True, slots=True)
class Ignore:
    """Patterns in their order; the last one that matches decides."""

    patterns: tuple[tuple[re.Pattern[str], bool], ...] = ()

    def leaves_out(self, path: str) -> bool:
        """Return whether the file or folder ``path``, relative to the context, is left out."""
        above = [path]
        while "/" in above[-1]:
            above.append(above[-1].rpartition("/")[0])
        is_out = False
        for pattern, leaves_out in self.patterns:
            if is_out != leaves_out and any(pattern.fullmatch(piece) for piece in above):
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
            patterns.append((re.compile(_regex(pattern), re.DOTALL), leaves_out))
        except re.error as error:
            raise DefinitionError(f"{path}:{number}: {line}: {error}; write it as in Go's filepath.Match") from error
    return Ignore(tuple(patterns))


def _regex(pattern: str) -> str:
    result, at = "", 0
    while at < len(pattern):
        letter = pattern[at]
        at += 1
        if letter == "*" and pattern[at : at + 1] == "*":
            at += 1 + (pattern[at + 1 : at + 2] == "/")
            result += ".*" if at >= len(pattern) else "(.*/)?"
        elif letter == "*":
            result += "[^/]*"
        elif letter == "?":
            result += "[^/]"
        elif letter == "\\" and at < len(pattern):
            result += re.escape(pattern[at])
            at += 1
        elif letter in "[]-^":
            result += letter
        else:
            result += re.escape(letter)
    return result


def match_regex(pattern: str) -> re.Pattern[str]:
    """Return a pattern of COPY (Go's filepath.Match, of a whole path) as a regular expression. Raises ValueError."""
    result, at = "", 0
    while at < len(pattern):
        letter = pattern[at]
        at += 1
        if letter == "*":
            result += "[^/]*"
        elif letter == "?":
            result += "[^/]"
        elif letter == "\\" and at < len(pattern):
            result += re.escape(pattern[at])
            at += 1
        elif letter == "[" and (end := pattern.find("]", at + 1)) > 0:
            result += f"[{pattern[at:end]}]"
            at = end + 1
        else:
            result += re.escape(letter)
    try:
        return re.compile(result, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{pattern}: {error}") from error
