"""Layers of random scripts: the same under every engine, and stacked they are what the scripts do to a plain folder."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ekiben.formats.layer import decode_name
from ekiben.formats.squashfs.reader import SquashfsReader, merged_layer
from support.random_edits import random_edits, script
from workspaces import Cli, Engine, NewStore, RecipeFolder, Workspace

pytestmark = pytest.mark.covers("ekiben/executors", "ekiben/formats")

# EKIBEN_RANDOM_TREES=1,2,3: seeds of other trees; EKIBEN_RANDOM_EDITS=200: longer scripts.
SEEDS = tuple(map(int, os.environ.get("EKIBEN_RANDOM_TREES", "1").split(",")))
EDITS = int(os.environ.get("EKIBEN_RANDOM_EDITS", "60"))
FOLDER = "opt/n"

# Engines differ where a layer changes or moves one of several names of a file of a layer below: fuse-overlayfs takes
# another name, rename(2) of a folder keeps links that a copy of it breaks. So names are made in the last layer alone,
# and nothing is moved there.
WITHOUT = (("link",), ("link",), ("move",))

Seen = dict[str, tuple[object, ...]]
seen: dict[int, tuple[str, list[str]]] = {}  # seed → the engine that was first, and its diff_ids


def scripts(seed: int) -> list[str]:
    """A script for each layer, all in one folder."""
    return [
        f"mkdir -p /{FOLDER}\ncd /{FOLDER}\n{script(random_edits(seed * 100 + number, EDITS, without))}\n"
        for number, without in enumerate(WITHOUT)
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_scripts_are_the_same_layers_under_every_engine(
    seed: int, engine: Engine, recipe_folder: RecipeFolder, workspace: Workspace, new_store: NewStore
) -> None:
    below = "base"
    for number, body in enumerate(scripts(seed)):
        (recipe_folder.path / "images" / f"random{number}.def").write_bytes(
            f"Bootstrap: localimage\nFrom: {below}.sif\n\n%post\n{body}".encode()
        )
        below = f"random{number}"
    recipe_folder.top(below)
    store = new_store(engine.user, "base")
    cwd = workspace.folder("out", engine.user)
    layers = Cli(workspace, engine.user).image(
        store, recipe_folder.path, "--engine", engine.name, "--format", "sif", "--no-verify", cwd=cwd
    )["layers"]
    assert stacked(store, layers) == plain(seed, workspace.folder("plain"))
    diff_ids = [layer["diff_id"] for layer in layers]
    first, expected = seen.setdefault(seed, (str(engine), diff_ids))
    assert diff_ids == expected, f"{engine} and {first} differ"


def plain(seed: int, folder: Path) -> Seen:
    """What the scripts leave in a folder of the machine's own: without layers, without an engine."""
    root = folder / FOLDER
    root.mkdir(parents=True)
    for body in scripts(seed):
        subprocess.run(["/bin/sh", "-e", "-c", body.replace(f"/{FOLDER}", str(root))], check=True, timeout=60)
    entries = {decode_name(os.fsencode(path.relative_to(root))): look_at(path) for path in root.rglob("*")}
    assert len({entry[0] for entry in entries.values()}) >= 3, "the scripts leave too little"
    return entries


def look_at(path: Path) -> tuple[object, ...]:
    status = path.lstat()
    kind = {stat.S_IFDIR: "dir", stat.S_IFREG: "file", stat.S_IFLNK: "symlink", stat.S_IFIFO: "fifo"}[
        stat.S_IFMT(status.st_mode)
    ]
    shown: object = ""
    if kind == "file":
        shown = hashlib.sha256(path.read_bytes()).hexdigest()
    if kind == "symlink":
        shown = os.readlink(path)  # noqa: PTH115  a Path would tidy it up
    return kind, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, shown


def stacked(store: Path, layers: list[dict[str, Any]]) -> Seen:
    """The same of the layers, one above the other, as the image has them."""
    entries: Seen = {}
    with ExitStack() as stack:
        blobs = [store / "blobs/sha256" / layer["digest"][7:] for layer in layers]
        for entry, chunks in merged_layer([SquashfsReader(stack.enter_context(blob.open("rb"))) for blob in blobs]):
            if entry.kind == "hardlink":
                entries[entry.path] = entries[entry.target]
                continue
            shown: object = hashlib.sha256(b"".join(chunks or ())).hexdigest() if entry.kind == "file" else entry.target
            entries[entry.path] = entry.kind, entry.mode, entry.uid, entry.gid, shown
    return {path.removeprefix(f"{FOLDER}/"): entry for path, entry in entries.items() if path.startswith(f"{FOLDER}/")}
