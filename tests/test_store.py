"""The store: never half a file, nothing removed that is needed, and every error a sentence."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.errors import StoreError, UsageError
from builder.oci import digest_of, store_manifest
from builder.store import MEDIA_MANIFEST, CorruptBlob, Store, StoredLayer, _identity
from own_recipe import becomes_empty

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.open_for_writing()
    return made


def put(store: Store, name: str, data: bytes = b"layer", key: str = "k1") -> StoredLayer:
    with store.staging() as staging:
        (staging / "blob").write_bytes(data)
        store.put_file(staging / "blob", digest_of(data))
    layer = StoredLayer(name=name, cache_key=key, diff_id="sha256:d", tar_size=9, digest=digest_of(data), size=len(data),
                        executor="none", seconds=0.1, inputs={"post": "x"}, notes={"a": [1]})  # fmt: skip
    store.put_layer(layer)
    return layer


def name_image(store: Store, name: str, *layers: StoredLayer) -> str:
    """An image of these layers; the digest of its manifest."""
    config = json.dumps({"name": name}).encode()
    store.put_blob(config)
    about = {"config": digest_of(config), "keys": [layer.cache_key for layer in layers]}
    return str(store.put_image(name, store_manifest(config, layers), about)["manifest"])


def age(store: Store, seconds: float = 3600) -> None:
    for path in (store.root / "blobs/sha256").iterdir():
        os.utime(path, (time.time() - seconds, time.time() - seconds))


def blobs(store: Store) -> set[str]:
    return {"sha256:" + path.name for path in (store.root / "blobs/sha256").iterdir()}


# ---------------------------------------------------------------------------------------------------------- put and get


def test_a_store_that_is_only_read_is_not_made(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    assert store.layer("k") is None
    assert store.image("x") is None
    assert store.images() == {}
    assert store.last_inputs("x") is None
    assert list(tmp_path.iterdir()) == []


def test_put_and_look_up(store: Store) -> None:
    layer = put(store, "base")
    again = Store(store.root)
    assert again.layer("k1") == layer
    assert again.layer("k2") is None
    assert again.last_inputs("base") == {"post": "x"}
    assert again.blob_path(layer.digest).stat().st_mode & 0o777 == 0o444
    assert list((store.root / "staging").iterdir()) == []


def test_it_is_an_oci_image_layout(store: Store) -> None:
    manifest = name_image(store, "one", put(store, "base"))
    assert json.loads((store.root / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    (entry,) = json.loads((store.root / "index.json").read_text())["manifests"]
    data = store.get_blob(manifest)
    assert entry == {"mediaType": MEDIA_MANIFEST, "digest": manifest, "size": len(data),
                     "annotations": {"org.opencontainers.image.ref.name": "one"}}  # fmt: skip
    assert (store.root / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")


def test_the_same_image_again_writes_nothing(store: Store) -> None:
    layer = put(store, "base")
    name_image(store, "one", layer)
    before = {path: path.stat().st_mtime_ns for path in store.root.rglob("*") if path.is_file()}
    name_image(store, "one", layer)
    assert before == {path: path.stat().st_mtime_ns for path in store.root.rglob("*") if path.is_file()}


def test_a_layer_whose_blob_is_gone_or_short_is_not_there(store: Store) -> None:
    layer = put(store, "base")
    store.blob_path(layer.digest).chmod(0o644)
    store.blob_path(layer.digest).write_bytes(b"lay")
    assert store.layer("k1") is None
    store.blob_path(layer.digest).unlink()
    assert store.layer("k1") is None
    assert store.last_inputs("base") == {"post": "x"}


@pytest.mark.parametrize("junk", [b"", b"{", b"\xff\xfe", b"[1]"])
def test_a_record_that_cannot_be_read_is_none(store: Store, junk: bytes) -> None:
    put(store, "base")
    (store.root / "keys/k1.json").write_bytes(junk)
    assert store.layer("k1") is None


# -------------------------------------------------------------------------------------------------------- damaged blobs


def test_damage_is_found_on_reading(store: Store) -> None:
    layer = put(store, "base")
    store.check_blob(layer.digest)
    path = store.blob_path(layer.digest)
    path.chmod(0o644)
    path.write_bytes(b"lyaer")
    for read in (store.get_blob, store.check_blob):
        with pytest.raises(CorruptBlob, match=f"blob {layer.digest} is damaged: {path} has other bytes") as caught:
            read(layer.digest)
        assert caught.value.digest == layer.digest
        assert caught.value.exit_code == 6


def test_a_blob_is_read_once_until_it_changes_or_one_asks_again(store: Store) -> None:
    layer = put(store, "base")
    path = store.blob_path(layer.digest)
    store.check_blob(layer.digest)
    stat = path.stat()
    path.chmod(0o644)
    path.write_bytes(b"lyaer")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # set back, and found all the same
    with pytest.raises(CorruptBlob):
        store.check_blob(layer.digest)
    (store.root / "checks" / path.name).write_text(_identity(path))  # as damage that nobody wrote looks
    store.check_blob(layer.digest)
    with pytest.raises(CorruptBlob):
        store.check_blob(layer.digest, again=True)


def test_a_missing_blob(store: Store) -> None:
    missing = digest_of(b"never")
    with pytest.raises(StoreError, match=r"is not in .*store: No such file"):
        store.get_blob(missing)
    with pytest.raises(StoreError, match=r"cannot be read: .*: No such file"):
        store.check_blob(missing)


def test_a_dropped_blob_is_made_again(store: Store) -> None:
    layer = put(store, "base")
    store.check_blob(layer.digest)
    store.drop_blob(layer.digest)
    assert store.layer("k1") is None
    assert put(store, "base") == store.layer("k1")


# ------------------------------------------------------------------------------------------------------- never half a file


def test_no_reader_sees_half_a_record(store: Store) -> None:
    """A writer replaces one image's record as fast as it can; every read is whole."""
    layer, stop = put(store, "base"), threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            store.put_image(
                "one", store_manifest(b"{}", [layer]), {"keys": ["k1"] * (number % 50), "config": str(number)}
            )

    thread = threading.Thread(target=write)
    store.put_image("one", store_manifest(b"{}", [layer]), {"keys": [], "config": "0"})
    thread.start()
    seen = set()
    try:
        for _ in range(300):
            image = store.image("one")
            assert image is not None
            assert len(image["keys"]) == int(image["config"]) % 50
            assert "one" in store.images()
            json.loads((store.root / "index.json").read_bytes())
            seen.add(image["config"])
    finally:
        stop.set()
        thread.join()
    assert len(seen) > 1


def test_staging_is_gone_whatever_happened(store: Store) -> None:
    with pytest.raises(KeyboardInterrupt), store.staging() as staging:
        (staging / "half").write_text("x")
        raise KeyboardInterrupt
    assert list((store.root / "staging").iterdir()) == []


def test_what_dead_processes_left_is_removed_and_what_live_ones_use_is_kept(store: Store) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from builder.store import Store\n"
        "store = Store(Path(sys.argv[1]))\n"
        "with store.staging() as staging:\n"
        "    (staging / 'half').write_text('x'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for _ in range(3):
        subprocess.run([sys.executable, "-c", script, store.root], cwd=ROOT, check=False)
    staging, host = store.root / "staging", socket.gethostname()
    assert len(list(staging.iterdir())) == 3
    left = next(staging.iterdir()).name.split("__")[1]
    for rest in ("_abc", "a__b", "__"):  # tempfile's names may hold underscores
        (staging / f"{host}__{left}__{rest}").mkdir()
    (staging / f"{host}__{left}__write").write_text("half a record")
    (staging / f"otherhost__{left}__a").mkdir()
    with store.staging() as mine:
        store.open_for_writing()
        assert {path.name for path in staging.iterdir()} == {mine.name, f"otherhost__{left}__a"}


def test_two_processes_put_the_same_layer_at_once(store: Store) -> None:
    script = (
        "import sys; from pathlib import Path; from builder.store import Store, StoredLayer; from builder.oci import digest_of\n"
        "store, data = Store(Path(sys.argv[1])), b'x' * 1_000_000\n"
        "store.open_for_writing()\n"
        "for number in range(20):\n"
        "    with store.staging() as staging:\n"
        "        (staging / 'blob').write_bytes(data)\n"
        "        store.put_file(staging / 'blob', digest_of(data))\n"
        "    store.put_layer(StoredLayer(name='a', cache_key='k', diff_id='d', tar_size=1, digest=digest_of(data), size=len(data),\n"
        "        executor='none', seconds=0, inputs={}))\n"
        "    store.check_blob(digest_of(data), again=True)\n"
        "    assert store.layer('k')\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", script, store.root], cwd=ROOT) for _ in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    assert len(blobs(store)) == 1


def test_a_lock_makes_the_second_wait(store: Store) -> None:
    order: list[str] = []

    def second() -> None:
        with store.lock("k", lambda: order.append("waits")):
            order.append("second")

    with store.lock("k", lambda: order.append("never")):
        thread = threading.Thread(target=second)
        thread.start()
        deadline = time.monotonic() + 5
        while not order and time.monotonic() < deadline:
            time.sleep(0.01)
        order.append("first")
    thread.join()
    assert order == ["waits", "first", "second"]


def test_without_a_place_for_locks_work_goes_on(store: Store) -> None:
    (store.root / "locks").rmdir()
    with store.lock("k", lambda: None):
        pass


# ------------------------------------------------------------------------------------------------------ places that refuse


def test_another_version(store: Store) -> None:
    (store.root / "version").write_text("7\n")
    with pytest.raises(
        StoreError, match=f"{store.root} is a store of version 7; this Ekiben reads version 2"
    ) as caught:
        Store(store.root)
    assert caught.value.hint == Store.elsewhere


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    for place in (tmp_path / "file", tmp_path / "file/store"):
        (tmp_path / "file").write_text("x")
        with pytest.raises(StoreError, match=f"the store {place} cannot be written") as caught:
            Store(place).open_for_writing()
        assert "--store" in str(caught.value.hint)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """1 MiB of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=False).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk(mounted: Path) -> None:
    store = Store(mounted / "store")
    store.open_for_writing()
    kept = put(store, "base")
    with (
        pytest.raises(StoreError, match=rf"no room in {store.root}: \d\.\d GB free") as caught,
        store.staging() as staging,
    ):
        (staging / "blob").write_bytes(bytes(2 << 20))
    assert "build.py prune" in str(caught.value.hint)
    assert list((store.root / "staging").iterdir()) == []
    assert store.layer("k1") == kept
    (mounted / "filler").write_bytes(bytes(shutil.disk_usage(mounted).free))
    with pytest.raises(StoreError, match="no room in"):
        store.put_blob(b"x" * 5000)
    assert blobs(store) == {kept.digest}


def test_a_store_that_can_only_be_read(mounted: Path) -> None:
    store = Store(mounted / "store")
    store.open_for_writing()
    layer = put(store, "base")
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    again = Store(store.root)
    again.check_blob(layer.digest)
    assert again.layer("k1") == layer
    with pytest.raises(
        StoreError, match=f"the store {store.root} cannot be written: {os.strerror(errno.EROFS)}"
    ) as caught:
        again.open_for_writing()
    assert "--store" in str(caught.value.hint)


# ------------------------------------------------------------------------------------------------------------- pruning


def test_prune_keeps_what_images_reach(store: Store) -> None:
    kept, dropped = put(store, "base", b"kept"), put(store, "old", b"dropped", "k2")
    manifest = name_image(store, "one", kept)
    age(store)
    assert store.prune(dry_run=True) == [(dropped.digest, 7)]
    assert dropped.digest in blobs(store)
    assert store.layer("k2") == dropped
    assert store.prune() == [(dropped.digest, 7)]
    assert blobs(store) == {kept.digest, manifest, store.images()["one"]["config"]}
    assert store.layer("k2") is None
    assert not (store.root / "keys/k2.json").exists()
    assert store.prune() == []


def test_prune_forgets_the_named_images(store: Store) -> None:
    shared, own = put(store, "base", b"shared"), put(store, "own", b"own", "k2")
    name_image(store, "one", shared)
    name_image(store, "two", shared, own)
    age(store)
    would = store.prune(forget=["two"], dry_run=True)
    assert set(store.images()) == {"one", "two"}
    assert store.prune(forget=["two"]) == would
    assert set(store.images()) == {"one"}
    assert [entry["annotations"] for entry in json.loads((store.root / "index.json").read_text())["manifests"]] == [
        {"org.opencontainers.image.ref.name": "one"}
    ]
    assert own.digest not in blobs(store)
    assert shared.digest in blobs(store)


def test_prune_of_an_unknown_image_does_nothing(store: Store) -> None:
    name_image(store, "one", put(store, "base"))
    with pytest.raises(UsageError, match=r"no image 'oen' in .*; nothing was removed\. Did you mean 'one'\?"):
        store.prune(forget=["one", "oen"])
    assert set(store.images()) == {"one"}


@pytest.mark.parametrize("tag", [None, "Signature: 8a477f597d28d172789f06886806bc55\n# Written by another program\n"])
def test_prune_of_a_folder_that_is_no_store(tmp_path: Path, tag: str | None) -> None:
    (tmp_path / "blobs/sha256").mkdir(parents=True)
    (tmp_path / "blobs/sha256/precious").write_text("x")
    if tag:
        (tmp_path / "CACHEDIR.TAG").write_text(tag)
    with pytest.raises(StoreError, match=r"is not an Ekiben store .* nothing was removed"):
        Store(tmp_path).prune()
    assert (tmp_path / "blobs/sha256/precious").exists()


@pytest.mark.parametrize(("free", "stays"), [(30e9, True), (1e9, False)])
def test_what_a_layer_leaves_behind_goes_when_all_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, stays: bool
) -> None:
    """Where the disk is nearly full, at once."""
    monkeypatch.setattr("builder.store.free_bytes", lambda folder: free)
    store = Store(tmp_path)
    store.open_for_writing()
    with store.building([], beside=True):
        with store.staging() as folder:
            (folder / "made").mkdir()
            (folder / "made/file").touch()
        assert becomes_empty(folder, 0.3 if stays else 10) is not stays
    assert becomes_empty(folder)


def test_prune_leaves_a_running_build_alone(store: Store) -> None:
    """What it made, what it found made and stands on: no image names them yet."""
    before, gone = put(store, "before", b"before", "k1"), put(store, "gone", b"gone", "k2")
    age(store)
    with store.building(["k1", "k3"]):
        during = put(store, "during", b"during", "k3")
        with store.staging():  # the next layer's
            assert store.prune() == [(gone.digest, 4)]
        assert blobs(store) == {before.digest, during.digest}
    age(store)
    assert {digest for digest, _ in store.prune()} == {before.digest, during.digest}


def test_a_killed_build_keeps_nothing_from_being_pruned(store: Store) -> None:
    layer = put(store, "base")
    age(store)
    script = (
        "import os, signal, sys; from pathlib import Path; from builder.store import Store\n"
        "with Store(Path(sys.argv[1])).building(['k1']): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script, store.root], cwd=ROOT, check=False)
    assert list((store.root / "staging").iterdir()) != []
    assert store.prune() == [(layer.digest, 5)]


def test_prune_does_not_stumble_over_a_damaged_manifest(store: Store) -> None:
    manifest = name_image(store, "one", layer := put(store, "base"))
    store.blob_path(manifest).write_text("{")
    age(store)
    assert store.prune() == []
    assert {manifest, layer.digest} <= blobs(store)


def test_a_store_where_no_folder_can_be() -> None:
    with pytest.raises(StoreError, match="the store /proc/nope cannot be written"):
        Store(Path("/proc/nope")).open_for_writing()


def test_what_layers_leave_behind_is_removed_when_it_is_said(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.store._ROOM", 0)
    with store.building([], beside=True):
        with store.staging() as first:
            pass
        assert first.exists()
        store.remove_left()
        wait_for_removal()
        assert not first.exists()
        with store.staging() as second:
            pass
        assert second.exists()
    wait_for_removal()
    assert not second.exists()


def wait_for_removal() -> None:
    for thread in threading.enumerate():
        if thread.name == "removal":
            thread.join()
