"""A SIF file is published as it is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ekiben.artifacts.exporters.sif import make_sif
from ekiben.core.errors import StoreError, UsageError
from ekiben.core.inner_path import InnerPath
from ekiben.formats.sif import read_sif
from ekiben.images.published import read_records
from ekiben.inspect import image_info
from ekiben.publish import file as publishing
from ekiben.publish.file import publish_file
from ekiben.publish.prune import prune
from ekiben.publish.publish import Published, PublishOptions
from ekiben.publish.record import version_record
from ekiben.store import Store
from ekiben.store.shared import open_shared
from support.hostile import flip
from support.published import Lab
from support.sample_recipe import RunCli, edit_record, quiet
from support.small_sifs import make, squashfs

UNTESTED = PublishOptions(check=False)


@pytest.fixture
def sif(lab: Lab, tmp_path: Path) -> Path:
    make_sif(lab.image(), lab.store, tmp_path / "any name.sif", squash=False)
    return tmp_path / "any name.sif"


@pytest.fixture
def colleague(tmp_path: Path) -> Store:
    """Has the file, and nothing of what it was built from."""
    (tmp_path / "colleague").mkdir()
    return Store(tmp_path / "colleague/store")


def put(sif: Path, store: Store, folder: Path, options: PublishOptions = UNTESTED) -> Published:
    return publish_file(sif, store, folder, quiet(), options)


def test_record_is_that_of_the_recipes_image(lab: Lab, sif: Path, colleague: Store, tmp_path: Path) -> None:
    done, expected = put(sif, colleague, tmp_path / "folder"), lab.put()
    assert done.sif.name == expected.sif.name
    assert done.sif.read_bytes() == sif.read_bytes()
    for field in ("name", "recipe", "stack", "sha256", "size", "sif", "image", "tasks", "environment", "sbom_sha256"):
        assert getattr(done.record, field) == getattr(expected.record, field), field
    assert [layer.diff_id for layer in done.record.layers] == [layer.diff_id for layer in expected.record.layers]
    names = {path.name for path in done.sif.parent.iterdir()}
    assert names == {path.name for path in expected.sif.parent.iterdir()}


def test_layers_of_a_file_are_not_offered_to_builds(sif: Path, colleague: Store, tmp_path: Path) -> None:
    """Their keys are the word of whoever made the file."""
    put(sif, colleague, tmp_path / "folder")
    assert open_shared(tmp_path / "folder").records.names("keys") == []


def test_file_is_published_once(lab: Lab, sif: Path, colleague: Store, tmp_path: Path) -> None:
    first = put(sif, colleague, tmp_path / "folder", PublishOptions(check=False, version="1", tags=["good"]))
    again = put(sif, colleague, tmp_path / "folder")
    assert (first.created, again.created, again.sif) == (True, False, first.sif)
    (record,) = read_records(InnerPath.below(first.sif.parent))[0]
    assert (record.version, record.file) == ("1", first.sif.name)
    assert (first.sif.parent / "good").is_symlink() and (first.sif.parent / "current").is_symlink()


def test_published_version_by_its_name(lab: Lab, run_cli: RunCli, tmp_path: Path) -> None:
    done = lab.put(version="1")
    argv = ("--store", tmp_path / "store", "--shared", lab.folder, "publish", "own:1", "--to", tmp_path / "folder")
    printed = run_cli(*argv, "--no-verify", "--version", "2").stdout
    assert "own-2-" in printed and "build on" not in printed
    (copy,) = (tmp_path / "folder/images/own").glob("own-2-*.sif")
    assert copy.read_bytes() == done.sif.read_bytes()
    assert json.loads(copy.with_suffix(".json").read_bytes())["sha256"] == done.record.sha256


def test_file_of_another_builder_is_refused(colleague: Store, tmp_path: Path) -> None:
    make(tmp_path / "x.sif", squashfs(tmp_path / "a", "a"))
    with pytest.raises(UsageError, match="was not built by Ekiben"):
        put(tmp_path / "x.sif", colleague, tmp_path / "folder")
    (tmp_path / "y.sif").write_bytes(b"no SIF")
    with pytest.raises(StoreError, match=rf"^{re.escape(str(tmp_path))}/y\.sif: not a SIF file"):
        put(tmp_path / "y.sif", colleague, tmp_path / "folder")
    assert list((tmp_path / "folder/store/staging").iterdir()) == []


def test_squashed_file_is_refused(lab: Lab, colleague: Store, tmp_path: Path) -> None:
    make_sif(lab.image(), lab.store, tmp_path / "s.sif", squash=True)
    with pytest.raises(UsageError, match="has all layers in one partition"):
        put(tmp_path / "s.sif", colleague, tmp_path / "folder")


def test_damaged_file_is_refused(sif: Path, colleague: Store, tmp_path: Path) -> None:
    layers = read_sif(sif).layers
    for at in [*(item.offset + item.size // 3 for item in layers), layers[0].offset + 100, layers[-1].offset + 8]:
        damaged = tmp_path / f"{at}.sif"
        damaged.write_bytes(sif.read_bytes())
        flip(damaged, at)
        with pytest.raises((StoreError, UsageError)):
            put(damaged, colleague, tmp_path / "folder")


def test_hostile_task_of_a_record_is_not_printed(lab: Lab, sif: Path, run_cli: RunCli) -> None:
    edit_record(lab.put().sif.with_suffix(".json"), tasks={"x; touch pwned": "", "greet": ""})
    printed = run_cli("--store", lab.store.root, "publish", sif, "--to", lab.folder, "--no-verify").stdout
    assert " greet\n" in printed
    assert "pwned" not in printed


def test_options_of_building_are_refused(sif: Path, run_cli: RunCli, tmp_path: Path) -> None:
    for option in (["--stack", "cu130"], ["--gpu-arch", "9.0"], ["--build-arg", "a=b"]):
        failed = run_cli("publish", sif, "--to", tmp_path / "folder", *option, code=2).stderr
        assert f"{option[0]} is for" in failed
    assert not (tmp_path / "folder").exists()


def test_published_file_is_not_signed_in_its_folder(lab: Lab, run_cli: RunCli) -> None:
    done = lab.put()
    for path in (done.sif, done.sif.parent / "current"):
        failed = run_cli("sign", path, code=2).stderr
        assert "a published file is not changed; -o FILE writes a signed copy" in failed


def test_version_with_other_bytes_than_its_record_is_written_again(sif: Path, colleague: Store, tmp_path: Path) -> None:
    done = put(sif, colleague, tmp_path / "folder", PublishOptions(check=False, current=False))
    flip(done.sif, done.sif.stat().st_size - 5000)
    again = put(sif, colleague, tmp_path / "folder")
    assert (again.sif, again.created) == (done.sif, True)
    assert again.sif.read_bytes() == sif.read_bytes()


def test_prune_leaves_a_version_that_is_being_published_again(
    lab: Lab, sif: Path, colleague: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it one whose record has other keys: that of whoever built it."""
    done, decisions = lab.put(current=False), list[tuple[bool, str]]()
    link = publishing.link

    def pruned(path: InnerPath, target: str) -> None:
        decisions.extend((item.keep, item.reason) for item in prune(lab.folder, unused_for=0)[0])
        link(path, target)

    monkeypatch.setattr(publishing, "link", pruned)
    assert put(sif, colleague, lab.folder).sif == done.sif
    assert decisions == [(True, "being published")]


def test_version_that_a_prune_removed_meanwhile_is_published_again(
    sif: Path, colleague: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that began before the announcement."""
    link, removed = publishing.link, list[str]()

    def removing(path: InnerPath, target: str) -> None:
        link(path, target)
        if not removed:
            removed.append(target)
            for ending in (".json", ".sif"):
                path.with_name(target.replace(".sif", ending)).remove()

    monkeypatch.setattr(publishing, "link", removing)
    done = put(sif, colleague, tmp_path / "folder")
    assert removed == [done.sif.name] and done.created
    assert done.sif.read_bytes() == sif.read_bytes()
    assert [record.file for record in read_records(InnerPath.below(done.sif.parent))[0]] == [done.sif.name]


@pytest.mark.parametrize("name", ["../x", "a/b", "Upper", ""])
def test_name_that_an_image_gives_itself_makes_no_folder(
    sif: Path, colleague: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(image_info, "_image_name", lambda *args: name)
    with pytest.raises(UsageError, match="names its image"):
        put(sif, colleague, tmp_path / "folder")
    assert list((tmp_path / "folder/images").iterdir()) == []


def test_what_no_record_may_have_leaves_no_file(
    sif: Path, colleague: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "version_record", lambda *args: {**version_record(*args), "stack": "a/b"})
    with pytest.raises(StoreError, match="the image's metadata do not fit a record: it 'stack'"):
        put(sif, colleague, tmp_path / "folder")
    assert list((tmp_path / "folder").glob("images/*/*")) == []
