"""The text of a definition file as Apptainer cuts it: stages, headers, sections, and the values of ``{{ name }}``.

What is in a section is read by ekiben.spec.definition.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

ARGUMENT = re.compile(r"\{\{\s*(\w+)\s*\}\}")
BOM = "\ufeff"
NAMELESS = "%"  # a line that Apptainer reads as a section without a name, or one with leading blanks
_STAGE = re.compile(r"bootstrap:", re.IGNORECASE)
_BOOTSTRAP = re.compile(r"\s*bootstrap\s*:", re.IGNORECASE)
_HEADER = re.compile(r"([A-Za-z]\w*)[ \t]*:[ \t]*(.*)", re.DOTALL)
_REMARK = re.compile(r"#[^!]")
Report = Callable[[int, str], None]  # called with a line's number and the problem


@dataclass(frozen=True, slots=True)
class Section:
    """A run of lines: a header (``name`` "") or a section.

    ``line`` is the number of its first body line, ``options`` what follows its name, ``numbers`` those of its lines.
    """

    name: str
    options: str
    line: int
    body: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[str]:
        """Return the tokens after the section's name, without a remark."""
        return self.options.split("#")[0].split()

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield each line with its number."""
        return zip(self.numbers, self.body, strict=True)

    def text(self) -> str:
        """Return the body, without the empty lines around it; "" where it has no other."""
        return "\n".join(self.body).strip("\n") + "\n" if any(line.strip() for line in self.body) else ""

    def text_numbers(self) -> list[int]:
        """Return the numbers of the lines of text()."""
        first = next((at for at, line in enumerate(self.body) if line), len(self.body))
        return self.numbers[first:]

    def join(self, later: Section) -> Section:
        """Return one section of both bodies; the options are those of the last line that has some."""
        return replace(
            self,
            options=later.options or self.options,
            body=[*self.body, *later.body],
            numbers=[*self.numbers, *later.numbers],
        )


def split(text: str) -> Iterator[Section]:
    """Yield the headers and sections of a definition file, in order; the first one is a header."""
    section = Section("", "", 1)
    for number, line in enumerate(text.removeprefix(BOM).split("\n"), 1):  # splitlines() would cut at form feeds, too
        if line.lstrip().startswith("%"):
            yield section
            name, _, options = line.lstrip("%").partition(" ")
            section = Section(NAMELESS if line[0] != "%" or not name else name.lower(), options, number + 1)
            continue
        if _STAGE.match(line) and (section.name or any(map(_BOOTSTRAP.match, section.body))):
            yield section
            section = Section("", "", number)
        section.body.append(line)
        section.numbers.append(number)
    # A text that ends with a line's end has no line after it.
    if section.body and not section.body[-1]:
        section.body.pop()
        section.numbers.pop()
    yield section


def assignments(lines: Iterable[str]) -> dict[str, str]:
    """Return the names and values of %arguments."""
    pairs = (line.strip().partition("=") for line in lines if line.strip() and not line.lstrip().startswith("#"))
    return {name.strip(): value.strip() for name, equals, value in pairs if equals and name.strip()}


def bind(line: str, arguments: Mapping[str, str], unknown: Callable[[str], None], used: set[str]) -> str:
    """Return a line with the values of its arguments, as Apptainer sets them: not after a remark's ``#``.

    A value may name other arguments, whose values are set as they are. ``unknown`` is called for a name without a
    value; ``used`` takes the names that were replaced.
    """
    pieces, done = [], 0
    for match in ARGUMENT.finditer(line):
        if _REMARK.search(line[done : match.start()]):
            continue
        name = match[1]
        if name not in arguments:
            unknown(name)
        used.add(name)
        pieces += [line[done : match.start()], _nested(arguments.get(name, ""), arguments, used)]
        done = match.end()
    return "".join([*pieces, line[done:]])


def _nested(value: str, arguments: Mapping[str, str], used: set[str]) -> str:
    def inner(match: re.Match[str]) -> str:
        used.add(match[1])
        return arguments.get(match[1], match[0])

    return ARGUMENT.sub(inner, value)


def header_pairs(section: Section, report: Report) -> Iterator[tuple[int, str, str]]:
    r"""Yield line, key (in its own case) and value of a header's lines. A value continues after a ``\`` at its end."""
    pending: tuple[int, str, str] | None = None
    for number, line in section.lines():
        text = line.split("#")[0].strip()
        if pending is not None and text:
            start, key, value = pending[0], pending[1], pending[2] + text
        elif not text:
            if pending is not None:
                report(pending[0], f"'{pending[1]}:' ends with '\\', and the next line is empty; remove the '\\'")
                pending = None
            continue
        elif match := _HEADER.fullmatch(text):
            start, key, value = number, match[1], match[2].strip()
        else:
            report(number, f"expected 'Key: value' or a %section, found: {text}")
            continue
        goes_on = value.endswith("\\") and value != "\\"
        pending = (start, key, value[:-1]) if goes_on else None
        if not goes_on:
            yield start, key, value
    if pending is not None:
        report(pending[0], f"'{pending[1]}:' ends with '\\', and no line follows; remove the '\\'")
