"""Ekiben as people install it: a wheel in an environment of its own, away from any checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from uv import find_uv_bin

import ekiben
from workspaces import ME, ROOT, NewStore, Workspace, copy_checkout

pytestmark = pytest.mark.covers("pyproject.toml", "ekiben/bootstrap.sh", "ekiben/core")

DATA = ("images", "recipes", "entrypoints", "sites")
# The keys of every layer of every recipe on its stack. sys.argv[1]: the folder that ``ekiben`` should come from.
KEYS = """
import json, pathlib, sys
import ekiben
assert pathlib.Path(ekiben.__file__).resolve().is_relative_to(pathlib.Path(sys.argv[1]).resolve()), ekiben.__file__
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe, recipe_folders
chains = {name: resolve(find_recipe(name)).layers for name in recipe_folders()}
print(json.dumps({name: [[layer.name, layer.cache_key] for layer in layers] for name, layers in chains.items()}))
"""


@dataclass(frozen=True)
class Installed:
    """``checkout`` is what the wheel was built from, ``venv`` what it is installed in; ``folder`` is empty."""

    checkout: Path
    dist: Path
    venv: Path
    folder: Path

    @property
    def wheel(self) -> Path:
        (wheel,) = self.dist.glob("*.whl")
        return wheel

    def run(self, *argv: str | Path, code: int = 0, env: Mapping[str, str] | None = None) -> str:
        """Run a program of the environment, and return its stdout."""
        merged = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        merged |= {"PATH": f"{self.venv / 'bin'}:{os.environ['PATH']}", **(env or {})}
        done = subprocess.run(
            [str(self.venv / "bin" / argv[0]), *map(str, argv[1:])],
            cwd=self.folder,
            env=merged,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == code, f"{argv}\n{done.stdout}\n{done.stderr}"
        return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Built and installed as `uv build` and `uv pip install` do it.

    Of two files the executable bit is set, as in no checkout of ours.
    """
    path = tmp_path_factory.mktemp("wheel")
    checkout = copy_checkout(path / "checkout")
    for name in ("entrypoints/hello.py", "images/scripts/install.py"):
        (checkout / name).chmod(0o755)
    for cache in ("images/scripts/__pycache__", "entrypoints/__pycache__"):
        (checkout / cache).mkdir()
        (checkout / cache / "left.cpython-311.pyc").touch()
    uv = find_uv_bin()
    subprocess.run([uv, "build", "--quiet", "--out-dir", path / "dist", checkout], check=True)
    made = Installed(checkout, path / "dist", path / "venv", path / "elsewhere")
    made.folder.mkdir()
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, made.venv], check=True)
    subprocess.run([uv, "pip", "install", "--quiet", "--python", made.venv / "bin/python", made.wheel], check=True)
    return made


def test_a_wheel_has_one_top_level_package_and_the_data_of_the_checkout(installed: Installed) -> None:
    names = zipfile.ZipFile(installed.wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"ekiben", f"ekiben-{ekiben.__version__}.dist-info"}
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]
    listed = subprocess.check_output(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *DATA], cwd=ROOT, text=True
    )
    assert {name.removeprefix("ekiben/_data/") for name in names if name.startswith("ekiben/_data/")} == {
        *listed.split()
    }
    assert {
        "ekiben/bootstrap.sh",
        "ekiben/py.typed",
        "ekiben/project/template/recipe.yaml",
        "ekiben/publish/catalog/index.html",
    } <= {*names}


def test_an_sdist_has_what_the_wheel_is_built_from_and_no_tests(installed: Installed) -> None:
    (sdist,) = installed.dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    assert {*DATA, "ekiben", "pyproject.toml", "README.md", "LICENSE"} <= tops
    assert not tops & {"tests", "bench", "build.py"}


def test_the_command_says_its_version_and_so_does_the_module(installed: Installed) -> None:
    assert installed.run("ekiben", "--version") == f"ekiben {ekiben.__version__}\n"
    assert installed.run("python", "-m", "ekiben", "--version") == f"ekiben {ekiben.__version__}\n"


def test_keys_of_all_recipes_are_those_of_the_checkout(installed: Installed) -> None:
    """Contents and executable bits are in them: a wheel keeps both."""
    of_wheel = json.loads(installed.run("python", "-c", KEYS, installed.venv))
    stdout = subprocess.check_output(
        [sys.executable, "-c", KEYS, installed.checkout], cwd=installed.checkout, text=True
    )
    of_checkout = json.loads(stdout)
    assert of_wheel == of_checkout
    assert {"hello", "lora-opencalm"} <= of_wheel.keys()
    unchanged = json.loads(subprocess.check_output([sys.executable, "-c", KEYS, ROOT], cwd=ROOT, text=True))
    assert unchanged["hello"] != of_wheel["hello"]  # so the bit is in the keys, and a lost one would have shown


def test_plan_names_every_layer(installed: Installed, tmp_path: Path) -> None:
    stdout = installed.run("ekiben", "--store", tmp_path, "plan", "lora-opencalm")
    assert [line.split()[1] for line in stdout.splitlines()] == [
        "base",
        "python",
        "compiler",
        "pytorch",
        "huggingface",
        "lora-opencalm",
    ]


def test_stacks_of_an_installation_are_not_locked_in_place(installed: Installed) -> None:
    stderr = installed.run("ekiben", "lock", "cu130", code=2)
    assert "part of the installed Ekiben" in stderr
    assert "images/stacks/" in stderr


def test_printed_engine_install_command_runs(installed: Installed) -> None:
    offered = installed.run("python", "-c", "from ekiben.core.paths import ENGINE_SETUP; print(ENGINE_SETUP)").strip()
    done = subprocess.run(
        ["sh", "-c", offered],
        cwd=installed.folder,
        env={**os.environ, "EKIBEN_NO_INSTALL": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr  # there is an engine here
    assert not [*installed.venv.rglob(".venv")]


def test_image_is_built(workspace: Workspace, new_store: NewStore, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The layers below are of a checkout's store: equal keys, so none is built again."""
    path = tmp_path_factory.mktemp("run")
    uv, venv = find_uv_bin(), path / "venv"
    subprocess.run([uv, "build", "--quiet", "--wheel", "--out-dir", path, workspace.checkout], check=True)
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, venv], check=True)
    (wheel,) = path.glob("*.whl")
    subprocess.run([uv, "pip", "install", "--quiet", "--python", venv / "bin/python", wheel], check=True)
    made = Installed(workspace.checkout, path, venv, workspace.folder("installed"))
    store = new_store(ME, "base", "python")
    stdout = made.run(
        "ekiben", "--store", store, "image", "hello", "--format", "sif", "--engine", "apptainer", "--json"
    )
    assert json.loads(stdout)["built"] == ["hello"]
    assert json.loads(made.run("ekiben", "--store", store, "run", "hello", "hello", "--", "--json"))["cpus"] > 0
