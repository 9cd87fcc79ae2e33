"""The store that many read and some write: who may do what, what is looked for where, and what removing leaves."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import time
from pathlib import Path

import pytest

from ekiben.artifacts.exporters.sif import make_sif
from ekiben.builder.build import plan
from ekiben.core.errors import CorruptBlob, StoreError
from ekiben.core.folder import Folder
from ekiben.core.inner_path import InnerPath
from ekiben.formats.partition import Partition, read_partition
from ekiben.store import Image, Store, prune, reachable
from ekiben.store.shared import Policy, SharedStore, open_shared
from support.cli_audit import ROOT
from support.hostile import damage
from support.sample_recipe import RunCli, SampleRecipe, chain_of, image_of, seed, seeded


def path_of(partition: Partition) -> Path:
    return Path(str(partition.path))


def copy_layers(store: Store, shared: SharedStore, image: Image) -> None:
    """As a published SIF."""
    sif = shared.shared_dir / "images" / "own.sif"
    make_sif(image, store, sif, squash=False)
    published = shared.folder / "images/own.sif"
    shared.policy.apply_to(published, 0o444)
    shared.put_layers(published, image.layers)


@pytest.fixture
def shared(tmp_path: Path) -> SharedStore:
    made = SharedStore(tmp_path / "lab")
    made.open_for_writing()
    return made


@pytest.fixture
def filled(files_only: SampleRecipe, tmp_path: Path, shared: SharedStore) -> SharedStore:
    """A shared store with every layer of the recipe."""
    store = seeded(files_only, tmp_path / "other", "ground")
    copy_layers(store, shared, image_of(files_only, store))
    return shared


def modes(folder: Path) -> set[tuple[str, int, int]]:
    return {
        ("folder" if path.is_dir() else "file", path.stat().st_mode & 0o7777, path.stat().st_gid)
        for path in [folder, *folder.rglob("*")]
    }


# ------------------------------------------------------------------------------------------------- mine, then the other


def test_layers_of_the_upstream_store_are_not_built(
    files_only: SampleRecipe, tmp_path: Path, filled: SharedStore
) -> None:
    mine = Store(tmp_path / "mine", open_shared(filled.shared_dir))
    assert [action.reason for action in plan(chain_of(files_only), mine)] == ["stored"] * 3
    assert not (tmp_path / "mine").exists()
    image = image_of(files_only, mine)
    blobs = {path.name for path in (tmp_path / "mine/blobs/sha256").iterdir()}
    assert not blobs & {layer.digest[7:] for layer in image.layers}  # config and manifest only
    assert all(path_of(mine.partition(layer)).is_relative_to(filled.shared_dir) for layer in image.layers)
    assert reachable(mine) >= {layer.digest for layer in image.layers}


def test_own_blobs_come_first_and_upstream_is_never_written(
    files_only: SampleRecipe, tmp_path: Path, filled: SharedStore
) -> None:
    before = {path: path.stat().st_mtime_ns for path in filled.shared_dir.rglob("*")}
    mine = Store(tmp_path / "mine", open_shared(filled.shared_dir))
    seed(mine, chain_of(files_only).layers[0])
    image = image_of(files_only, mine)
    assert path_of(mine.partition(image.layers[0])).is_relative_to(tmp_path / "mine")
    assert path_of(mine.partition(image.layers[1])).is_relative_to(filled.shared_dir)
    prune(mine, untag=["own"])
    assert before == {path: path.stat().st_mtime_ns for path in filled.shared_dir.rglob("*")}


def test_a_damaged_upstream_blob_is_rebuilt_in_the_own_store(
    files_only: SampleRecipe, tmp_path: Path, filled: SharedStore
) -> None:
    mine = Store(tmp_path / "mine", open_shared(filled.shared_dir))
    roof = image_of(files_only, mine).layers[1]
    part = filled.partition(roof)
    damage(path_of(part), bytes(roof.size), part.offset)
    with pytest.raises(CorruptBlob):
        mine.check_blob(roof.digest, again=True)
    mine.drop_blob(roof.digest)
    assert path_of(part).exists()
    assert image_of(files_only, mine).layers[1].digest == roof.digest
    mine.check_blob(roof.digest, again=True)
    assert path_of(mine.partition(roof)).is_relative_to(tmp_path / "mine")


@pytest.mark.parametrize("where", ["shared", "mine"])
def test_a_truncated_blob_is_not_found(
    files_only: SampleRecipe, tmp_path: Path, filled: SharedStore, where: str
) -> None:
    mine = Store(tmp_path / "mine", open_shared(filled.shared_dir))
    roof = image_of(files_only, mine).layers[1]
    part = filled.partition(roof)
    data = b"".join(read_partition(part))
    if where == "shared":
        path_of(part).chmod(0o644)
        os.truncate(path_of(part), part.offset + 100)
    else:
        mine.blobs.path(roof.digest).path.write_bytes(data[:100])
    assert mine.layer(roof.cache_key) is None
    image = image_of(files_only, mine)
    assert b"".join(read_partition(mine.partition(image.layers[1]))) == data


def test_layer_file_copies_a_partition_once_and_checks_it(
    files_only: SampleRecipe, tmp_path: Path, filled: SharedStore
) -> None:
    """For what mounts no part of a file: copied here, once, and compared."""
    mine = Store(tmp_path / "mine", open_shared(filled.shared_dir))
    ground, roof, _ = image_of(files_only, mine).layers
    path = mine.layer_file(roof)
    assert path == mine.blobs.path(roof.digest).path
    assert hashlib.sha256(path.read_bytes()).hexdigest() == roof.digest[7:]
    before = path.stat()
    assert mine.layer_file(roof) == path
    assert path.stat().st_ino == before.st_ino
    part = filled.partition(ground)
    damage(path_of(part), b"other", part.offset + 100)
    with pytest.raises(StoreError, match=r"should be sha256:.*, is sha256:"):
        mine.layer_file(ground)
    assert not mine.blobs.path(ground.digest).lexists()


# ----------------------------------------------------------------------------------------------------- groups and modes


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o000], ids=oct)
def test_published_files_inherit_group_and_mode(files_only: SampleRecipe, tmp_path: Path, umask: int) -> None:
    """A folder of a group: all below it is the group's; nobody writes into a file again."""
    group = next(
        (number for number in os.getgroups() if number != os.getegid()), 4 if os.geteuid() == 0 else os.getegid()
    )
    shared_dir = tmp_path / "lab"
    shared_dir.mkdir()
    os.chown(shared_dir, -1, group)
    shared_dir.chmod(0o770)
    store = seeded(files_only, tmp_path / "other", "ground")
    before = os.umask(umask)
    try:
        shared = SharedStore(shared_dir)
        shared.open_for_writing()
        copy_layers(store, shared, image_of(files_only, store))
    finally:
        os.umask(before)
    assert modes(shared_dir / "store") | modes(shared_dir / "images") == {
        ("folder", 0o2770, group),
        ("file", 0o440, group),
    }


def test_a_new_shared_folder_is_readable_by_all(shared: SharedStore) -> None:
    assert modes(shared.shared_dir) == {("folder", 0o2755, os.getegid()), ("file", 0o444, os.getegid())}


def test_a_folder_closed_to_its_group_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir(mode=0o700)
    with pytest.raises(StoreError, match="closed to its group") as caught:
        SharedStore(tmp_path / "lab").open_for_writing()
    assert caught.value.hint and "chmod 2750" in caught.value.hint
    assert list((tmp_path / "lab").iterdir()) == []


def test_a_missing_parent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be written: No such file or directory"):
        SharedStore(tmp_path / "no" / "lab").open_for_writing()


def test_a_file_or_dangling_link_instead_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lab").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, message in (("lab", "a file"), ("link", "a link that points to no folder")):
        wanted = f"{tmp_path / name} is {message}; publish into a folder"
        with pytest.raises(StoreError, match=re.escape(wanted)) as caught:
            SharedStore(tmp_path / name).open_for_writing()
        assert caught.value.hint == "give an existing folder, or a new name, which is created"
    assert (tmp_path / "lab").read_text() == "kept"


@pytest.mark.parametrize(
    ("code", "word"), [(errno.ENOSPC, "No space left"), (errno.EDQUOT, "quota exceeded, of the group")]
)
def test_a_full_disk_or_quota_names_the_folder_and_group(shared: SharedStore, code: int, word: str) -> None:
    with (
        pytest.raises(StoreError, match=f"no space left in {shared.shared_dir}: .*{word}") as caught,
        shared.translated_errors(),
    ):
        raise OSError(code, os.strerror(code), "file")
    assert caught.value.hint and f"prune --in {shared.shared_dir}" in caught.value.hint


def test_make_folder_tolerates_a_concurrent_maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between looking and renaming another one has made it and writes into it."""

    def is_folder(folder: InnerPath) -> bool:
        if is_there := found(folder):
            return is_there
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "theirs").touch()
        return False

    found = InnerPath.is_folder
    monkeypatch.setattr(InnerPath, "is_folder", is_folder)
    Policy.of(InnerPath.below(tmp_path)).make_folder(InnerPath.below(tmp_path) / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder" / "theirs").exists()


# ------------------------------------------------------------------------------------------------------------- removing


def test_staging_of_other_hosts_is_removed_after_a_week(shared: SharedStore) -> None:
    left = shared.root / "staging" / "elsewhere__1__x"
    left.mkdir()
    shared.open_for_writing()
    assert left.exists()
    os.utime(left, (time.time() - 8 * 86400,) * 2)
    shared.open_for_writing()
    assert not left.exists()


# ----------------------------------------------------------------------------------------------------- the command line


def test_shared_store_from_option_environment_or_config_file(
    run_cli: RunCli, files_only: SampleRecipe, filled: SharedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EKIBEN_SHARED")
    argv = ("--store", tmp_path / "mine", "plan", files_only.path)
    (tmp_path / "config/ekiben").mkdir(parents=True)
    none = {"XDG_CONFIG_HOME": str(tmp_path / "none")}
    assert "BUILD" in run_cli(*argv, env=none).stdout
    assert "BUILD" not in run_cli("--shared", filled.shared_dir, *argv, env=none).stdout
    assert "BUILD" not in run_cli(*argv, env={**none, "EKIBEN_SHARED": str(filled.shared_dir)}).stdout
    (tmp_path / "config/ekiben/config.yaml").write_text(f"shared: {filled.shared_dir}\n")
    written = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    assert "BUILD" not in run_cli(*argv, env=written).stdout
    assert "BUILD" in run_cli(*argv, env={**written, "EKIBEN_SHARED": ""}).stdout
    (tmp_path / "config/ekiben/config.yaml").write_text("shraed: /x\n")
    assert "unknown key 'shraed'. Did you mean 'shared'?" in run_cli(*argv, env=written, code=3).stderr


def test_missing_shared_store_gives_a_hint(run_cli: RunCli, files_only: SampleRecipe, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for shared_dir, message in (
        (tmp_path / "no", "there is no such folder"),
        (tmp_path / "file", "it is a file"),
        (tmp_path / "empty", "nothing was published there yet"),
    ):
        done = run_cli(
            "--store", tmp_path / "mine", "plan", files_only.path, env={"EKIBEN_SHARED": str(shared_dir)}, code=6
        )
        assert f"no shared store in {shared_dir}: {message}" in done.stderr
        assert f"{ROOT}/build.py --store {tmp_path}/mine publish --to" in done.stderr
        assert "set EKIBEN_SHARED= to use none" in done.stderr


# ------------------------------------------------------------------------------- a colleague who acts meanwhile


@pytest.fixture
def thesis(tmp_path: Path) -> Path:
    """What the victim has elsewhere: old files, one of them a key."""
    folder = tmp_path / "thesis"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).write_text("precious")
        (folder / name).chmod(0o600)
        os.utime(folder / name, (time.time() - 30 * 86400,) * 2)
    return folder


@pytest.mark.parametrize("name", ["store/staging", "store"])
def test_staging_exchanged_while_it_is_swept_costs_nothing(
    name: str, shared: SharedStore, thesis: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("a", "b"):
        (shared.root / "staging" / file).touch()
    if name == "store":
        (thesis / "staging").symlink_to(thesis)
    exchanged = shared.shared_dir / name

    def exchange(folder: Folder) -> list[str]:
        found = list_names(folder)
        if folder.path.name == "staging" and not exchanged.is_symlink():
            exchanged.rename(shared.shared_dir / "aside")
            exchanged.symlink_to(thesis)
        return found

    list_names = Folder.names
    monkeypatch.setattr(Folder, "names", exchange)
    shared.staging_area.sweep()
    assert exchanged.is_symlink()
    assert {path.read_text() for path in thesis.iterdir() if path.is_file()} == {"precious"}
    assert {"a", "b"} <= {path.name for path in thesis.iterdir()}


def test_a_file_exchanged_before_its_mode_is_set_changes_no_other(
    shared: SharedStore, thesis: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(policy: Policy, handle: int, mode: int) -> None:
        (temporary,) = shared.shared_dir.glob(".README.*")
        temporary.unlink()
        temporary.symlink_to(thesis / "a")
        apply(policy, handle, mode)

    apply = Policy.apply_permissions
    monkeypatch.setattr(Policy, "apply_permissions", exchange)
    with pytest.raises(OSError, match="a different file has this name now"):
        shared.write_file(shared.folder / "README", b"new")
    assert stat.S_IMODE((thesis / "a").stat().st_mode) == 0o600
    assert (thesis / "a").read_text() == "precious"


def test_an_exchanged_folder_is_named_and_a_wrong_path_is_not_called_one(shared: SharedStore, tmp_path: Path) -> None:
    (shared.root / "staging").rmdir()
    (shared.root / "staging").symlink_to(tmp_path)
    with (
        pytest.raises(StoreError, match=r"store/staging was replaced by a link or a different file"),
        shared.translated_errors(),
    ):
        shared.staging_area.sweep()
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot be written: Not a directory: .*/file$"):
        SharedStore(tmp_path / "file/lab").open_for_writing()


@pytest.mark.parametrize("way", ["images", "images/hello"])
def test_nothing_is_written_through_a_link_on_the_way(way: str, shared: SharedStore, thesis: Path) -> None:
    (shared.shared_dir / "images/hello").mkdir(parents=True, exist_ok=True)
    (thesis / "hello").mkdir()
    (shared.shared_dir / way).rename(shared.shared_dir / "aside")
    (shared.shared_dir / way).symlink_to(thesis)
    with pytest.raises(OSError):
        shared.write_file(shared.folder / "images/hello/x.json", b"{}")
    assert sorted(path.name for path in thesis.rglob("*")) == ["a", "b", "hello"]
