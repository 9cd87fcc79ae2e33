"""Which GPUs a library has code for."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from ekiben.gpu.device_code import DeviceCode, read_device_code, runs_on
from support.fat_elf import elf, fatbin

USUAL = ("sm_75", "sm_80", "sm_86", "sm_90", "compute_90")


def read(data: bytes) -> DeviceCode | None:
    return read_device_code(lambda offset, size: data[offset : offset + size])


def test_device_code_of_a_library() -> None:
    found = read(elf(fatbin(USUAL), fatbin(reversed(USUAL), header=112), fatbin(["sm_90a", "sm_100f"])))
    assert found is not None
    assert found.fatbins == {USUAL: 2, ("sm_90a", "sm_100f"): 1}
    assert found.names == ["sm_75", "sm_80", "sm_86", "sm_90", "sm_90a", "sm_100f", "compute_90"]
    assert found.covered("8.9") == (2, 0, 3)
    assert found.covered("9.0") == (3, 0, 3)
    assert found.covered("10.0") == (1, 2, 3)
    assert found.covered("7.0") == (0, 0, 3)


def test_device_code_of_relocatable_objects() -> None:
    found = read(elf(fatbin(["sm_80"]), section=b"__nv_relfatbin"))
    assert found is not None
    assert found.names == ["sm_80"]


@pytest.mark.parametrize(
    "data",
    [b"", b"\x7fELF", b"#!/bin/sh\n" * 20, elf(), elf(fatbin(USUAL), section=b".data"), elf(fatbin(USUAL), kind=8)],
    ids=["empty", "short", "script", "no fatbin", "other section", "no bits"],
)
def test_library_without_device_code(data: bytes) -> None:
    assert read(data) is None


def test_python_interpreter_has_no_device_code() -> None:
    assert read(Path("/proc/self/exe").read_bytes()) is None


@pytest.mark.parametrize(
    ("names", "capability", "how"),
    [
        (["sm_80"], "8.0", "sass"),
        (["sm_80"], "8.9", "sass"),  # the same major version, a later minor one
        (["sm_86"], "8.0", None),  # an earlier minor one
        (["sm_80"], "9.0", None),
        (["sm_70"], "7.5", "sass"),
        (["sm_75"], "7.0", None),
        (["sm_90a"], "9.0", "sass"),
        (["sm_100a"], "10.3", None),
        (["sm_100f"], "10.3", "sass"),
        (["sm_103f"], "10.0", None),
        (["sm_120"], "12.1", "sass"),
        (["compute_80"], "8.0", "ptx"),
        (["compute_80"], "12.0", "ptx"),
        (["compute_90"], "8.9", None),
        (["compute_90a"], "10.0", None),
        (["compute_90a"], "9.0", "ptx"),
        (["compute_100f"], "10.3", "ptx"),
        (["compute_100f"], "12.0", None),
        (["compute_70", "sm_90"], "9.0", "sass"),
        ([], "9.0", None),
    ],
)
def test_device_code_runs_on_compatible_gpus(names: list[str], capability: str, how: str | None) -> None:
    assert runs_on(names, capability) == how


def test_damaged_device_code_is_reported() -> None:
    whole = elf(fatbin(USUAL))
    assert read(whole) is not None
    with pytest.raises(ValueError, match="ends before its 4 section headers"):
        read(whole[:-1])
    with pytest.raises(ValueError, match="no fat binary at 64: 0x1234"):
        read(whole.replace(struct.pack("<I", 0xBA55ED50), struct.pack("<I", 0x1234)))
    longer = bytearray(whole)
    struct.pack_into("<Q", longer, 64 + 8, 1 << 40)
    with pytest.raises(ValueError, match="no fat binary at 64"):
        read(bytes(longer))
    within = bytearray(whole)
    struct.pack_into("<Q", within, 64 + 16 + 8, 1 << 40)
    with pytest.raises(ValueError, match="no entry of a fat binary at 80"):
        read(bytes(within))
