"""The bill of materials of a real image, of the store and of its SIF."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ekiben.core.paths import PROJECT_ROOT
from ekiben.spec.stack import find_stack, read_pins
from sbom_checks import check_sbom
from workspaces import ME, USER, Cli, NewStore, RecipeFolder, Workspace

pytestmark = pytest.mark.covers("ekiben/inspect", "ekiben/packages")


def test_sbom_equals_dpkg_and_importlib_inside(hello: Path, workspace: Workspace, cli: Cli, user_cli: Cli) -> None:
    sbom = cli.run("--store", hello, "sbom", "hello").stdout
    debian, python = check_sbom(sbom, workspace.path / "hello.sif")
    stack = find_stack("cu130", [PROJECT_ROOT / "images"])
    drifted = {line.split(" ")[0] for line in _drift(sbom)}
    for name, version in stack.apt_lock().packages.items():
        assert debian.get(name, version) == version or name in drifted
    assert python == {name: version for name, version, _ in read_pins((stack.folder / "python.lock").read_text())}
    # Far from the store, and for another user, it is the same. (What drifted is in the store's records.)
    away = workspace.folder("away", USER)
    done = user_cli.run("--store", away / "empty", "sbom", workspace.path / "hello.sif", "-o", away / "hello.cdx.json")
    assert (away / "hello.cdx.json").read_text() == sbom or drifted
    assert "Debian's" in done.stdout
    for secret in (os.uname().nodename, str(workspace.path), str(hello)):
        assert secret not in sbom


def _drift(sbom: str) -> list[str]:
    return [
        item["value"]
        for item in json.loads(sbom)["metadata"]["component"]["properties"]
        if item["name"] == "ekiben:drift"
    ]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "head -c 3000 /var/lib/dpkg/status >/tmp/status; mv /tmp/status /var/lib/dpkg/status",
            "dpkg's database is broken",
        ),
        ("rm /opt/venv/lib/python3.11/site-packages/uv-*.dist-info/METADATA", "a Python package is broken"),
    ],
)
def test_broken_package_database_is_named(
    script: str, message: str, new_store: NewStore, recipe_folder: RecipeFolder, cli: Cli
) -> None:
    """What a %post broke is reported with the layer's name."""
    store = new_store(ME, "base", "python")
    recipe_folder.layer("own", "python", script)
    recipe_folder.top("own")
    cli.image(store, recipe_folder.path, "--format", "oci", "-o", recipe_folder.path / "own.tar", "--no-verify")
    assert f"layer own: {message}" in cli.run("--store", store, "sbom", "own", code=8).stderr
