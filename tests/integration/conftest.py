"""Fixtures of the tests with real engines; see rooms.py."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import write_recipe
from rooms import ENGINES, ME, USER, Cli, Engine, NewStore, RecipeFolder, Room, copy_checkout, give, need, share_layers

# A shell's background job starts with Ctrl-C ignored, and hands that on; a user's terminal does not.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def room() -> Iterator[Room]:
    """EKIBEN_TEST_ROOM names one that stays, with its caches and first layers; else it is made and removed."""
    need("apptainer", "buildah", "mmdebstrap")
    asked = os.environ.get("EKIBEN_TEST_ROOM")
    path = Path(asked) if asked else Path(tempfile.mkdtemp(prefix="ekiben-room-"))
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o755)
    for user in (ME, USER):
        (path / "stores" / user).mkdir(parents=True, exist_ok=True)
        give(path / "stores" / user, user)
    shutil.rmtree(path / "checkout", ignore_errors=True)
    try:
        yield Room(path, copy_checkout(path / "checkout"))
    finally:
        if not asked:
            shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def tidy(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test's folders hold images: they go when it ends."""
    room = request.getfixturevalue("room") if "room" in request.fixturenames else None
    if not isinstance(room, Room):
        yield
        return
    before = list(room.made)
    yield
    for folder in [folder for folder in room.made if folder not in before]:
        shutil.rmtree(folder, ignore_errors=True)
        room.made.remove(folder)


@pytest.fixture(scope="session")
def cli(room: Room) -> Cli:
    return Cli(room)


@pytest.fixture(scope="session")
def user_cli(room: Room) -> Cli:
    return Cli(room, USER)


@pytest.fixture(scope="session")
def hello(room: Room, cli: Cli) -> Path:
    """A store of root's in which `hello` is built: the first layers of all other tests' stores."""
    store = room.store(ME, "hello")
    made = cli.image(store, "hello", "--engine", "apptainer", "--format", "sif", "-o", room.path / "hello.sif")
    assert {item["name"] for item in made["layers"]} == {"base", "python", "hello"}
    return store


@pytest.fixture(scope="session")
def drill(room: Room, hello: Path, cli: Cli) -> Path:
    """A recipe whose task is a drill for jobs, and beside it drill.sif."""
    store, folder = room.store(ME, "drill"), room.path / "drill"
    for place in (store, folder):
        shutil.rmtree(place, ignore_errors=True)
    share_layers(hello, store, ["base", "python"], ME)
    recipe = write_recipe(folder / "recipe")
    cli.image(store, recipe, "--format", "sif", "--no-verify", "-o", folder / "drill.sif")
    return recipe


@pytest.fixture
def new_store(room: Room, hello: Path, request: pytest.FixtureRequest) -> Iterator[NewStore]:
    """new_store(user, *layers): a store of the user's own in which just these layers are there; their blobs are links."""
    made: list[Path] = []

    def make(user: str = ME, *layers: str) -> Path:
        name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
        store = room.store(user, f"{name}-{len(made)}")
        shutil.rmtree(store, ignore_errors=True)
        made.append(store)
        share_layers(hello, store, layers, user)
        return store

    yield make
    for store in made:
        shutil.rmtree(store, ignore_errors=True)


@pytest.fixture(params=ENGINES, ids=str)
def engine(request: pytest.FixtureRequest, room: Room) -> Engine:
    found = request.param
    assert isinstance(found, Engine)
    return found


@pytest.fixture
def own_recipe(room: Room) -> RecipeFolder:
    path = room.folder("recipe") / "own"
    (path / "images").mkdir(parents=True)
    return RecipeFolder(path)
