"""A folder that others write to: nothing in it leads a reader, a publisher or prune out of it, or ends one with a
traceback.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from ekiben.core.errors import StoreError
from ekiben.core.inner_path import InnerPath
from ekiben.images.published import read_records
from ekiben.publish.catalog.write import make_catalog
from ekiben.publish.prune import prune, published
from ekiben.store import Store
from ekiben.store.shared import open_shared
from support.hostile import NO_RECORDS
from support.published import Lab, unused
from support.sample_recipe import RunCli, edit_record


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A victim's folder with files such as prune looks for."""
    home = tmp_path / "home"
    home.mkdir()
    for name in (".ssh", "thesis-1-0123456789ab.sif", "thesis-1-0123456789ab.txt", "x.sif", "x.sif.sha256", "x.json"):
        (home / name).write_text("precious")
        os.utime(home / name, (0, 0))
    return home


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def add_record(sif: Path, record_name: str, /, **changes: Any) -> None:
    """A record that one of the folder's writers made by hand, beside a real one."""
    shutil.copyfile(sif.with_suffix(".json"), sif.with_name(record_name))
    edit_record(sif.with_name(record_name), **{"published": "2001-01-01T00:00:00+00:00", **changes})


def prune_all(shared_dir: Path) -> None:
    for _ in range(2):
        prune(shared_dir, unused_for=0, grace=0)


@pytest.mark.parametrize("field", ["file", "name", "both"])
def test_a_record_that_names_a_file_elsewhere_moves_nothing(lab: Lab, home: Path, field: str) -> None:
    done = lab.put()
    path = home / "thesis-1-0123456789ab.sif"
    relative = os.path.relpath(path, done.sif.parent)
    changes = {
        "file": {"file": relative},
        "name": {"name": "../../../home", "file": path.name},
        "both": {"name": "../..", "file": "../home/" + path.name},
    }[field]
    add_record(done.sif, "own-0-0123456789ab.json", size=path.stat().st_size, **changes)
    before = contents(home)
    assert [record.file for record in read_records(InnerPath.below(done.sif.parent))[0]] == [done.sif.name]
    prune_all(lab.folder)
    assert contents(home) == before
    assert done.sif.exists()


@pytest.mark.parametrize("name", ["own", "other"])
def test_an_image_folder_that_is_a_link_is_not_entered(lab: Lab, tmp_path: Path, home: Path, name: str) -> None:
    lab.put()
    if name == "own":
        (lab.folder / "images/own").rename(tmp_path / "aside")
    (lab.folder / "images" / name).symlink_to(home)
    before = contents(home)
    assert name not in published(lab.folder)
    prune_all(lab.folder)
    make_catalog(
        lab.folder, Store(tmp_path / "reader", open_shared(lab.folder)), out=None, runs=[], log=lambda line: None
    )
    if name == "own":
        with pytest.raises(StoreError, match=r"images/own is a link"):
            lab.put()
    assert contents(home) == before


@pytest.mark.parametrize("folder", ["trash", "images", "store"])
def test_a_folder_of_the_layout_that_is_a_link_is_refused(lab: Lab, home: Path, folder: str) -> None:
    done = lab.put()
    lab.put_next()
    unused(lab.folder, 99)
    (home / f"{int(time.time()) - 9 * 86400}__aa__thesis").write_text("precious")
    (lab.folder / folder).rename(home / folder) if folder != "trash" else (lab.folder / folder).rmdir()
    (lab.folder / folder).symlink_to(home / folder if folder != "trash" else home)
    before = sorted(home.rglob("*"))
    for act in (
        lambda: prune(lab.folder, names=[done.sif.name], grace=0),
        lambda: lab.put_next(),
    ):
        with pytest.raises(StoreError, match=rf"{folder}\b.*\bis a link"):
            act()
    assert sorted(home.rglob("*")) == before


def test_folders_of_modulefiles_that_are_links_are_not_entered(lab: Lab, home: Path) -> None:
    lab.put(module=True)
    (home / "dangling").symlink_to("nowhere")
    (lab.folder / "modulefiles/ekiben/other").symlink_to(home)
    prune_all(lab.folder)
    assert (home / "dangling").is_symlink()


def test_records_that_are_links_or_pipes_are_skipped(lab: Lab, home: Path) -> None:
    done = lab.put()
    os.mkfifo(done.sif.with_name("own-0-0123456789ab.json"))
    (done.sif.parent / "own-0-ba9876543210.json").symlink_to(home / "x.json")
    (done.sif.parent / "own-0-aaaaaaaaaaaa.json").mkdir()
    records, skipped = read_records(InnerPath.below(done.sif.parent))
    assert [record.file for record in records] == [done.sif.name]
    assert dict(skipped) == {
        "own-0-0123456789ab.json": "cannot be read: it is not a regular file",
        "own-0-ba9876543210.json": "cannot be read: it is a link",
        "own-0-aaaaaaaaaaaa.json": "cannot be read: it is not a regular file",
    }
    prune_all(lab.folder)
    assert done.sif.exists()


def test_a_sif_that_is_a_link_is_no_version(lab: Lab, tmp_path: Path) -> None:
    done = lab.put()
    done.sif.rename(tmp_path / "elsewhere.sif")
    done.sif.symlink_to(tmp_path / "elsewhere.sif")
    assert read_records(InnerPath.below(done.sif.parent)) == (
        [],
        [(f"{done.sif.stem}.json", f"its {done.sif.name} is not a regular file")],
    )


def test_a_later_versions_record_is_read_and_its_fields_kept(lab: Lab) -> None:
    done = lab.put()
    path = done.sif.with_suffix(".json")
    data = json.loads(path.read_bytes())
    layers = [{**layer, "compression": "zstd"} for layer in data["layers"]]
    edit_record(path, provenance={"builder": "later"}, layers=layers)
    for key in (lab.folder / "store/keys").iterdir():
        edit_record(key, compression="zstd")
    (record,) = read_records(InnerPath.below(done.sif.parent))[0]
    assert record.data["provenance"] == {"builder": "later"}
    assert not lab.put().created


DAMAGE = [*NO_RECORDS, b"{}", b'{"digest": "sha256:../../../../../home/x.sif", "name": "../../x"}']


@pytest.mark.parametrize("data", DAMAGE)
def test_damaged_files_give_no_traceback(lab: Lab, tmp_path: Path, home: Path, run_cli: RunCli, data: bytes) -> None:
    done = lab.put()
    before = contents(home)
    victims = [
        *lab.folder.glob("store/keys/*.json"),
        *lab.folder.glob("images/own/own-*.json"),
        *lab.folder.glob("store/last/*.json"),
    ]
    assert len(victims) > 4
    for path in victims:
        path.chmod(0o644)
        path.write_bytes(data)
    for path in (
        *lab.folder.glob("store/layers/*/"),
        lab.folder / "store/layers",
        lab.folder / "store/keys",
        lab.folder / "store/refs",
        lab.folder / "store/checks",
        lab.folder / "store/results",
    ):
        (path / "stray.json").write_bytes(data)
        (path / "README").write_bytes(data)
    runs = done.sif.with_suffix(".runs")
    runs.mkdir()
    (runs / "0123456789ab.json").write_bytes(data)
    for argv in (
        ("prune", "--in", lab.folder, "--unused-for", "0", "--grace", "0"),
        ("catalog", lab.folder),
        ("--shared", lab.folder, "--store", tmp_path / "reader", "plan", lab.recipe.path),
        ("--store", lab.store.root, "publish", lab.recipe.path, "--to", lab.folder, "--no-verify"),
    ):
        assert "Traceback" not in run_cli(*argv).stderr
    assert contents(home) == before
