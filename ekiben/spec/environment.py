"""%environment: a table of values where possible, else a shell script, which only a shell can evaluate."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ekiben.core.errors import DefinitionError

_EXPORT = re.compile(r"export[ \t]+([A-Za-z_]\w*)=((?!\s).*)?", re.ASCII)
_NAMES = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", re.ASCII)
_QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"")
_HOME = re.compile(r"(?:^|:)~")
# Assignments in an image's own script, and their references. The shell's own variables differ at each start.
_OF_CALLER = {"HOME", "PWD", "OPTIND", "UID", "GID"}
# Names in a %post that extends the image's environment or labels in Apptainer's way.
_WRITES = re.compile(
    r"(?:APPTAINER|SINGULARITY)_(?:ENVIRONMENT|LABELS)\b|/\.singularity\.d/env\b|(?<![\w.}/-])/environment(?![\w./-])"
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(?:=.*)?", re.ASCII | re.DOTALL)
_OF_THE_SHELL = re.compile(r"\$\{?(?:RANDOM|SRANDOM|UID|EUID|PPID|HOSTNAME|SECONDS|EPOCH\w*|[^A-Za-z_{])", re.ASCII)


@dataclass(frozen=True, slots=True)
class EnvironmentScript:
    """A %environment that a shell evaluates. ``line``: the number of its first line in ``path``, 0 where no text of
    this form is there; ``required``: variables that have to be set before it; ``table``: its values, where it is no
    more than that; ``file``: where the image has it, whose text is unknown before the build."""

    text: str
    path: Path
    line: int
    required: tuple[str, ...] = ()
    table: Mapping[str, str] = field(default_factory=dict)
    file: str = ""

    @property
    def where(self) -> str:
        """Return the path and the line, for an error."""
        return f"{self.path}:{self.line}" if self.line else str(self.path)


def without_comment(line: str) -> str:
    """Return a line without its comment, as a shell reads it: # at a word's start, outside quotes."""
    quote, before, is_escaped = "", " ", False
    for at, letter in enumerate(line):
        if is_escaped:
            is_escaped = False
        elif letter == "\\" and quote != "'":
            is_escaped = True
        elif quote:
            quote = "" if letter == quote else quote
        elif letter == "#" and before.isspace():
            return line[:at].rstrip()
        elif letter in "\"'":
            quote = letter
        before = letter
    return line


def read_table(lines: Sequence[str]) -> dict[str, str] | None:
    """Return the values of lines ``export NAME=value``, each with its references; None for other scripts.

    A name that appears twice is more: the second value may refer to the first.
    """
    table: dict[str, str] = {}
    for line in lines:
        text = without_comment(line.strip())
        if not text or text.startswith("#"):
            continue
        match = _EXPORT.fullmatch(text)
        if match is None or match[1] in table:
            return None
        written = match[2] or ""
        try:
            parts = _split_shell(written)
        except ValueError:
            return None
        is_expanded = "`" in written or "$" in _NAMES.sub("", written) or re.search(r"'[^'\"]*\$|\\\$", written)
        if "\\" in _QUOTED.sub("", written):  # Apptainer's shell keeps the backslash, others remove it
            return None
        if len(parts) > 1 or is_expanded or _HOME.search("".join(parts)):
            return None
        table[match[1]] = "".join(parts)
    return table


def _split_shell(text: str) -> list[str]:
    """Split a line into a shell's parts; operators (; & | and openers) are parts. Raises ValueError."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|<>()")
    lexer.whitespace_split, lexer.commenters = True, ""
    return list(lexer)


def references(value: str) -> list[str]:
    """Return the names of the variables that ``value`` refers to."""
    return [match[1] or match[2] for match in _NAMES.finditer(value)]


def is_known(table: Mapping[str, str], inherited: Mapping[str, str]) -> bool:
    """Return whether each value refers only to names of ``inherited`` and of earlier lines."""
    known = set(inherited)
    for name, value in table.items():
        if not known.issuperset(references(value)):
            return False
        known.add(name)
    return True


def writes_environment(text: str) -> bool:
    """Return whether a script, or the destination of a file, adds to the image's environment or labels."""
    return _WRITES.search(text) is not None


def depends_on_caller(table: Mapping[str, str]) -> bool:
    """Return whether values refer to a variable that scripts see of whoever starts the image."""
    return any(name in _OF_CALLER for value in table.values() for name in references(value))


def depends_on_start(text: str) -> bool:
    """Return whether a script is more than assignments, so that its values may differ at each start: it runs
    commands, reads files, or tests what is there."""
    for line in text.split("\n"):
        code = without_comment(line.strip())
        if not code or code.startswith("#"):
            continue
        try:
            parts = _split_shell(code)
        except ValueError:
            return True
        if "`" in code or _OF_THE_SHELL.search(code) or code.endswith("\\"):
            return True
        commands = [list(parts) for is_end, parts in itertools.groupby(parts, ";".__eq__) if not is_end]
        if not all(map(_only_assigns, commands)):
            return True
    return False


def _only_assigns(command: Sequence[str]) -> bool:
    if command[0] in ("export", "unset"):
        return all(_ASSIGNMENT.fullmatch(word) for word in command)
    return all("=" in word and _ASSIGNMENT.fullmatch(word) for word in command)


def table_script(environment: Mapping[str, str], path: Path, where: str = "") -> EnvironmentScript:
    """Return a recipe's ``environment:`` as a script, for values that only a shell knows.

    Raises DefinitionError, which begins with ``where``, for what expand() refuses, but for unknown names.
    """
    lines, required, defined = list[str](), list[str](), set[str]()
    for name, value in environment.items():
        _refuse_expansions(name, value, where)
        quoted = re.sub(r'(["\\])', r"\\\1", value)
        lines.append(f'export {name}="{quoted}"')
        required += [used for used in references(value) if used not in defined]
        defined.add(name)
    return EnvironmentScript("\n".join(lines), path, 0, tuple(dict.fromkeys(required)), environment)


def expand(environment: Mapping[str, str], inherited: Mapping[str, str], where: str = "") -> dict[str, str]:
    """Return ``inherited`` with ``environment`` on top; ``$NAME`` and ``${NAME}`` are earlier values.

    The rule of a table in %environment and of a recipe's ``environment:``. Raises DefinitionError, which begins with
    ``where``, for what else a shell expands (``$``, backquotes, a home's ``~``) and for a name that no layer sets: it
    would silently become empty.
    """
    result = dict(inherited)
    for name, value in environment.items():
        if unknown := sorted(set(references(value)) - result.keys()):
            raise DefinitionError(
                f"{where}environment: {name} refers to ${unknown[0]}, which no layer sets, and which an image cannot"
                " take from where it runs",
                hint=(
                    f"leave ${unknown[0]} out, set it in a line before, or set {name} in a task's own script, which"
                    f" runs where ${unknown[0]} is known"
                ),
            )
        _refuse_expansions(name, value, where)
        result[name] = _NAMES.sub(lambda ref: result[ref[1] or ref[2]], value)
    return result


def _refuse_expansions(name: str, value: str, where: str) -> None:
    if "$" in _NAMES.sub("", value) or "`" in value or _HOME.search(value):
        raise DefinitionError(
            f"{where}environment: {name}: of what a shell expands only $NAME and ${{NAME}} are known; "
            f"write the value itself (found: {value})"
        )
