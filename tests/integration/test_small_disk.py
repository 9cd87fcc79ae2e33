"""Files that do not fit on the file system: a small one, mounted by root."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.core.errors import StoreError
from ekiben.formats.sif import SifHeader, write_sif
from support.small_disk import mount_tmpfs
from support.small_sifs import ID, blob, make

pytestmark = pytest.mark.covers("ekiben/formats", "ekiben/store")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mount_tmpfs(tmp_path / "disk", "size=1m") as disk:
        yield disk


def test_full_disk_names_needed_bytes_and_folder(tmp_path: Path, small_disk: Path) -> None:
    out = small_disk / "x.sif"
    full = rf"{out} cannot be written: {os.strerror(errno.ENOSPC)}; it needs 3.0 MB"
    with pytest.raises(StoreError, match=full) as caught:
        make(out, blob(tmp_path / "a", bytes(3_000_000)))
    assert caught.value.hint and "-o" in caught.value.hint
    assert not list(small_disk.iterdir())


def test_disk_that_fills_while_writing(tmp_path: Path, small_disk: Path) -> None:
    layers = [blob(tmp_path / "a", b"a" * 70_000), blob(tmp_path / "b", bytes(900_000))]
    other = small_disk / "other"

    def fill_up(_: int) -> None:
        other.write_bytes(bytes(140_000))

    with pytest.raises(StoreError, match=os.strerror(errno.ENOSPC)):
        write_sif(small_disk / "x.sif", layers, SifHeader(ID, "", "amd64", 0), on_bytes=fill_up)
    assert list(small_disk.iterdir()) == [other]
