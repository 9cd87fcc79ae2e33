"""A library with device code as nvcc leaves it: an ELF file whose fat binaries hold only headers and a few bytes."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable

from ekiben.gpu.device_code import ARCH_SPECIFIC, ELF_HEADER, FAMILY_SPECIFIC, FATBIN_MAGIC, SECTION


def entry(name: str, payload: bytes = b"code" * 2, header: int = 64) -> bytes:
    kind, number, suffix = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", name).groups()  # type: ignore[union-attr]
    flags = {"": 0x8011, "a": 0x8011 | ARCH_SPECIFIC, "f": 0x8011 | FAMILY_SPECIFIC}[suffix]
    head = struct.pack("<2HIQ12xI8xQ", 2 if kind == "sm" else 1, 0x101, header, len(payload), int(number), flags)
    return head.ljust(header, b"\0") + payload


def fatbin(names: Iterable[str], header: int = 64) -> bytes:
    body = b"".join(entry(name, header=header) for name in names)
    return struct.pack("<I2HQ", FATBIN_MAGIC, 1, 16, len(body)) + body


def elf(*fatbins: bytes, section: bytes = b".nv_fatbin", kind: int = 1, gap: bytes = b"\0" * 8) -> bytes:
    """The fat binaries in one section, ``gap`` between them."""
    data = gap.join(fatbins)
    names = b"\0.text\0" + section + b"\0.shstrtab\0"
    start = ELF_HEADER.size
    table = start + len(data) + len(names)
    rows = [
        SECTION.pack(*[0] * 10),
        SECTION.pack(1, 1, 0, 0, start, 0, 0, 0, 0, 0),
        SECTION.pack(7, kind, 0, 0, start, len(data), 0, 0, 8, 0),
        SECTION.pack(8 + len(section), 3, 0, 0, start + len(data), len(names), 0, 0, 1, 0),
    ]
    head = ELF_HEADER.pack(b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 0, table, 0, 64, 0, 0, SECTION.size, len(rows), 3)
    return head + data + names + b"".join(rows)
