"""`build.py image` again: said from memory while nothing it rests on has changed, found out anew after any change."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from builder import answers, store
from builder.errors import StoreError
from builder.store import Store
from own_recipe import Done, Own, RunCli, chain_of, seeded


@dataclass(frozen=True)
class Made:
    """An image that is there, of a recipe and a store of its own; ``ask`` is the same command each time."""

    own: Own
    store: Store
    sif: Path
    settings: Path
    run_cli: RunCli

    def ask(self, env: dict[str, str] | None = None, *words: str) -> Done:
        return self.run_cli("--store", self.store.root, "image", self.own.path, "--format", "sif", "-o", self.sif, "--no-verify",
                            *words, env={"XDG_CONFIG_HOME": str(self.settings), "PYTEST_CURRENT_TEST": "", **(env or {})})  # fmt: skip


@pytest.fixture
def made(flat: Own, tmp_path: Path, run_cli: RunCli) -> Made:
    """All of it is there, and what was said of it is kept."""
    found = Made(flat, seeded(flat, tmp_path / "store", "ground"), tmp_path / "own.sif", tmp_path / "config", run_cli)
    assert "1 of 3 layers to build" not in found.ask().stderr
    time.sleep(answers._SETTLED + 0.1)
    found.ask()
    return found


def is_found_out(done: Done) -> bool:
    """Whoever looks says what is being done."""
    assert "layers" in done.stderr
    return "own.sif …" in done.stderr


def test_the_same_is_said(made: Made) -> None:
    first = made.ask()
    assert not is_found_out(first)
    assert first.stderr == "own: all 3 layers are stored\n"
    kept = [path.read_bytes() for path in (made.store.root / answers.FOLDER).iterdir()]
    assert len(kept) == 1
    shutil.rmtree(made.store.root / answers.FOLDER)
    again = made.ask()
    assert is_found_out(again)
    assert again.stdout == first.stdout
    assert [path.read_bytes() for path in (made.store.root / answers.FOLDER).iterdir()] == kept


def edit_of_the_same_size_and_time(made: Made) -> None:
    path = made.own.path / "entrypoints/greet.py"
    before = path.stat()
    path.write_text(path.read_text().replace("hello", "HELLO"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def a_file_more_in_a_copied_folder(made: Made) -> None:
    made.own.write("files/tree/sub/c.txt", "c\n")


def a_file_less_in_a_copied_folder(made: Made) -> None:
    (made.own.path / "files/tree/sub/b.txt").unlink()


def an_executable_bit(made: Made) -> None:
    (made.own.path / "files/data.txt").chmod(0o755)


def an_edited_layer(made: Made) -> None:
    made.own.replace("images/roof.def", "/opt/tree", "/opt/trees")


def no_sif(made: Made) -> None:
    made.sif.unlink()


def another_sif(made: Made) -> None:
    made.sif.write_bytes(made.sif.read_bytes()[:-1])


def a_short_blob(made: Made) -> None:
    layer = made.store.layer(chain_of(made.own).layers[1].cache_key)
    assert layer
    path = made.store.own_path(layer.digest)
    path.chmod(0o644)
    path.write_bytes(b"short")


def no_record_of_the_image(made: Made) -> None:
    (made.store.root / "refs/own.json").unlink()


CHANGES = [edit_of_the_same_size_and_time, a_file_more_in_a_copied_folder, a_file_less_in_a_copied_folder, an_executable_bit,
           an_edited_layer, no_sif, another_sif, a_short_blob, no_record_of_the_image]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changes_is_found_out(made: Made, change: Callable[[Made], None]) -> None:
    assert not is_found_out(made.ask())
    change(made)
    done = made.ask()
    assert is_found_out(done)
    fresh = Made(
        made.own, seeded(made.own, made.store.root.with_name("fresh"), "ground"), made.sif, made.settings, made.run_cli
    )
    made.sif.unlink()
    told = [
        [line for line in item.splitlines() if not line.startswith("file")]
        for item in (done.stdout, fresh.ask().stdout)
    ]
    assert told[0] == told[1]


def test_another_question_is_another_answer(made: Made) -> None:
    assert is_found_out(made.ask({"EKIBEN_REGISTRY": "127.0.0.1:9/x"}))
    assert is_found_out(made.ask({"PATH": f"{made.settings}:{os.environ['PATH']}"}))
    assert is_found_out(made.ask(None, "--json"))
    assert not is_found_out(made.ask({"SHLVL": "7", "OLDPWD": "/tmp"}))


def test_a_link_that_leads_to_another_recipe(made: Made, tmp_path: Path) -> None:
    other = Own(tmp_path / "other")
    shutil.copytree(made.own.path, other.path)
    other.write("entrypoints/greet.py", "print('another')\n")
    link = tmp_path / "link"
    link.symlink_to(made.own.path)
    linked = Made(Own(link), made.store, made.sif, made.settings, made.run_cli)
    linked.ask()
    assert not is_found_out(linked.ask())
    link.unlink()
    link.symlink_to(other.path)
    done = linked.ask()
    assert "1 of 3 layers to build" in done.stderr
    assert done.stdout != made.ask().stdout


def test_settings_that_come_are_found(made: Made) -> None:
    """A file that is not there is part of what an answer rests on."""
    (made.settings / "ekiben").mkdir(parents=True)
    (made.settings / "ekiben/config.yaml").write_text("registry: 127.0.0.1:9/x\n")
    assert is_found_out(made.ask())


def test_nothing_is_kept_of_what_has_just_changed(made: Made) -> None:
    """It may have changed after it was read: the next invocation looks again."""
    made.own.write("files/data.txt", "other\n")
    made.ask()
    assert is_found_out(made.ask())


def test_a_damaged_answer_is_none(made: Made) -> None:
    [kept] = (made.store.root / answers.FOLDER).iterdir()
    record = json.loads(kept.read_text())
    for damaged in ("", "[]", '"x"', kept.read_text()[:-2], json.dumps({**record, "folders": 7})):
        kept.write_text(damaged)
        assert is_found_out(made.ask())
    assert not is_found_out(made.ask())


# ------------------------------------------------------------------------------------------------------ the module alone


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder ``tree`` to rest on, and words that ask; everything counts as settled."""
    monkeypatch.setattr(answers, "_BEGAN", time.time() + 60)
    monkeypatch.setattr(sys, "argv", ["build.py", "--store", str(tmp_path / "store"), "image", "x"])
    (tmp_path / "tree/sub").mkdir(parents=True)
    (tmp_path / "tree/sub/file").write_text("x")
    return tmp_path


def keep(room: Path, daemon: list[str] | bool | None = None) -> bool:
    """Whether it is said again."""
    files = [str(room / "absent")]
    if kept := answers.record(folders=[str(room / "tree")], files=files, daemon=daemon, told="", said="said"):
        Store(room / "store").put_answer(*kept)
    return answers.answer(sys.argv[1:])


def test_a_link_to_a_folder_is_not_looked_behind(room: Path) -> None:
    assert keep(room)
    (room / "tree/link").symlink_to(room)
    assert not keep(room)


def test_what_a_link_to_a_file_names_counts(room: Path) -> None:
    (room / "data").write_text("x")
    (room / "tree/link").symlink_to(room / "data")
    assert keep(room)
    (room / "data").write_text("y")
    assert not answers.answer(sys.argv[1:])


def test_a_file_that_may_not_be_looked_at_is_as_none(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's folder on PATH, say."""
    look = os.stat

    def refuse(path: str, **more: bool) -> os.stat_result:
        if str(path).endswith("absent"):
            raise PermissionError(13, "Permission denied", path)
        return look(path, **more)

    monkeypatch.setattr(answers.os, "stat", refuse)
    assert keep(room)
    monkeypatch.undo()


def test_a_renamed_file_is_another(room: Path) -> None:
    assert keep(room)
    (room / "tree/sub/file").rename(room / "tree/sub/other")
    assert not answers.answer(sys.argv[1:])


def test_too_many_files_are_not_looked_at(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_MOST", 1)
    assert not keep(room)


def test_a_daemon_that_answers_or_not(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{room}/nobody.sock")
    assert keep(room, daemon=False)
    assert not keep(room, daemon=True)
    assert not keep(room, daemon=["ekiben/x:latest", "sha256:0"])
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    assert not keep(room, daemon=False)


def test_old_answers_go(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "KEPT", 3)
    for number in range(5):
        monkeypatch.setenv("EKIBEN_TEST_NUMBER", str(number))
        assert keep(room)
    assert len(list((room / "store" / answers.FOLDER).iterdir())) == 3


def test_a_store_that_cannot_be_written_keeps_nothing(room: Path) -> None:
    (room / "store").write_text("a file")
    with pytest.raises(StoreError):
        keep(room)
    assert not answers.answer(sys.argv[1:])


def test_the_words_of_a_question(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keep(room)
    store, rest = sys.argv[2], sys.argv[3:]
    monkeypatch.setattr(sys, "argv", ["build.py", f"--store={store}", *rest])
    assert keep(room)
    assert not answers.answer(["--verbose", *sys.argv[1:]])
    assert not answers.answer(["--store", "image"])
    assert not answers.answer(["--help"])
