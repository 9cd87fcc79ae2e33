"""Which folders and files `run --live` shows instead of an image's."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from ekiben.core.paths import PROJECT_ROOT
from ekiben.run.live import live_files
from ekiben.spec.recipe import LAUNCHER, find_recipe


def make_recipe(folder: Path, entrypoint: str) -> Path:
    (folder / "entrypoints").mkdir(parents=True)
    (folder / "entrypoints/go.py").write_text("print(1)\n")
    (folder / "recipe.yaml").write_text(
        json.dumps(
            {
                "name": "mine",
                "description": "a test",
                "stack": "cu130",
                "layer": "python",
                "tasks": {"go": {"entrypoint": entrypoint, "help": "print"}},
            }
        )
    )
    return folder


def test_recipe_outside_the_checkout_is_one_mount(tmp_path: Path) -> None:
    folder = make_recipe(tmp_path / "mine", "go.py")
    assert live_files(find_recipe(str(folder))).mounts == {"/opt/ekiben/recipe": folder}


def test_folder_of_two_origins_is_mounted_file_by_file(tmp_path: Path) -> None:
    folder = make_recipe(tmp_path / "mine", "train.py")
    shipped = PROJECT_ROOT / "entrypoints"
    assert live_files(find_recipe(str(folder))).mounts == {
        "/opt/ekiben/recipe/entrypoints/ekiben_tasks": shipped / "ekiben_tasks",
        **{f"/opt/ekiben/recipe/entrypoints/{name}": shipped / name for name in LAUNCHER},
        "/opt/ekiben/recipe/entrypoints/go.py": folder / "entrypoints/go.py",
        "/opt/ekiben/recipe/entrypoints/train.py": shipped / "train.py",
        "/opt/ekiben/recipe/recipe.yaml": folder / "recipe.yaml",
    }


@pytest.mark.parametrize("recipe", sorted(path.parent.name for path in PROJECT_ROOT.glob("recipes/*/recipe.yaml")))
def test_mounts_show_each_file_of_the_recipe(recipe: str) -> None:
    found = find_recipe(recipe)
    mounts = live_files(found).mounts
    for inside, path in found.members().items():
        target = f"/opt/ekiben/recipe/{inside}"
        mount = next(name for name in mounts if target == name or target.startswith(f"{name}/"))
        assert Path(f"{mounts[mount]}{target.removeprefix(mount)}") == path


def test_origin_names_the_commit_and_whether_files_differ(tmp_path: Path) -> None:
    folder = make_recipe(tmp_path / "mine", "go.py")
    assert live_files(find_recipe(str(folder))).origin == str(folder)

    def git(*args: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
        return subprocess.run(
            ["git", "-C", folder, *identity, *args], check=True, capture_output=True, text=True
        ).stdout

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "x")
    commit = git("rev-parse", "HEAD")[:12]
    assert live_files(find_recipe(str(folder))).origin == f"{folder} at {commit}"
    (folder / "entrypoints/go.py").write_text("print(2)\n")
    assert live_files(find_recipe(str(folder))).origin == f"{folder} at {commit}-dirty"


@pytest.mark.parametrize("setting", ["fsmonitor", "clean", "process", "hook"])
def test_nothing_that_the_settings_of_a_repository_name_is_run(tmp_path: Path, setting: str) -> None:
    """A folder that came as an archive has a .git/config of its own."""
    folder, evil = make_recipe(tmp_path / "mine", "go.py"), tmp_path / "evil"
    evil.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\ncat\n")
    evil.chmod(0o755)
    (folder / ".gitattributes").write_text("*.py filter=evil\n")

    def git(*args: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
        subprocess.run(["git", "-C", folder, *identity, *args], check=True, capture_output=True)

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "x")
    (folder / "entrypoints/go.py").write_text("print(2)\n")
    key = {"fsmonitor": "core.fsmonitor", "hook": "core.hooksPath"}.get(setting, f"filter.evil.{setting}")
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "post-index-change").symlink_to(evil)
    git("config", key, str(hooks if setting == "hook" else evil))
    assert live_files(find_recipe(str(folder))).origin.endswith("-dirty")
    assert not (tmp_path / "ran").exists()


def test_a_pipe_instead_of_the_index_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ekiben.run.live._PATIENCE", 1.0)
    folder = make_recipe(tmp_path / "mine", "go.py")
    for argv in (
        ["init", "--quiet"],
        ["add", "."],
        ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", "-C", folder, *argv], check=True)
    (folder / ".git/index").unlink()
    os.mkfifo(folder / ".git/index")
    assert live_files(find_recipe(str(folder))).origin == str(folder)
