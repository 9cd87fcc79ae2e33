"""What is not a file instead of a recipe's file: one sentence, at once.

A pipe would be waited for, a sparse file read for hours.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from ekiben.core.errors import DefinitionError, EkibenError
from ekiben.packages.lock import open_stack
from ekiben.packages.outdated import read_locks
from ekiben.project.lock import lock_recipe
from ekiben.resolve.render import render
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from ekiben.spec.source_folders import SourceFolders
from support.own_recipes import recipe_in
from support.sample_recipe import SampleRecipe

HUGE = 8 << 40  # bytes, none of which is on the disk


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path has at most 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def put_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE)


def put_circle(path: Path) -> None:
    path.symlink_to(path.name)


def put_folder(path: Path) -> None:
    path.mkdir()


KINDS: dict[str, Callable[[Path], None]] = {
    "a pipe": put_pipe,
    "a socket": put_socket,
    "a sparse file": put_sparse,
    "a circle of links": put_circle,
    "a folder": put_folder,
}
FILES = (
    "recipe.yaml",
    "images/roof.def",
    "images/stacks/tiny/stack.yaml",
    "images/stacks/tiny/apt.lock",
    "images/stacks/tiny/top.lock",
    "images/stacks/tiny/SHA256SUMS",
    "files/data.txt",
    "files/tree/a.txt",
    "entrypoints/greet.py",
    "entrypoints/helper.py",
    "configs/greet.yaml",
    "notes.txt",
    "SHA256SUMS",
    "requirements.txt",
    "images/roof.lock",
)
NO_FILE = ("entrypoints/helper.py", "requirements.txt", "images/roof.lock")  # what is not a file there is none of these
SECONDS = 20


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    def end(signal_number: int, frame: object) -> NoReturn:
        pytest.fail(f"not answered within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def recipe(files_only: SampleRecipe) -> SampleRecipe:
    files_only.recipe(data=["notes.txt"])
    for name in ("notes.txt", "entrypoints/helper.py", "images/stacks/tiny/SHA256SUMS", "SHA256SUMS"):
        files_only.write(name, "")
    files_only.write("requirements.txt", "humanize\n")
    files_only.write("images/stacks/tiny/top.lock", "a==1\n")
    lines = "%arguments\n    stack=\n\n%files\n    {{ stack }}/top.lock /opt/\n"
    files_only.replace("images/roof.def", "%files\n", lines)
    return files_only


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_a_recipe_with_it_is_refused_at_once(
    recipe: SampleRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")
    (recipe.path / name).unlink(missing_ok=True)
    KINDS[kind](recipe.path / name)
    is_folder = kind == "a folder" and name.startswith(("files/", "images/stacks/tiny/top"))  # which %files copies
    is_ignored = name in NO_FILE and (name, kind) != ("entrypoints/helper.py", "a sparse file")
    with contextlib.nullcontext() if is_folder or is_ignored else pytest.raises(EkibenError):
        render(resolve(find_recipe(str(recipe.path))), "def", tmp_path / "out")
    with contextlib.suppress(EkibenError):
        read_locks(recipe.path / "images", SourceFolders(recipe.path))
    with contextlib.suppress(EkibenError):
        stack = open_stack(f"{recipe.path}/images/stacks/tiny")
        stack.check_locks()
        stack.apt_lock()
    with contextlib.suppress(EkibenError):
        list(lock(recipe))


def lock(recipe: SampleRecipe) -> Iterator[str]:
    yield from lock_recipe(recipe_in(recipe.path) if (recipe.path / "recipe.yaml").is_file() else find_recipe("none"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["images", "entrypoints", "images/stacks", "images/stacks/tiny", "files", "files/tree"]
)
def test_no_folder(recipe: SampleRecipe, name: str, kind: str) -> None:
    (recipe.path / name).rename(recipe.path / "before")
    KINDS[kind](recipe.path / name)
    with contextlib.nullcontext() if (kind, name) == ("a folder", "files/tree") else pytest.raises(EkibenError):
        resolve(find_recipe(str(recipe.path)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_that_is_no_folder(tmp_path: Path, kind: str) -> None:
    KINDS[kind](tmp_path / "mine")
    with pytest.raises(EkibenError):
        find_recipe(f"{tmp_path}/mine")


def test_the_sentence_names_the_file_and_what_to_do(recipe: SampleRecipe) -> None:
    put_sparse(recipe.path / "notes.txt")
    with pytest.raises(
        DefinitionError, match=r"notes\.txt has .* GB, more than the 4\.29 GB of a recipe's file"
    ) as caught:
        resolve(find_recipe(str(recipe.path)))
    assert caught.value.hint.endswith("--bind")
