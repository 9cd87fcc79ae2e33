"""Damaged records of a store, and images and records of strangers: one sentence, no traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ekiben.core.checked import Fields
from ekiben.core.errors import StoreError, UsageError
from ekiben.core.progress import Progress
from ekiben.inspect._records import published_layers
from ekiben.inspect.describe import describe
from ekiben.inspect.image_reader import open_image
from ekiben.inspect.metadata import CompiledWheel, ImageMetadata
from ekiben.inspect.sbom import sbom_of
from ekiben.store import Store
from support.hostile import NO_RECORDS
from support.sample_recipe import SampleRecipe, edit_record, image_of, seeded


@pytest.fixture
def store(files_only: SampleRecipe, tmp_path: Path) -> Store:
    made = seeded(files_only, tmp_path / "store", "ground")
    image_of(files_only, made)
    return made


@pytest.mark.parametrize(
    "change",
    [
        {"keys": []},
        {"keys": ["x", "y", "z", "w"]},
        {"keys": 3},
        {"config": "sha256:../../x"},
        {"config": "sha256:" + "0" * 64},
        {"stack": None},
        {"manifest": "sha256:" + "0" * 64},
        {"manifest": 3},
        {"tasks": []},
        {"recipe": 1},
    ],
)
def test_damaged_image_record_is_one_error(store: Store, change: dict[str, Any]) -> None:
    path = store.root / "refs/own.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **change}))
    with pytest.raises((StoreError, UsageError)):
        describe("own", store)
    with pytest.raises((StoreError, UsageError)), open_image("own", store):
        pass
    with pytest.raises((StoreError, UsageError)):
        sbom_of("own", store, Progress(quiet=True))


def test_fields_of_a_later_version_are_ignored(store: Store) -> None:
    before = describe("own", store)
    path = store.root / "refs/own.json"
    edit_record(path, provenance={})
    assert describe("own", store) == before


@pytest.mark.parametrize(
    "data", [*NO_RECORDS, b"{}", b'{"file": "../../x", "layers": []}', b'{"file": "x.sif", "layers": [3]}']
)
def test_invalid_published_record_is_an_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(UsageError, match="not a record of a published image: it "):
        published_layers(tmp_path / "x.json")


@pytest.mark.parametrize(
    "data",
    [
        *NO_RECORDS,
        b"{}",
        b'{"recipe": 1}',
        b'{"recipe": "a", "stack": "b", "layers": [1]}',
        b'{"recipe": "a", "stack": "b", "layers": {}}',
        b'{"recipe": "a", "stack": "b", "layers": [], "compiled": 3}',
    ],
)
def test_invalid_image_metadata_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"is not|has no|is nested"):
        ImageMetadata.parse(data)


@pytest.mark.parametrize(
    "source", [3, [], None, {"commit": 3}, {"name": "x"}, {"name": "x", "version": "1", "sha256": [1]}]
)
def test_invalid_wheel_source_is_an_error(source: Any) -> None:
    with pytest.raises(ValueError, match=r"is not|has no"):
        CompiledWheel.parse(Fields.of({"package": "x", "source": source, "cache_key": "k"}))
