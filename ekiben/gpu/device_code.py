"""Read the CUDA device code of an ELF file, without CUDA: the GPUs that it has code for.

nvcc puts "fat binaries" into two sections of a library. Each is a header and entries; an entry is machine code (SASS)
or PTX for one architecture. Only headers are read. NVIDIA does not document the format; what is used here was compared
with what cuobjdump lists for the libraries of torch 2.11, cuBLAS, cuDNN, NCCL and bitsandbytes (CUDA 11.8 to 13.2).
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

ReadAt = Callable[[int, int], bytes]  # (offset, size) → that many bytes, fewer at the end

ELF = b"\x7fELF\x02\x01"  # 64 bits, little endian
ELF_HEADER = struct.Struct(
    "<16s2HI3QI6H"
)  # [6] offset of the section headers, [11] size of one, [12] count, [13] index of the names
SECTION = struct.Struct("<2I4Q2I2Q")  # name, type, flags, address, offset, size, …
NOBITS = 8
FATBIN_SECTIONS = {b".nv_fatbin", b"__nv_relfatbin"}  # whole programs; programs linked with -rdc=true
FATBIN = struct.Struct("<I2HQ")  # magic, version, header size, size of the entries
FATBIN_MAGIC = 0xBA55ED50
ENTRY = struct.Struct("<2HIQ12xI8xQ")  # kind, version, header size, size; architecture; flags
PTX, SASS = 1, 2
ARCH_SPECIFIC, FAMILY_SPECIFIC = 1 << 20, 1 << 21  # sm_90a, sm_100f
_NAME = re.compile(r"(sm|compute)_(\d+)([af]?)")


@dataclass(frozen=True, slots=True)
class DeviceCode:
    """``fatbins``: what one fat binary holds (``("sm_80", "sm_90a", "compute_90")``) → how many hold just that."""

    fatbins: dict[tuple[str, ...], int]

    @property
    def names(self) -> list[str]:
        """Return every architecture there is code for, oldest first."""
        return sorted({name for held in self.fatbins for name in held}, key=_order)

    def covered(self, capability: str) -> tuple[int, int, int]:
        """Count the fat binaries that a GPU of that compute capability runs as they are, and those it runs after
        compiling their PTX: (as they are, compiled, all). Some libraries keep code for other architectures in fat
        binaries of its own, so not all are needed; none is too few."""
        counts = [(runs_on(held, capability), count) for held, count in self.fatbins.items()]
        return (
            sum(count for code, count in counts if code == "sass"),
            sum(count for code, count in counts if code == "ptx"),
            sum(count for _, count in counts),
        )


def runs_on(names: Iterable[str], capability: str) -> str | None:
    """Return ``"sass"``, ``"ptx"`` (compiled by the driver at the first start) or None, for a compute capability as
    ``"8.9"``.

    Machine code runs on its own major version from its minor version on; sm_90a only on 9.0; sm_100f on all of 10.x
    from 10.0 on. PTX is compiled for the same architecture and all later ones.
    https://docs.nvidia.com/cuda/cuda-compiler-driver-nvcc/#gpu-compilation
    """
    major, minor = (int(digits) for digits in capability.split("."))
    here = major * 10 + minor
    best = None
    for name in names:
        match = _NAME.fullmatch(name)
        if not match:
            continue
        kind, number, suffix = match[1], int(match[2]), match[3]
        same_family = number // 10 == major and number <= here
        if kind == "sm" and (number == here if suffix == "a" else same_family):
            return "sass"
        if kind == "compute" and (
            number == here if suffix == "a" else same_family if suffix == "f" else number <= here
        ):
            best = "ptx"
    return best


def read_device_code(read_at: ReadAt) -> DeviceCode | None:
    """Return the device code in a 64-bit ELF file; None when it is no such file or has none.

    Raises ValueError when damaged.
    """
    fatbins: Counter[tuple[str, ...]] = Counter()
    for start, size in _fatbin_sections(read_at):
        fatbins.update(_fatbins(read_at, start, start + size))
    return DeviceCode(dict(sorted(fatbins.items()))) if fatbins else None


def _fatbin_sections(read_at: ReadAt) -> Iterator[tuple[int, int]]:
    """(offset, size) of each section that holds fat binaries."""
    head = read_at(0, ELF_HEADER.size)
    if len(head) < ELF_HEADER.size or not head.startswith(ELF):
        return
    fields = ELF_HEADER.unpack(head)
    table, entry_size, count, names_index = fields[6], fields[11], fields[12], fields[13]
    if not table or entry_size != SECTION.size or names_index >= count:
        return  # no section headers: a stripped file
    headers = read_at(table, count * SECTION.size)
    if len(headers) < count * SECTION.size:
        raise ValueError(f"ELF file ends before its {count} section headers at {table}")
    sections = list(SECTION.iter_unpack(headers))
    names = read_at(sections[names_index][4], sections[names_index][5])
    for name, kind, _, _, offset, size, *_ in sections:
        if names[name : names.find(b"\0", name)] in FATBIN_SECTIONS and kind != NOBITS:
            yield offset, size


def _fatbins(read_at: ReadAt, position: int, end: int) -> Iterator[tuple[str, ...]]:
    """Yield the architectures of each fat binary between ``position`` and ``end``: aligned to 8 bytes with zeros."""
    while position + FATBIN.size <= end:
        magic, _, header, size = FATBIN.unpack(_exactly(read_at, position, FATBIN.size))
        if not magic:
            position += 8
            continue
        if magic != FATBIN_MAGIC or header < FATBIN.size or position + header + size > end:
            raise ValueError(f"no fat binary at {position}: {magic:#x}, {size} bytes of {end - position}")
        yield tuple(sorted(set(_entries(read_at, position + header, position + header + size)), key=_order))
        position += header + size


def _entries(read_at: ReadAt, position: int, end: int) -> Iterator[str]:
    while position + ENTRY.size <= end:
        kind, _, header, size, number, flags = ENTRY.unpack(_exactly(read_at, position, ENTRY.size))
        if header < ENTRY.size or position + header + size > end:
            raise ValueError(f"no entry of a fat binary at {position}: {header} + {size} bytes of {end - position}")
        suffix = "a" if flags & ARCH_SPECIFIC else "f" if flags & FAMILY_SPECIFIC else ""
        if kind in (PTX, SASS):
            yield f"{'sm' if kind == SASS else 'compute'}_{number}{suffix}"
        position += header + size


def _exactly(read_at: ReadAt, offset: int, size: int) -> bytes:
    data = read_at(offset, size)
    if len(data) < size:
        raise ValueError(f"ends early: {size} bytes wanted at {offset}, {len(data)} there")
    return data


def _order(name: str) -> tuple[int, int, str]:
    match = _NAME.fullmatch(name)
    assert match
    return ("sm", "compute").index(match[1]), int(match[2]), match[3]
