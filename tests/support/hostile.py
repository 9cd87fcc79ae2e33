"""Damage by a disk or by somebody else: bytes that are no record, names that point out of a folder, flipped bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

NOT_JSON = (b"", b"{", b"\xff", b"\xff\xfe\0", b"[" * 100_000, b'{"format": NaN}')
NO_RECORDS = (*NOT_JSON, b"3", b"null", b"[]", b"[1]")
NO_BASENAMES = (
    "",
    ".",
    "..",
    "../x",
    "../../evil",
    "a/b",
    "/etc",
    "/tmp/evil",
    ".hidden",
    "a\0b",
    "a\nb",
    "\ud800",
    "x" * 256,
)
# In the place of a value of a record.
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**31,
    2**64,
    10**400,
    1.5,
    "",
    "x",
    "../../x",
    "/etc/passwd",
    "a\0b",
    "a\nb",
    "あ",
    "\ud800",
    "x" * 5000,
    "-1",
    "٣",
    "sha256:" + "0" * 64,
    "sha256:../../x",
    "2026-01-01",
    [],
    {},
    [None],
    [[]],
    [{}],
    {"": ""},
    {"a": None},
    ["x"],
    [1],
)


def damage(path: Path, data: bytes, at: int = 0) -> None:
    """Write over a part of a file that may be read-only. Its time of modification and mode stay, as on a bad disk."""
    before = path.stat()
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)
    path.chmod(before.st_mode & 0o7777)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def flip(path: Path, at: int, bit: int = 0) -> None:
    damage(path, bytes([path.read_bytes()[at] ^ 1 << bit]), at)
