"""Who published or removed a version, and versions whose record somebody removed or damaged."""

from __future__ import annotations

import getpass
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ekiben.core.errors import StoreError
from ekiben.core.inner_path import InnerPath
from ekiben.core.pgp_key import Key
from ekiben.images import ImageOptions, find_image
from ekiben.images.published import RECORD_FORMAT, read_records, removals, unrecorded_versions
from ekiben.publish.catalog.write import make_catalog
from ekiben.publish.prune import prune
from ekiben.publish.publish import Published
from ekiben.publish.record import signer_of
from ekiben.publish.repair import repair
from ekiben.store import Store
from ekiben.store.shared import open_shared, user_name
from support.hostile import NO_RECORDS, flip
from support.published import Lab, unused
from support.sample_recipe import RunCli, edit_record, quiet

ME = user_name(os.geteuid())


def folder_of(done: Published) -> InnerPath:
    return InnerPath.below(done.sif.parent)


def record_of(done: Published) -> Path:
    return done.sif.with_suffix(".json")


@pytest.mark.parametrize("variable", ["USER", "LOGNAME", "LNAME", "USERNAME"])
def test_publisher_is_no_variable(lab: Lab, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "mallory")
    assert getpass.getuser() in ("mallory", ME)
    done = lab.put()
    assert (done.record.by, json.loads(record_of(done).read_bytes())["by"]) == (ME, ME)


def test_publisher_is_the_owner_of_the_sif_and_who_wrote_its_record_anew_is_named(lab: Lab, run_cli: RunCli) -> None:
    done = lab.put()
    edit_record(record_of(done), by="director")
    assert [(record.by, record.recorded_by) for record in read_records(folder_of(done))[0]] == [(ME, "")]
    assert "written again" not in run_cli("--shared", lab.folder, "list").stdout
    if os.geteuid() != 0:
        pytest.skip("only root can give files to another user")
    os.chown(record_of(done), 12345, -1)
    assert [(record.by, record.recorded_by) for record in read_records(folder_of(done))[0]] == [(ME, "12345")]
    listed = json.loads(run_cli("--shared", lab.folder, "list", "--json").stdout)
    published = [item for item in listed if item.get("state") == "published"]
    assert [(item["by"], item["recorded_by"]) for item in published] == [(ME, "12345")]
    assert f"by {ME}  " in (text := run_cli("--shared", lab.folder, "list").stdout)
    assert text.rstrip().endswith("(record written again by 12345)")


def remove(path: Path) -> None:
    path.unlink()


def damage(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(b"{}")


def exchange(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


HIDE = {remove: "its record is missing", damage: "its record", exchange: "its record cannot be read: it is a link"}


@pytest.mark.parametrize("hide", HIDE)
def test_version_without_its_record_is_listed_pruned_and_repaired(lab: Lab, hide: Any, run_cli: RunCli) -> None:
    done = lab.put(version="1", current=False)
    hide(record_of(done))
    (item,) = unrecorded_versions(folder_of(done))
    assert (item.name, item.version, item.file, item.size, item.by) == (
        done.record.name,
        "1",
        done.sif.name,
        done.sif.stat().st_size,
        ME,
    )
    assert item.reason.startswith(HIDE[hide])
    listed = run_cli("--shared", lab.folder, "list").stdout
    assert "own:1" in listed and HIDE[hide] in listed and f"publish --repair {lab.folder}" in listed
    with pytest.raises(StoreError, match=rf"own:1 is {done.sif.name} in .*, and {HIDE[hide]}") as caught:
        find_image("own:1", ImageOptions(shared=lambda: lab.folder))
    assert f"publish --repair {lab.folder}" in (caught.value.hint or "")
    assert "repaired" in run_cli("publish", "--repair", lab.folder).stdout
    (record,) = read_records(folder_of(done))[0]
    before = done.record
    assert replace(record, layers=(), checks=(), published="", data={}) == replace(
        before, layers=(), checks=(), published="", data={}
    )
    assert [(layer.name, layer.digest, layer.diff_id, layer.tar_size) for layer in record.layers] == [
        (layer.name, layer.digest, layer.diff_id, layer.tar_size) for layer in before.layers
    ]
    assert "repaired" in record.data
    assert find_image("own:1", ImageOptions(shared=lambda: lab.folder)).sif == done.sif
    assert "every version has its record" in run_cli("publish", "--repair", lab.folder).stdout


def test_version_without_its_record_is_pruned_by_its_last_use(lab: Lab) -> None:
    kept, pinned, done = lab.put(), lab.put_next(pin=True, current=False), lab.put_next(current=False)
    for item in (kept, pinned, done):
        remove(record_of(item))
    unused(lab.folder, 10)
    reasons = {item.file: (item.keep, item.reason) for item in prune(lab.folder)[0]}
    assert reasons == {
        kept.sif.name: (True, "tagged current, and its record is missing"),
        pinned.sif.name: (True, "pinned, and its record is missing"),
        done.sif.name: (True, "last used 10 days ago, and its record is missing"),
    }
    unused(lab.folder, 40)
    prune(lab.folder)
    assert [item.sif.exists() for item in (kept, pinned, done)] == [True, True, False]
    assert done.sif.with_suffix(".cdx.json").exists() is False


def test_new_sif_of_a_running_publisher_is_kept(lab: Lab) -> None:
    """Between the file and its record."""
    done = lab.put(current=False)
    remove(record_of(done))
    os.utime(done.sif, (0, time.time()))
    shared = open_shared(lab.folder)
    shared.open_for_writing()
    with shared.building(["0" * 64]):
        (decision,) = prune(lab.folder, unused_for=0)[0]
        assert (decision.keep, decision.reason) == (True, "being published, and its record is missing")


def test_publishing_again_writes_the_record(lab: Lab) -> None:
    done = lab.put(version="1")
    remove(record_of(done))
    again = lab.put()
    assert again.sif == done.sif
    assert [item.file for item in read_records(folder_of(done))[0]] == [done.sif.name]
    assert unrecorded_versions(folder_of(done)) == []


def test_who_removed_a_version_is_the_owner_of_the_note(lab: Lab, run_cli: RunCli) -> None:
    done = lab.put(version="1")
    lab.put_next(version="2")
    prune(lab.folder, names=[done.sif.name])
    (removal,) = removals(folder_of(done))
    assert (removal.file, removal.by) == (done.sif.name, ME)
    note = done.sif.with_suffix(".removed")
    assert json.loads(note.read_bytes())["sha256"] == done.record.sha256
    listed = run_cli("--shared", lab.folder, "list").stdout.splitlines()
    assert [line.split() for line in listed if " removed " in line] == [
        ["own:1", "removed", removal.removed[:10], "by", ME]
    ]
    prune(lab.folder, unused_for=0, grace=0)
    assert note.exists()
    for data in NO_RECORDS:
        damage(note)
        note.write_bytes(data)
        assert removals(folder_of(done)) == []
    exchange(note)
    assert removals(folder_of(done)) == []


def test_version_whose_removal_was_interrupted_is_not_repaired(lab: Lab) -> None:
    done = lab.put()
    remove(record_of(done))
    done.sif.with_suffix(".removed").write_bytes(b"{}")
    (item,) = repair(lab.folder, lab.store, quiet())
    assert item.reason.startswith("its removal was interrupted")
    assert not record_of(done).exists()


def test_file_of_a_running_publisher_is_not_repaired(lab: Lab) -> None:
    done = lab.put()
    remove(record_of(done))
    shared = open_shared(lab.folder)
    shared.open_for_writing()
    with shared.building(["0" * 64]):
        (item,) = repair(lab.folder, lab.store, quiet())
    assert "another process publishes in this folder" in item.reason
    assert not record_of(done).exists()


def test_record_that_its_publisher_wrote_meanwhile_stays(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    done = lab.put()
    record = record_of(done).read_bytes()
    remove(record_of(done))

    def writing(*args: Any) -> Key | None:
        record_of(done).write_bytes(record)
        return signer_of(*args)

    monkeypatch.setattr("ekiben.publish.repair.signer_of", writing)
    assert repair(lab.folder, lab.store, quiet()) == []
    assert record_of(done).read_bytes() == record


def test_file_that_was_removed_or_exchanged_meanwhile_gets_no_record(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = lab.put()
    remove(record_of(done))
    data = done.sif.read_bytes()

    def exchanging(*args: Any) -> Key | None:
        (tmp_path / "other").write_bytes(data)
        (tmp_path / "other").replace(done.sif)
        return signer_of(*args)

    monkeypatch.setattr("ekiben.publish.repair.signer_of", exchanging)
    (item,) = repair(lab.folder, lab.store, quiet())
    assert item.reason == "it was changed or removed while it was read"

    def removing(*args: Any) -> Key | None:
        done.sif.unlink()
        return signer_of(*args)

    monkeypatch.setattr("ekiben.publish.repair.signer_of", removing)
    (item,) = repair(lab.folder, lab.store, quiet())
    assert item.reason == "it was changed or removed while it was read"
    assert not record_of(done).exists()


# --------------------------------------------------------------------------------------------------- hostile folders


def test_file_that_is_no_sif_is_no_version(lab: Lab, tmp_path: Path) -> None:
    done = lab.put()
    for name, content in (("own-0-0123456789ab.sif", b"x" * 99), ("other-0-0123456789ab.sif", done.sif.read_bytes())):
        (done.sif.parent / name).write_bytes(content)
    (done.sif.parent / "own-0-aaaaaaaaaaaa.sif").symlink_to(done.sif)
    os.mkfifo(done.sif.parent / "own-0-bbbbbbbbbbbb.sif")
    (done.sif.parent / "own-0-cccccccccccc.sif").mkdir()
    assert unrecorded_versions(folder_of(done)) == []
    assert repair(lab.folder, lab.store, quiet()) == []


def test_damaged_file_gets_no_record(lab: Lab, run_cli: RunCli) -> None:
    done = lab.put()
    remove(record_of(done))
    flip(done.sif, done.sif.stat().st_size - 5000)
    failed = run_cli("publish", "--repair", lab.folder, code=1)
    assert f"no record  {done.sif.name}: {done.sif.name} is damaged: its SHA-256 is" in failed.stdout
    assert not record_of(done).exists()


def test_sif_of_another_builder_gets_no_record(lab: Lab, tmp_path: Path) -> None:
    import hashlib

    from support.small_sifs import make, squashfs

    done = lab.put()
    make(tmp_path / "x.sif", squashfs(tmp_path / "a", "a"))
    data = (tmp_path / "x.sif").read_bytes()
    name = f"own-9-{hashlib.sha256(data).hexdigest()[:12]}.sif"
    (done.sif.parent / name).write_bytes(data)
    (item,) = repair(lab.folder, lab.store, quiet())
    assert item.file == name and "was not built by Ekiben" in item.reason


def test_record_of_a_later_version_of_ekiben_stays(lab: Lab) -> None:
    done = lab.put()
    edit_record(record_of(done), format=RECORD_FORMAT + 1)
    before = record_of(done).read_bytes()
    (item,) = repair(lab.folder, lab.store, quiet())
    assert "is of format 2" in item.reason
    assert record_of(done).read_bytes() == before


def test_catalog_names_what_has_no_record(lab: Lab, tmp_path: Path) -> None:
    lab.put()
    done = lab.put_next()
    remove(record_of(done))
    make_catalog(
        lab.folder, Store(tmp_path / "reader", open_shared(lab.folder)), out=None, runs=[], log=lambda line: None
    )
    skipped = json.loads((lab.folder / "catalog/catalog.json").read_bytes())["skipped"]
    assert skipped == [{"file": f"images/own/{done.sif.name}", "reason": "its record is missing"}]
