"""Locking a recipe's own packages, with the real index."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError, LockMismatchError, UsageError
from ekiben.project.create import create_recipe
from ekiben.project.lock import lock_recipe, read_below
from ekiben.resolve.resolve import resolve
from ekiben.spec.stack import find_stack, read_pins
from support.own_recipes import lock, recipe_in
from workspaces import Cli, Workspace, need

pytestmark = pytest.mark.covers("ekiben/project")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_recipe(tmp_path / "mine", layer="huggingface")
    return tmp_path / "mine"


def pins_of(folder: Path) -> dict[str, str]:
    text = (folder / "images/mine-packages.lock").read_text()
    return {name: version for name, version, hashes in read_pins(text) if hashes}


def test_only_what_the_layers_below_lack_is_locked_with_hashes(folder: Path) -> None:
    """trl depends on torch, transformers and accelerate, which are there."""
    lock(folder, "humanize\ntrl\n")
    assert {"humanize", "trl"} <= pins_of(folder).keys()
    assert not {"torch", "transformers", "accelerate", "numpy", "nvidia-cublas", "pip", "uv"} & pins_of(folder).keys()
    text = (folder / "images/mine-packages.lock").read_text()
    assert "://" not in text
    assert "index" not in text


def test_pyproject_requirements_are_locked(folder: Path) -> None:
    (folder / "requirements.txt").unlink()
    (folder / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1"\ndependencies = ["humanize==4.9.0"]\n')
    lock(folder)
    assert pins_of(folder) == {"humanize": "4.9.0"}


def test_another_version_than_the_layers_have_is_refused(folder: Path) -> None:
    with pytest.raises(DefinitionError, match=r"(?s)does not go with the layers .*huggingface.*torch"):
        lock(folder, "torch==2.0.0\n")
    assert not (folder / "images/mine-packages.lock").exists()


def test_requirements_that_the_layers_have_already_need_no_layer(folder: Path) -> None:
    with pytest.raises(UsageError, match="every package in it is already in the layer 'huggingface'"):
        lock(folder, "torch\ntransformers\n")


def test_code_of_a_pyproject_is_not_run(folder: Path, tmp_path: Path) -> None:
    (folder / "requirements.txt").unlink()
    (folder / "setup.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom setuptools import setup\nsetup(install_requires=['humanize'])\n"
    )
    project = '[project]\nname = "x"\nversion = "1"\n'
    (folder / "pyproject.toml").write_text(f'{project}dynamic = ["dependencies"]\n')
    with pytest.raises(DefinitionError, match="dependencies are dynamic"):
        lock(folder)
    (folder / "pyproject.toml").write_text(f'{project}dependencies = ["x @ file://{folder}"]\n')
    with pytest.raises(DefinitionError, match="has no wheel; lock without --only-binary"):
        lock(folder)
    sources = f'[tool.uv.sources]\nhumanize = {{ path = "{folder}", editable = true }}\n'
    (folder / "pyproject.toml").write_text(f'{project}dependencies = ["humanize==4.9.0"]\n{sources}')
    lock(folder)
    assert pins_of(folder) == {"humanize": "4.9.0"}
    assert not (tmp_path / "ran").exists()


def test_options_of_indexes_are_uv_s(folder: Path) -> None:
    lock(folder, f"--find-links {folder}  # none here\n--pre\nhumanize==4.9.0 # pinned\n")
    assert pins_of(folder) == {"humanize": "4.9.0"}


def test_keep_keeps_a_locked_version(folder: Path) -> None:
    lock(folder, "humanize==4.9.0\n")
    assert "mine: up to date" in lock(folder, "humanize\n", keep=True)
    assert pins_of(folder) == {"humanize": "4.9.0"}
    assert any(line.startswith("mine/images/mine-packages.lock: humanize 4.9.0 → ") for line in lock(folder))


def test_check_writes_nothing_and_fails_when_the_lock_is_out_of_date(folder: Path) -> None:
    lock(folder, "humanize\n")
    assert lock(folder, check=True) == ["mine: up to date"]
    before = (folder / "images/mine-packages.lock").read_bytes()
    with pytest.raises(LockMismatchError):
        lock(folder, "humanize\ntabulate\n", check=True)
    assert (folder / "images/mine-packages.lock").read_bytes() == before


def test_sha256sum_reads_the_sums_and_edited_files_are_refused(folder: Path) -> None:
    with pytest.raises(DefinitionError, match="is not locked"):
        resolve(recipe_in(folder))
    lock(folder, "humanize\n")
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
    assert resolve(recipe_in(folder)).layers[-2].name == "mine-packages"
    (folder / "requirements.txt").write_text("humanize\ntabulate\n")
    with pytest.raises(DefinitionError, match=r"requirements\.txt: was changed and not locked again"):
        resolve(recipe_in(folder))
    lock(folder)
    with (folder / "images/mine-packages.lock").open("a") as file:
        file.write("# by hand\n")
    with pytest.raises(DefinitionError, match=r"mine-packages\.lock: was edited by hand"):
        resolve(recipe_in(folder))


def test_a_replaced_package_is_the_image_s(tmp_path: Path, workspace: Workspace, cli: Cli) -> None:
    """The tests of the layer below, which compare it with its lock file, pass all the same."""
    need("apptainer")
    store, folder = workspace.folder("store"), workspace.folder("replacing") / "mine"
    create_recipe(folder, layer="python")
    cli.run("add", "--replace", "pip<26", folder)
    cli.run("--store", store, "build", folder, "--format", "sif", cwd=folder.parent)
    argv = ["apptainer", "-q", "exec", "--cleanenv", folder.parent / "mine.sif", "pip", "--version"]
    assert f"pip {pins_of(folder)['pip']} " in subprocess.check_output(argv, text=True)


def test_packages_that_layers_below_compile_are_known_with_their_version(tmp_path: Path) -> None:
    create_recipe(tmp_path / "mine", layer="flash-attn")
    recipe = recipe_in(tmp_path / "mine")
    below = read_below(recipe, find_stack("cu130", recipe.image_folders))
    assert below.versions["flash-attn"] == below.compiled["flash-attn"] != ""
    assert below.layers[-1] == "flash-attn"
    lock(tmp_path / "mine", "flash-attn\nhumanize\n")
    assert pins_of(tmp_path / "mine").keys() == {"humanize"}
    with pytest.raises(DefinitionError, match=r"asks for flash-attn<2, and a layer below has flash-attn 2"):
        lock(tmp_path / "mine", "flash-attn<2\n")


def test_recipe_lock_for_arm64_keeps_the_versions_of_amd64(folder: Path) -> None:
    """Asked for once, it is kept up to date; where it would say the same, there is none."""
    lock(folder, "humanize==4.9.0\n")
    text = (folder / "images/mine-packages.lock").read_text()
    assert list(lock_recipe(recipe_in(folder), arch="arm64")) == ["mine: up to date"]
    assert not (folder / "images/mine-packages.arm64.lock").exists()
    assert resolve(recipe_in(folder), arch="arm64").stack.arch == "arm64"

    only = "colorama==0.4.6; platform_machine == 'aarch64'\n"
    lock(folder, f"humanize==4.9.0\n{only}")
    assert list(lock_recipe(recipe_in(folder), arch="arm64")) == [
        "mine/images/mine-packages.arm64.lock: colorama (new) → 0.4.6"
    ]
    assert (folder / "images/mine-packages.lock").read_text() == text
    assert "mine-packages.arm64.lock" in (folder / "SHA256SUMS").read_text()
    assert lock(folder, check=True) == ["mine: up to date"]
    lock(folder, "humanize==4.9.0\n", keep=True)
    assert not (folder / "images/mine-packages.arm64.lock").exists()
