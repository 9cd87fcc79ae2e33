"""Reads definition files: https://apptainer.org/docs/user/latest/definition_files.html

A faithful reader: section bodies are kept to the byte (heredocs, tabs, case). All problems of a file are
reported together, each with its line and the nearest known name.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from builder.errors import DefinitionError, nearest

HEADERS = ("bootstrap", "from", "stage", "osversion", "mirrorurl", "include", "registry", "namespace", "fingerprints")
SECTIONS = ("arguments", "files", "post", "environment", "labels", "test", "help", "runscript", "startscript")
BOOTSTRAPS = ("localimage", "debootstrap", "docker")
REFUSED = {
    "setup": "it runs on the host, outside any cache key; do the work in %post",
    "pre": "it runs on the host, outside any cache key; do the work in %post",
    "appinstall": "SCIF apps are not supported; a recipe's tasks take their place",
}

_SECTION = re.compile(r"%([A-Za-z]+)\b[ \t]*(.*)")
_HEADER = re.compile(r"([A-Za-z]+)[ \t]*:[ \t]*(.*)")
_ARGUMENT = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_EXPORT = re.compile(r"export[ \t]+([A-Za-z_]\w*)=(.*)")
_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
_REFERENCE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})")


@dataclass(frozen=True, slots=True)
class Copy:
    """One line of %files: ``source`` relative to the folder that holds images/, or a path in ``stage``."""

    source: str
    destination: str
    stage: str | None
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One header with its sections; a file has one, or several that hand files to the last."""

    name: str | None
    header: Mapping[str, str]
    arguments: Mapping[str, str]
    files: tuple[Copy, ...] = ()
    post: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    test: str = ""
    help: str = ""
    runscript: str = ""

    @property
    def bootstrap(self) -> str:
        return self.header["bootstrap"]

    @property
    def parent(self) -> str | None:
        """The definition this stage stands on: ``From: python.sif`` names ``python``."""
        return Path(self.header["from"]).name.removesuffix(".sif") if self.bootstrap == "localimage" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A definition file. ``root`` is the folder that holds its images/ folder: %files paths start there."""

    name: str
    path: Path
    root: Path
    text: str
    stages: tuple[Stage, ...]

    @property
    def final(self) -> Stage:
        return self.stages[-1]


def read_definition(path: Path, *, root: Path, arguments: Mapping[str, str] | None = None) -> Definition:
    """Read ``path`` with ``arguments`` bound over its own %arguments; names it does not declare are left to others.

    Errors: DefinitionError listing every problem of the file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DefinitionError(f"{path}: cannot be read: {error}") from error
    return _Reader(path, text).read(root, arguments or {})


def declared_arguments(path: Path) -> set[str]:
    """The names in a file's %arguments, for telling which of a stack's arguments nobody uses."""
    return {name for part in _split(path.read_text(encoding="utf-8", errors="replace")) if part.name == "arguments"
            for name in _assignments(part.body)}  # fmt: skip


@dataclass(slots=True)
class _Part:
    """A run of lines: a header (``name`` "") or a section; ``line`` is the number of its first body line."""

    name: str
    words: str
    line: int
    body: list[str]


def _split(text: str) -> Iterator[_Part]:
    part = _Part("", "", 1, [])
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() would cut at form feeds, too
        if match := _SECTION.match(line):
            yield part
            part = _Part(match[1].lower(), match[2].split(" #")[0].strip(), number + 1, [])
        elif _begins_stage(line, part):
            yield part
            part = _Part("", "", number, [line])
        else:
            part.body.append(line)
    yield part


def _begins_stage(line: str, part: _Part) -> bool:
    """A header after a section or after another header; in %post only in the usual spelling, for scripts are text."""
    if part.name == "post":
        return line.startswith("Bootstrap:")
    return _is_header_start(line) and (part.name != "" or any(map(_is_header_start, part.body)))


def _is_header_start(line: str) -> bool:
    return re.match(r"bootstrap[ \t]*:", line, re.IGNORECASE) is not None


def _assignments(lines: list[str]) -> dict[str, str]:
    pairs = (line.strip().partition("=") for line in lines if line.strip() and not line.lstrip().startswith("#"))
    return {name.strip(): value.strip().strip("\"'") for name, equals, value in pairs if equals}


class _Reader:
    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = path, text
        self.problems: list[str] = []

    def problem(self, line: int, message: str) -> None:
        self.problems.append(f"{self.path}:{line}: {message}")

    def give_up(self) -> NoReturn:
        raise DefinitionError("\n".join(self.problems))

    def read(self, root: Path, given: Mapping[str, str]) -> Definition:
        groups: list[list[_Part]] = []
        for part in _split(self.text):
            if not part.name:
                groups.append([part])
            elif not groups:
                groups.append([_Part("", "", 1, []), part])
            else:
                groups[-1].append(part)
        stages = tuple(self.stage(group, given) for group in groups)
        names = [stage.name for stage in stages if stage.name]
        for earlier, stage in enumerate(stages):
            for copy in stage.files:
                if copy.stage and copy.stage not in names[:earlier]:
                    self.problem(copy.line, f"%files from {copy.stage}: no such stage before this one."
                                 + nearest(copy.stage, names[:earlier]))  # fmt: skip
        if self.problems:
            self.give_up()
        return Definition(name=self.path.stem, path=self.path, root=root, text=self.text, stages=stages)

    def stage(self, parts: list[_Part], given: Mapping[str, str]) -> Stage:
        arguments = self.arguments(parts, given)
        used: set[str] = set()
        bound = [replace_part(part, self.bind(part, arguments, used)) for part in parts if part.name != "arguments"]
        for name in sorted(set(arguments) - used):
            self.problem(next(part.line for part in parts if part.name == "arguments"),
                         f"argument '{name}' is declared and never used; remove it or write {{{{ {name} }}}}")  # fmt: skip
        header = self.header(bound[0])
        sections = self.sections(bound[1:])
        return Stage(
            name=header.get("stage"),
            header=header,
            arguments=arguments,
            files=tuple(copy for part in bound if part.name == "files" for copy in self.files(part)),
            environment=self.environment(sections.get("environment")),
            labels=self.labels(sections.get("labels")),
            **{name: "\n".join(sections[name].body).strip("\n") + "\n" for name in ("post", "test", "help", "runscript")
               if name in sections and any(line.strip() for line in sections[name].body)},
        )  # fmt: skip

    def arguments(self, parts: list[_Part], given: Mapping[str, str]) -> dict[str, str]:
        arguments: dict[str, str] = {}
        for part in parts:
            if part.name == "arguments":
                arguments |= _assignments(part.body)
        return {name: given.get(name, default) for name, default in arguments.items()}

    def bind(self, part: _Part, arguments: Mapping[str, str], used: set[str]) -> list[str]:
        def value(match: re.Match[str], number: int) -> str:
            name = match[1]
            used.add(name)
            if name not in arguments:
                said = f"argument '{name}' is not declared in %arguments." + nearest(name, arguments)
                self.problem(part.line + number, said)
                return ""
            return arguments[name]

        lines = []
        for number, line in enumerate(part.body):
            lines.append(_ARGUMENT.sub(partial(value, number=number), line))
        return lines

    def header(self, part: _Part) -> dict[str, str]:
        header: dict[str, str] = {}
        for number, line in enumerate(part.body, part.line):
            text = line.split(" #")[0].strip()
            if not text or text.startswith("#"):
                continue
            match = _HEADER.fullmatch(text)
            if not match:
                self.problem(number, f"expected 'Key: value' or a %section, found: {text}")
            elif match[1].lower() not in HEADERS:
                self.problem(number, f"unknown key '{match[1]}'." + nearest(match[1].lower(), HEADERS))
            elif match[1].lower() in header:
                self.problem(number, f"'{match[1]}:' appears twice; leave one")
            else:
                header[match[1].lower()] = match[2].strip()
        return self.checked_header(header, part.line)

    def checked_header(self, header: dict[str, str], line: int) -> dict[str, str]:
        bootstrap = header.setdefault("bootstrap", "")
        if bootstrap not in BOOTSTRAPS:
            said = f"'Bootstrap: {bootstrap}' is not supported." if bootstrap else "no 'Bootstrap:' key."
            self.problem(line, said + nearest(bootstrap, BOOTSTRAPS))
        elif bootstrap == "debootstrap" and not header.get("osversion"):
            self.problem(line, "Bootstrap: debootstrap needs 'OSVersion: <suite>'")
        elif bootstrap != "debootstrap" and not header.get("from"):
            self.problem(line, f"Bootstrap: {bootstrap} needs 'From:'")
        elif bootstrap == "docker" and not _DIGEST.search(header["from"]):
            self.problem(
                line, f"From: {header['from']} is a tag that can move; pin it: {header['from']}@sha256:<digest>"
            )
        header.setdefault("from", "")
        return header

    def sections(self, parts: list[_Part]) -> dict[str, _Part]:
        sections: dict[str, _Part] = {}
        for part in parts:
            if part.name in REFUSED:
                self.problem(part.line - 1, f"%{part.name} is refused: {REFUSED[part.name]}")
            elif part.name not in SECTIONS:
                self.problem(part.line - 1, f"unknown section %{part.name}." + nearest(part.name, SECTIONS))
            elif part.name in sections and part.name != "files":
                self.problem(part.line - 1, f"%{part.name} appears twice; put both in one")
            elif part.words and part.name not in ("files", "post"):
                self.problem(part.line - 1, f"%{part.name} takes no words: {part.words}")
            elif part.name == "post" and part.words:
                self.problem(part.line - 1, f"%post {part.words}: only /bin/sh runs here; start another shell inside")
            sections[part.name] = part
        return sections

    def files(self, part: _Part) -> Iterator[Copy]:
        words = part.words.split()
        stage = words[1] if len(words) == 2 and words[0] == "from" else None
        if words and stage is None:
            self.problem(part.line - 1, f"%files {part.words}: expected '%files' or '%files from <stage>'")
        for number, line in enumerate(part.body, part.line):
            try:
                paths = shlex.split(_without_comment(line))
            except ValueError as error:
                self.problem(number, f"%files: {error}: {line.strip()}")
                continue
            if len(paths) in (1, 2) and ".." in paths[-1].split("/"):
                self.problem(
                    number, f"%files: the destination climbs with '..'; write the path it means: {line.strip()}"
                )
            elif len(paths) in (1, 2):
                folder = "/" if paths[-1].endswith("/") else ""  # the file keeps its name in that folder
                yield Copy(paths[0], posixpath.normpath("/" + paths[-1].strip("/")).rstrip("/") + folder, stage, number)
            elif paths:
                self.problem(number, f"%files wants 'source [destination]', found {len(paths)} words: {line.strip()}")

    def environment(self, part: _Part | None) -> dict[str, str]:
        environment: dict[str, str] = {}
        for number, line in enumerate(part.body if part else [], part.line if part else 0):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            match = _EXPORT.fullmatch(_without_comment(text))
            try:
                words = _shell_words(match[2]) if match else []
            except ValueError:
                words = ["", ""]
            # A Docker image's environment is a table of values, not a script.
            if not match or len(words) > 1:
                self.problem(number, f"%environment takes only 'export NAME=value' lines, found: {text}")
            elif "`" in match[2] or "$" in _REFERENCE.sub("", match[2]) or re.search(r"'[^'\"]*\$|\\\$", match[2]):
                said = "%environment: of what a shell expands only $NAME and ${NAME} are known, outside single quotes"
                self.problem(number, f"{said}; write the value itself: {text}")
            else:
                environment[match[1]] = words[0] if words else ""
        return environment

    def labels(self, part: _Part | None) -> dict[str, str]:
        labels: dict[str, str] = {}
        for line in part.body if part else []:
            name, value = [*line.split(None, 1), "", ""][:2]
            if name and not name.startswith("#"):
                labels[name] = value.strip()
        return labels


def _without_comment(line: str) -> str:
    """As a shell sees it: # begins a comment where a word begins, outside quotes."""
    quote, before = "", " "
    for at, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote and before != "\\" else quote
        elif letter == "#" and before.isspace():
            return line[:at].rstrip()
        elif letter in "\"'" and before != "\\":
            quote = letter
        before = letter
    return line


def _shell_words(text: str) -> list[str]:
    """A shell's words; what ends a command (; & |) or opens another one stands alone. Errors: ValueError."""
    words = shlex.shlex(text, posix=True, punctuation_chars=";&|<>()")
    words.whitespace_split, words.commenters = True, ""
    return list(words)


def replace_part(part: _Part, body: list[str]) -> _Part:
    return replace(part, body=body)


def expand(environment: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    """``inherited`` with ``environment`` on top; ``$NAME`` and ``${NAME}`` stand for what came before."""
    result = dict(inherited)
    for name, value in environment.items():
        result[name] = re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda m: result.get(m[1] or m[2], ""), value)
    return result
