"""Debian packages that a mirror no longer has as locked, with a small archive served here."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from workspaces import ME, ROOT, Cli, NewStore, RecipeFolder, Workspace

pytestmark = pytest.mark.covers("ekiben/packages", "ekiben/project", "ekiben/builder/bases")

STACK = ROOT / "images/stacks/cu130"
LOCKED = "\n[own]\nekiben-tool=1.0\n"


@dataclass(frozen=True)
class Archive:
    """A Debian archive of one package; ``mirror`` is its line for sources.list."""

    folder: Path
    port: int

    @property
    def mirror(self) -> str:
        return f"mirror=deb [trusted=yes] http://127.0.0.1:{self.port}/ ./"

    def offer(self, *versions: str) -> None:
        stanzas = []
        for version in versions:
            tree = self.folder / f"tree-{version}"
            control = (
                f"Package: ekiben-tool\nVersion: {version}\nArchitecture: all\nMaintainer: nobody"
                " <nobody@localhost>\nDescription: x\n"
            )
            (tree / "DEBIAN").mkdir(parents=True, exist_ok=True)
            (tree / "DEBIAN/control").write_text(control)
            (tree / "opt").mkdir(exist_ok=True)
            (tree / "opt/tool-version").write_text(version)
            package = self.folder / f"ekiben-tool_{version}_all.deb"
            subprocess.run(
                ["dpkg-deb", "--root-owner-group", "--build", tree, package], check=True, stdout=subprocess.DEVNULL
            )
            digest = hashlib.sha256(package.read_bytes()).hexdigest()
            stanzas.append(f"{control}Filename: ./{package.name}\nSize: {package.stat().st_size}\nSHA256: {digest}\n")
        (self.folder / "Packages").write_text("\n".join(stanzas))


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def archive(workspace: Workspace) -> Iterator[Archive]:
    folder = workspace.folder("archive")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Archive(folder, server.server_port)
        server.shutdown()


@pytest.fixture
def recipe(recipe_folder: RecipeFolder) -> Path:
    """One layer on base that installs the package, with a stack of its own in which 1.0 is locked."""
    stack = recipe_folder.path / "images/stacks/drifting"
    shutil.copytree(STACK, stack, ignore=shutil.ignore_patterns("SHA256SUMS"))
    (stack / "stack.yaml").write_text(
        yaml.dump({**yaml.safe_load((STACK / "stack.yaml").read_text()), "name": "drifting"})
    )
    (stack / "apt.lock").write_text((STACK / "apt.lock").read_text() + LOCKED)
    recipe_folder.layer("own", "base", "apt-get update\napt-get install -y ekiben-tool\nrm -rf /var/lib/apt/lists/*")
    recipe_folder.top("own", "cat /opt/tool-version")
    about = json.loads((recipe_folder.path / "recipe.yaml").read_text())
    (recipe_folder.path / "recipe.yaml").write_text(json.dumps({**about, "name": "drifter", "stack": "drifting"}))
    return recipe_folder.path


def test_lock_mismatch_is_reported_recorded_and_refused_when_locked(
    cli: Cli, new_store: NewStore, archive: Archive, recipe: Path
) -> None:
    archive.offer("2.0")
    store = new_store(ME, "base")
    argv = ("--engine", "apptainer", "--format", "sif", "--build-arg", archive.mirror)
    refused = cli.run("--store", store, "image", recipe, *argv, "--locked", cwd=recipe, code=9)
    assert "ekiben-tool 1.0 → 2.0" in refused.stderr
    assert not [key for key in (store / "keys").iterdir() if json.loads(key.read_text())["name"] == "own"]

    stderr = cli.run("--store", store, "image", recipe, *argv, cwd=recipe).stderr
    assert "drift: ekiben-tool 1.0 → 2.0" in stderr
    about = json.loads(cli.run("--store", store, "inspect", "drifter", "--json").stdout)
    assert [layer["drift"] for layer in about["layers"] if layer["name"] == "own"] == [["ekiben-tool 1.0 → 2.0"]]
    assert "drift" in cli.run("--store", store, "inspect", "drifter").stdout
    verified = cli.run("--store", store, "verify", recipe, cwd=recipe)
    assert "drift   own: ekiben-tool 1.0 → 2.0" in verified.stdout
    again = cli.run("--store", store, "image", recipe, *argv, "--locked", cwd=recipe, code=9)
    assert "ekiben-tool 1.0 → 2.0" in again.stderr


def test_locked_version_of_the_mirror_is_installed(
    cli: Cli, new_store: NewStore, archive: Archive, recipe: Path
) -> None:
    archive.offer("1.0", "2.0")
    argv = ("--engine", "apptainer", "--format", "sif", "--build-arg", archive.mirror, "--locked")
    made = cli.run("--store", new_store(ME, "base"), "image", recipe, *argv, cwd=recipe)
    assert "drift:" not in made.stderr
    shown = subprocess.check_output(
        ["apptainer", "--silent", "exec", recipe / "drifter.sif", "cat", "/opt/tool-version"]
    )
    assert shown == b"1.0"
