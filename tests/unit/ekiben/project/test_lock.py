"""Locking a recipe's own packages, with the real index."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError, UsageError
from ekiben.project.create import create_recipe
from ekiben.project.lock import lock_recipe
from support.own_recipes import lock, recipe_in
from support.sample_recipe import RunCli


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_recipe(tmp_path / "mine", layer="huggingface")
    return tmp_path / "mine"


def test_requirements_outside_an_index_are_refused(folder: Path) -> None:
    wheel = folder / "local-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("local.py", "")
        archive.writestr("local-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: local\nVersion: 1.0\n")
        archive.writestr("local-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("local-1.0.dist-info/RECORD", "")
    with pytest.raises(DefinitionError, match=r"local @ .*only packages of an index"):
        lock(folder, f"local @ {wheel.as_uri()}\n")


@pytest.mark.parametrize(
    "line",
    [
        "-e {0}",
        "--editable={0}",
        "{0}",
        "x @ file://{0}",
        "--no-binary :all:",
        "./evil",
        "-e \\\n{0}",
    ],
)
def test_code_of_a_requirement_is_not_run(folder: Path, tmp_path: Path, line: str) -> None:
    """uv runs a folder's setup.py to read its dependencies."""
    evil = tmp_path / "evil"
    evil.mkdir()
    (folder / "evil").mkdir()
    (evil / "setup.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom setuptools import setup\nsetup(name='x', version='1')\n"
    )
    (evil / "more.txt").write_text(f"-e {evil}\n")
    with pytest.raises(
        DefinitionError,
        match=r"requirements\.txt:2: .*(only packages of an index|outside the recipe's folder|is not a Python package)",
    ):
        lock(folder, f"humanize\n{line.format(evil)}\n")
    assert not (tmp_path / "ran").exists()


def test_a_recipe_without_a_layer_of_its_own_has_nothing_to_lock(tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/recipe.yaml").write_text("name: plain\ndescription: x\nstack: cu130\nlayer: python\ntasks: {}\n")
    assert "adds no layer of its own" in run_cli("lock", "plain", code=2).stderr


def test_architecture_without_locks_below_is_refused(tmp_path: Path) -> None:
    create_recipe(tmp_path / "mine", layer="huggingface", stack="cu124")
    with pytest.raises(UsageError, match="--arch arm64: stack cu124 is locked for amd64 only"):
        list(lock_recipe(recipe_in(tmp_path / "mine"), arch="arm64"))
