"""Archives of sources that are damaged, or that somebody made to do harm."""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError
from ekiben.packages.sources import build_requirements
from support.tars import plain_tar

PROJECT = b'[build-system]\nrequires = ["hatchling"]\n' + b"# remark\n" * 2000
TAR = plain_tar({"roof-1.0/pyproject.toml": PROJECT})


def zipped(compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        archive.writestr("roof-1.0/pyproject.toml", PROJECT)
    return out.getvalue()


def with_flag(data: bytes) -> bytes:
    """Return a zip whose file is said to be encrypted, in both of its headers."""
    central = data.index(b"PK\x01\x02")
    return data[:6] + b"\x01" + data[7 : central + 8] + b"\x01" + data[central + 9 :]


def with_damage(data: bytes, at: int, length: int = 40) -> bytes:
    return data[:at] + b"\xff" * length + data[at + length :]


def with_size(size: int) -> bytes:
    """Return a tar whose first file says that it has ``size`` bytes."""
    header = tarfile.TarInfo("roof-1.0/zeros")
    header.size = size
    return header.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


@pytest.mark.parametrize("make", [lambda: gzip.compress(TAR), lambda: lzma.compress(TAR), lambda: TAR, zipped])
def test_requirements_of_a_build_are_read(make: Callable[[], bytes], tmp_path: Path) -> None:
    (path := tmp_path / "roof-1.0").write_bytes(make())
    assert build_requirements(path, "roof 1.0") == ["hatchling"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: with_flag(zipped()),
        lambda: with_damage(zipped(), 60),
        lambda: with_damage(zipped(zipfile.ZIP_LZMA), 70, 20),
        lambda: with_damage(gzip.compress(TAR), 40),
        lambda: gzip.compress(TAR)[:60],
        lambda: with_damage(lzma.compress(TAR), 60),
        lambda: with_size(17 << 30),
    ],
    ids=["encrypted", "zip", "zip with LZMA", "gzip", "cut", "xz", "17 GiB"],
)
def test_archive_that_cannot_be_read_is_refused(make: Callable[[], bytes], tmp_path: Path) -> None:
    (path := tmp_path / "roof-1.0").write_bytes(make())
    with pytest.raises(DefinitionError, match=r"roof 1\.0: its source (cannot be read|unpacks to more)"):
        build_requirements(path, "roof 1.0")
