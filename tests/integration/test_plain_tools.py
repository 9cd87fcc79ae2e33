"""A recipe of several layers, built without Ekiben: its rendered files by Apptainer and Docker, its OCI archive read by
Apptainer.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from test_layer_content import Seen, is_known, read_folder, read_image
from workspaces import USER, Cli, Workspace, as_user, give

pytestmark = pytest.mark.covers("ekiben/resolve", "ekiben/artifacts", "ekiben/spec")

REGISTRY = "127.0.0.1:5000"
# %files of a layer comes after the %post of the one below, and goes into its folders.
LAYERS = {
    "lower": (
        r"""
%files
    "files/a name" "/opt/a copy"
    files/data.txt /opt/data.txt
    files/tree /opt/tree

%post
    umask 022
    printf 'lower %s\n' "$(cat /opt/data.txt)" >/opt/data.txt
    mkdir -p /opt/into /opt/empty '/opt/sp ace' /opt/gone/deep; ln -s into /opt/link
    printf 'old\n' >/opt/gone/deep/file; printf 'x' >/opt/tree/below
    mkfifo -m 600 /opt/pipe; ln /opt/pipe /opt/pipe-too; printf 'x' >/opt/first; ln /opt/first /opt/second
    rm -r /usr/share/doc; rm /etc/issue
    useradd --no-create-home --uid 444 porter; printf 'x' >/opt/owned; chown porter:12 /opt/owned; chmod 4750 /opt/owned
"""
    ),
    "upper": (
        r"""
%environment
    export GREETING="it's"

%files
    files/data.txt /opt/data.txt
    files/data.txt /opt/into
    files/data.txt /opt/empty
    files/data.txt /opt/link
    "files/it's" "/opt/sp ace"
    "files/a name" /opt/new/
    files/tree /opt/tree
    files/tree/*.md /srv

%post
    umask 022
    printf '%s %s\n' "$GREETING" "$(cat /opt/data.txt)" >>/opt/said
    rm -r /opt/gone; mkdir /opt/gone; printf 'new\n' >/opt/gone/new
    rm "/opt/a copy"; ln -s 'sp ace' "/opt/a copy"
"""
    ),
}
FILES = ("data.txt", "a name", "it's", "tree/one.md", "tree/two words.md", "tree/deep/x.txt")


@dataclass(frozen=True)
class Stacked:
    path: Path
    store: Path
    layers: list[dict[str, Any]]
    archive: Path


@pytest.fixture(scope="module")
def stacked(workspace: Workspace, cli: Cli, hello: Path) -> Iterator[Stacked]:
    host, port = REGISTRY.split(":")
    try:
        socket.create_connection((host, int(port)), 5).close()
    except OSError:
        pytest.skip(f"no registry answers at {REGISTRY} (tests/services.sh start)")
    folder = workspace.folder("plain")
    recipe_file = {"name": "plain", "description": "a test", "stack": "cu130", "layer": "base", "tasks": {}}
    recipe = folder / "plain"
    (recipe / "images").mkdir(parents=True)
    (recipe / "recipe.yaml").write_text(json.dumps(recipe_file))
    pushed = json.loads(cli.run("--store", hello, "push", recipe, f"{REGISTRY}/ekiben-test/plain:1", "--json").stdout)
    below = "ground"
    (recipe / "images/ground.def").write_text(f"Bootstrap: docker\nFrom: {pushed['ref']}\n")
    for name, text in LAYERS.items():
        (recipe / f"images/{name}.def").write_text(f"Bootstrap: localimage\nFrom: {below}.sif\n{text}")
        below = name
    for path in FILES:
        (recipe / "files" / path).parent.mkdir(parents=True, exist_ok=True)
        (recipe / "files" / path).write_text(f"{path}\n")
        (recipe / "files" / path).chmod(0o644)
    (recipe / "recipe.yaml").write_text(json.dumps({**recipe_file, "layer": below}))
    store = folder / "store"
    built = cli.image(
        store, recipe, "--engine", "apptainer", "--no-verify", "--format", "oci", "-o", folder / "plain.tar"
    )
    yield Stacked(recipe, store, built["layers"], folder / "plain.tar")


@pytest.mark.guard
def test_apptainer_builds_the_oci_archive(stacked: Stacked, workspace: Workspace) -> None:
    """As root, for an ordinary user's Apptainer gives all files of an archive to him."""
    tree = workspace.folder("sandbox") / "tree"
    argv = ["apptainer", "build", "--sandbox", tree, f"oci-archive:{stacked.archive}"]
    subprocess.run(argv, capture_output=True, check=True)
    theirs = dict(read_folder(tree, {}, {}))
    assert differing(read_image(stacked.store, stacked.layers), theirs) == {}


def test_apptainer_builds_the_rendered_definition(stacked: Stacked, workspace: Workspace, cli: Cli) -> None:
    """As an ordinary user, whose Apptainer gives all files of a registry's image to root: so owners are not
    compared.
    """
    folder = workspace.folder("rendered")
    file = Path(cli.run("render", stacked.path, "--to", "def", "-o", folder / "def").stdout.strip())
    give(file.parent, USER)
    tree = workspace.folder("sandbox", USER) / "tree"
    argv = ["apptainer", "build", "--fakeroot", "--no-https", "--sandbox", tree, file.name]
    done = subprocess.run(
        argv, cwd=file.parent, env=Cli(workspace, USER).settings(), capture_output=True, text=True, **as_user(USER)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    theirs, ours = dict(read_folder(tree)), read_image(stacked.store, stacked.layers)
    assert differing(without_owners(ours), without_owners(theirs)) == {}
    assert theirs["opt/owned"][:4] == ours["opt/owned"][:4] == ("file", 0o4750, 444, 12)
    for path in ("opt/into/data.txt", "opt/empty/data.txt", "opt/sp ace/it's", "opt/tree/tree/deep/x.txt", "opt/said"):
        assert path in theirs, "nothing was compared"


def without_owners(seen: Seen) -> Seen:
    return {path: (kind, mode, shown) for path, (kind, mode, _, _, shown, _) in seen.items()}


def differing(ours: Seen, theirs: Seen) -> dict[str, tuple[object, object]]:
    assert len(ours) > 2000
    return {
        path: (ours.get(path), theirs.get(path))
        for path in ours.keys() | theirs.keys()
        if not is_known(path) and ours.get(path) != theirs.get(path)
    }


def test_docker_builds_the_rendered_dockerfile(stacked: Stacked, workspace: Workspace, cli: Cli) -> None:
    folder = workspace.folder("rendered") / "docker"
    cli.run("render", stacked.path, "--to", "dockerfile", "-o", folder)
    name = "ekiben-test/plain-tools"
    build = ["/usr/bin/docker", "build", "--quiet", "--network", "none", "-t", name, str(folder)]
    done = subprocess.run(
        build, env={**os.environ, "DOCKER_BUILDKIT": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    archive = folder / "root.tar"
    try:
        container = subprocess.check_output(["/usr/bin/docker", "create", name], text=True).strip()
        subprocess.run(["/usr/bin/docker", "export", "-o", archive, container], check=True)
        subprocess.run(["/usr/bin/docker", "rm", container], check=True, capture_output=True)
    finally:
        subprocess.run(["/usr/bin/docker", "rmi", "--force", name], check=False, capture_output=True)
    with tarfile.open(archive) as tar:
        theirs = {info.name: info for info in tar}
    ours = {path: entry for path, entry in read_image(stacked.store, stacked.layers).items() if path.startswith("opt/")}
    assert {path for path in theirs if path.startswith("opt/")} == set(ours)
    assert {path: theirs[path].mode & 0o7777 for path in ours if not theirs[path].issym()} == {
        path: entry[1] for path, entry in ours.items() if not theirs[path].issym()
    }
