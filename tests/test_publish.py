"""Publishing: one folder of plain files and links, each whole or not there, whoever else is at work."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builder import publish as module
from builder.assemble import known_sif, make_sif
from builder.errors import StoreError, UsageError
from builder.publish import Published, prune, publish, published, records, tags
from builder.shared import SharedStore, open_shared
from builder.sif import Partition, read_sif
from builder.store import Store, StoredLayer
from own_recipe import Own, RunCli, image_of, quiet, seeded


@pytest.fixture
def store(flat: Own, tmp_path: Path) -> Store:
    return seeded(flat, tmp_path / "store", "ground")


def put(flat: Own, store: Store, place: Path, **options: Any) -> Published:
    return publish(image_of(flat, store), store, place, quiet(), check=False, **options)


def put_next(flat: Own, store: Store, place: Path, **options: Any) -> Published:
    """A further version: the data were edited."""
    (flat.path / "files/data.txt").write_text(f"{time.time_ns()}\n")
    return put(flat, store, place, **options)


def stems(place: Path) -> list[str]:
    return [record["file"] for record in records(place / "images/own")]


# ----------------------------------------------------------------------------------------------------------- what is there


def test_the_place_is_as_documented(flat: Own, store: Store, tmp_path: Path) -> None:
    place = tmp_path / "lab"
    done = put(flat, store, place, version="1.2", tags=["stable"], pin=True)
    assert re.fullmatch(r"own-1\.2-[0-9a-f]{12}\.sif", done.sif.name)
    stem = done.sif.name.removesuffix(".sif")
    assert {path.name for path in done.sif.parent.iterdir()} == {
        f"{stem}.sif", f"{stem}.sif.sha256", f"{stem}.json", f"{stem}.cdx.json", f"{stem}.pin", "current", "stable",
    }  # fmt: skip
    assert {path.name for path in place.iterdir()} == {"README", "images", "store", "trash"}
    assert list((place / "store/blobs/sha256").iterdir()) == []  # every byte is there once, in the SIF
    assert list((place / "store/staging").iterdir()) == []
    digest = hashlib.sha256(done.sif.read_bytes()).hexdigest()
    assert digest.startswith(stem.rpartition("-")[2])
    checked = subprocess.run(
        ["sha256sum", "-c", f"{stem}.sif.sha256"], cwd=done.sif.parent, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert tags(done.sif.parent) == {"current": done.sif.name, "stable": done.sif.name}
    image, record = image_of(flat, store), done.record
    assert read_sif(done.sif).id == record["sif"]
    assert (record["name"], record["version"], record["sha256"], record["size"]) == (
        "own",
        "1.2",
        digest,
        done.sif.stat().st_size,
    )
    assert [layer["cache_key"] for layer in record["layers"]] == [layer.cache_key for layer in image.layers]
    assert record["tasks"] == {"greet": "say hello"}
    assert record["previous"] is None
    documented = (module.__doc__ or "").split("The record, one JSON object:")[1]
    assert [name for name in record if not re.search(rf"\b{name}\b", documented)] == []


def test_the_same_again_moves_nothing(flat: Own, store: Store, tmp_path: Path) -> None:
    first = put(flat, store, tmp_path / "lab")
    before = {path: path.lstat().st_mtime_ns for path in (tmp_path / "lab").rglob("*") if not path.is_dir()}
    again = put(flat, store, tmp_path / "lab")
    assert (again.sif, again.record, again.moved, again.made) == (first.sif, first.record, 0, False)
    assert before == {path: path.lstat().st_mtime_ns for path in (tmp_path / "lab").rglob("*") if not path.is_dir()}


def test_an_image_on_the_same_layers_moves_only_its_own(flat: Own, store: Store, tmp_path: Path) -> None:
    place = tmp_path / "lab"
    first = put(flat, store, place, tags=["good"])
    links = {path.name for path in (place / "store/layers").iterdir()}
    base = image_of(flat, store).layers[0]
    assert base.digest[7:] in links
    second = put_next(flat, store, place)
    assert {path.name for path in (place / "store/layers").iterdir()} - links == {
        layer["digest"][7:] for layer in second.record["layers"][1:]
    }
    assert len(list((place / "store/layers" / base.digest[7:]).iterdir())) == 2
    assert second.moved == sum(layer["size"] for layer in second.record["layers"][1:])
    assert second.record["previous"] == first.sif.name
    assert tags(first.sif.parent) == {"current": second.sif.name, "good": first.sif.name}
    assert stems(place) == [first.sif.name, second.sif.name]


def test_a_sum_taken_when_the_image_was_made_is_that_of_the_published_file(
    flat: Own, store: Store, tmp_path: Path
) -> None:
    image = image_of(flat, store)
    made = make_sif(image, store, tmp_path / "own.sif", flat=False, hashed=True)
    assert made.sha256 == known_sif(store, read_sif(tmp_path / "own.sif").id)
    assert make_sif(image, store, tmp_path / "own.sif", flat=False) == replace(made, made=False)
    done = put(flat, store, tmp_path / "lab")
    assert done.record["sha256"] == made.sha256 == hashlib.sha256(done.sif.read_bytes()).hexdigest()


def test_current_is_left_alone_when_asked(flat: Own, store: Store, tmp_path: Path) -> None:
    first = put(flat, store, tmp_path / "lab")
    second = put_next(flat, store, tmp_path / "lab", current=False, tags=["trial"])
    assert tags(first.sif.parent) == {"current": first.sif.name, "trial": second.sif.name}


@pytest.mark.parametrize(("options", "said"), [({"version": "a/b"}, "--version a/b"), ({"tags": ["../x"]}, "--tag ../x"),
                                               ({"tags": ["x.sif"]}, "--tag x.sif")])  # fmt: skip
def test_a_name_that_is_no_name(flat: Own, store: Store, tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        put(flat, store, tmp_path / "lab", **options)
    assert not (tmp_path / "lab").exists()


# --------------------------------------------------------------------------------------------------------------- accidents


def test_a_half_written_file_under_the_name_is_replaced(flat: Own, store: Store, tmp_path: Path) -> None:
    """Someone's copy that was cut short: it is no version, and goes aside when the whole one comes."""
    place = tmp_path / "lab"
    done = put(flat, store, place)
    data = done.sif.read_bytes()
    done.sif.unlink()
    done.sif.write_bytes(data[:1000])
    assert records(done.sif.parent) == []
    again = put(flat, store, place)
    assert again.sif == done.sif
    assert again.sif.read_bytes() == data
    assert len(list((place / "trash").iterdir())) == 1


def test_a_layer_that_is_gone_comes_again(flat: Own, store: Store, tmp_path: Path) -> None:
    place = tmp_path / "lab"
    done = put(flat, store, place)
    inode = done.sif.stat().st_ino
    link = next((place / "store/layers" / done.record["layers"][1]["digest"][7:]).iterdir())
    link.unlink()
    assert put(flat, store, place).made is False
    assert link.exists()
    assert done.sif.stat().st_ino == inode  # a job may have it open
    (place / "store/keys" / f"{done.record['layers'][1]['cache_key']}.json").unlink()
    put(flat, store, place)
    assert open_shared(place).layer(done.record["layers"][1]["cache_key"])


def test_a_published_layer_that_is_damaged_is_not_copied(flat: Own, store: Store, tmp_path: Path) -> None:
    """The next version takes what the place has; where that has other bytes, the publisher's own."""
    place = tmp_path / "lab"
    first = put(flat, store, place)
    part = open_shared(place).partition(image_of(flat, store).layers[0])
    first.sif.chmod(0o644)
    with first.sif.open("r+b") as stream:
        stream.seek(part.offset + part.size // 2)
        stream.write(b"other bytes")
    second = put_next(flat, store, place)
    assert second.moved == sum(layer["size"] for layer in second.record["layers"])
    assert hashlib.sha256(second.sif.read_bytes()).hexdigest() == second.record["sha256"]
    for layer in image_of(flat, store).layers:  # found in the newest that has them
        open_shared(place).check_blob(layer.digest, again=True)


@pytest.mark.parametrize("when", ["before its part is found", "before it is opened", "before its layers are noted"])
def test_a_version_pruned_while_another_one_is_made_of_it(
    flat: Own, store: Store, tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a prune that had begun before the publisher was announced: what it takes away comes from the publisher's store."""
    place = tmp_path / "lab"
    first = put(flat, store, place)
    partition, put_layers, taken = SharedStore.partition, SharedStore.put_layers, []

    def take(sif: Path) -> None:
        if not taken:
            sif.rename(place / "trash" / sif.name)
            taken.append(sif.name)

    def found(shared: SharedStore, layer: StoredLayer, **options: Any) -> Partition:
        if when == "before its part is found":
            take(first.sif)
        part = partition(shared, layer, **options)
        if when == "before it is opened":
            take(part.path)
        return part

    def noted(shared: SharedStore, sif: Path, layers: Sequence[StoredLayer]) -> None:
        if when == "before its layers are noted":
            take(sif)
        put_layers(shared, sif, layers)

    monkeypatch.setattr(SharedStore, "partition", found)
    monkeypatch.setattr(SharedStore, "put_layers", noted)
    second = put_next(flat, store, place)
    assert taken
    assert hashlib.sha256(second.sif.read_bytes()).hexdigest() == second.record["sha256"]
    assert all(open_shared(place).layer(layer["cache_key"]) for layer in second.record["layers"])


def test_a_layer_stays_while_a_version_has_it(flat: Own, store: Store, tmp_path: Path) -> None:
    place = tmp_path / "lab"
    first, second = put(flat, store, place), put_next(flat, store, place)
    prune(place, names=[first.sif.name])
    shared, gone = open_shared(place), first.record["layers"][1:]
    assert [shared.layer(layer["cache_key"]) for layer in gone] == [None, None]
    assert all(shared.layer(layer["cache_key"]) for layer in second.record["layers"])
    assert {path.name for path in (place / "store/layers").iterdir()} == {
        layer["digest"][7:] for layer in second.record["layers"]
    }
    assert {path.stem for path in (place / "store/keys").iterdir()} == {
        layer["cache_key"] for layer in second.record["layers"]
    }
    assert len(list((place / "store/layers" / gone[0]["digest"][7:]).parent.glob("*/*"))) == 3


def test_one_who_publishes_while_it_is_removed_keeps_its_layers(
    flat: Own, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same image again, just when prune has seen that its links lead nowhere, or its keys."""
    place = tmp_path / "lab"
    first = put(flat, store, place)
    image = image_of(flat, store)
    put_next(flat, store, place)
    unlink, came = Path.unlink, []

    def publish_and_unlink(path: Path, *, missing_ok: bool = False) -> None:
        if path.parent.parent.name == "layers" and not came:
            came.append(publish(image, store, place, quiet(), check=False, current=False))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", publish_and_unlink)
    prune(place, names=[first.sif.name])
    monkeypatch.undo()
    assert came[0].sif == first.sif
    assert all(open_shared(place).layer(layer["cache_key"]) for layer in came[0].record["layers"])


def test_a_damaged_layer_is_not_published(flat: Own, store: Store, tmp_path: Path) -> None:
    image = image_of(flat, store)
    path = store.blob_path(image.layers[1].digest)
    path.chmod(0o644)
    path.write_bytes(bytes(image.layers[1].size))
    with pytest.raises(StoreError, match=r"blob sha256:\w+ is damaged"):
        publish(image, store, tmp_path / "lab", quiet(), check=False)
    assert published(tmp_path / "lab") == {"own": []}
    assert list((tmp_path / "lab/images/own").iterdir()) == []
    assert list((tmp_path / "lab/store/layers").iterdir()) == []
    assert list((tmp_path / "lab/store/staging").iterdir()) == []


RENAMES = 14  # of a second version: everything that gets its name


@pytest.mark.parametrize("where", range(1, RENAMES + 2))
def test_an_end_at_any_rename_leaves_what_was_there(
    flat: Own, store: Store, tmp_path: Path, where: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kill would: what has its name is whole, what has none is not seen, and the next run goes on."""
    place = tmp_path / "lab"
    first = put(flat, store, place)
    (flat.path / "files/data.txt").write_text("other\n")
    image, count, rename = image_of(flat, store), 0, os.rename

    def end(source: Any, target: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        if count == where:
            raise KeyboardInterrupt
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", end)
    try:
        publish(image, store, place, quiet(), check=False)
    except KeyboardInterrupt:
        assert count == where
    else:
        assert (count, where) == (RENAMES, RENAMES + 1)
    monkeypatch.undo()
    seen = records(first.sif.parent)
    assert seen[0]["file"] == first.sif.name
    for record in seen:
        assert hashlib.sha256((first.sif.parent / record["file"]).read_bytes()).hexdigest() == record["sha256"]
        assert all(open_shared(place).layer(layer["cache_key"]) for layer in record["layers"])
    assert (first.sif.parent / "current").exists()
    assert list((place / "store/staging").iterdir()) == []
    second = publish(image, store, place, quiet(), check=False)
    assert tags(first.sif.parent)["current"] == second.sif.name != first.sif.name


# ------------------------------------------------------------------------------------------------------------------- prune


def unused(place: Path, days: float) -> None:
    for path in place.glob("images/*/*"):
        os.utime(path, (time.time() - days * 86400,) * 2, follow_symlinks=False)


def test_prune_keeps_what_is_pinned_tagged_or_used(flat: Own, store: Store, tmp_path: Path) -> None:
    place = tmp_path / "lab"
    old = put(flat, store, place, pin=True).sif.name
    tagged = put_next(flat, store, place, tags=["paper"]).sif.name
    going = put_next(flat, store, place).sif.name
    used = put_next(flat, store, place).sif.name
    newest = put_next(flat, store, place).sif.name
    unused(place, 31)
    os.utime(place / "images/own" / used, (time.time() - 86400, time.time() - 40 * 86400))
    before = {path.name for path in (place / "images/own").iterdir()}
    for dry_run in (True, False):
        fates, aside, removed = prune(place, unused_for=30, dry_run=dry_run)
        assert {fate.file: fate.why for fate in fates} == {
            old: "pinned", tagged: "tagged paper", going: "last used 31 days ago", used: "last used 1 days ago",
            newest: "tagged current",
        }  # fmt: skip
        assert [fate.file for fate in fates if not fate.kept] == [going]
        assert aside == fates[2].size
        assert removed == 0
        if dry_run:
            assert {path.name for path in (place / "images/own").iterdir()} == before
    assert stems(place) == [old, tagged, used, newest]
    stem = going.removesuffix(".sif")
    assert before - {path.name for path in (place / "images/own").iterdir()} == {
        going,
        f"{going}.sha256",
        f"{stem}.json",
        f"{stem}.cdx.json",
    }
    shared = open_shared(place)
    for record in records(place / "images/own"):
        assert all(shared.layer(layer["cache_key"]) for layer in record["layers"])
    _, _, removed = prune(place, unused_for=30, grace=0)
    assert removed >= aside
    assert list((place / "trash").iterdir()) == []


def test_what_a_job_has_open_it_keeps(flat: Own, store: Store, tmp_path: Path) -> None:
    place = tmp_path / "lab"
    first = put(flat, store, place)
    put_next(flat, store, place)
    with first.sif.open("rb") as running:
        prune(place, names=[first.sif.name])
        assert not first.sif.exists()
        assert hashlib.file_digest(running, "sha256").hexdigest() == first.record["sha256"]
        (aside,) = (place / "trash").glob("*.sif")
        assert os.fstat(running.fileno()).st_ino == aside.stat().st_ino  # NFS serves it on: the file is there


def test_a_named_one_goes_unless_something_holds_it(flat: Own, store: Store, tmp_path: Path) -> None:
    place = tmp_path / "lab"
    first, second = put(flat, store, place), put_next(flat, store, place)
    fates, _, _ = prune(place, names=["own"])
    assert [(fate.file, fate.kept) for fate in fates] == [(first.sif.name, False), (second.sif.name, True)]
    with pytest.raises(UsageError, match=r"nothing named 'onw' was published there\. Did you mean 'own'"):
        prune(place, names=["onw"])


def test_where_the_last_use_is_not_known_nothing_goes_by_itself(
    flat: Own, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "lab"
    put(flat, store, place)
    put_next(flat, store, place)
    unused(place, 99)
    monkeypatch.setattr(SharedStore, "knows_last_use", lambda shared: False)
    fates, _, _ = prune(place)
    assert all(fate.kept for fate in fates)
    assert "noatime" in fates[0].why


def test_what_killed_publishers_left_goes_after_a_day(flat: Own, store: Store, tmp_path: Path) -> None:
    place = tmp_path / "lab"
    done = put(flat, store, place)
    other = put_next(flat, store, place)
    done.sif.with_suffix(".json").unlink()  # killed before the record was written
    (done.sif.parent / ".own.json.abc").write_text("half")
    for days, left in ((0.5, True), (1.5, False)):
        unused(place, days)
        prune(place)
        assert done.sif.exists() == left
        assert done.sif.with_suffix(".cdx.json").exists() == left
        assert (done.sif.parent / ".own.json.abc").exists() == left
    assert other.sif.exists()
    assert other.sif.with_suffix(".cdx.json").exists()


def test_one_who_links_it_while_it_is_removed_keeps_it(
    flat: Own, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "lab"
    first = put(flat, store, place)
    put_next(flat, store, place)
    discard = SharedStore.discard

    def link_and_discard(shared: SharedStore, path: Path) -> None:
        if path.suffix == ".json":
            module._link(first.sif.parent, "mine", first.sif.name)
        discard(shared, path)

    monkeypatch.setattr(SharedStore, "discard", link_and_discard)
    prune(place, names=[first.sif.name])
    assert first.sif.name in stems(place)
    assert (first.sif.parent / "mine").exists()


def test_prune_refuses_what_is_no_place(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/precious").write_text("x")
    with pytest.raises(StoreError, match="no shared store in"):
        prune(tmp_path / "data")
    assert (tmp_path / "data/precious").exists()


# -------------------------------------------------------------------------------------------------------- the command line


def test_publish_and_prune_by_command(run_cli: RunCli, flat: Own, store: Store, tmp_path: Path) -> None:
    words = ("--store", store.root, "publish", flat.path, "--to", tmp_path / "lab", "--no-verify")
    first = run_cli(*words, "--version", "1")
    assert f"singularity exec --nv {tmp_path}/lab/images/own/current greet" in first.stdout
    assert "of layers moved" in first.stdout
    assert "(there already)" in run_cli(*words, "--version", "1").stdout
    record = json.loads(run_cli(*words, "--json").stdout)
    assert (record["version"], record["moved"]) == ("1", 0)
    flat.write("files/data.txt", "new\n")
    run_cli(*words)
    done = run_cli("prune", "--in", tmp_path / "lab", "own", "--grace", "0")
    assert [line.split()[0] for line in done.stdout.splitlines()[:2]] == ["remove", "keep"]
    assert "tagged current" in done.stdout
    run_cli("prune", "--in", tmp_path / "nowhere", code=6)
