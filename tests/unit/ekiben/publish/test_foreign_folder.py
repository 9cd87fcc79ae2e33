"""A folder that others write to: nothing in it leads a reader, a publisher or prune out of it, or ends one with a traceback."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from ekiben.core.errors import StoreError
from ekiben.publish._records import read_records
from ekiben.publish.catalog.write import make_catalog
from ekiben.publish.prune import prune, published
from ekiben.store import Store
from ekiben.store.shared import open_shared
from support.published import put, put_next, unused
from support.sample_recipe import RunCli, SampleRecipe, edit_record


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
def test_a_record_that_names_a_file_elsewhere_moves_nothing(
    files_only: SampleRecipe, store: Store, tmp_path: Path, home: Path, field: str
) -> None:
    shared_dir = tmp_path / "lab"
    done = put(files_only, store, shared_dir)
    path = home / "thesis-1-0123456789ab.sif"
    relative = os.path.relpath(path, done.sif.parent)
    changes = {"file": {"file": relative}, "name": {"name": "../../../home", "file": path.name},
               "both": {"name": "../..", "file": "../home/" + path.name}}[field]  # fmt: skip
    add_record(done.sif, "own-0-0123456789ab.json", size=path.stat().st_size, **changes)
    before = contents(home)
    assert [record.file for record in read_records(done.sif.parent)[0]] == [done.sif.name]
    prune_all(shared_dir)
    assert contents(home) == before
    assert done.sif.exists()


@pytest.mark.parametrize("name", ["own", "other"])
def test_an_image_folder_that_is_a_link_is_not_entered(
    files_only: SampleRecipe, store: Store, tmp_path: Path, home: Path, name: str
) -> None:
    shared_dir = tmp_path / "lab"
    put(files_only, store, shared_dir)
    if name == "own":
        (shared_dir / "images/own").rename(tmp_path / "aside")
    (shared_dir / "images" / name).symlink_to(home)
    before = contents(home)
    assert name not in published(shared_dir)
    prune_all(shared_dir)
    make_catalog(
        shared_dir, Store(tmp_path / "reader", open_shared(shared_dir)), out=None, runs=[], log=lambda line: None
    )
    if name == "own":
        with pytest.raises(StoreError, match=r"images/own is a link"):
            put(files_only, store, shared_dir)
    assert contents(home) == before


@pytest.mark.parametrize("folder", ["trash", "images", "store"])
def test_a_folder_of_the_layout_that_is_a_link_is_refused(
    files_only: SampleRecipe, store: Store, tmp_path: Path, home: Path, folder: str
) -> None:
    shared_dir = tmp_path / "lab"
    done = put(files_only, store, shared_dir)
    put_next(files_only, store, shared_dir)
    unused(shared_dir, 99)
    (home / f"{int(time.time()) - 9 * 86400}__aa__thesis").write_text("precious")
    (shared_dir / folder).rename(home / folder) if folder != "trash" else (shared_dir / folder).rmdir()
    (shared_dir / folder).symlink_to(home / folder if folder != "trash" else home)
    before = sorted(home.rglob("*"))
    for act in (
        lambda: prune(shared_dir, names=[done.sif.name], grace=0),
        lambda: put_next(files_only, store, shared_dir),
    ):
        with pytest.raises(StoreError, match=f"{folder} is a link"):
            act()
    assert sorted(home.rglob("*")) == before


def test_folders_of_modulefiles_that_are_links_are_not_entered(
    files_only: SampleRecipe, store: Store, tmp_path: Path, home: Path
) -> None:
    shared_dir = tmp_path / "lab"
    put(files_only, store, shared_dir, module=True)
    (home / "dangling").symlink_to("nowhere")
    (shared_dir / "modulefiles/ekiben/other").symlink_to(home)
    prune_all(shared_dir)
    assert (home / "dangling").is_symlink()


def test_records_that_are_links_or_pipes_are_skipped(
    files_only: SampleRecipe, store: Store, tmp_path: Path, home: Path
) -> None:
    shared_dir = tmp_path / "lab"
    done = put(files_only, store, shared_dir)
    os.mkfifo(done.sif.with_name("own-0-0123456789ab.json"))
    (done.sif.parent / "own-0-ba9876543210.json").symlink_to(home / "x.json")
    (done.sif.parent / "own-0-aaaaaaaaaaaa.json").mkdir()
    records, skipped = read_records(done.sif.parent)
    assert [record.file for record in records] == [done.sif.name]
    assert dict(skipped) == {
        "own-0-0123456789ab.json": "is not a regular file", "own-0-ba9876543210.json": "is a link",
        "own-0-aaaaaaaaaaaa.json": "is not a regular file",
    }  # fmt: skip
    prune_all(shared_dir)
    assert done.sif.exists()


def test_a_sif_that_is_a_link_is_no_version(files_only: SampleRecipe, store: Store, tmp_path: Path) -> None:
    done = put(files_only, store, tmp_path / "lab")
    done.sif.rename(tmp_path / "elsewhere.sif")
    done.sif.symlink_to(tmp_path / "elsewhere.sif")
    assert read_records(done.sif.parent) == (
        [],
        [(f"{done.sif.stem}.json", f"its {done.sif.name} is not a regular file")],
    )


def test_a_later_versions_record_is_read_and_its_fields_kept(
    files_only: SampleRecipe, store: Store, tmp_path: Path
) -> None:
    shared_dir = tmp_path / "lab"
    done = put(files_only, store, shared_dir)
    path = done.sif.with_suffix(".json")
    data = json.loads(path.read_bytes())
    layers = [{**layer, "compression": "zstd"} for layer in data["layers"]]
    edit_record(path, provenance={"builder": "later"}, layers=layers)
    for key in (shared_dir / "store/keys").iterdir():
        edit_record(key, compression="zstd")
    (record,) = read_records(done.sif.parent)[0]
    assert record.data["provenance"] == {"builder": "later"}
    assert not put(files_only, store, shared_dir).created


DAMAGE = [
    b"",
    b"\xff",
    b"{",
    b"[1]",
    b"{}",
    b"[" * 100_000,
    b'{"digest": "sha256:../../../../../home/x.sif", "name": "../../x"}',
]


@pytest.mark.parametrize("data", DAMAGE)
def test_damaged_files_give_no_command_a_traceback(
    files_only: SampleRecipe, store: Store, tmp_path: Path, home: Path, run_cli: RunCli, data: bytes
) -> None:
    shared_dir = tmp_path / "lab"
    done = put(files_only, store, shared_dir)
    before = contents(home)
    victims = [
        *shared_dir.glob("store/keys/*.json"),
        *shared_dir.glob("images/own/own-*.json"),
        *shared_dir.glob("store/last/*.json"),
    ]
    assert len(victims) > 4
    for path in victims:
        path.chmod(0o644)
        path.write_bytes(data)
    for path in (*shared_dir.glob("store/layers/*/"), shared_dir / "store/layers", shared_dir / "store/keys", shared_dir / "store/refs",
                 shared_dir / "store/checks", shared_dir / "store/results"):  # fmt: skip
        (path / "stray.json").write_bytes(data)
        (path / "README").write_bytes(data)
    runs = done.sif.with_suffix(".runs")
    runs.mkdir()
    (runs / "0123456789ab.json").write_bytes(data)
    for argv in (("prune", "--in", shared_dir, "--unused-for", "0", "--grace", "0"), ("catalog", shared_dir),
                  ("--shared", shared_dir, "--store", tmp_path / "reader", "plan", files_only.path),
                  ("--store", store.root, "publish", files_only.path, "--to", shared_dir, "--no-verify")):  # fmt: skip
        assert "Traceback" not in run_cli(*argv).stderr
    assert contents(home) == before
