"""Expand variables, and split lines, as a Dockerfile's own instructions do; a RUN's command is the shell's.

https://docs.docker.com/reference/dockerfile/#environment-replacement
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
Lookup = Callable[[str], str | None]


def expand_word(word: str, variables: Mapping[str, str] | Lookup, escape: str = "\\") -> str:
    """Return ``word`` expanded and without its quotes. Raises ValueError for what cannot be read."""
    look = variables if callable(variables) else variables.get
    return _Word(word, look, escape).read()


def split_line(text: str, escape: str = "\\") -> list[str]:
    """Split at blanks outside quotes; quotes and escapes stay."""
    result: list[str] = []
    word, quote, at = "", "", 0
    while at < len(text):
        letter = text[at]
        if letter == escape and quote != "'" and at + 1 < len(text):
            word += text[at : at + 2]
            at += 2
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        if letter.isspace() and not quote:
            result += [word] if word else []
            word = ""
        else:
            word += letter
        at += 1
    return [*result, word] if word else result


class _Word:
    def __init__(self, text: str, look: Lookup, escape: str) -> None:
        self.text, self.look, self.escape = text, look, escape
        self.at = 0

    def read(self, stop: str = "") -> str:
        result = ""
        while self.at < len(self.text):
            letter = self.text[self.at]
            if stop and letter == stop:
                self.at += 1
                return result
            self.at += 1
            if letter == "'":
                result += self.single()
            elif letter == '"':
                result += self.double()
            elif letter == "$":
                result += self.variable()
            elif letter == self.escape:
                result += self.text[self.at : self.at + 1]
                self.at += 1
            else:
                result += letter
        if stop:
            raise ValueError(f"'{stop}' is missing in {self.text}")
        return result

    def single(self) -> str:
        end = self.text.find("'", self.at)
        if end < 0:
            raise ValueError(f"a single quote is not closed: {self.text}")
        result, self.at = self.text[self.at : end], end + 1
        return result

    def double(self) -> str:
        result = ""
        while self.at < len(self.text):
            letter = self.text[self.at]
            self.at += 1
            if letter == '"':
                return result
            if letter == "$":
                result += self.variable()
            elif letter == self.escape:
                following = self.text[self.at : self.at + 1]
                self.at += 1
                result += following if following in ('"', "$", self.escape) else letter + following
            else:
                result += letter
        raise ValueError(f"a double quote is not closed: {self.text}")

    def variable(self) -> str:
        if self.text[self.at : self.at + 1] == "{":
            self.at += 1
            return self.braced()
        if match := _NAME.match(self.text, self.at):
            self.at = match.end()
            return self.look(match[0]) or ""
        if self.text[self.at : self.at + 1] in tuple("0123456789@*#?-!"):
            self.at += 1
            return ""
        return "$"

    def braced(self) -> str:
        match = _NAME.match(self.text, self.at)
        if not match:
            raise ValueError(f"${{…}} without a name: {self.text}")
        self.at = match.end()
        value = self.look(match[0])
        if self.text[self.at : self.at + 1] == "}":
            self.at += 1
            return value or ""
        has_colon = self.text[self.at : self.at + 1] == ":"
        self.at += has_colon
        modifier = self.text[self.at : self.at + 1]
        if modifier not in ("-", "+", "?"):
            raise ValueError(
                f"of ${{{match[0]}…}} only :-, :+ and :? are known, and the same without ':': {self.text}; write the"
                " value itself"
            )
        self.at += 1
        word = self.read("}")
        is_set = bool(value) if has_colon else value is not None
        if modifier == "-":
            return (value or "") if is_set else word
        if modifier == "+":
            return word if is_set else ""
        if not is_set:
            raise ValueError(f"{match[0]}: {word or 'is not set'}")
        return value or ""
