"""Records that somebody else wrote, or a disk damaged: no path outside the store, no traceback."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ekiben.core.checked import Fields, with_checksum, without_checksum
from ekiben.core.errors import StoreError
from ekiben.core.files import digest_of
from ekiben.store import Store, StoredLayer, prune
from ekiben.store._records import Kind
from ekiben.store.shared import IMAGES, SharedStore
from support.hostile import NO_BASENAMES, NO_RECORDS

ESCAPES = ["sha256:../../../precious", "sha256:/precious", "../../precious", "sha256:", "sha256:" + "A" * 64]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "a/b/store")
    made.open_for_writing()
    return made


def layer_of(data: bytes, **changes: Any) -> dict[str, Any]:
    return {
        "name": "base",
        "cache_key": "k1",
        "diff_id": digest_of(b"tar"),
        "tar_size": 9,
        "digest": digest_of(data),
        "size": len(data),
        "executor": "none",
        "seconds": 0.1,
        "inputs": {"post": "x"},
        "notes": {},
        **changes,
    }


def put_record(store: Store, record: Any, name: str = "keys/k1.json") -> None:
    store.put_blob(b"layer")
    (store.root / name).write_bytes(record if isinstance(record, bytes) else json.dumps(record).encode())


@pytest.mark.parametrize("digest", ESCAPES)
def test_only_a_digest_is_a_path_in_the_store(store: Store, tmp_path: Path, digest: str) -> None:
    precious = tmp_path / "a/b/precious"
    for path in (precious, store.root / "blobs/precious", tmp_path / "precious"):
        path.write_text("x")
    for use in (store.blob_path, store.drop_blob, store.get_blob, store.find, store.check_blob):
        with pytest.raises(StoreError, match="is not a digest"):
            use(digest)
    assert precious.exists()
    assert (store.root / "blobs/precious").exists()


@pytest.mark.parametrize("name", NO_BASENAMES)
def test_a_name_that_is_no_file_name_is_not_written(store: Store, tmp_path: Path, name: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreError, match="does not name a record"):
        store.note_last(name, "k")
    with pytest.raises(StoreError, match="does not name a record"):
        store.put_check(f"{name}/x", {})
    assert sorted(tmp_path.rglob("*")) == before


def flipped(data: bytes) -> Iterator[bytes]:
    """Yield ``data`` with one bit of one byte changed, for each byte."""
    for at, byte in enumerate(data):
        yield data[:at] + bytes([byte ^ 1]) + data[at + 1 :]


def test_a_record_with_a_flipped_bit_is_none_or_the_same(store: Store) -> None:
    store.put_blob(b"layer")
    store.put_layer(StoredLayer.parse(Fields.of(layer_of(b"layer"))))
    layer, path = store.layer("k1"), store.root / "keys/k1.json"
    assert layer is not None
    for data in flipped(path.read_bytes()):
        path.write_bytes(data)
        assert store.layer("k1") in (None, layer), data


@pytest.mark.parametrize("kind", ["checks", "refs", "results"])
def test_every_kind_of_record_has_a_checksum(store: Store, kind: Kind) -> None:
    store.records.write(kind, "one", {"sha256": "0" * 64})
    path = store.root / kind / "one.json"
    assert store.records.read(kind, "one") == {"sha256": "0" * 64}
    path.write_bytes(path.read_bytes().replace(b"00", b"01", 1))
    assert store.records.read(kind, "one") is None


@pytest.mark.parametrize("complete", [with_checksum, dict])
def test_fields_of_a_later_version_are_ignored(store: Store, complete: Callable[[Any], Any]) -> None:
    put_record(store, complete(layer_of(b"layer", signed_by="a later version")))
    assert store.layer("k1") == StoredLayer.parse(Fields.of(layer_of(b"layer")))


def test_names_of_older_stores_are_read(store: Store) -> None:
    put_record(store, layer_of(b"layer", notes={"handed over": {"/opt/x.whl": "a"}, "drift": ["x 1 → 2"]}))
    layer = store.layer("k1")
    assert layer is not None
    assert dict(layer.notes) == {"outputs": {"/opt/x.whl": "a"}, "drift": ["x 1 → 2"]}
    (store.root / "learnt").mkdir()
    (store.root / "learnt/tiny.json").write_text('{"units": 3}')
    assert store.compile_stats("tiny") == {"units": 3}
    store.put_compile_stats("tiny", {"units": 4})
    assert store.compile_stats("tiny") == {"units": 4}
    assert without_checksum(json.loads((store.root / "compile_stats/tiny.json").read_text())) == {"units": 4}


DAMAGED = [
    *NO_RECORDS,
    {},
    layer_of(b"layer", digest="sha256:../../x"),
    layer_of(b"layer", digest=None),
    layer_of(b"layer", size=-1),
    layer_of(b"layer", size="5"),
    layer_of(b"layer", name="../x"),
    layer_of(b"layer", cache_key="../k1"),
    layer_of(b"layer", cache_key="other"),
    layer_of(b"layer", notes=[]),
]


@pytest.mark.parametrize("record", DAMAGED)
def test_a_damaged_layer_record_is_no_record(store: Store, record: Any) -> None:
    put_record(store, record)
    assert store.layer("k1") is None
    store.last_inputs("base")
    prune(store)


@pytest.mark.parametrize(
    "record", [b"\xff", {}, {"manifest": "sha256:../x", "config": "x", "keys": []}, {"keys": 3}, [1], {"manifest": {}}]
)
def test_a_damaged_image_record_is_no_image(store: Store, record: Any) -> None:
    put_record(store, record, "refs/one.json")
    assert store.image("one") is None
    assert store.images() == {}
    assert prune(store, dry_run=True) is not None
    prune(store)


@pytest.mark.parametrize("record", [b"\xff", {}, {"files": 3}, {"files": [{"digest": "sha256:../x"}]}, {"files": [3]}])
def test_a_damaged_result_is_no_result(store: Store, record: Any) -> None:
    put_record(store, record, "results/r.json")
    assert store.result("r") is None
    assert store.results() == []
    prune(store)


@pytest.mark.parametrize("record", [b"\xff", b"\x80abc", b"[", b"{}"])
def test_damaged_check_record_is_rechecked(store: Store, record: bytes) -> None:
    digest = store.put_blob(b"data")
    (store.root / "checks" / digest[7:]).write_bytes(record)
    (store.root / "checks/x.json").write_bytes(record)
    store.check_blob(digest)
    assert store.check("x") in (None, {})


def test_a_record_with_a_key_that_is_a_link_or_a_pipe_is_no_record(store: Store, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text(json.dumps(layer_of(b"layer")))
    put_record(store, b"")
    (store.root / "keys/k1.json").unlink()
    (store.root / "keys/k1.json").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(store.root / "keys/k2.json")
    assert store.layer("k1") is None
    assert store.layer("k2") is None


# ------------------------------------------------------------------------------------------------------ a shared folder


@pytest.fixture
def shared(tmp_path: Path) -> SharedStore:
    made = SharedStore(tmp_path / "lab")
    made.open_for_writing()
    return made


def link_layer(shared: SharedStore, target: str, name: str = "0-5-x.sif") -> str:
    digest = digest_of(b"bytes")
    folder = shared.root / "layers" / digest[7:]
    folder.mkdir()
    (folder / name).symlink_to(target)
    return digest


def test_a_layer_is_found_in_an_image_of_its_own_folder_only(shared: SharedStore, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/x.sif").write_bytes(b"bytes")
    (shared.shared_dir / IMAGES / "own").mkdir()
    (shared.shared_dir / IMAGES / "own/real.sif").write_bytes(b"bytes")
    digest = link_layer(shared, "../../../images/own/real.sif")
    folder = shared.root / "layers" / digest[7:]
    assert shared.find(digest) is not None
    (shared.shared_dir / IMAGES / "linked").symlink_to(tmp_path / "home")
    (shared.shared_dir / IMAGES / "own/link.sif").symlink_to(tmp_path / "home/x.sif")
    for target in (
        "../../../../home/x.sif",
        str(tmp_path / "home/x.sif"),
        "../../../images/linked/x.sif",
        "../../../images/own/link.sif",
        "../../../images/../../home/x.sif",
    ):
        (folder / "0-5-x.sif").unlink()
        (folder / "0-5-x.sif").symlink_to(target)
        assert shared.find(digest) is None, target


@pytest.mark.parametrize("stray", ["README", "a-b", "--", "-5-5-x.sif", "x-y-z.sif"])
def test_stray_file_beside_layer_links_is_ignored(shared: SharedStore, stray: str) -> None:
    digest = link_layer(shared, "../../../images/own/none.sif")
    (shared.root / "layers" / digest[7:] / stray).write_bytes(b"bytes")
    (shared.root / "layers/stray").write_text("x")
    (shared.root / "keys/stray.json").write_bytes(b"\xff")
    assert shared.find(digest) is None
    shared.drop_dangling()


def test_damaged_usage_record_keeps_and_breaks_nothing(shared: SharedStore) -> None:
    (shared.root / "staging/x").mkdir()
    (shared.root / "staging/x/needed").write_bytes(b"k1 \xff k2")
    (shared.root / "staging/y/needed").mkdir(parents=True)
    assert {"k1", "k2"} <= shared.announced_keys()


def test_nothing_is_written_through_a_link(shared: SharedStore, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (shared.shared_dir / IMAGES / "own").symlink_to(tmp_path / "home")
    with pytest.raises(StoreError, match="is a link"):
        shared.policy.make_folder(shared.folder / IMAGES / "own")


def test_stray_file_in_the_trash_is_ignored(shared: SharedStore) -> None:
    for name in ("\u00b2__aa__x", "README", "__"):
        (shared.shared_dir / "trash" / name).write_text("x")
    assert shared.empty_trash(0, dry_run=False) == 0
    assert len(list((shared.shared_dir / "trash").iterdir())) == 3
