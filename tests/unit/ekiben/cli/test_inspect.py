"""`inspect` of files that are no SIF, or a damaged one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ekiben.artifacts.exporters.sif import make_sif
from ekiben.core.errors import EkibenError
from ekiben.inspect.describe import describe
from ekiben.inspect.text import format_description
from support.sample_recipe import RunCli, SampleRecipe, image_of, seeded


@pytest.mark.parametrize("junk", [b"", b"x" * 10, b"\0" * 70_000, b"#!/bin/sh\n" * 9000])
def test_inspect_of_a_file_that_is_no_sif_is_an_error(run_cli: RunCli, tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "x.sif").write_bytes(junk)
    assert "x.sif: not a SIF file" in run_cli("inspect", "x.sif", code=6).stderr


def test_inspect_of_a_missing_file_or_folder_is_an_error(run_cli: RunCli) -> None:
    assert "none.sif is not there" in run_cli("inspect", "none.sif", code=2).stderr
    assert "./: no recipe.yaml there, and it is not a SIF file" in run_cli("inspect", "./", code=2).stderr


def test_inspect_of_a_damaged_sif_gives_no_traceback(files_only: SampleRecipe, tmp_path: Path) -> None:
    """Any bytes in its head: never a traceback."""
    store = seeded(files_only, tmp_path / "store", "ground")
    make_sif(image_of(files_only, store), store, tmp_path / "x.sif", squash=False)
    intact, rng = (tmp_path / "x.sif").read_bytes(), random.Random(1)
    for _ in range(300):
        data = bytearray(intact[: rng.choice([len(intact), rng.randrange(len(intact))])])
        for _ in range(rng.randrange(1, 9)):
            data[rng.randrange(32, min(len(data), 4096 + 585 * 4)) if len(data) > 40 else 0] = rng.randrange(256)
        (tmp_path / "y.sif").write_bytes(data)
        try:
            assert "y.sif" in format_description(describe(str(tmp_path / "y.sif"), store))
        except EkibenError as error:
            assert "y.sif" in str(error)
