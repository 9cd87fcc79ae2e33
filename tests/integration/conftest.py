"""Fixtures of the tests with real engines; see workspaces.py."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben import executors
from jobs import write_recipe
from workspaces import (
    ENGINES,
    ME,
    USER,
    BuiltImage,
    Cli,
    Engine,
    NewStore,
    RecipeFolder,
    Workspace,
    copy_checkout,
    give,
    locked,
    make_image,
    need,
    share_layers,
)

# A shell's background job starts with Ctrl-C ignored, and hands that on; a user's terminal does not.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def run_folder() -> Path:
    """The folder that all processes of this run share; tests/support/session.py names and removes it."""
    folder = Path(os.environ["EKIBEN_TEST_RUN"])
    folder.mkdir(mode=0o755, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def workspace(run_folder: Path) -> Workspace:
    """$EKIBEN_TEST_WORKSPACE, which stays with its caches and first layers; without it a temporary one of this
    process.
    """
    need("apptainer", "buildah", "mmdebstrap")
    path = Path(os.environ.get("EKIBEN_TEST_WORKSPACE") or run_folder / os.environ.get("PYTEST_XDIST_WORKER", "main"))
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o755)
    for user in (ME, USER):
        (path / "stores" / user).mkdir(parents=True, exist_ok=True)
        give(path / "stores" / user, user)
    shutil.rmtree(path / "checkout", ignore_errors=True)
    return Workspace(path, copy_checkout(path / "checkout"))


@pytest.fixture(autouse=True)
def tidy(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test's folders hold images: they go when it ends."""
    workspace = request.getfixturevalue("workspace") if "workspace" in request.fixturenames else None
    if not isinstance(workspace, Workspace):
        yield
        return
    before = list(workspace.made)
    yield
    for folder in [folder for folder in workspace.made if folder not in before]:
        shutil.rmtree(folder, ignore_errors=True)
        workspace.made.remove(folder)


@pytest.fixture(scope="session")
def cli(workspace: Workspace) -> Cli:
    return Cli(workspace)


@pytest.fixture(scope="session")
def user_cli(workspace: Workspace) -> Cli:
    return Cli(workspace, USER)


@pytest.fixture(scope="session")
def hello(workspace: Workspace, cli: Cli, run_folder: Path) -> Path:
    """A store of root's in which `hello` is built: the first layers of all other tests' stores.

    The first process of a run that asks for it builds the layers, and the others link them.
    """
    store, layers = workspace.store(ME, "hello"), run_folder / "hello"
    with locked(run_folder / "hello.lock"):
        if layers.exists() and not store.exists():
            share_layers(layers, store, ["base", "python", "hello"], ME)
        store.mkdir(exist_ok=True)  # the ordinary user reads it, too
        made = cli.image(store, "hello", "--engine", "apptainer", "--format", "sif", "-o", workspace.path / "hello.sif")
        if not layers.exists():
            share_layers(store, layers, ["base", "python", "hello"], ME)
    assert {item["name"] for item in made["layers"]} == {"base", "python", "hello"}
    return store


@pytest.fixture(scope="session")
def lora_opencalm(workspace: Workspace, run_folder: Path) -> BuiltImage:
    """`make image recipe=lora-opencalm` in a clone, once in a run."""
    folder = run_folder / "lora-opencalm"
    image = BuiltImage(folder / "clone", folder / "store", folder / "stdout")
    with locked(run_folder / "lora-opencalm.lock"):
        if not image.stdout_file.exists():
            shutil.rmtree(folder, ignore_errors=True)
            copy_checkout(image.checkout)
            done = make_image(image)
            assert done.returncode == 0, done.stdout + done.stderr
            image.stdout_file.write_text(done.stdout)
    return image


@pytest.fixture(scope="session")
def job_recipe(workspace: Workspace, hello: Path, cli: Cli) -> Path:
    """A recipe whose task is fake_task.py, and beside it fake.sif."""
    store, folder = workspace.store(ME, "fake"), workspace.path / "fake"
    for old in (store, folder):
        shutil.rmtree(old, ignore_errors=True)
    share_layers(hello, store, ["base", "python"], ME)
    recipe = write_recipe(folder / "recipe")
    cli.image(store, recipe, "--format", "sif", "--no-verify", "-o", folder / "fake.sif")
    return recipe


@pytest.fixture
def new_store(workspace: Workspace, hello: Path, request: pytest.FixtureRequest) -> Iterator[NewStore]:
    """new_store(user, *layers): a store of the user's own in which just these layers are there; their blobs are
    links.
    """
    made: list[Path] = []

    def make(user: str = ME, *layers: str) -> Path:
        name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
        store = workspace.store(user, f"{name}-{len(made)}")
        shutil.rmtree(store, ignore_errors=True)
        made.append(store)
        share_layers(hello, store, layers, user)
        return store

    yield make
    for store in made:
        shutil.rmtree(store, ignore_errors=True)


@pytest.fixture(params=ENGINES, ids=str)
def engine(request: pytest.FixtureRequest, workspace: Workspace) -> Engine:
    found = request.param
    assert isinstance(found, Engine)
    if reason := executors.load(found.name).unavailable():
        pytest.skip(f"{found.name}: {reason} (tests/services.sh install)")
    return found


@pytest.fixture
def recipe_folder(workspace: Workspace) -> RecipeFolder:
    path = workspace.folder("recipe") / "own"
    (path / "images").mkdir(parents=True)
    return RecipeFolder(path)
