"""The bill of materials of a real image, of the store and of its SIF."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bills import check_bill
from builder.recipe import HOUSE
from builder.stack import find_stack, read_pins
from rooms import ME, USER, Cli, NewStore, RecipeFolder, Room


def test_the_bill_is_what_dpkg_and_python_say_inside(hello: Path, room: Room, cli: Cli, user_cli: Cli) -> None:
    bill = cli.run("--store", hello, "sbom", "hello").stdout
    debian, python = check_bill(bill, room.path / "hello.sif")
    stack = find_stack("cu130", [HOUSE / "images"])
    drifted = {line.split(" ")[0] for line in _drift(bill)}
    for name, version in stack.apt_lock().packages.items():
        assert debian.get(name, version) == version or name in drifted
    assert python == {name: version for name, version, _ in read_pins((stack.folder / "python.lock").read_text())}
    # Far from the store, and for another user, it is the same. (What drifted is in the store's records.)
    away = room.folder("away", USER)
    done = user_cli.run("--store", away / "empty", "sbom", room.path / "hello.sif", "-o", away / "hello.cdx.json")
    assert (away / "hello.cdx.json").read_text() == bill or drifted
    assert "Debian's" in done.stdout
    for secret in (os.uname().nodename, str(room.path), str(hello)):
        assert secret not in bill


def _drift(bill: str) -> list[str]:
    return [
        item["value"]
        for item in json.loads(bill)["metadata"]["component"]["properties"]
        if item["name"] == "ekiben:drift"
    ]


@pytest.mark.parametrize(("script", "said"), [
    ("head -c 3000 /var/lib/dpkg/status >/tmp/status; mv /tmp/status /var/lib/dpkg/status", "dpkg's database is broken"),
    ("rm /opt/venv/lib/python3.11/site-packages/uv-*.dist-info/METADATA", "a Python package is broken"),
])  # fmt: skip
def test_a_layer_whose_database_is_broken(
    script: str, said: str, new_store: NewStore, own_recipe: RecipeFolder, cli: Cli
) -> None:
    """What a %post broke is said with the layer's name."""
    store = new_store(ME, "base", "python")
    own_recipe.layer("own", "python", script)
    own_recipe.top("own")
    cli.image(store, own_recipe.path, "--format", "oci", "-o", own_recipe.path / "own.tar", "--no-verify")
    assert f"layer own: {said}" in cli.run("--store", store, "sbom", "own", code=8).stderr
