"""The store that many read and some write: who may do what, what is looked for where, and what removing leaves."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import time
from pathlib import Path

import pytest

from builder.assemble import make_sif
from builder.chain import Chain, resolve
from builder.errors import StoreError
from builder.pipeline import Image, Options, build, plan
from builder.progress import Progress
from builder.recipe import find_recipe
from builder.shared import Policy, SharedStore, open_shared
from builder.sif import read_partition
from builder.store import CorruptBlob, Store
from own_recipe import Own, RunCli, seed, seeded


def chain_of(own: Own) -> Chain:
    return resolve(find_recipe(str(own.path)))


def make(own: Own, store: Store) -> Image:
    return build(chain_of(own), store, Options(), Progress(io.StringIO(), quiet=True))


def copy_layers(store: Store, shared: SharedStore, image: Image) -> None:
    """As a published SIF."""
    sif = shared.place / "images" / "own.sif"
    make_sif(image, store, sif, flat=False)
    shared.settle(sif, 0o444)
    shared.put_layers(sif, image.layers)


@pytest.fixture
def shared(tmp_path: Path) -> SharedStore:
    made = SharedStore(tmp_path / "lab")
    made.open_for_writing()
    return made


@pytest.fixture
def filled(flat: Own, tmp_path: Path, shared: SharedStore) -> SharedStore:
    """A shared store with every layer of the recipe."""
    store = seeded(flat, tmp_path / "other", "ground")
    copy_layers(store, shared, make(flat, store))
    return shared


def modes(folder: Path) -> set[tuple[str, int, int]]:
    return {("folder" if path.is_dir() else "file", path.stat().st_mode & 0o7777, path.stat().st_gid)
            for path in [folder, *folder.rglob("*")]}  # fmt: skip


# -------------------------------------------------------------------------------------------------- mine, then the other


def test_what_the_other_store_has_is_not_built(flat: Own, tmp_path: Path, filled: SharedStore) -> None:
    mine = Store(tmp_path / "mine", open_shared(filled.place))
    assert [action.reason for action in plan(chain_of(flat), mine)] == ["stored"] * 3
    assert not (tmp_path / "mine").exists()
    image = make(flat, mine)
    blobs = {path.name for path in (tmp_path / "mine/blobs/sha256").iterdir()}
    assert not blobs & {layer.digest[7:] for layer in image.layers}  # config and manifest only
    assert all(mine.partition(layer).path.is_relative_to(filled.place) for layer in image.layers)
    assert mine.reachable() >= {layer.digest for layer in image.layers}


def test_ones_own_comes_first_and_the_other_is_never_written(flat: Own, tmp_path: Path, filled: SharedStore) -> None:
    before = {path: path.stat().st_mtime_ns for path in filled.place.rglob("*")}
    mine = Store(tmp_path / "mine", open_shared(filled.place))
    seed(mine, chain_of(flat).layers[0])
    image = make(flat, mine)
    assert mine.partition(image.layers[0]).path.is_relative_to(tmp_path / "mine")
    assert mine.partition(image.layers[1]).path.is_relative_to(filled.place)
    mine.prune(forget=["own"])
    assert before == {path: path.stat().st_mtime_ns for path in filled.place.rglob("*")}


def test_a_damaged_blob_of_the_other_is_made_again_here(flat: Own, tmp_path: Path, filled: SharedStore) -> None:
    mine = Store(tmp_path / "mine", open_shared(filled.place))
    roof = make(flat, mine).layers[1]
    part = filled.partition(roof)
    part.path.chmod(0o644)
    with part.path.open("r+b") as stream:
        stream.seek(part.offset)
        stream.write(bytes(roof.size))
    with pytest.raises(CorruptBlob):
        mine.check_blob(roof.digest, again=True)
    mine.drop_blob(roof.digest)
    assert part.path.exists()
    assert make(flat, mine).layers[1].digest == roof.digest
    mine.check_blob(roof.digest, again=True)
    assert mine.partition(roof).path.is_relative_to(tmp_path / "mine")


@pytest.mark.parametrize("where", ["shared", "mine"])
def test_another_users_half_written_file_is_none(flat: Own, tmp_path: Path, filled: SharedStore, where: str) -> None:
    mine = Store(tmp_path / "mine", open_shared(filled.place))
    roof = make(flat, mine).layers[1]
    part = filled.partition(roof)
    data = b"".join(read_partition(part))
    if where == "shared":
        part.path.chmod(0o644)
        os.truncate(part.path, part.offset + 100)
    else:
        mine.own_path(roof.digest).write_bytes(data[:100])
    assert mine.layer(roof.cache_key) is None
    image = make(flat, mine)
    assert b"".join(read_partition(mine.partition(image.layers[1]))) == data


def test_a_layer_as_a_file_of_its_own(flat: Own, tmp_path: Path, filled: SharedStore) -> None:
    """For what mounts no part of a file: copied here, once, and compared."""
    mine = Store(tmp_path / "mine", open_shared(filled.place))
    ground, roof, _ = make(flat, mine).layers
    path = mine.layer_file(roof)
    assert path == mine.own_path(roof.digest)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == roof.digest[7:]
    before = path.stat()
    assert mine.layer_file(roof) == path
    assert path.stat().st_ino == before.st_ino
    part = filled.partition(ground)
    part.path.chmod(0o644)
    with part.path.open("r+b") as stream:
        stream.seek(part.offset + 100)
        stream.write(b"other")
    with pytest.raises(StoreError, match=r"should be sha256:.*, is sha256:"):
        mine.layer_file(ground)
    assert not mine.own_path(ground.digest).exists()


# ----------------------------------------------------------------------------------------------------- groups and modes


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o000], ids=oct)
def test_what_is_written_is_as_the_folder_is_whatever_the_umask(flat: Own, tmp_path: Path, umask: int) -> None:
    """A folder of a group: all below it is the group's; nobody writes into a file again."""
    group = next(
        (number for number in os.getgroups() if number != os.getegid()), 4 if os.geteuid() == 0 else os.getegid()
    )
    place = tmp_path / "lab"
    place.mkdir()
    os.chown(place, -1, group)
    place.chmod(0o770)
    store = seeded(flat, tmp_path / "other", "ground")
    before = os.umask(umask)
    try:
        shared = SharedStore(place)
        shared.open_for_writing()
        copy_layers(store, shared, make(flat, store))
    finally:
        os.umask(before)
    assert modes(place / "store") | modes(place / "images") == {("folder", 0o2770, group), ("file", 0o440, group)}


def test_a_folder_made_by_publishing_is_for_all_to_read(shared: SharedStore) -> None:
    assert modes(shared.place) == {("folder", 0o2755, os.getegid()), ("file", 0o444, os.getegid())}


def test_a_folder_closed_to_its_group_is_said(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir(mode=0o700)
    with pytest.raises(StoreError, match="closed to its group") as caught:
        SharedStore(tmp_path / "lab").open_for_writing()
    assert caught.value.hint and "chmod 2750" in caught.value.hint
    assert list((tmp_path / "lab").iterdir()) == []


def test_a_parent_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be written: No such file or directory"):
        SharedStore(tmp_path / "no" / "lab").open_for_writing()


def test_a_file_where_a_folder_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "lab").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, said in (("lab", "a file"), ("link", "a link that leads to no folder")):
        wanted = f"{tmp_path / name} is {said}, and what is published goes into a folder"
        with pytest.raises(StoreError, match=re.escape(wanted)) as caught:
            SharedStore(tmp_path / name).open_for_writing()
        assert caught.value.hint == "give a folder that is there, or a new name for one to be made"
    assert (tmp_path / "lab").read_text() == "kept"


@pytest.mark.parametrize(
    ("code", "word"), [(errno.ENOSPC, "No space left"), (errno.EDQUOT, "quota exceeded, of the group")]
)
def test_no_room_is_said_with_whose_it_is(shared: SharedStore, code: int, word: str) -> None:
    with pytest.raises(StoreError, match=f"no room in {shared.place}: .*{word}") as caught, shared.translated_errors():
        raise OSError(code, os.strerror(code), "file")
    assert caught.value.hint and f"prune --in {shared.place}" in caught.value.hint


def test_two_make_the_same_folder_at_once(tmp_path: Path) -> None:
    """Between looking and renaming another one has made it, and has begun to write into it."""
    policy = Policy.of(tmp_path)

    class Slow(type(tmp_path)):  # type: ignore[misc]
        def is_dir(self, **options: bool) -> bool:
            there = super().is_dir()
            if not there:
                (tmp_path / "folder").mkdir()
                (tmp_path / "folder" / "theirs").touch()
            return there

    policy.make_folder(Slow(tmp_path / "folder"))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder" / "theirs").exists()


# ------------------------------------------------------------------------------------------------------------- removing


def test_what_another_hosts_dead_left_goes_after_a_week(shared: SharedStore) -> None:
    left = shared.root / "staging" / "elsewhere__1__x"
    left.mkdir()
    shared.open_for_writing()
    assert left.exists()
    os.utime(left, (time.time() - 8 * 86400,) * 2)
    shared.open_for_writing()
    assert not left.exists()


# ----------------------------------------------------------------------------------------------------- the command line


def test_shared_from_option_environment_or_file(
    run_cli: RunCli, flat: Own, filled: SharedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EKIBEN_SHARED")
    words = ("--store", tmp_path / "mine", "plan", flat.path)
    (tmp_path / "config/ekiben").mkdir(parents=True)
    none = {"XDG_CONFIG_HOME": str(tmp_path / "none")}
    assert "build" in run_cli(*words, env=none).stdout
    assert "build" not in run_cli("--shared", filled.place, *words, env=none).stdout
    assert "build" not in run_cli(*words, env={**none, "EKIBEN_SHARED": str(filled.place)}).stdout
    (tmp_path / "config/ekiben/config.yaml").write_text(f"shared: {filled.place}\n")
    written = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    assert "build" not in run_cli(*words, env=written).stdout
    assert "build" in run_cli(*words, env={**written, "EKIBEN_SHARED": ""}).stdout
    (tmp_path / "config/ekiben/config.yaml").write_text("shraed: /x\n")
    assert "unknown key 'shraed'. Did you mean 'shared'?" in run_cli(*words, env=written, code=3).stderr


def test_a_shared_store_that_is_not_there_is_said(run_cli: RunCli, flat: Own, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for place, said in (
        (tmp_path / "no", "there is no such folder"),
        (tmp_path / "file", "it is a file"),
        (tmp_path / "empty", "nothing was published there yet"),
    ):
        done = run_cli("--store", tmp_path / "mine", "plan", flat.path, env={"EKIBEN_SHARED": str(place)}, code=6)
        assert f"no shared store in {place}: {said}" in done.stderr
        assert "EKIBEN_SHARED= goes without" in done.stderr
