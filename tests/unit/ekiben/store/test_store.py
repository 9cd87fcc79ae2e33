"""The store: never half a file, nothing removed that is needed, and every error a sentence."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ekiben.builder.layer import prepare_job
from ekiben.core.errors import CorruptBlob, StoreError, UsageError
from ekiben.core.files import digest_of
from ekiben.core.inner_path import InnerPath
from ekiben.executors import Script
from ekiben.formats.oci import MEDIA_MANIFEST, store_manifest
from ekiben.store import Store, StoredLayer, damaged_records, prune
from ekiben.store._blobs import identity
from ekiben.store.store import _REPLACE
from support.hostile import damage
from support.sample_recipe import becomes_empty
from support.stores import blobs, put

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.open_for_writing()
    return made


def name_image(store: Store, name: str, *layers: StoredLayer) -> str:
    """An image of these layers; the digest of its manifest."""
    config = json.dumps({"name": name}).encode()
    store.put_blob(config)
    about = {"config": digest_of(config), "keys": [layer.cache_key for layer in layers]}
    return str(store.put_image(name, store_manifest(config, layers), about)["manifest"])


def kill_in(store: Store, context: str) -> None:
    """Run ``context``, of the store, in a process that is killed before it leaves it."""
    script = (
        "import os, signal, sys; from pathlib import Path; from ekiben.store import Store\n"
        f"with Store(Path(sys.argv[1])).{context}; os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script, store.root], cwd=ROOT, check=False)


def age(store: Store, seconds: float = 3600) -> None:
    for path in (store.root / "blobs/sha256").iterdir():
        os.utime(path, (time.time() - seconds, time.time() - seconds))


# ---------------------------------------------------------------------------------------------------------- put and get


def test_reading_creates_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    assert store.layer("k") is None
    assert store.image("x") is None
    assert store.images() == {}
    assert store.last_inputs("x") is None
    assert list(tmp_path.iterdir()) == []


def test_a_stored_layer_is_found_by_its_key(store: Store) -> None:
    layer = put(store, "base")
    again = Store(store.root)
    assert again.layer("k1") == layer
    assert again.layer("k2") is None
    assert again.last_inputs("base") == {"post": "x"}
    assert again.blob_path(layer.digest).stat().st_mode & 0o777 == 0o444
    assert list((store.root / "staging").iterdir()) == []


def test_the_folder_is_an_oci_image_layout(store: Store) -> None:
    manifest = name_image(store, "one", put(store, "base"))
    assert json.loads((store.root / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    (entry,) = json.loads((store.root / "index.json").read_text())["manifests"]
    data = store.get_blob(manifest)
    assert entry == {
        "mediaType": MEDIA_MANIFEST,
        "digest": manifest,
        "size": len(data),
        "annotations": {"org.opencontainers.image.ref.name": "one"},
    }
    assert (store.root / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")


def test_the_same_image_again_writes_nothing(store: Store) -> None:
    layer = put(store, "base")
    name_image(store, "one", layer)
    before = {path: path.stat().st_mtime_ns for path in store.root.rglob("*") if path.is_file()}
    name_image(store, "one", layer)
    assert before == {path: path.stat().st_mtime_ns for path in store.root.rglob("*") if path.is_file()}


def test_a_layer_with_a_missing_or_short_blob_is_not_found(store: Store) -> None:
    layer = put(store, "base")
    store.blob_path(layer.digest).chmod(0o644)
    store.blob_path(layer.digest).write_bytes(b"lay")
    assert store.layer("k1") is None
    store.blob_path(layer.digest).unlink()
    assert store.layer("k1") is None
    assert store.last_inputs("base") == {"post": "x"}


# -------------------------------------------------------------------------------------------------------- damaged blobs


def test_reading_a_damaged_blob_raises_corrupt_blob(store: Store) -> None:
    layer = put(store, "base")
    store.check_blob(layer.digest)
    path = store.blob_path(layer.digest)
    damage(path, b"lyaer")
    for read in (store.get_blob, store.check_blob):
        with pytest.raises(CorruptBlob, match=f"blob {layer.digest} is damaged: {path} has other bytes") as caught:
            read(layer.digest)
        assert caught.value.digest == layer.digest
        assert caught.value.exit_code == 6


def test_check_blob_reads_again_only_after_a_change_or_on_request(store: Store) -> None:
    layer = put(store, "base")
    path = store.blob_path(layer.digest)
    store.check_blob(layer.digest)
    damage(path, b"lyaer")  # its time is set back, and it is found all the same
    with pytest.raises(CorruptBlob):
        store.check_blob(layer.digest)
    (store.root / "checks" / path.name).write_text(identity(path))  # as damage that nobody wrote looks
    store.check_blob(layer.digest)
    with pytest.raises(CorruptBlob):
        store.check_blob(layer.digest, again=True)


def test_a_missing_blob_is_a_store_error(store: Store) -> None:
    missing = digest_of(b"never")
    with pytest.raises(StoreError, match=r"is not in .*store: No such file"):
        store.get_blob(missing)
    with pytest.raises(StoreError, match=r"cannot be read: .*: No such file"):
        store.check_blob(missing)


def test_a_dropped_blob_can_be_put_again(store: Store) -> None:
    layer = put(store, "base")
    store.check_blob(layer.digest)
    store.drop_blob(layer.digest)
    assert store.layer("k1") is None
    assert put(store, "base") == store.layer("k1")


# ---------------------------------------------------------------------------------------------------- never half a file


def test_concurrent_readers_see_complete_records(store: Store) -> None:
    """A writer replaces one image's record as fast as it can; every read is whole."""
    layer, stop = put(store, "base"), threading.Event()
    numbers = {digest_of(b"%d" % number): number for number in range(100_000)}

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            store.put_image(
                "one",
                store_manifest(b"{}", [layer]),
                {"keys": ["k1"] * (number % 50), "config": digest_of(b"%d" % number)},
            )

    thread = threading.Thread(target=write)
    store.put_image("one", store_manifest(b"{}", [layer]), {"keys": [], "config": digest_of(b"0")})
    thread.start()
    seen = set()
    try:
        for _ in range(300):
            image = store.image("one")
            assert image is not None
            assert len(image["keys"]) == numbers[image["config"]] % 50
            assert "one" in store.images()
            json.loads((store.root / "index.json").read_bytes())
            seen.add(image["config"])
    finally:
        stop.set()
        thread.join()
    assert len(seen) > 1


def test_staging_is_removed_after_an_interrupt(store: Store) -> None:
    with pytest.raises(KeyboardInterrupt), store.staging() as staging:
        (staging / "half").write_text("x")
        raise KeyboardInterrupt
    assert list((store.root / "staging").iterdir()) == []


def test_prune_keeps_staging_of_live_processes(store: Store) -> None:
    for _ in range(3):
        kill_in(store, "staging() as staging: (staging / 'half').write_text('x')")
    staging, host = store.root / "staging", socket.gethostname()
    folders = [path.name for path in staging.iterdir() if path.is_dir()]
    assert len(folders) == 3
    left = folders[0].split("__")[1]
    for rest in ("_abc", "a__b", "__"):  # tempfile's names may hold underscores
        (staging / f"{host}__{left}__{rest}").mkdir()
    (staging / f"{host}__{left}__write").write_text("half a record")
    (staging / f"otherhost__{left}__a").mkdir()
    with store.staging() as mine:
        store.open_for_writing()
        lock = "__".join([*mine.name.split("__")[:2], "lock"])
        assert {path.name for path in staging.iterdir()} == {mine.name, lock, f"otherhost__{left}__a"}


def sweep_elsewhere(store: Store) -> None:
    """Open the store in another PID namespace, which has the same host name and none of this one's processes."""
    script = (
        "import sys; from pathlib import Path; from ekiben.store import"
        " Store\nStore(Path(sys.argv[1])).open_for_writing()"
    )
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c", script]
    subprocess.run([*unshare, store.root], cwd=ROOT, check=True)


def test_staging_of_a_live_process_in_another_pid_namespace_is_kept(store: Store) -> None:
    with store.staging() as folder:
        sweep_elsewhere(store)
        assert folder.is_dir()
    assert list((store.root / "staging").iterdir()) == []


def test_staging_of_an_ended_process_in_another_pid_namespace_is_removed(store: Store) -> None:
    kill_in(store, "staging(): pass")
    assert len(list((store.root / "staging").iterdir())) == 2
    sweep_elsewhere(store)
    assert list((store.root / "staging").iterdir()) == []


def test_staging_of_an_earlier_version_is_known_by_its_process(store: Store) -> None:
    staging, host = store.root / "staging", socket.gethostname()
    for process in (os.getpid(), 2**22 + 1):
        (staging / f"{host}__{process}__abc").mkdir()
    store.open_for_writing()
    assert [path.name for path in staging.iterdir()] == [f"{host}__{os.getpid()}__abc"]


def test_two_processes_put_the_same_layer_at_once(store: Store) -> None:
    script = (
        "import sys; from pathlib import Path; from ekiben.store import Store, StoredLayer; from ekiben.core.files"
        " import digest_of\nstore, data = Store(Path(sys.argv[1])), b'x' * 1_000_000\nstore.open_for_writing()\nfor"
        " number in range(20):\n    with store.staging() as staging:\n        (staging / 'blob').write_bytes(data)\n   "
        "     store.put_file(staging / 'blob', digest_of(data))\n    store.put_layer(StoredLayer(name='a',"
        " cache_key='k', diff_id='d', tar_size=1, digest=digest_of(data), size=len(data),\n        executor='none',"
        " seconds=0, inputs={}))\n    store.check_blob(digest_of(data), again=True)\n    assert store.layer('k')\n"
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


def test_a_missing_locks_folder_is_tolerated(store: Store) -> None:
    (store.root / "locks").rmdir()
    with store.lock("k", lambda: None):
        pass


# --------------------------------------------------------------------------------------------------- places that refuse


def test_another_store_version_is_refused(store: Store) -> None:
    (store.root / "version").write_text("7\n")
    with pytest.raises(
        StoreError, match=f"{store.root} is a store of version 7; this Ekiben reads version 2"
    ) as caught:
        Store(store.root)
    assert caught.value.hint == _REPLACE


def test_a_folder_that_cannot_be_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for root in (tmp_path / "file", tmp_path / "file/store", Path("/proc/nope")):
        with pytest.raises(StoreError, match=f"the store {root} cannot be written") as caught:
            Store(root).open_for_writing()
        assert "--store" in str(caught.value.hint)


# ------------------------------------------------------------------------------------------------------------- pruning


def test_prune_keeps_what_images_reach(store: Store) -> None:
    kept, dropped = put(store, "base", b"kept"), put(store, "old", b"dropped", "k2")
    manifest = name_image(store, "one", kept)
    age(store)
    assert prune(store, dry_run=True) == [(dropped.digest, 7)]
    assert dropped.digest in blobs(store)
    assert store.layer("k2") == dropped
    assert prune(store) == [(dropped.digest, 7)]
    assert blobs(store) == {kept.digest, manifest, store.images()["one"]["config"]}
    assert store.layer("k2") is None
    assert not (store.root / "keys/k2.json").exists()
    assert prune(store) == []


def test_prune_untags_the_named_images(store: Store) -> None:
    shared, unshared = put(store, "base", b"shared"), put(store, "own", b"own", "k2")
    name_image(store, "one", shared)
    name_image(store, "two", shared, unshared)
    age(store)
    would = prune(store, untag=["two"], dry_run=True)
    assert set(store.images()) == {"one", "two"}
    assert prune(store, untag=["two"]) == would
    assert set(store.images()) == {"one"}
    assert [entry["annotations"] for entry in json.loads((store.root / "index.json").read_text())["manifests"]] == [
        {"org.opencontainers.image.ref.name": "one"}
    ]
    assert unshared.digest not in blobs(store)
    assert shared.digest in blobs(store)


def test_prune_of_an_unknown_image_does_nothing(store: Store) -> None:
    name_image(store, "one", put(store, "base"))
    with pytest.raises(UsageError, match=r"no image 'oen' in .*; nothing was removed\. Did you mean 'one'\?"):
        prune(store, untag=["one", "oen"])
    assert set(store.images()) == {"one"}


@pytest.mark.parametrize("tag", [None, "Signature: 8a477f597d28d172789f06886806bc55\n# Written by another program\n"])
def test_prune_refuses_a_folder_without_the_tag(tmp_path: Path, tag: str | None) -> None:
    (tmp_path / "blobs/sha256").mkdir(parents=True)
    (tmp_path / "blobs/sha256/precious").write_text("x")
    if tag:
        (tmp_path / "CACHEDIR.TAG").write_text(tag)
    with pytest.raises(StoreError, match=r"is not an Ekiben store .* nothing was removed"):
        prune(Store(tmp_path))
    assert (tmp_path / "blobs/sha256/precious").exists()


@pytest.mark.parametrize(("free", "stays"), [(30e9, True), (1e9, False)])
def test_temporary_trees_stay_until_the_build_ends_if_space_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, stays: bool
) -> None:
    """Where the disk is nearly full, at once."""
    monkeypatch.setattr(InnerPath, "free_bytes", lambda folder: free)
    store = Store(tmp_path)
    store.open_for_writing()
    with store.building([], background=True):
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
            assert prune(store) == [(gone.digest, 4)]
        assert blobs(store) == {before.digest, during.digest}
    age(store)
    assert {digest for digest, _ in prune(store)} == {before.digest, during.digest}


def test_prune_ignores_the_staging_of_a_killed_build(store: Store) -> None:
    layer = put(store, "base")
    age(store)
    kill_in(store, "building(['k1']): pass")
    assert list((store.root / "staging").iterdir()) != []
    assert prune(store) == [(layer.digest, 5)]


def test_prune_keeps_an_image_with_a_damaged_manifest(store: Store) -> None:
    manifest = name_image(store, "one", layer := put(store, "base"))
    store.blob_path(manifest).write_text("{")
    age(store)
    assert prune(store) == []
    assert {manifest, layer.digest} <= blobs(store)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"manifest": 3}'])
@pytest.mark.parametrize("kind", ["refs", "results"])
def test_prune_removes_nothing_that_a_damaged_record_may_name(store: Store, kind: str, damage: bytes) -> None:
    layer, other = put(store, "base", b"layer"), put(store, "old", b"other", "k2")
    name_image(store, "one", layer)
    record = store.root / "refs/one.json"
    if kind == "results":
        record = store.root / "results/r.json"
    intact = record.read_bytes() if kind == "refs" else b""
    record.write_bytes(damage)
    age(store)
    before = blobs(store)
    assert damaged_records(store) == [record]
    assert prune(store, dry_run=True) == []
    assert prune(store) == []
    assert blobs(store) == before
    assert store.layer("k1") == layer
    assert record.exists()
    if kind == "refs":
        record.write_bytes(intact)
    else:
        record.unlink()
    assert prune(store) == [(other.digest, 5)]


def test_prune_forgets_a_damaged_record_by_name(store: Store) -> None:
    layer = put(store, "base", b"layer")
    name_image(store, "one", layer)
    (store.root / "refs/one.json").write_bytes(b"{")
    age(store)
    assert damaged_records(store, ["one"]) == []
    prune(store, untag=["one"])
    assert layer.digest not in blobs(store)
    assert not (store.root / "refs/one.json").exists()


def test_remove_finished_removes_the_temporary_trees_made_so_far(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ekiben.store._staging.DEFERRED_REMOVAL_BYTES", 0)
    with store.building([], background=True):
        with store.staging() as first:
            pass
        assert first.exists()
        store.remove_finished()
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


def test_small_data_are_written_over_a_damaged_blob(store: Store) -> None:
    digest = store.put_blob(b'{"config": 1}')
    damage(store.blob_path(digest), b'{"config": 3}')
    assert store.put_blob(b'{"config": 1}') == digest
    assert store.get_blob(digest) == b'{"config": 1}'


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_writes_or_enters_a_new_store(tmp_path: Path, umask: int) -> None:
    """What is in it runs as its user."""
    former = os.umask(umask)
    try:
        store = Store(tmp_path / "cache/store")
        store.open_for_writing()
        store.put_blob(b"x")
    finally:
        os.umask(former)
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    assert [path for path in store.root.rglob("*") if path.stat().st_mode & 0o022] == []


def test_scripts_of_layers_do_not_see_downloads(store: Store, tmp_path: Path) -> None:
    """What another build takes by its name alone, and what a policy trusts."""
    (tmp_path / "staging").mkdir()
    job = prepare_job(Script("x", "true\n", {}), [], store, tmp_path / "staging", log=print)
    assert job.cache == store.cache
    assert not store.downloads.is_relative_to(job.cache)
