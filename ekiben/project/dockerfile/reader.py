"""Read a Dockerfile into instructions: https://docs.docker.com/reference/dockerfile/

Continuation lines, comments between them, heredocs, parser directives and flags are read as BuildKit reads them. All
problems of a file are reported together, each with its line.

dockerfile-parse of PyPI is not used: it reads the lines of a heredoc as instructions, and flags as a part of the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ekiben.core.errors import DefinitionError, nearest
from ekiben.core.files import read_source

INSTRUCTIONS = (
    "ADD",
    "ARG",
    "CMD",
    "COPY",
    "ENTRYPOINT",
    "ENV",
    "EXPOSE",
    "FROM",
    "HEALTHCHECK",
    "LABEL",
    "MAINTAINER",
    "ONBUILD",
    "RUN",
    "SHELL",
    "STOPSIGNAL",
    "USER",
    "VOLUME",
    "WORKDIR",
)
_WITH_JSON = ("ADD", "CMD", "COPY", "ENTRYPOINT", "RUN", "SHELL", "VOLUME")
_WITH_HEREDOCS = ("ADD", "COPY", "RUN")
_WITH_FLAGS = ("ADD", "COPY", "FROM", "HEALTHCHECK", "RUN")
_DIRECTIVE = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.+?)\s*")
_HEREDOC = re.compile(r"(\d*)<<(-?)(?:\"([A-Za-z_]\w*)\"|'([A-Za-z_]\w*)'|([A-Za-z_]\w*))")
_FLAG = re.compile(r"--([a-z][a-z-]*)(?:=(\S*))?(?:\s+|$)")


@dataclass(frozen=True, slots=True)
class Heredoc:
    """``content`` is expanded where the name is not quoted; tabs are stripped already."""

    name: str
    content: str
    is_quoted: bool
    strips_tabs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction. ``text`` has no continuation marks and no flags; ``lines`` are its parts, as continued.

    ``argv`` is the JSON form, None for the shell form. ``where`` is FILE:LINE.
    """

    name: str
    text: str
    lines: tuple[str, ...]
    line: int
    where: str
    flags: tuple[tuple[str, str], ...] = ()
    argv: tuple[str, ...] | None = None
    heredocs: tuple[Heredoc, ...] = ()


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """A file's instructions, and the mark that continues a line."""

    path: Path
    instructions: tuple[Instruction, ...]
    escape: str


def read_dockerfile(path: Path) -> Dockerfile:
    """Read ``path``. Raises DefinitionError that lists every problem of the file."""
    return parse_dockerfile(path, read_source(path))


def parse_dockerfile(path: Path, text: str) -> Dockerfile:
    """Read the text of ``path``. Raises DefinitionError that lists every problem of it."""
    return _Reader(path, text.removeprefix("\ufeff")).read()


class _Reader:
    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.lines = [line.removesuffix("\r") for line in text.split("\n")]
        self.escape = "\\"
        self.problems: list[str] = []
        self.at = 0  # index of the next line

    def problem(self, line: int, message: str) -> None:
        self.problems.append(f"{self.path}:{line}: {message}")

    def read(self) -> Dockerfile:
        self.directives()
        instructions = [*self.instructions()]
        if not self.problems and "FROM" not in [item.name for item in instructions]:
            self.problem(1, "there is no FROM, which every Dockerfile begins with")
        if self.problems:
            raise DefinitionError("\n".join(self.problems))
        return Dockerfile(self.path, tuple(instructions), self.escape)

    def directives(self) -> None:
        seen: set[str] = set()
        for number, line in enumerate(self.lines, 1):
            match = _DIRECTIVE.fullmatch(line)
            if not match:
                return
            name, value = match[1].lower(), match[2]
            if name in seen:
                self.problem(number, f"the directive '{name}' appears twice; leave one")
            elif name == "escape" and value not in ("\\", "`"):
                self.problem(number, f"escape is \\ or `, found: {value}")
            elif name == "escape":
                self.escape = value
            seen.add(name)

    def instructions(self) -> Iterator[Instruction]:
        while self.at < len(self.lines):
            line = self.lines[self.at].strip()
            if line and not line.startswith("#"):
                if (instruction := self.instruction()) is not None:
                    yield instruction
            else:
                self.at += 1

    def instruction(self) -> Instruction | None:
        number = self.at + 1
        parts = self.continued()
        name, *rest = parts[0].split(None, 1)
        parts = [*rest, *parts[1:]] if rest else ["", *parts[1:]]
        name = name.upper()
        if name not in INSTRUCTIONS:
            self.problem(number, f"unknown instruction '{name}'." + nearest(name, INSTRUCTIONS))
            return None
        flags, parts = self.flags(name, parts)
        text = "".join(parts).strip()
        heredocs = tuple(self.heredocs(number, text)) if name in _WITH_HEREDOCS else ()
        if not text:
            self.problem(number, f"{name} needs an argument")
            return None
        argv = self.json_list(number, name, text) if name in _WITH_JSON else None
        return Instruction(
            name=name,
            text=text,
            lines=tuple(parts),
            line=number,
            where=f"{self.path}:{number}",
            flags=flags,
            argv=argv,
            heredocs=heredocs,
        )

    def continued(self) -> list[str]:
        """Return the parts of one instruction, without the marks that continue it and the comments between."""
        parts: list[str] = []
        while self.at < len(self.lines):
            line = self.lines[self.at]
            self.at += 1
            if parts and (not line.strip() or line.lstrip().startswith("#")):
                continue
            text = line.rstrip(" \t")
            if not text.endswith(self.escape):
                parts.append(line if parts else line.lstrip())
                break
            if text.endswith(self.escape * 2):
                self.problem(
                    self.at,
                    f"the line ends in {self.escape * 2}, which only some versions of Docker continue; write a blank"
                    " before the last one, or something behind it",
                )
            text = text[: -len(self.escape)]
            parts.append(text if parts else text.lstrip())
        return parts

    def flags(self, name: str, parts: list[str]) -> tuple[tuple[tuple[str, str], ...], list[str]]:
        """Split off the flags, which may be on several lines."""
        flags: list[tuple[str, str]] = []
        if name not in _WITH_FLAGS:
            return (), parts
        rest = list(parts)
        while rest:
            text = rest[0].lstrip()
            match = _FLAG.match(text)
            if match:
                flags.append((match[1], match[2] or ""))
                rest[0] = text[match.end() :]
            elif text or len(rest) == 1:
                rest[0] = text
                break
            else:
                rest.pop(0)
        return tuple(flags), rest

    def heredocs(self, number: int, text: str) -> Iterator[Heredoc]:
        for match in _heredoc_marks(text):
            name = match[3] or match[4] or match[5]
            strips = match[2] == "-"
            body: list[str] = []
            while True:
                if self.at >= len(self.lines):
                    self.problem(number, f"the heredoc <<{name} has no end; a line '{name}' ends it")
                    return
                line = self.lines[self.at]
                self.at += 1
                if (line.lstrip("\t") if strips else line) == name:
                    break
                body.append((line.lstrip("\t") if strips else line) + "\n")
            yield Heredoc(name, "".join(body), match[5] is None, strips)

    def json_list(self, number: int, name: str, text: str) -> tuple[str, ...] | None:
        if not text.startswith("["):
            return None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None  # [ is a command, too
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.problem(number, f"{name} takes a JSON list of strings, found: {text}")
            return None
        return tuple(value)


def _heredoc_marks(text: str) -> Iterator[re.Match[str]]:
    """Yield the heredocs' marks outside quotes."""
    at, quote = 0, ""
    while at < len(text):
        letter = text[at]
        match = None if quote else _HEREDOC.match(text, at)
        if letter == "\\" and quote != "'":
            at += 2
        elif quote:
            quote = "" if letter == quote else quote
            at += 1
        elif text.startswith("<<<", at):
            at += 3
        elif match:
            yield match
            at = match.end()
        else:
            quote = letter if letter in "\"'" else ""
            at += 1
