"""Sources that an ordinary user may not read, and outputs where he may not write: a sentence with the path, also as
JSON.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from support.sample_recipe import RECIPE, ROOF, SampleRecipe, seeded
from workspaces import USER, Cli, Workspace, give

pytestmark = pytest.mark.covers("ekiben/resolve", "ekiben/cli", "ekiben/builder")

GROUND = "Bootstrap: debootstrap\nOSVersion: bookworm\n"
DENIED = "Permission denied"


@pytest.fixture
def recipe(workspace: Workspace) -> SampleRecipe:
    """Root's recipe of files, which the ordinary user may read."""
    sample = SampleRecipe(workspace.folder("recipe") / RECIPE["name"])
    sample.recipe()
    sample.stack(arguments={})
    sample.write("images/ground.def", GROUND)
    sample.write("images/roof.def", ROOF.replace("walls.sif", "ground.sif"))
    entrypoints = ("entrypoints/library/part.py", "entrypoints/greet.py")
    for file in ("files/data.txt", "files/tree/a.txt", "files/tree/sub/b.txt", "configs/greet.yaml", *entrypoints):
        sample.write(file, "text\n")
    for folder in (sample.path, *(path for path in sample.path.rglob("*") if path.is_dir())):
        folder.chmod(0o755)
    return sample


@pytest.fixture
def user(workspace: Workspace) -> Cli:
    return Cli(workspace, USER)


def refused(cli: Cli, cwd: Path, *argv: str | Path) -> str:
    """The message of a command that ends with an error, without a traceback."""
    done = cli.run("--store", cwd / "store", *argv, cwd=cwd, code=None)
    assert done.returncode in range(1, 12), done
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ") or "\nerror: " in done.stderr, done.stderr
    if "--json" in argv:
        error = json.loads(done.stdout)["error"]
        assert error["exit_code"] == done.returncode
        assert error["message"] in done.stderr
    return done.stderr


RESOLVING = {
    "plan": ["plan", "RECIPE", "--json"],
    "image": ["image", "RECIPE", "--format", "sif", "--no-verify", "--json"],
    "render": ["render", "RECIPE", "--to", "dockerfile", "-o", "new"],
    "bundle": ["bundle", "RECIPE", "--json"],
    "doctor": ["doctor", "RECIPE", "--json"],
    "verify": ["verify", "RECIPE", "--json"],
    "push": ["push", "RECIPE", "127.0.0.1:9/x", "--json"],
    "publish": ["publish", "RECIPE", "--to", "shared", "--json"],
    "sbom": ["sbom", "RECIPE"],
    "diff": ["diff", "RECIPE", "RECIPE", "--json"],
}


@pytest.mark.parametrize("command", RESOLVING)
def test_unreadable_source_is_named(command: str, recipe: SampleRecipe, user: Cli, workspace: Workspace) -> None:
    file = recipe.path / "files/data.txt"
    file.chmod(0)
    argv = [str(recipe.path) if arg == "RECIPE" else arg for arg in RESOLVING[command]]
    message = refused(user, workspace.folder("out", USER), *argv)
    if command not in ("sbom", "diff"):  # they name images of the store, and this one is not there
        assert f"{file}: " in message
        assert DENIED in message


@pytest.mark.parametrize(
    "path",
    [
        "files/tree",
        "files/tree/sub",
        "entrypoints/library",
        "files",
        "images",
        "images/roof.def",
        "images/stacks/tiny/stack.yaml",
        "recipe.yaml",
        "entrypoints/greet.py",
        "configs/greet.yaml",
        ".",
    ],
)
def test_every_unreadable_path_is_named(path: str, recipe: SampleRecipe, user: Cli, workspace: Workspace) -> None:
    (recipe.path / path).chmod(0)
    message = refused(user, workspace.folder("out", USER), "plan", str(recipe.path), "--json")
    assert str(recipe.path / path).removesuffix("/.") in message


def test_unreadable_folder_in_a_pattern_is_named(recipe: SampleRecipe, user: Cli, workspace: Workspace) -> None:
    """A shell's pattern leaves out what would match in it."""
    recipe.write("files/other/a.txt", "text\n")
    (recipe.path / "files/other").chmod(0o755)
    recipe.replace("images/roof.def", "files/data.txt /opt/data/", "files/*/a.txt /opt/data/")
    (recipe.path / "files/tree").chmod(0)
    message = refused(user, workspace.folder("out", USER), "plan", str(recipe.path), "--json")
    assert f"{recipe.path}/files/tree: {DENIED}" in message


@pytest.mark.parametrize(
    "argv",
    [
        ["run", "--dry-run", "RECIPE", "greet"],
        ["submit", "--scheduler", "slurm", "--dry-run", "--json", "RECIPE", "greet"],
        ["lock", "RECIPE"],
        ["notebook", "RECIPE", "--dry-run"],
        ["shell", "RECIPE", "--dry-run"],
    ],
    ids=" ".join,
)
def test_unreadable_recipe_is_named(argv: list[str], recipe: SampleRecipe, user: Cli, workspace: Workspace) -> None:
    file = recipe.path / "recipe.yaml"
    file.chmod(0)
    args = [str(recipe.path) if arg == "RECIPE" else arg for arg in argv]
    message = refused(user, workspace.folder("out", USER), *args)
    assert str(file) in message
    assert DENIED in message


@pytest.fixture
def closed(workspace: Workspace) -> Path:
    """A folder of root's in which the ordinary user may look, and not write."""
    return workspace.folder("closed")


WRITING = {
    "image": ["image", "RECIPE", "--format", "sif", "--no-verify", "-o", "CLOSED/x.sif", "--json"],
    "oci": ["image", "RECIPE", "--format", "oci", "--no-verify", "-o", "CLOSED/x.tar", "--json"],
    "render": ["render", "RECIPE", "--to", "def", "-o", "CLOSED/new"],
    "sbom": ["sbom", RECIPE["name"], "-o", "CLOSED/x.json"],
    "doctor": ["doctor", "--record", "-o", "CLOSED/x.yaml"],
    "init": ["init", "CLOSED/mine"],
    "bundle": ["bundle", "RECIPE", "-o", "CLOSED/x.bundle", "--json"],
    "publish": ["publish", "RECIPE", "--to", "CLOSED/shared", "--no-verify", "--json"],
    "submit": ["submit", "--scheduler", "slurm", "--runs", "CLOSED/runs", "--force", "--json", "RECIPE", "greet"],
}


@pytest.mark.parametrize("command", WRITING)
def test_closed_output_is_named(
    command: str, recipe: SampleRecipe, user: Cli, closed: Path, workspace: Workspace
) -> None:
    out = workspace.folder("out", USER)
    seeded(recipe, out / "store", "ground", "roof", *([RECIPE["name"]] if command == "bundle" else []))
    subprocess.run(["chown", "-R", USER, out / "store"], check=True)
    (out / f"{RECIPE['name']}.sif").touch()
    if command == "sbom":
        user.run(
            "--store", out / "store", "image", recipe.path, "--format", "sif", "--no-verify", "-o", "x.sif", cwd=out
        )
    args = [arg.replace("RECIPE", str(recipe.path)).replace("CLOSED", str(closed)) for arg in WRITING[command]]
    message = refused(user, out, *args)
    assert str(closed) in message
    assert not list(closed.iterdir())


def test_unreadable_folder_of_data_is_named(recipe: SampleRecipe, user: Cli, workspace: Workspace) -> None:
    """A bundle without it would be taken for a whole one."""
    out, data = workspace.folder("out", USER), workspace.folder("data")
    (data / "set/closed").mkdir(parents=True)
    (data / "set/closed/data").write_text("1\n")
    (data / "set/closed").chmod(0)
    seeded(recipe, out / "store", "ground", "roof", RECIPE["name"])
    subprocess.run(["chown", "-R", USER, out / "store"], check=True)
    message = refused(
        user, out, "bundle", str(recipe.path), "--include", data / "set", "-o", out / "x.bundle", "--json"
    )
    assert f"{data}/set/closed: {DENIED}" in message
    assert not (out / "x.bundle").exists()


@pytest.mark.parametrize("argv", [["plan", "RECIPE", "--json"], ["list", "--json"]], ids=" ".join)
def test_unreadable_store_is_named(
    argv: list[str], recipe: SampleRecipe, user: Cli, closed: Path, workspace: Workspace
) -> None:
    out = workspace.folder("out", USER)
    (out / "store").mkdir()
    (out / "store").chmod(0o700)
    message = refused(user, out, *(arg.replace("RECIPE", str(recipe.path)) for arg in argv))
    assert str(out / "store") in message


def test_missing_right_to_write_is_no_obstacle_to_a_plan(recipe: SampleRecipe, user: Cli, workspace: Workspace) -> None:
    """Nothing above is refused for another reason: the same recipe is planned where nothing is closed."""
    out = workspace.folder("out", USER)
    give(out, USER)
    planned = json.loads(user.run("--store", out / "store", "plan", recipe.path, "--json", cwd=out).stdout)
    assert [layer["layer"] for layer in planned] == ["ground", "roof", RECIPE["name"]]
