"""The bytes that a push sends. tests/integration/test_push.py has a real registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from ekiben.artifacts.exporters.sif import make_sif
from ekiben.formats.sif import SifBytes
from ekiben.store import Store
from support.sample_recipe import SampleRecipe, image_of, seeded


@pytest.fixture
def store(files_only: SampleRecipe, tmp_path: Path) -> Store:
    files_only.write("files/data.txt", str(tmp_path) * 1000)  # each test's image is another one
    return seeded(files_only, tmp_path / "store", "ground")


def test_pushed_sif_equals_the_written_file(files_only: SampleRecipe, store: Store, tmp_path: Path) -> None:
    from ekiben.artifacts.push import sif_bytes

    image = image_of(files_only, store)
    made = make_sif(image, store, tmp_path / "x.sif", squash=False, on_bytes=lambda count: None)
    data = (tmp_path / "x.sif").read_bytes()
    sif: SifBytes = sif_bytes(image, store)
    assert sif.size == made.size == len(data)
    for offset in (0, 1, 4095, 32768, sif.size // 2, sif.size - 1, sif.size):
        assert b"".join(sif.read(offset)) == data[offset:]
