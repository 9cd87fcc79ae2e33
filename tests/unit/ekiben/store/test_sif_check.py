"""A SIF is an image's when all of its bytes are: only then it is called present, or a check of it recorded."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest

from ekiben.artifacts.exporters.sif import make_sif
from ekiben.builder.verify import verify_image, verify_sif
from ekiben.core.errors import StoreError, UsageError, VerifyError
from ekiben.formats.sif import read_sif
from ekiben.store import Image, Store, check_sif
from support.hostile import flip
from support.programs import write_program
from support.sample_recipe import RunCli, SampleRecipe, chain_of, image_of, seeded
from support.small_sifs import small_sif


@pytest.fixture
def image(files_only: SampleRecipe, store: Store) -> Image:
    return image_of(files_only, store)


@pytest.mark.parametrize("squash", [False, True])
def test_sif_with_flipped_bit_is_written_again(image: Image, store: Store, tmp_path: Path, squash: bool) -> None:
    out = tmp_path / "x.sif"
    assert make_sif(image, store, out, squash=squash).created
    intact, rng = out.read_bytes(), random.Random(1)
    assert not make_sif(image, store, out, squash=squash).created
    for part in read_sif(out).descriptors:
        flip(out, part.offset + rng.randrange(part.size))
        with pytest.raises(VerifyError, match="is not own as it was made"):
            check_sif(image, out, store)
        assert make_sif(image, store, out, squash=squash).created
        assert out.read_bytes() == intact


def test_flipped_bit_of_header_or_table_is_detected(image: Image, store: Store, tmp_path: Path) -> None:
    out = tmp_path / "x.sif"
    make_sif(image, store, out, squash=False)
    for at in (33, 42, 45, 50, 4096, 4096 + 585 + 13, 4096 + 2 * 585 + 30, 4096 + 2 * 585 + 200):
        flip(out, at)
        with pytest.raises((VerifyError, StoreError)):
            check_sif(image, out, store)
        flip(out, at)
    check_sif(image, out, store)


def test_every_flipped_bit_outside_the_data_is_detected(image: Image, store: Store, tmp_path: Path) -> None:
    """Of the padding, too, which nobody reads: equal files are promised."""
    out, rng = tmp_path / "x.sif", random.Random(2)
    make_sif(image, store, out, squash=False)
    intact = out.read_bytes()
    spans = [(item.offset, item.offset + item.size) for item in read_sif(out).descriptors]
    padding = [(end, start) for (_, end), (start, _) in itertools.pairwise(spans) if start > end]
    assert padding
    positions = [
        *range(128),
        *(rng.randrange(128, spans[0][0]) for _ in range(60)),
        *(at for start, end in padding for at in (start, end - 1, rng.randrange(start, end))),
    ]
    for at in positions:
        flip(out, at)
        with pytest.raises((VerifyError, StoreError)):
            check_sif(image, out, store)
        flip(out, at)
    with out.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(VerifyError, match="bytes instead of"):
        check_sif(image, out, store)
    assert make_sif(image, store, out, squash=False).created
    assert out.read_bytes() == intact


@pytest.mark.parametrize("field", ["config", "manifest"])
def test_a_damaged_config_or_manifest_is_written_again_by_a_build(
    files_only: SampleRecipe, image: Image, store: Store, field: str
) -> None:
    ref = store.images()[image.name]
    path = store.blob_path(ref["config"] if field == "config" else ref["manifest"])
    intact = path.read_bytes()
    flip(path, 20)
    assert image_of(files_only, store) == image
    assert path.read_bytes() == intact


def test_unchanged_file_read_once(image: Image, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "x.sif"
    make_sif(image, store, out, squash=False)
    monkeypatch.setattr("ekiben.store.sif_check.difference", lambda *_: pytest.fail("it is read again"))
    check_sif(image, out, store)


def test_a_squashed_sif_from_elsewhere_is_compared_by_its_files(
    files_only: SampleRecipe, image: Image, store: Store, tmp_path: Path
) -> None:
    make_sif(image, store, tmp_path / "x.sif", squash=True)
    other = seeded(files_only, tmp_path / "other", "ground")
    image_of(files_only, other)
    check_sif(image, tmp_path / "x.sif", other)
    third = seeded(files_only, tmp_path / "third", "ground")
    image_of(files_only, third)
    part = read_sif(tmp_path / "x.sif").layers[0]
    flip(tmp_path / "x.sif", part.offset + 110)
    with pytest.raises(VerifyError, match="is not own as it was made"):
        check_sif(image, tmp_path / "x.sif", third)


def test_tests_of_another_image_are_not_run_nor_recorded(
    files_only: SampleRecipe, image: Image, store: Store, tmp_path: Path
) -> None:
    other = tmp_path / "other.sif"
    files_only.recipe(layer="ground", description="another")
    make_sif(image_of(files_only, store), store, other, squash=False)
    before = sorted((store.root / "checks").iterdir())
    with pytest.raises(
        VerifyError, match=r"other\.sif is not own: it was built of other layers, or by an earlier version"
    ):
        verify_sif(image, other, store, print)
    assert sorted((store.root / "checks").iterdir()) == before


@pytest.mark.parametrize("what", ["missing.sif", "."])
def test_requested_sif_must_exist(files_only: SampleRecipe, store: Store, tmp_path: Path, what: str) -> None:
    files_only.recipe(layer="ground")
    image_of(files_only, store)
    with pytest.raises(UsageError, match=r"--sif: .* is not"):
        verify_image(chain_of(files_only), store, tmp_path / what)


@pytest.mark.parametrize("what", ["missing.sif", "."])
def test_run_refuses_a_sif_that_is_not_there(run_cli: RunCli, what: str) -> None:
    assert f"--sif: {what} is not" in run_cli("run", "--dry-run", "--sif", what, "hello", "hello", code=2).stderr


def test_run_refuses_a_sif_where_the_runtime_takes_none(run_cli: RunCli, tmp_path: Path) -> None:
    small_sif(tmp_path / "x.sif")
    tools = tmp_path / "bin"
    write_program(tools / "docker", "#!/bin/sh\nexit 1\n")
    argv = ("run", "--dry-run", "--cpu", "--runtime", "docker", "--sif", "x.sif", "hello", "hello")
    stderr = run_cli(*argv, code=2, env={"PATH": f"{tools}:{os.environ['PATH']}"}).stderr
    assert "--sif: docker cannot run a SIF" in stderr


def test_a_noted_file_that_cannot_be_looked_up_is_no_reason_to_refuse_a_new_one(
    image: Image, store: Store, tmp_path: Path
) -> None:
    """It is in a folder that another user may enter, say; for root, its name is too long."""
    header = image.sif_header(store)
    unknown = f"/{'x' * 300}/own.sif"
    store.put_check(f"sif-files-{header.id}", {"files": {unknown: "1 2 3"}, "sha256": {}})
    assert make_sif(image, store, tmp_path / "x.sif", squash=False).created
    check_sif(image, tmp_path / "x.sif", store)
    noted = store.check(f"sif-files-{header.id}")
    assert noted
    assert unknown not in noted["files"]
