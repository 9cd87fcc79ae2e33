"""An open folder: who exchanges its path, or an entry, for a link changes nothing elsewhere."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from ekiben.core.folder import Folder


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    folder = tmp_path / "victim"
    (folder / "sub").mkdir(parents=True)
    for name in ("file", "sub/file"):
        (folder / name).write_text("precious")
    (folder / "file").chmod(0o600)
    return folder


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    (folder / "sub").mkdir(parents=True)
    for name in ("file", "sub/file"):
        (folder / name).write_text("of the folder")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def is_unchanged(victim: Path) -> bool:
    texts = [(victim / name).read_text() for name in ("file", "sub/file")]
    return texts == ["precious"] * 2 and (victim / "file").stat().st_mode & 0o777 == 0o600


def write(folder: Folder) -> None:
    with folder.new_file("file") as stream:
        stream.write(b"x")


OPERATIONS: dict[str, Callable[[Folder], object]] = {
    "remove": lambda folder: folder.remove("file"),
    "remove_tree": lambda folder: folder.remove_tree("sub"),
    "move": lambda folder: folder.move("file", "other"),
    "change": lambda folder: folder.change("file", lambda handle: os.fchmod(handle, 0o777)),
    "link": lambda folder: folder.link("file", "elsewhere"),
    "make_folder": lambda folder: folder.make_folder("new", lambda handle: os.fchmod(handle, 0o777)),
    "new_file": write,
    "read": lambda folder: folder.read("file") == b"of the folder" or pytest.fail("read elsewhere"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_folder_exchanged_for_it_is_left_alone(name: str, shared: Path, victim: Path) -> None:
    with Folder.open(shared) as folder:
        shared.rename(shared.with_name("aside"))
        shared.symlink_to(victim)
        OPERATIONS[name](folder)
    assert is_unchanged(victim)
    assert names(victim) == ["file", "sub"]


@pytest.mark.parametrize("name", ["remove", "remove_tree", "move", "link"])
def test_a_link_is_removed_or_replaced_and_not_followed(name: str, shared: Path, victim: Path) -> None:
    for entry in ("file", "sub"):
        (shared / entry).rename(shared / f"old-{entry}")
        (shared / entry).symlink_to(victim / entry)
    with Folder.open(shared) as folder:
        OPERATIONS[name](folder)
    assert is_unchanged(victim)


def test_a_link_where_a_folder_was_is_named(shared: Path, victim: Path) -> None:
    (shared / "new").symlink_to(victim)
    with Folder.open(shared) as folder, pytest.raises(NotADirectoryError, match="it is a link") as caught:
        OPERATIONS["make_folder"](folder)
    assert caught.value.filename == str(shared / "new")
    assert is_unchanged(victim)


def _link(path: Path, victim: Path) -> None:
    path.symlink_to(victim / "file")


def _hard_link(path: Path, victim: Path) -> None:
    path.hardlink_to(victim / "file")


def _pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path, victim: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _device(path: Path, victim: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [_link, _pipe, _socket, _device])
def test_what_is_no_file_is_not_read_and_does_not_block(make: Callable[..., None], shared: Path, victim: Path) -> None:
    make(shared / "odd", victim)
    with Folder.open(shared) as folder, pytest.raises(OSError):
        folder.read("odd")


@pytest.mark.parametrize("make", [_link, _hard_link, _pipe, _socket])
def test_the_mode_of_what_lies_elsewhere_is_not_changed(make: Callable[..., None], shared: Path, victim: Path) -> None:
    make(shared / "odd", victim)
    with Folder.open(shared) as folder, pytest.raises(OSError):
        folder.change("odd", lambda handle: os.fchmod(handle, 0o777))
    assert is_unchanged(victim)


def test_a_folder_below_is_reached_by_no_link(shared: Path, victim: Path) -> None:
    (shared / "out").symlink_to(victim)
    with Folder.open(shared) as folder:
        with pytest.raises(NotADirectoryError):
            folder.folder("out", "sub")
        assert [inner.path.name for inner in folder.folders()] == ["sub"]
        assert not folder.is_folder("out")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "../x", "a\0"])
def test_a_name_that_leads_elsewhere_is_refused(name: str, shared: Path) -> None:
    with Folder.open(shared) as folder, pytest.raises(ValueError, match="not the name of an entry"):
        folder.remove(name)


def test_a_large_file_is_refused_before_it_is_read(shared: Path) -> None:
    with (shared / "sparse").open("wb") as stream:
        stream.truncate(40_000_000_000)
    with Folder.open(shared) as folder, pytest.raises(ValueError, match="has 40000000000 bytes, more than 16777216"):
        folder.read("sparse")


def test_a_file_whose_temporary_name_became_a_link_does_not_appear(shared: Path, victim: Path) -> None:
    def exchange(folder: Folder) -> None:
        with folder.new_file("new") as stream:
            (temporary,) = shared.glob(".new.*")
            temporary.unlink()
            temporary.symlink_to(victim / "file")
            stream.write(b"x")
            os.fchmod(stream.fileno(), 0o644)

    with Folder.open(shared) as folder, pytest.raises(OSError, match="a different file has this name now"):
        exchange(folder)
    assert is_unchanged(victim)
    assert names(shared) == ["file", "sub"]


def test_a_failed_write_leaves_the_old_file(shared: Path) -> None:
    with Folder.open(shared) as folder, pytest.raises(KeyError), folder.new_file("file") as stream:
        stream.write(b"half")
        raise KeyError
    assert (shared / "file").read_text() == "of the folder"
    assert names(shared) == ["file", "sub"]


def test_a_tree_of_any_depth_is_removed_with_few_descriptors(shared: Path) -> None:
    at = os.open(shared / "sub", os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=at)
        deeper = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = deeper
    os.close(os.open("last", os.O_CREAT | os.O_WRONLY, dir_fd=at))
    os.close(at)
    with Folder.open(shared) as folder:
        assert folder.remove_tree("sub") == len("of the folder")
    assert names(shared) == ["file"]


def test_a_tree_of_folders_without_permissions_is_removed(shared: Path) -> None:
    for name in ("sub/a", "sub/a/b"):
        (shared / name).mkdir()
    (shared / "sub/a/b/file").touch()
    (shared / "sub/a/b").chmod(0o500)
    (shared / "sub/a").chmod(0o500)
    with Folder.open(shared) as folder:
        folder.remove_tree("sub")
    assert names(shared) == ["file"]


def test_signal_while_it_closes_does_not_close_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, close = Folder.open(tmp_path), os.close

    def close_and_interrupt(handle: int) -> None:
        close(handle)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "close", close_and_interrupt)
        folder.close()
    with (tmp_path / "another").open("w") as another:  # has the number now
        folder.close()
        another.write("x")
    assert (tmp_path / "another").read_text() == "x"


def test_a_file_that_is_replaced_meanwhile_is_no_error(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shared / "new").write_text("new")
    open_file = os.open

    def open_and_replace(name: str, *arguments: int, dir_fd: int | None = None) -> int:
        handle = open_file(name, *arguments, dir_fd=dir_fd)
        if name == "file":
            (shared / "new").rename(shared / "file")
        return handle

    with Folder.open(shared) as folder:
        monkeypatch.setattr(os, "open", open_and_replace)
        folder.change("file", os.fsync)
    assert (shared / "file").read_text() == "new"
