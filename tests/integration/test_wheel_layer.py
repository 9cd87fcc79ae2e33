"""A layer that installs a lock file has the bytes of its %post, under every engine, and no script sees its caches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ekiben.spec.stack import without_packages
from workspaces import ROOT, Cli, Engine, NewStore, RecipeFolder, Workspace

pytestmark = pytest.mark.covers("ekiben/builder/wheel_layer.py", "images/scripts/install_wheels.py")

INSTALL = "/opt/venv/bin/python /opt/ekiben/install.py /opt/ekiben/locks/few.lock"
PACKAGES = ("tqdm", "charset-normalizer", "packaging", "pyyaml", "hf-xet")  # with programs, and with compiled modules
FILES = "\n%files\n    images/few.lock /opt/ekiben/locks/few.lock\n"
_VERBOSE = "installed by hard links"


def few_packages(recipe: RecipeFolder) -> None:
    """Write a lock file with some of huggingface's packages."""
    text = (ROOT / "images/stacks/cu130/huggingface.lock").read_text()
    names = {line.partition("==")[0] for line in text.splitlines() if "==" in line and line[0].isalnum()}
    assert names > set(PACKAGES)
    (recipe.path / "images/few.lock").write_text(without_packages(text, names - set(PACKAGES)))


def wheels_folder(store: Path, user: str) -> Path:
    return store.parent / ("wheels-root" if user == "root" else "wheels")


def test_layer_has_the_bytes_of_its_script(
    engine: Engine, recipe_folder: RecipeFolder, workspace: Workspace, new_store: NewStore
) -> None:
    few_packages(recipe_folder)
    cli, digests = Cli(workspace, engine.user), []
    for number, post in enumerate((f"true\n{INSTALL}", INSTALL, INSTALL)):
        recipe_folder.layer("few", "python", post, FILES)
        recipe_folder.top("few")
        store = new_store(engine.user, "base", "python")
        options = ("--engine", engine.name, "--format", "sif", "--no-verify")
        out = workspace.folder("out", engine.user)
        done = cli.run("-v", "--store", store, "build", recipe_folder.path, "--json", *options, cwd=out)
        assert (_VERBOSE in done.stderr) == bool(number), done.stderr
        record = next(path for path in (store / "keys").iterdir() if '"few"' in path.read_text())
        digests.append(record.read_text().partition('"diff_id":')[2].split('"')[1])
        assert not list(wheels_folder(store, engine.user).glob("*/stage-*"))
    assert len(set(digests)) == 1


def test_no_script_of_a_recipe_sees_the_caches(
    recipe_folder: RecipeFolder, cli: Cli, workspace: Workspace, new_store: NewStore
) -> None:
    few_packages(recipe_folder)
    recipe_folder.layer("mine", "python", "test -d /run/ekiben/cache/uv\ntest ! -e /run/ekiben/cache/compiled")
    recipe_folder.layer("few", "mine", INSTALL, FILES)
    recipe_folder.top("few")
    store = new_store("root", "base", "python")
    done = cli.run("-v", "--store", store, "build", recipe_folder.path, "--no-verify", cwd=workspace.folder("out"))
    assert _VERBOSE not in done.stderr
    assert "layer mine changes /opt/venv" not in done.stderr
    assert "no hard links: a layer below is not one of Ekiben's" in done.stderr
    assert os.geteuid() == 0


def test_one_layer_serves_two_bases(
    recipe_folder: RecipeFolder, cli: Cli, workspace: Workspace, new_store: NewStore
) -> None:
    """The key does not name the base, and the bytes are the same on both; the tests run again on the new one."""
    few_packages(recipe_folder)
    test = '\n%test\n    python -c "import tqdm, yaml"\n'
    recipe_folder.layer("few", "python", INSTALL, FILES + test)
    recipe_folder.top("few")
    store, out = new_store("root", "base", "python"), workspace.folder("out")
    options = ("--engine", "apptainer", "--format", "sif")
    first = cli.image(store, recipe_folder.path, *options, cwd=out)
    assert first["built"][:-1] == ["few"]
    base = (ROOT / "images/base.def").read_text().replace("Include: ca-certificates", "Include: ca-certificates file")
    (recipe_folder.path / "images/base.def").write_text(base)
    second = cli.image(store, recipe_folder.path, *options, cwd=out)
    assert second["built"][:-1] == ["base", "python"]
    layers = [{layer["name"]: layer for layer in image["layers"]} for image in (first, second)]
    assert layers[0]["few"] == layers[1]["few"]
    assert layers[0]["python"]["diff_id"] != layers[1]["python"]["diff_id"]
    assert [check["reused"] for check in second["checks"]] == [None]
    done = cli.run("--store", store, "verify", recipe_folder.path, "--rebuild", "--engine", "apptainer", cwd=out)
    assert "few" in done.stdout + done.stderr
