"""Add Debian packages to the `apt-get install` line of a definition's %post, and remove them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ekiben.core.errors import DefinitionError, UsageError
from ekiben.spec.definition_text import Section, split

_PACKAGE = re.compile(r"[a-z0-9][a-z0-9.+-]+")
_INSTALL = re.compile(r"\bapt-get\b(?:[^;&|\n\\#]|\\\n)*?\binstall\b(?P<packages>(?:[^;&|<>\n\\#]|\\\n)*)")
_SHELLS = ("sh", "bash", "dash", "ash", "ksh", "zsh")
_CLEAN = ("apt-get update", "rm -rf /var/lib/apt/lists/*")  # lines that an installation alone needs


@dataclass(frozen=True, slots=True)
class _Post:
    """The %post of a definition's last stage: the offsets of its body in the text; ``line`` is the body's first."""

    start: int
    end: int
    line: int


def check_package(name: str) -> str:
    """Return the name of a Debian package. Raises UsageError."""
    if not _PACKAGE.fullmatch(name):
        raise UsageError(
            f"'{name:.80}' is not the name of a Debian package",
            hint="a version is not part of it: the build takes the mirror's",
        )
    return name


def installed_packages(text: str, path: Path) -> list[str]:
    """Return the packages that the last stage's %post names, in its order. Raises DefinitionError."""
    post = _post(text, path)
    return [word for install in _installs(text, post) for word in _packages(install)] if post else []


def add_packages(text: str, names: Sequence[str], path: Path) -> str:
    """Return the text with ``names`` in its first `apt-get install` line, or in a new one at the beginning of %post.

    Raises DefinitionError when %post is not a shell script.
    """
    post = _post(text, path)
    if post is None:
        start = text if not text or text.endswith("\n") else text + "\n"
        return f"{start}\n%post\n{_lines(names, '    ')}"
    install = next((item for item in _installs(text, post) if _packages(item)), None)
    if install is not None:
        arguments = install["packages"].rstrip(" \t")
        at = install.start("packages") + len(arguments)
        between = re.search(r"\s*\\\n[ \t]*(?=\S+$)", arguments)
        return text[:at] + "".join((between[0] if between else " ") + name for name in names) + text[at:]
    body = text[post.start : post.end]
    first = re.match(r"(?:[ \t]*#![^\n]*\n)?(?:[ \t]*\n)*", body)
    at = post.start + (first.end() if first else 0)
    indent = re.match(r"[ \t]*", text[at:])
    return text[:at] + _lines(names, indent[0] if indent and body.strip() else "    ") + text[at:]


def _lines(names: Sequence[str], indent: str) -> str:
    update, clean = _CLEAN
    lines = (update, f"apt-get install -y --no-install-recommends {' '.join(names)}", clean)
    return "".join(f"{indent}{line}\n" for line in lines)


def remove_package(text: str, name: str, path: Path) -> str:
    """Return the text without the package. A command that installs nothing else goes with its lines.

    Raises DefinitionError for a command that cannot be removed.
    """
    post = _post(text, path)
    for install in reversed(list(_installs(text, post))) if post else ():
        arguments = _packages(install)
        if name not in arguments:
            continue
        if set(arguments) == {name}:
            text = _without_command(text, install, path)
            continue
        start, end = install.span("packages")
        kept = re.sub(rf"(?:\s|\\\n)+{re.escape(name)}(?:=\S+)?(?=[\s\\]|$)", "", install["packages"])
        text = text[:start] + kept + text[end:]
    post = _post(text, path)
    if post and not any("apt-get" in line and line not in _CLEAN for line in _stripped(text[post.start : post.end])):
        lines = text[post.start : post.end].splitlines(keepends=True)
        text = text[: post.start] + "".join(line for line in lines if line.strip() not in _CLEAN) + text[post.end :]
    return text


def _stripped(body: str) -> list[str]:
    return [line.strip() for line in body.splitlines()]


def _without_command(text: str, install: re.Match[str], path: Path) -> str:
    start, end = text.rfind("\n", 0, install.start()) + 1, text.find("\n", install.end()) + 1 or len(text)
    if text[start : install.start()].strip() or text[install.end() : end].strip():
        line = text.count("\n", 0, install.start()) + 1
        raise DefinitionError(
            f"{path}:{line}: this line installs nothing else, and has another command",
            hint="remove the package there yourself",
        )
    return text[:start] + text[end:]


def _installs(text: str, post: _Post | None) -> Iterator[re.Match[str]]:
    """Yield the `apt-get install` commands of %post that are not in a remark."""
    for match in _INSTALL.finditer(text, post.start, post.end) if post else ():
        before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        if "#" not in before:
            yield match


def _packages(install: re.Match[str]) -> list[str]:
    arguments = (word.partition("=")[0] for word in install["packages"].replace("\\\n", " ").split())
    return [word for word in arguments if _PACKAGE.fullmatch(word)]


def _post(text: str, path: Path) -> _Post | None:
    """Return the first %post of the last stage. Raises DefinitionError when it is not run by a shell."""
    last: list[Section] = []
    for item in split(text):
        last = [item] if not item.name else [*last, item]
    section = next((item for item in last if item.name == "post"), None)
    if section is None:
        return None
    lines = text.split("\n")
    start = sum(len(line) + 1 for line in lines[: section.line - 1])
    end = min(
        start + sum(len(line) + 1 for line in lines[section.line - 1 : section.line - 1 + len(section.body)]), len(text)
    )
    shebang = re.match(r"\s*#!\s*(\S+)(?:\s+(\S+))?", text[start:end])
    option = re.search(r"-c\s+(\S+)", section.options)
    program = option[1] if option else ""
    if shebang:
        program = shebang[2] or "" if shebang[1].endswith("/env") else shebang[1]
    if program and program.rpartition("/")[2] not in _SHELLS:
        raise DefinitionError(
            f"{path}:{section.line}: %post is run by {program}, so no `apt-get install` line is written into it",
            hint="install the package in that program, or in a layer below",
        )
    return _Post(start, end, section.line)
