"""SIFs on a file system whose files can share blocks."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ekiben.core.errors import StoreError
from ekiben.formats.partition import Partition
from ekiben.formats.sif import SifHeader, write_sif
from support.small_disk import mount_xfs
from support.small_sifs import DEFFILE, ID, blob

pytestmark = pytest.mark.covers("ekiben/formats", "ekiben/store")
SIZE = 24 << 20


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Path]:
    with mount_xfs(tmp_path / "xfs") as folder:
        yield folder


def used_bytes(folder: Path) -> int:
    os.sync()
    stats = os.statvfs(folder)
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize


def layers_in(folder: Path) -> list[Partition]:
    layers = [os.urandom(SIZE), os.urandom(4096), os.urandom(5000)]  # the last is no multiple of a block
    return [blob(folder / f"layer{number}", data) for number, data in enumerate(layers)]


def sif_of(layers: list[Partition], out: Path) -> str:
    """Return the SHA-256 that write_sif() finds."""
    sha = hashlib.sha256()
    write_sif(out, layers, SifHeader(ID, DEFFILE, "amd64", 0), file_hash=sha)
    return sha.hexdigest()


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_sif_shares_the_blocks_of_its_layers_and_has_the_same_bytes(
    xfs: Path, tmp_path: Path, is_checked: bool
) -> None:
    layers = [replace(layer, is_checked=is_checked) for layer in layers_in(xfs)]
    elsewhere = sif_of(layers, tmp_path / "x.sif")  # another file system: copied
    before = used_bytes(xfs)
    assert sif_of(layers, xfs / "x.sif") == elsewhere
    assert used_bytes(xfs) - before < SIZE / 4
    assert (xfs / "x.sif").read_bytes() == (tmp_path / "x.sif").read_bytes()
    assert hashlib.sha256((xfs / "x.sif").read_bytes()).hexdigest() == elsewhere


def test_a_damaged_layer_is_reported_though_its_blocks_are_shared(xfs: Path) -> None:
    layers = layers_in(xfs)
    with Path(str(layers[0].path)).open("r+b") as stream:
        stream.seek(SIZE // 2)
        stream.write(b"damage")
    with pytest.raises(StoreError, match="should be sha256:"):
        sif_of(layers, xfs / "x.sif")
    assert not (xfs / "x.sif").exists()


def test_a_layer_of_another_sif_is_shared(xfs: Path) -> None:
    layers = layers_in(xfs)
    sif_of(layers, xfs / "one.sif")
    data = (xfs / "one.sif").read_bytes()
    offset = data.index(Path(str(layers[0].path)).read_bytes())
    layer = replace(layers[0], path=xfs / "one.sif", offset=offset)
    before = used_bytes(xfs)
    sif_of([layer, *layers[1:]], xfs / "two.sif")
    assert used_bytes(xfs) - before < SIZE / 4
    assert subprocess.run(["cmp", xfs / "one.sif", xfs / "two.sif"], check=False).returncode == 0
