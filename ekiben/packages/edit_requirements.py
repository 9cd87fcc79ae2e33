"""Add packages to a list of requirements, and remove them; comments, order and line ends stay.

A name that is in the list keeps what the new requirement does not say, as `uv add` has it. pyproject.toml is edited by
uv, in a folder of ours.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from uv import find_uv_bin

from ekiben.core.errors import DefinitionError, UsageError
from ekiben.core.process import ProcessError, run
from ekiben.packages.requirements import is_git, requirement_lines

_REMARK = re.compile(r"\s+#.*")


@dataclass(frozen=True, slots=True)
class Change:
    """What changes in a list: ``old`` and ``new`` are requirements; "" for one that is not there."""

    old: str
    new: str

    def __str__(self) -> str:
        if self.old and self.new:
            return f"{self.old} → {self.new}"
        return f"+ {self.new}" if self.new else f"- {self.old}"


def parse_argument(text: str) -> Requirement:
    """Return a requirement of the command line. Raises UsageError."""
    line = text.strip()
    try:
        requirement = None if len(line.splitlines()) > 1 else Requirement(line)
    except InvalidRequirement:
        requirement = None
    if requirement is None:
        example = "'NAME @ git+https://HOST/PATH@REFERENCE'" if is_git(line) else "NAME, 'NAME>=1.2' or 'NAME[EXTRA]'"
        raise UsageError(f"'{line:.200}' is not a requirement", hint=f"write {example}")
    return requirement


def name_of(line: str) -> str:
    """Return the canonical name of the package that a line asks for, "" for another line."""
    try:
        return canonicalize_name(Requirement(line).name)
    except InvalidRequirement:
        return ""


def add_line(text: str, requirement: str, where: str) -> tuple[str, Change | None]:
    """Return the text of a list with a requirement, and what changed: None where the list has it.

    One with another marker is another line. ``where`` names the list in errors. Raises UsageError when it has the
    package more than once with the same marker.
    """
    asked = parse_argument(requirement)
    name = canonicalize_name(asked.name)
    named = [(span, Requirement(line)) for span, line in requirement_lines(text) if name_of(line) == name]
    matches = [(span, old) for span, old in named if old.marker == asked.marker]
    if not matches:
        return append_line(text, requirement.strip()), Change("", requirement.strip())
    if len(matches) > 1:
        numbers = ", ".join(str(span.start) for span, _ in matches)
        raise UsageError(f"{where} names {name} in the lines {numbers}; edit the one that you mean")
    span, old = matches[0]
    merged = _merge(old, asked)
    if merged == str(old):
        return text, None
    lines = text.splitlines(keepends=True)
    last = lines[span.stop - 2]
    body = last.rstrip("\r\n")
    remark = _REMARK.search(body)
    lines[span.start - 1 : span.stop - 1] = [merged + (remark[0] if remark else "") + last[len(body) :]]
    return "".join(lines), Change(str(old), merged)


def append_line(text: str, line: str) -> str:
    """Return the text with one more line, whose end is as that of the others."""
    end = "\r\n" if "\r\n" in text else "\n"
    start = text if not text or text.endswith(("\n", "\r")) else text + end
    return f"{start}{line}{end}"


def _merge(old: Requirement, new: Requirement) -> str:
    """Return the old requirement with the version and the extras that the new one has."""
    merged = Requirement(str(old))
    merged.extras |= new.extras
    if new.url or new.specifier:
        merged.url, merged.specifier = new.url, new.specifier
    return str(merged)


def remove_lines(text: str, is_removed: Callable[[str], bool]) -> tuple[str, list[Change]]:
    """Return the text of a list without the lines that are to go, and what was removed."""
    lines, changes = text.splitlines(keepends=True), list[Change]()
    for span, line in reversed(list(requirement_lines(text))):
        if is_removed(line):
            del lines[span.start - 1 : span.stop - 1]
            changes.insert(0, Change(line, ""))
    return "".join(lines), changes


def edit_project(text: str, source: Path, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> str:
    """Return the text of a pyproject.toml that uv has edited. Raises DefinitionError where uv refuses it."""
    with tempfile.TemporaryDirectory(prefix="ekiben-edit-") as folder:
        project = Path(folder, "pyproject.toml")
        project.write_text(text, encoding="utf-8")
        options = ["--frozen", "--no-config", "--quiet", "--project", folder]
        options += ["--python", sys.executable]
        names = {key: value for key, value in os.environ.items() if not key.startswith("UV_")}
        command = (
            ["add", "--raw", "--no-workspace", *options, "--", *add] if add else ["remove", *options, "--", *remove]
        )
        try:
            run([find_uv_bin(), *command], env=names)
        except ProcessError as error:
            raise DefinitionError(
                f"{source}: uv does not edit it: {error.stderr.strip()}",
                hint="edit [project] dependencies, then `ekiben lock --keep`",
            ) from error
        return project.read_text(encoding="utf-8")
