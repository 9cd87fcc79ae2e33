"""Several files as one: on a disk that fills at any byte nothing new is left, and the message names what was to be
written.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ekiben.core.atomic import is_vacant, new_folder, new_parents, write_files
from ekiben.core.errors import EkibenError, UsageError
from ekiben.project.create import create_recipe
from ekiben.resolve.docker_files import write_compose, write_devcontainer
from ekiben.resolve.render import render
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from support.sample_recipe import SampleRecipe


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file grow above ``size`` bytes, as on a disk that is full by then; what was written before stays."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def tree(folder: Path) -> dict[str, str | None]:
    """What is below a folder: path → text, of a folder None."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_text() for path in paths}


WRITERS: dict[str, tuple[Callable[[SampleRecipe, Path], object], str]] = {
    "init": (lambda sample, folder: create_recipe(folder / "a/mine"), "a/mine"),
    "init in a folder": (lambda sample, folder: create_recipe(folder / "present"), "present"),
    "render --to dockerfile": (lambda sample, folder: render(resolved(sample), "dockerfile", folder / "a/b"), "a/b"),
    "render --to def": (lambda sample, folder: render(resolved(sample), "def", folder / "present"), "present"),
    "render --to compose": (lambda sample, folder: write_compose(resolved(sample), folder / "a"), "a/compose.yaml"),
    "render --to devcontainer": (
        lambda sample, folder: write_devcontainer(resolved(sample), folder),
        ".devcontainer/devcontainer.json",
    ),
}


def resolved(sample: SampleRecipe) -> object:
    return resolve(find_recipe(str(sample.path)))


@pytest.mark.parametrize("name", WRITERS)
def test_write_error_leaves_nothing_new_and_names_the_path(name: str, sample: SampleRecipe, tmp_path: Path) -> None:
    write, path = WRITERS[name]
    complete, folder = tmp_path / "complete", tmp_path / "full"
    for top in (complete, folder):
        (top / "present").mkdir(parents=True)
    write(sample, complete)
    sizes = sorted({len(text.encode()) for text in tree(complete).values() if text})
    for size in [0, *(size - 1 for size in sizes)]:
        inode = (folder / "present").stat().st_ino
        with largest_file(size), pytest.raises(EkibenError) as caught:
            write(sample, folder)
        assert str(caught.value) == f"{folder / path} cannot be written: {os.strerror(errno.EFBIG)}"
        assert tree(folder) == {"present": None}
        assert (folder / "present").stat().st_ino == inode
    write(sample, folder)
    assert tree(folder) == tree(complete)


def test_folder_that_exists_stays_the_same(tmp_path: Path) -> None:
    """A shell may stand in it, and it may have its own permissions."""
    folder = tmp_path / "x"
    folder.mkdir(0o750)
    before = folder.stat()
    with new_folder(folder) as fresh:
        (fresh / "a/b").mkdir(parents=True)
        (fresh / "c").write_text("c")
    assert (folder.stat().st_ino, folder.stat().st_mode) == (before.st_ino, before.st_mode)
    assert tree(folder) == {"a": None, "a/b": None, "c": "c"}


def test_file_written_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(UsageError, match="c was written there meanwhile"), new_folder(tmp_path / "x") as fresh:
        (fresh / "a").write_text("new")
        (fresh / "c").write_text("new")
        (tmp_path / "x/c").write_text("another's")
    assert tree(tmp_path) == {"x": None, "x/c": "another's"}


@pytest.mark.parametrize("inside", [True, False], ids=["in it", "beside it"])
def test_rest_of_a_killed_writer_goes_and_a_living_ones_stays(inside: bool, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    if inside:
        folder.mkdir()
    outer = folder if inside else tmp_path
    if (pid := os.fork()) == 0:
        with new_folder(folder) as fresh:
            (fresh / "half").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    [left] = outer.glob(".*")
    with new_folder(tmp_path / "x/y" if inside else tmp_path / "y"):  # it is young, and might have no lock yet
        assert left.exists()
    old = left.stat().st_ctime + 60
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ekiben.core.atomic.time.time", lambda: old)
        with new_folder(folder / "z" if inside else tmp_path / "z") as living:
            assert not left.exists()
            with new_folder(folder / "u" if inside else tmp_path / "u"):
                assert living.exists()
        assert is_vacant(tmp_path / "v")


def test_a_source_that_cannot_be_read_is_not_called_the_target(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), new_folder(tmp_path / "x"):
        (tmp_path / "missing").read_text()
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_pair_are_both_new_or_both_old(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_files({first: "old", second: "old"})
    with (
        largest_file(10),
        pytest.raises(UsageError, match=f"{second} cannot be written: {os.strerror(errno.EFBIG)}"),
    ):
        write_files({first: "new", second: "n" * 11})
    assert tree(tmp_path) == {"first": "old", "second": "old"}
    write_files({first: "new", second: [b"n", b"ew"]})
    assert tree(tmp_path) == {"first": "new", "second": "new"}


def test_parents_that_were_made_go_after_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(UsageError, match="x cannot be written: broken"), new_parents(tmp_path / "a/b/c/x"):
        assert (tmp_path / "a/b/c").is_dir()
        raise OSError(errno.EIO, "broken")
    assert tree(tmp_path) == {"a": None}


def test_a_file_where_a_parent_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(UsageError, match=rf"{tmp_path}/file/x cannot be written: {tmp_path}/file is not a folder"),
        new_folder(tmp_path / "file/x"),
    ):
        pytest.fail("it was made")
