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

from ekiben.artifacts.exporters.sif import make_sif
from ekiben.core.errors import StoreError, UsageError
from ekiben.core.inner_path import InnerPath
from ekiben.formats.partition import Partition
from ekiben.formats.sif import read_sif
from ekiben.images import published as _records
from ekiben.images.published import read_records, tags
from ekiben.publish.prune import prune, published
from ekiben.publish.publish import PublishOptions, is_on_file_system_of, publish
from ekiben.store import Store, StoredLayer, known_sif
from ekiben.store.shared import SharedStore, open_shared
from support.hostile import damage, flip
from support.published import Lab, unused
from support.sample_recipe import RunCli, SampleRecipe, image_of, quiet, seeded


def stems(shared_dir: Path) -> list[str]:
    return [record.file for record in read_records(InnerPath.below(shared_dir / "images/own"))[0]]


# -------------------------------------------------------------------------------------------------------- what is there


def test_shared_folder_layout_is_as_documented(lab: Lab) -> None:
    done = lab.put(version="1.2", tags=["stable"], pin=True)
    assert re.fullmatch(r"own-1\.2-[0-9a-f]{12}\.sif", done.sif.name)
    stem = done.sif.name.removesuffix(".sif")
    assert {path.name for path in done.sif.parent.iterdir()} == {
        f"{stem}.sif",
        f"{stem}.sif.sha256",
        f"{stem}.json",
        f"{stem}.cdx.json",
        f"{stem}.pin",
        "current",
        "stable",
    }
    assert {path.name for path in lab.folder.iterdir()} == {"README", "images", "store", "trash"}
    assert list((lab.folder / "store/blobs/sha256").iterdir()) == []  # every byte is there once, in the SIF
    assert list((lab.folder / "store/staging").iterdir()) == []
    digest = hashlib.sha256(done.sif.read_bytes()).hexdigest()
    assert digest.startswith(stem.rpartition("-")[2])
    checked = subprocess.run(
        ["sha256sum", "-c", f"{stem}.sif.sha256"], cwd=done.sif.parent, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert tags(InnerPath.below(done.sif.parent)) == {"current": done.sif.name, "stable": done.sif.name}
    image, record = lab.image(), done.record
    assert read_sif(done.sif).id == record.sif
    assert (record.name, record.version, record.sha256, record.size) == ("own", "1.2", digest, done.sif.stat().st_size)
    assert [layer.cache_key for layer in record.layers] == [layer.cache_key for layer in image.layers]
    assert record.tasks == {"greet": "say hello"}
    assert record.previous is None
    documented = (_records.__doc__ or "").split("The record, one JSON object:")[1]
    assert [name for name in record.data if not re.search(rf"\b{name}\b", documented)] == []


@pytest.mark.parametrize("of_another", [False, True])
@pytest.mark.parametrize("ending", [".sif", ".sif.sha256", ".cdx.json", ".json"])
def test_publish_repairs_a_damaged_file(lab: Lab, tmp_path: Path, ending: str, of_another: bool) -> None:
    first = lab.put(version=None, tags=["good"])
    path = first.sif.with_name(first.sif.stem + ending)
    intact = path.read_bytes()
    flip(path, len(intact) // 2)
    if of_another:
        lab = replace(lab, store=seeded(lab.recipe, tmp_path / "another", "ground"))
    again = lab.put()
    assert again.sif == first.sif
    assert hashlib.sha256(first.sif.read_bytes()).hexdigest() == first.record.sha256
    if ending == ".json":
        assert again.record == replace(
            first.record, published=again.record.published, previous=first.sif.name, data=again.record.data
        )
    elif ending != ".cdx.json":
        assert path.read_bytes() == intact
    assert not lab.put().created
    assert len(stems(lab.folder)) == 1


def test_publish_repairs_a_file_of_an_earlier_day(lab: Lab) -> None:
    first = lab.put(version="1.0")
    flip(first.sif, read_sif(first.sif).layers[0].offset + 500)
    intact = hashlib.sha256(first.sif.read_bytes()).hexdigest() == first.record.sha256
    assert not intact
    again = lab.put()
    assert (again.sif, again.created) == (first.sif, True)
    assert hashlib.sha256(first.sif.read_bytes()).hexdigest() == first.record.sha256
    first.sif.chmod(0o644)
    os.truncate(first.sif, 5000)
    assert lab.put().sif == first.sif
    assert hashlib.sha256(first.sif.read_bytes()).hexdigest() == first.record.sha256


def test_publishing_again_copies_nothing(lab: Lab) -> None:
    first = lab.put()
    before = {path: path.lstat().st_mtime_ns for path in (lab.folder).rglob("*") if not path.is_dir()}
    again = lab.put()
    assert (again.sif, again.record, again.bytes_copied, again.created) == (first.sif, first.record, 0, False)
    assert before == {path: path.lstat().st_mtime_ns for path in (lab.folder).rglob("*") if not path.is_dir()}


def test_only_missing_layers_are_copied(lab: Lab) -> None:
    first = lab.put(tags=["good"])
    links = {path.name for path in (lab.folder / "store/layers").iterdir()}
    base = lab.image().layers[0]
    assert base.digest[7:] in links
    second = lab.put_next()
    assert {path.name for path in (lab.folder / "store/layers").iterdir()} - links == {
        layer.digest[7:] for layer in second.record.layers[1:]
    }
    assert len(list((lab.folder / "store/layers" / base.digest[7:]).iterdir())) == 2
    assert second.bytes_copied == sum(layer.size for layer in second.record.layers[1:])
    assert second.record.previous == first.sif.name
    assert tags(InnerPath.below(first.sif.parent)) == {"current": second.sif.name, "good": first.sif.name}
    assert stems(lab.folder) == [first.sif.name, second.sif.name]


def test_digest_taken_while_writing_is_that_of_the_published_file(lab: Lab, tmp_path: Path) -> None:
    image = lab.image()
    made = make_sif(image, lab.store, tmp_path / "own.sif", squash=False, with_sha256=True)
    assert made.sha256 == known_sif(lab.store, read_sif(tmp_path / "own.sif").id)
    assert make_sif(image, lab.store, tmp_path / "own.sif", squash=False) == replace(made, created=False)
    done = lab.put()
    assert done.record.sha256 == made.sha256 == hashlib.sha256(done.sif.read_bytes()).hexdigest()


def test_current_is_left_alone_when_asked(lab: Lab) -> None:
    first = lab.put()
    second = lab.put_next(current=False, tags=["trial"])
    assert tags(InnerPath.below(first.sif.parent)) == {"current": first.sif.name, "trial": second.sif.name}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": "a/b"}, "--version a/b"),
        ({"tags": ["../x"]}, "--tag ../x"),
        ({"tags": ["x.sif"]}, "--tag x.sif"),
        ({"tags": ["current"], "current": False}, "--tag current: --no-current leaves"),
    ],
)
def test_invalid_names_are_refused(lab: Lab, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        lab.put(**options)
    assert not (lab.folder).exists()


# ------------------------------------------------------------------------------------------------------------ accidents


def test_incomplete_file_of_the_name_is_replaced(lab: Lab) -> None:
    """Someone's copy that was cut short: it is not a version, and goes aside when the whole one comes."""
    done = lab.put()
    data = done.sif.read_bytes()
    done.sif.unlink()
    done.sif.write_bytes(data[:1000])
    assert read_records(InnerPath.below(done.sif.parent))[0] == []
    again = lab.put()
    assert again.sif == done.sif
    assert again.sif.read_bytes() == data
    assert len(list((lab.folder / "trash").iterdir())) == 1


def test_missing_layer_is_published_again(lab: Lab) -> None:
    done = lab.put()
    inode = done.sif.stat().st_ino
    link = next((lab.folder / "store/layers" / done.record.layers[1].digest[7:]).iterdir())
    link.unlink()
    assert lab.put().created is False
    assert link.exists()
    assert done.sif.stat().st_ino == inode  # a job may have it open
    (lab.folder / "store/keys" / f"{done.record.layers[1].cache_key}.json").unlink()
    lab.put()
    assert open_shared(lab.folder).layer(done.record.layers[1].cache_key)


@pytest.fixture
def other_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is not on the file system of the shared folder."""
    monkeypatch.setattr("ekiben.publish.publish.is_on_file_system_of", lambda folder, store, layer: False)


def test_layers_on_the_same_file_system_come_from_the_store(lab: Lab) -> None:
    """It is this user's, and compared already: a damaged file of colleagues is not read."""
    first = lab.put()
    base = lab.image().layers[0]
    assert is_on_file_system_of(InnerPath.below(lab.folder), lab.store, base)
    assert not is_on_file_system_of(InnerPath.below(Path("/proc")), lab.store, base)
    damage(first.sif, b"other bytes", open_shared(lab.folder).partition(base).offset)
    second = lab.put_next()
    assert second.bytes_copied == sum(layer.size for layer in second.record.layers[1:])
    assert hashlib.sha256(second.sif.read_bytes()).hexdigest() == second.record.sha256


@pytest.mark.usefixtures("other_file_system")
def test_a_published_layer_that_is_damaged_is_not_copied(lab: Lab) -> None:
    """The next version copies what the folder has; where that has other bytes, from the publisher's store."""
    first = lab.put()
    part = open_shared(lab.folder).partition(lab.image().layers[0])
    damage(first.sif, b"other bytes", part.offset + part.size // 2)
    second = lab.put_next()
    assert second.bytes_copied == sum(layer.size for layer in second.record.layers)
    assert hashlib.sha256(second.sif.read_bytes()).hexdigest() == second.record.sha256
    for layer in lab.image().layers:  # found in the newest that has them
        open_shared(lab.folder).check_blob(layer.digest, again=True)


@pytest.mark.usefixtures("other_file_system")
@pytest.mark.parametrize("when", ["before its part is found", "before it is opened", "before its layers are noted"])
def test_version_pruned_while_another_one_copies_from_it(lab: Lab, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a prune that started before the publisher was registered: what it takes away comes from the publisher's
    store.
    """
    first = lab.put()
    partition, put_layers, taken = SharedStore.partition, SharedStore.put_layers, []

    def take(sif: Path) -> None:
        if not taken:
            sif.rename(lab.folder / "trash" / sif.name)
            taken.append(sif.name)

    def found(shared: SharedStore, layer: StoredLayer, **options: Any) -> Partition:
        if when == "before its part is found":
            take(first.sif)
        part = partition(shared, layer, **options)
        if when == "before it is opened":
            take(Path(str(part.path)))
        return part

    def noted(shared: SharedStore, sif: InnerPath, layers: Sequence[StoredLayer]) -> None:
        if when == "before its layers are noted":
            take(sif.path)
        put_layers(shared, sif, layers)

    monkeypatch.setattr(SharedStore, "partition", found)
    monkeypatch.setattr(SharedStore, "put_layers", noted)
    second = lab.put_next()
    assert taken
    assert hashlib.sha256(second.sif.read_bytes()).hexdigest() == second.record.sha256
    assert all(open_shared(lab.folder).layer(layer.cache_key) for layer in second.record.layers)


def test_a_layer_stays_while_a_version_has_it(lab: Lab) -> None:
    first, second = lab.put(), lab.put_next()
    prune(lab.folder, names=[first.sif.name])
    shared, gone = open_shared(lab.folder), first.record.layers[1:]
    assert [shared.layer(layer.cache_key) for layer in gone] == [None, None]
    assert all(shared.layer(layer.cache_key) for layer in second.record.layers)
    assert {path.name for path in (lab.folder / "store/layers").iterdir()} == {
        layer.digest[7:] for layer in second.record.layers
    }
    assert {path.stem for path in (lab.folder / "store/keys").iterdir()} == {
        layer.cache_key for layer in second.record.layers
    }
    assert len(list((lab.folder / "store/layers" / gone[0].digest[7:]).parent.glob("*/*"))) == 3


def test_concurrent_publisher_keeps_its_layers(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same image again, just when prune has seen that its links lead nowhere, or its keys."""
    first = lab.put()
    image = lab.image()
    lab.put_next()
    remove, came = InnerPath.remove, []

    def publish_and_remove(path: InnerPath, *, missing_ok: bool = False) -> None:
        if path.parent.parent.name == "layers" and not came:
            came.append(publish(image, lab.store, lab.folder, PublishOptions(check=False, current=False), quiet()))
        remove(path, missing_ok=missing_ok)

    monkeypatch.setattr(InnerPath, "remove", publish_and_remove)
    prune(lab.folder, names=[first.sif.name])
    monkeypatch.undo()
    assert came[0].sif == first.sif
    assert all(open_shared(lab.folder).layer(layer.cache_key) for layer in came[0].record.layers)


def test_a_damaged_layer_is_not_published(files_only: SampleRecipe, store: Store, tmp_path: Path) -> None:
    image = image_of(files_only, store)
    path = store.blob_path(image.layers[1].digest)
    damage(path, bytes(image.layers[1].size))
    with pytest.raises(StoreError, match=r"blob sha256:\w+ is damaged"):
        publish(image, store, tmp_path / "lab", PublishOptions(check=False), quiet())
    assert published(tmp_path / "lab") == {}
    assert list((tmp_path / "lab/store/layers").iterdir()) == []
    assert list((tmp_path / "lab/store/staging").iterdir()) == []


RENAMES = 14  # of a second version: everything that gets its name


@pytest.mark.parametrize("where", range(1, RENAMES + 2))
def test_interrupt_at_any_rename_keeps_the_former_state(lab: Lab, where: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kill would: what has its name is whole, what has none is not seen, and the next run continues."""
    first = lab.put()
    (lab.recipe.path / "files/data.txt").write_text("other\n")
    image, count, rename = lab.image(), 0, os.rename

    def end(source: Any, target: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        if count == where:
            raise KeyboardInterrupt
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", end)
    try:
        publish(image, lab.store, lab.folder, PublishOptions(check=False), quiet())
    except KeyboardInterrupt:
        assert count == where
    else:
        assert (count, where) == (RENAMES, RENAMES + 1)
    monkeypatch.undo()
    seen = read_records(InnerPath.below(first.sif.parent))[0]
    assert seen[0].file == first.sif.name
    for record in seen:
        assert hashlib.sha256((first.sif.parent / record.file).read_bytes()).hexdigest() == record.sha256
        assert all(open_shared(lab.folder).layer(layer.cache_key) for layer in record.layers)
    assert (first.sif.parent / "current").exists()
    assert list((lab.folder / "store/staging").iterdir()) == []
    second = publish(image, lab.store, lab.folder, PublishOptions(check=False), quiet())
    assert tags(InnerPath.below(first.sif.parent))["current"] == second.sif.name != first.sif.name


# ---------------------------------------------------------------------------------------------------------------- prune


def test_prune_keeps_what_is_pinned_tagged_or_used(lab: Lab) -> None:
    old = lab.put(pin=True).sif.name
    tagged = lab.put_next(tags=["paper"]).sif.name
    going = lab.put_next().sif.name
    used = lab.put_next().sif.name
    newest = lab.put_next().sif.name
    unused(lab.folder, 31)
    os.utime(lab.folder / "images/own" / used, (time.time() - 86400, time.time() - 40 * 86400))
    before = {path.name for path in (lab.folder / "images/own").iterdir()}
    for dry_run in (True, False):
        decisions, aside, removed = prune(lab.folder, unused_for=30, dry_run=dry_run)
        assert {decision.file: decision.reason for decision in decisions} == {
            old: "pinned",
            tagged: "tagged paper",
            going: "last used 31 days ago",
            used: "last used 1 days ago",
            newest: "tagged current",
        }
        assert [decision.file for decision in decisions if not decision.keep] == [going]
        assert aside == decisions[2].size
        assert removed == 0
        if dry_run:
            assert {path.name for path in (lab.folder / "images/own").iterdir()} == before
    assert stems(lab.folder) == [old, tagged, used, newest]
    stem = going.removesuffix(".sif")
    assert before - {path.name for path in (lab.folder / "images/own").iterdir()} == {
        going,
        f"{going}.sha256",
        f"{stem}.json",
        f"{stem}.cdx.json",
    }
    shared = open_shared(lab.folder)
    for record in read_records(InnerPath.below(lab.folder / "images/own"))[0]:
        assert all(shared.layer(layer.cache_key) for layer in record.layers)
    _, _, removed = prune(lab.folder, unused_for=30, grace=0)
    assert removed >= aside
    assert list((lab.folder / "trash").iterdir()) == []


def test_prune_keeps_versions_that_a_job_has_open(lab: Lab) -> None:
    first = lab.put()
    lab.put_next()
    with first.sif.open("rb") as running:
        prune(lab.folder, names=[first.sif.name])
        assert not first.sif.exists()
        assert hashlib.file_digest(running, "sha256").hexdigest() == first.record.sha256
        (aside,) = (lab.folder / "trash").glob("*.sif")
        assert os.fstat(running.fileno()).st_ino == aside.stat().st_ino  # NFS serves it on: the file is there


def test_named_version_is_pruned_unless_held(lab: Lab) -> None:
    first, second = lab.put(), lab.put_next()
    decisions, _, _ = prune(lab.folder, names=["own"])
    assert [(decision.file, decision.keep) for decision in decisions] == [
        (first.sif.name, False),
        (second.sif.name, True),
    ]
    with pytest.raises(UsageError, match=r"nothing named 'onw' was published there\. Did you mean 'own'"):
        prune(lab.folder, names=["onw"])


def test_without_access_times_nothing_is_pruned_automatically(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.put()
    lab.put_next()
    unused(lab.folder, 99)
    monkeypatch.setattr(SharedStore, "knows_last_use", lambda shared: False)
    decisions, _, _ = prune(lab.folder)
    assert all(decision.keep for decision in decisions)
    assert "noatime" in decisions[0].reason


def test_leftovers_of_killed_publishers_are_pruned_after_a_day(lab: Lab) -> None:
    done = lab.put()
    other = lab.put_next()
    done.sif.with_suffix(".json").unlink()  # killed before the SIF had its name
    done.sif.unlink()
    (done.sif.parent / ".own.json.abc").write_text("half")
    for days, left in ((0.5, True), (1.5, False)):
        unused(lab.folder, days)
        prune(lab.folder)
        assert done.sif.with_suffix(".cdx.json").exists() == left
        assert (done.sif.parent / ".own.json.abc").exists() == left
    assert other.sif.exists()
    assert other.sif.with_suffix(".cdx.json").exists()


def test_version_linked_during_prune_is_kept(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    first = lab.put()
    lab.put_next()
    discard = SharedStore.discard

    def link_and_discard(shared: SharedStore, path: InnerPath) -> None:
        if path.name.endswith(".json"):
            path.with_name("mine").link(first.sif.name)
        discard(shared, path)

    monkeypatch.setattr(SharedStore, "discard", link_and_discard)
    prune(lab.folder, names=[first.sif.name])
    assert first.sif.name in stems(lab.folder)
    assert (first.sif.parent / "mine").exists()


def test_prune_refuses_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/precious").write_text("x")
    with pytest.raises(StoreError, match="no shared store in"):
        prune(tmp_path / "data")
    assert (tmp_path / "data/precious").exists()


# ----------------------------------------------------------------------------------------------------- the command line


def test_publish_and_prune_by_command(run_cli: RunCli, files_only: SampleRecipe, store: Store, tmp_path: Path) -> None:
    argv = ("--store", store.root, "publish", files_only.path, "--to", tmp_path / "my lab", "--no-verify")
    first = run_cli(*argv, "--version", "1")
    assert f" exec --nv '{tmp_path}/my lab/images/own/current' greet" in first.stdout
    assert f"EKIBEN_SHARED='{tmp_path}/my lab' " in first.stdout
    assert "of layers copied" in first.stdout
    assert "(existing)" in run_cli(*argv, "--version", "1").stdout
    record = json.loads(run_cli(*argv, "--json").stdout)
    assert (record["version"], record["bytes_copied"]) == ("1", 0)
    files_only.write("files/data.txt", "new\n")
    run_cli(*argv)
    done = run_cli("prune", "--in", tmp_path / "my lab", "own", "--grace", "0")
    assert [line.split()[0] for line in done.stdout.splitlines()[:2]] == ["remove", "keep"]
    assert "tagged current" in done.stdout
    assert re.fullmatch(r"[0-9.]+ [kM]?B removed", done.stdout.splitlines()[-1])
    assert (
        "quarantined, to be removed in 1 day; " in run_cli("prune", "--in", tmp_path / "my lab", "--grace", "1").stdout
    )
    run_cli("prune", "--in", tmp_path / "nowhere", code=6)
