"""Patterns of .dockerignore and of COPY.

They may be somebody else's, as may the paths: matching takes time in proportion to both lengths, where a regular
expression with several stars can take exponential time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that matches one letter of ``letters``, or many where it ``repeats``; None matches none.

    ``skip`` is the number of steps to advance without it; 0: it has to match a letter.
    """

    letters: re.Pattern[str] | None
    repeats: bool = False
    skip: int = 0


_NAME = re.compile(r"[^/]")
_ANY = re.compile(r".", re.DOTALL)
_SLASH = re.compile("/")
_STAR = _Step(_NAME, repeats=True, skip=1)
_FOLDERS = (_Step(None, skip=3), _Step(_ANY, repeats=True, skip=1), _Step(_SLASH))  # some folders, or none


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of whole paths."""

    steps: tuple[_Step, ...]

    def matches(self, path: str) -> bool:
        """Return whether the whole path is one of the pattern's."""
        reached = self._reach([0])
        for letter in path:
            after: list[int] = []
            for at in reached:
                step = self.steps[at] if at < len(self.steps) else None
                if step is not None and step.letters is not None and step.letters.fullmatch(letter):
                    after.append(at if step.repeats else at + 1)
            reached = self._reach(after)
        return len(self.steps) in reached

    def _reach(self, starts: Iterable[int]) -> set[int]:
        """Return these positions, and those that follow without a letter."""
        reached: set[int] = set()
        left = list(starts)
        while left:
            at = left.pop()
            if at in reached:
                continue
            reached.add(at)
            if at < len(self.steps) and (step := self.steps[at]).skip:
                left += [at + step.skip, *([at + 1] if step.letters is None else [])]
        return reached


def ignore_pattern(text: str) -> Pattern:
    """Read a pattern of .dockerignore, in which ``**`` matches any folders. Raises ValueError."""
    return _read(text, has_folders=True)


def copy_pattern(text: str) -> Pattern:
    """Read a pattern of COPY: Go's filepath.Match, of a whole path. Raises ValueError."""
    return _read(text, has_folders=False)


def _read(text: str, *, has_folders: bool) -> Pattern:
    steps: list[_Step] = []
    at = 0
    while at < len(text):
        letter, end = text[at], text.find("]", at + 2)
        at += 1
        if has_folders and text.startswith("**", at - 1):
            at += 1 + text.startswith("/", at + 1)
            steps += [_Step(_ANY, repeats=True, skip=1)] if at >= len(text) else _FOLDERS
        elif letter == "*":
            steps.append(_STAR)
        elif letter == "?":
            steps.append(_Step(_NAME))
        elif letter == "[" and end > 0:
            steps.append(_Step(_letters(text[at - 1 : end + 1])))
            at = end + 1
        elif letter == "[" and has_folders:
            raise ValueError(f"{text}: a [ without its ]")
        else:
            if letter == "\\" and at < len(text):
                letter, at = text[at], at + 1
            steps.append(_Step(re.compile(re.escape(letter), re.DOTALL)))
    return Pattern(tuple(steps))


def _letters(text: str) -> re.Pattern[str]:
    """Return a class of letters. Raises ValueError."""
    inner = text[1:-1].replace("[", r"\[")  # which Python warns of as a future nested class
    try:
        return re.compile(f"[{inner}]", re.DOTALL)
    except re.error as error:
        raise ValueError(f"{text}: {error}") from error
