"""Read the ELF header of a compiled extension: machine, needed libraries, dynamic symbols."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

_MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}


@dataclass(frozen=True, slots=True)
class Library:
    """``needed``: file names of libraries; ``defined`` and ``undefined``: dynamic symbols."""

    machine: str
    needed: tuple[str, ...]
    defined: frozenset[str]
    undefined: frozenset[str]


def read_library(data: bytes) -> Library:
    """Return machine, needed libraries and dynamic symbols of a library.

    Raises ValueError when ``data`` is no 64-bit ELF file, or not all of one.
    """
    if not data.startswith(b"\x7fELF\x02\x01"):
        raise ValueError("not a 64-bit ELF file")
    # Late: it takes longer to import than an invocation that finds all layers stored.
    from elftools.common.exceptions import ELFError
    from elftools.construct import ConstructError
    from elftools.elf.elffile import ELFFile

    try:
        return _read(ELFFile(io.BytesIO(data)), len(data))
    except (ELFError, ConstructError, AttributeError, ArithmeticError, LookupError, UnicodeDecodeError) as error:
        raise ValueError(f"damaged ELF file: {error}") from error


def _read(file: ELFFile, size: int) -> Library:
    from elftools.elf.dynamic import DynamicSection
    from elftools.elf.sections import SymbolTableSection

    needed: list[str] = []
    defined, undefined = set[str](), set[str]()
    for section in file.iter_sections():
        if section["sh_type"] != "SHT_NOBITS" and section["sh_offset"] + section["sh_size"] > size:
            raise ValueError("damaged ELF file: a section ends after the file")
        if isinstance(section, DynamicSection):
            needed += [tag.needed for tag in section.iter_tags("DT_NEEDED")]  # type: ignore[attr-defined]  # set by the tag's name
        elif isinstance(section, SymbolTableSection) and section["sh_type"] == "SHT_DYNSYM":
            for symbol in section.iter_symbols():
                (undefined if symbol["st_shndx"] == "SHN_UNDEF" else defined).add(symbol.name)
    machine = file["e_machine"]
    return Library(_MACHINES.get(machine, str(machine)), tuple(needed), frozenset(defined), frozenset(undefined))
