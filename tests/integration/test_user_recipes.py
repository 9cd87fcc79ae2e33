"""A recipe and a layer of one's own, inside the repository and outside it, by the commands of the README."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from workspaces import ME, USER, Cli, NewStore, RecipeFolder, Workspace, copy_checkout

pytestmark = pytest.mark.covers("ekiben/resolve", "ekiben/project")

LAYER = """\
Bootstrap: localimage
From: python.sif

%files
    images/mine.txt /opt/mine.txt

%post
    tr a-z A-Z </opt/mine.txt >/opt/MINE.txt

%environment
    export MINE=yes

%test
    test "$(cat /opt/MINE.txt)" = A-LINE
"""
SCRIPT = "import os\nprint('greetings from', os.environ['MINE'], open('/opt/MINE.txt').read().strip())\n"


@pytest.fixture
def clone(workspace: Workspace) -> Path:
    return copy_checkout(workspace.folder("clone"))


def run_task(user: str, sif: Path, *args: str) -> str:
    command = ["apptainer", "--silent", "exec", "--cleanenv", str(sif), *args]
    argv = command if user == ME else ["runuser", "-u", user, "--", *command]
    return subprocess.run(argv, cwd="/", capture_output=True, text=True, check=True).stdout


def add_layer(images: Path) -> None:
    images.mkdir(exist_ok=True)
    (images / "mine.def").write_text(LAYER)
    (images / "mine.txt").write_text("a-line\n")


def test_recipe_and_layer_inside_the_repository(clone: Path, new_store: NewStore) -> None:
    store = new_store(ME, "base", "python")
    shutil.copytree(clone / "recipes/hello", clone / "recipes/mine")
    recipe = clone / "recipes/mine/recipe.yaml"
    recipe.write_text(recipe.read_text().replace("name: hello", "name: mine").replace("layer: python", "layer: mine"))
    add_layer(clone / "images")
    environment = {**os.environ, "EKIBEN_STORE": str(store)}
    done = subprocess.run(
        ["make", "image", "recipe=mine", "options=--format sif"],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mine: 2 of 4 layers to build" in done.stderr
    for user in (ME, USER):
        assert '"cpus"' in run_task(user, clone / "mine.sif", "hello", "--json")
        assert run_task(user, clone / "mine.sif", "sh", "-c", "cat /opt/MINE.txt; echo $MINE") == "A-LINE\nyes\n"
    listed = subprocess.check_output(["make", "help"], cwd=clone, text=True)
    assert "mine" in listed.split("recipes:")[1].split()


def test_recipe_and_layer_outside_the_repository(workspace: Workspace, new_store: NewStore) -> None:
    """An ordinary user's folder, with a layer and a script of its own; the repository can only be read."""
    store, home = new_store(USER, "base", "python"), workspace.folder("projects", USER)
    recipe = home / "greeter"
    (recipe / "entrypoints").mkdir(parents=True)
    (recipe / "entrypoints/greet.py").write_text(SCRIPT)
    add_layer(recipe / "images")
    (recipe / "recipe.yaml").write_text(
        "name: greeter\ndescription: says hello\nstack: cu130\nlayer: mine\n"
        "tasks:\n  greet:\n    entrypoint: greet.py\n    help: say hello\ntest: |\n  greet | grep greetings\n"
    )
    cli = Cli(workspace, USER)
    made = cli.image(store, recipe, "--engine", "apptainer", "--format", "sif", cwd=home)
    assert made["built"] == ["mine", "greeter"]
    assert [check["runtime"] for check in made["checks"]] == ["apptainer"]
    assert run_task(USER, home / "greeter.sif", "greet") == "greetings from yes A-LINE\n"
    ran = cli.run("run", recipe, "greet", cwd=home)
    assert ran.stdout == "greetings from yes A-LINE\n"
    assert "no recipe.yaml there" in cli.run("image", home / "nothing", cwd=home, code=2).stderr


def test_prune_keeps_a_layer_of_docker_that_a_container_uses(
    recipe_folder: RecipeFolder, cli: Cli, new_store: NewStore
) -> None:
    recipe_folder.layer("kept", "base", "echo used >/opt/used")
    recipe_folder.top("kept")
    store = new_store(ME, "base")
    cli.image(store, recipe_folder.path, "--engine", "docker", "--format", "sif", "--no-verify", cwd=recipe_folder.path)
    listed = subprocess.check_output(["docker", "images", "--format", "{{.Repository}}:{{.Tag}}"], text=True)
    image = next(name for name in listed.split() if name.startswith("ekiben/layer:"))
    container = subprocess.check_output(["docker", "create", image, "true"], text=True).strip()
    try:
        warning = cli.run("--store", store, "prune", "--engines").stderr
        assert f"containers use {image}" in warning
    finally:
        subprocess.run(["docker", "rm", container], stdout=subprocess.DEVNULL, check=True)
    assert "containers use" not in cli.run("--store", store, "prune", "--engines").stderr


@pytest.mark.parametrize("name", ["docker", "buildah", "podman"])
def test_prune_removes_layers_of_an_engine(
    name: str, recipe_folder: RecipeFolder, cli: Cli, new_store: NewStore
) -> None:
    recipe_folder.layer("kept", "base", "echo kept >/opt/kept")
    recipe_folder.top("kept")
    store = new_store(ME, "base")
    cli.image(store, recipe_folder.path, "--engine", name, "--format", "sif", "--no-verify", cwd=recipe_folder.path)
    stdout = cli.run("--store", store, "prune", "--engines").stdout
    assert f"layer images of {'docker' if name == 'docker' else ''}" in stdout  # buildah and podman share theirs
    listed = subprocess.check_output([name, "images"], text=True)
    assert "ekiben/layer" not in listed
    assert "localhost/layers" not in listed
    assert cli.image(store, recipe_folder.path, "--format", "sif", "--no-verify", cwd=recipe_folder.path)["built"] == []
