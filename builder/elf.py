"""What a compiled extension says of itself: its machine, the libraries it needs, its symbols. Device code: cubins.py.

https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from builder.cubins import ELF, ELF_HEADER, NOBITS, SECTION

MACHINES = {62: "x86_64", 183: "aarch64"}
_DYNAMIC = struct.Struct("<2Q")  # tag, value
_SYMBOL = struct.Struct("<IBBH2Q")  # name, …, section (0: it is defined elsewhere), …
_NEEDED = 1  # the tag of a library's name


class NotElf(ValueError):
    """The bytes are no 64-bit ELF file."""


@dataclass(frozen=True, slots=True)
class Library:
    """``needed``: file names of libraries; ``defined`` and ``undefined``: dynamic symbols."""

    machine: str
    needed: tuple[str, ...]
    defined: frozenset[str]
    undefined: frozenset[str]


def read_library(data: bytes) -> Library:
    """Errors: ValueError for what is no 64-bit ELF file, or not a whole one."""
    if not data.startswith(ELF):
        raise ValueError("not a 64-bit ELF file")
    try:
        return _read(data)
    except (struct.error, IndexError) as error:
        raise ValueError(f"damaged ELF file: {error}") from error


def _read(data: bytes) -> Library:
    head = ELF_HEADER.unpack_from(data)
    rows = [SECTION.unpack_from(data, head[6] + number * SECTION.size) for number in range(head[12])]
    names = _content(data, rows[head[13]])
    sections = {_text(names, row[0]): row for row in rows}
    needed: list[str] = []
    defined, undefined = set[str](), set[str]()
    if ".dynstr" in sections:
        strings = _content(data, sections[".dynstr"])
        for tag, value in _DYNAMIC.iter_unpack(_content(data, sections[".dynamic"])):
            if tag == _NEEDED:
                needed.append(_text(strings, value))
        for name, _, _, section, _, _ in _SYMBOL.iter_unpack(_content(data, sections[".dynsym"])):
            (defined if section else undefined).add(_text(strings, name))
    return Library(MACHINES.get(head[2], str(head[2])), tuple(needed), frozenset(defined), frozenset(undefined))


def _content(data: bytes, row: tuple[int, ...]) -> bytes:
    kind, offset, size = row[1], row[4], row[5]
    if kind == NOBITS:
        return b""
    if offset + size > len(data):
        raise ValueError("a section ends after the file")
    return data[offset : offset + size]


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode("utf-8", "replace")
