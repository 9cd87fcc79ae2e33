"""The store that many read and some write: who may do what, what is looked for where, and what removing leaves."""

from __future__ import annotations

import errno
import io
import os
import stat
import time
from pathlib import Path

import pytest

from builder.chain import Chain, resolve
from builder.errors import StoreError
from builder.pipeline import Image, Options, build, plan
from builder.progress import Progress
from builder.recipe import find_recipe
from builder.shared import Policy, SharedStore, open_shared
from builder.store import CorruptBlob, Store, StoredLayer
from own_recipe import Own, RunCli, seed, seeded


def chain_of(own: Own) -> Chain:
    return resolve(find_recipe(str(own.path)))


def make(own: Own, store: Store) -> Image:
    return build(chain_of(own), store, Options(), Progress(io.StringIO(), quiet=True))


def copy_layers(store: Store, shared: SharedStore, *layers: StoredLayer) -> None:
    for layer in layers:
        with shared.staging() as staging:
            (staging / "blob").write_bytes(store.blob_path(layer.digest).read_bytes())
            shared.put_file(staging / "blob", layer.digest)
        shared.put_layer(layer)


@pytest.fixture
def shared(tmp_path: Path) -> SharedStore:
    made = SharedStore(tmp_path / "lab")
    made.open_for_writing()
    return made


@pytest.fixture
def filled(flat: Own, tmp_path: Path, shared: SharedStore) -> SharedStore:
    """A shared store with every layer of the recipe."""
    store = seeded(flat, tmp_path / "other", "ground")
    copy_layers(store, shared, *make(flat, store).layers)
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
    assert all(mine.blob_path(layer.digest).is_relative_to(filled.place) for layer in image.layers)
    assert mine.reachable() >= {layer.digest for layer in image.layers}


def test_ones_own_comes_first_and_the_other_is_never_written(flat: Own, tmp_path: Path, filled: SharedStore) -> None:
    before = {path: path.stat().st_mtime_ns for path in filled.place.rglob("*")}
    mine = Store(tmp_path / "mine", open_shared(filled.place))
    seed(mine, chain_of(flat).layers[0])
    image = make(flat, mine)
    assert mine.blob_path(image.layers[0].digest).is_relative_to(tmp_path / "mine")
    assert mine.blob_path(image.layers[1].digest).is_relative_to(filled.place)
    mine.prune(forget=["own"])
    assert before == {path: path.stat().st_mtime_ns for path in filled.place.rglob("*")}


def test_a_damaged_blob_of_the_other_is_made_again_here(flat: Own, tmp_path: Path, filled: SharedStore) -> None:
    mine = Store(tmp_path / "mine", open_shared(filled.place))
    roof = make(flat, mine).layers[1]
    path = filled.own_path(roof.digest)
    path.chmod(0o644)
    path.write_bytes(bytes(roof.size))
    with pytest.raises(CorruptBlob):
        mine.check_blob(roof.digest, again=True)
    mine.drop_blob(roof.digest)
    assert path.exists()
    assert make(flat, mine).layers[1].digest == roof.digest
    mine.check_blob(roof.digest, again=True)
    assert mine.blob_path(roof.digest).is_relative_to(tmp_path / "mine")


@pytest.mark.parametrize("where", ["shared", "mine"])
def test_another_users_half_written_blob_is_none(flat: Own, tmp_path: Path, filled: SharedStore, where: str) -> None:
    mine = Store(tmp_path / "mine", open_shared(filled.place))
    roof = make(flat, mine).layers[1]
    half = filled.own_path(roof.digest) if where == "shared" else mine.own_path(roof.digest)
    data = filled.own_path(roof.digest).read_bytes()
    half.unlink(missing_ok=True)
    half.write_bytes(data[:100])
    assert mine.layer(roof.cache_key) is None
    image = make(flat, mine)
    assert mine.blob_path(image.layers[1].digest).read_bytes() == data


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
        copy_layers(store, shared, *make(flat, store).layers)
        shared.put_image("x", {"layers": [], "config": {"digest": "sha256:0"}}, {"config": "sha256:0", "keys": []})
    finally:
        os.umask(before)
    assert modes(place / "store") == {("folder", 0o2770, group), ("file", 0o440, group)}


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


def age(shared: SharedStore, days: float) -> None:
    for path in (shared.root / "blobs/sha256").iterdir():
        os.utime(path, (time.time() - days * 86400,) * 2)


def test_a_blob_lately_used_is_kept(filled: SharedStore) -> None:
    filled.unused_for = 30 * 86400
    age(filled, 29)
    assert filled.prune() == []
    age(filled, 31)
    assert len(filled.prune()) == 3


def test_what_is_removed_is_first_moved_aside(filled: SharedStore) -> None:
    age(filled, 1)
    some = next((filled.root / "blobs/sha256").iterdir())
    with some.open("rb") as stream:
        assert len(filled.prune()) == 3
        assert stream.read(4) == b"hsqs"
    assert list((filled.root / "keys").iterdir()) == []
    assert filled.empty_trash(60, dry_run=False) == 0
    assert len(list((filled.place / "trash").iterdir())) == 3
    assert filled.empty_trash(0, dry_run=False) > 0
    assert list((filled.place / "trash").iterdir()) == []


def test_a_publisher_who_comes_while_it_is_removed_keeps_it(
    filled: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what it needs, looks, and finds the blob: that was before the blob was moved, so it is moved back."""
    age(filled, 1)
    keys = [path.stem for path in (filled.root / "keys").iterdir()]
    publishers = []
    drop = SharedStore.drop_blob

    def come_and_drop(store: SharedStore, digest: str) -> None:
        if not publishers:
            publishers.append(store.building(keys))
            publishers[0].__enter__()
            assert all(store.layer(key) for key in keys)
        drop(store, digest)

    monkeypatch.setattr(SharedStore, "drop_blob", come_and_drop)
    assert filled.prune() == []
    assert all(filled.layer(key) for key in keys)
    publishers[0].__exit__(None, None, None)


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
    for place, said in (
        (tmp_path / "no", "there is no such folder"),
        (tmp_path / "empty", "nothing was published there yet"),
    ):
        done = run_cli("--store", tmp_path / "mine", "plan", flat.path, env={"EKIBEN_SHARED": str(place)}, code=6)
        assert f"no shared store in {place}: {said}" in done.stderr
        assert "EKIBEN_SHARED= goes without" in done.stderr


def test_blobs_are_read_only_files(filled: SharedStore) -> None:
    for path in (filled.root / "blobs/sha256").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o444
