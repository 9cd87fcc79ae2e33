"""The archive of a package's folder: its bytes depend on its files alone."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError
from ekiben.spec.source_tree import read_tree


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A package as tools leave it: a.py, sub/b.py and a link are its sources."""
    for name in ("a.py", "sub/b.py", "sub/__pycache__/b.pyc", "x.egg-info/PKG-INFO", "build/lib/a.py", ".venv/bin/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "sub/link.py").symlink_to("../a.py")
    return tmp_path


def git(folder: Path, *args: str) -> None:
    subprocess.run(["git", "-C", folder, *args], check=True, capture_output=True)


def members(folder: Path) -> dict[str, tarfile.TarInfo]:
    out = io.BytesIO()
    read_tree(folder).write(out)
    return {info.name: info for info in tarfile.open(fileobj=io.BytesIO(out.getvalue()))}


def test_archive_has_the_sources_and_not_what_tools_write(folder: Path) -> None:
    (folder / "a.py").chmod(0o700)
    before = read_tree(folder).digest()
    assert {name: info.mode for name, info in members(folder).items()} == {
        "source/a.py": 0o755,
        "source/sub/b.py": 0o644,
        "source/sub/link.py": 0o777,
    }
    os.utime(folder / "a.py", (1, 1))
    (folder / "sub/b.py").chmod(0o600)
    assert read_tree(folder).digest() == before
    (folder / "sub/b.py").write_text("y")
    assert read_tree(folder).digest() != before


def test_of_a_repository_what_git_tracks_counts_and_the_rest_is_named(folder: Path, tmp_path: Path) -> None:
    git(folder, "init", "--quiet")
    git(folder, "add", "a.py", "sub/link.py")
    (folder / ".gitignore").write_text("*.bin\n")
    (folder / "large.bin").touch()
    # Settings of the repository start no program.
    git(folder, "config", "core.fsmonitor", f"touch {tmp_path}/ran; false")
    tree = read_tree(folder)
    assert tree.files == ("a.py", "sub/link.py")
    assert tree.untracked == (".gitignore", "sub/b.py")
    assert not (tmp_path / "ran").exists()
    (folder / "a.py").unlink()
    assert read_tree(folder).files == ("sub/link.py",)


def test_definitions_locks_and_images_are_left_out_of_the_recipe_folder(folder: Path) -> None:
    before = read_tree(folder).files
    for name in (
        "recipe.yaml",
        "SHA256SUMS",
        "mine.sif",
        "images/mine.def",
        "images/mine.lock",
        "images/mine.sources.json",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    assert read_tree(folder).files == before


@pytest.mark.parametrize("target", ["/etc/passwd", "../../outside"])
def test_a_link_that_leaves_the_folder_is_refused(folder: Path, target: str) -> None:
    (folder / "sub/out").symlink_to(target)
    with pytest.raises(DefinitionError, match=r"sub/out: points to .*, outside the package's folder"):
        read_tree(folder).digest()


def test_a_pipe_and_a_huge_folder_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(DefinitionError, match="pipe: is not a regular file"):
        read_tree(folder).digest()
    (folder / "pipe").unlink()
    with (folder / "large").open("wb") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(DefinitionError, match=r"a package of more than 1\.07 GB is not built"):
        read_tree(folder).digest()
