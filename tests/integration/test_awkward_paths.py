"""Paths with characters that have a meaning for runtimes, overlays or CSV: stores, working folders, outputs, shared
folders.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from workspaces import ENGINES, ME, USER, Cli, Engine, Workspace, give, share_layers

pytestmark = pytest.mark.covers("ekiben/store", "ekiben/executors", "ekiben/run", "ekiben/publish")

AWKWARD = "a:b,c d'e\"f\\g"
TASK = """\
import sys, os
from pathlib import Path
data, out = (Path(word) for word in sys.argv[1:])
out.mkdir()
(out / "result").write_text(f"{data.read_text()} {os.getcwd()}")
print("done")
"""


@pytest.fixture
def awkward(workspace: Workspace, hello: Path) -> Iterator[Path]:
    """A folder with such a name, which both users write to."""
    path = workspace.folder("awkward") / AWKWARD
    path.mkdir()
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def write_recipe(awkward: Path) -> Path:
    recipe = awkward / "mine"
    for folder in ("images", "entrypoints"):
        (recipe / folder).mkdir(parents=True)
    (recipe / "images/two.def").write_text(
        "Bootstrap: localimage\nFrom: python.sif\n\n%post\n    echo text >/text\n    rm /etc/issue\n    mkdir"
        " /opt/here\n"
    )
    (recipe / "images/three.def").write_text(
        "Bootstrap: localimage\nFrom: two.sif\n\n%post\n    cat /text >/opt/here/again\n    useradd -r other\n"
    )
    (recipe / "entrypoints/copy.py").write_text(TASK)
    (recipe / "recipe.yaml").write_text(
        json.dumps(
            {
                "name": "mine",
                "description": "a test",
                "stack": "cu130",
                "layer": "three",
                "test": "test -e /opt/here/again && test ! -e /etc/issue",
                "tasks": {"copy": {"entrypoint": "copy.py", "help": "copy a text", "launch": "single"}},
            }
        )
    )
    return recipe


def new_store(awkward: Path, hello: Path, user: str) -> Path:
    store = awkward / "st:o,re"
    share_layers(hello, store, ["base", "python"], user)
    return store


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_build_with_each_engine(engine: Engine, awkward: Path, hello: Path, workspace: Workspace) -> None:
    cli, store, recipe = Cli(workspace, engine.user), new_store(awkward, hello, engine.user), write_recipe(awkward)
    image = cli.image(
        store, recipe, "--engine", engine.name, "--format", "sif", "-o", awkward / "o:u,t.sif", cwd=awkward
    )
    assert {"two", "three"} <= set(image["built"])
    done = cli.run("--store", store, "verify", recipe, "--sif", awkward / "o:u,t.sif", cwd=awkward)
    assert "passed under apptainer" in done.stdout
    assert not list((store / "staging").iterdir())
    assert not list(Path("/tmp").glob("ekiben-buildah-*"))


@pytest.mark.parametrize("user", [ME, USER])
@pytest.mark.parametrize("kind", ["sif", "copy-local", "published", "live", "docker", "podman"])
def test_run_a_task(kind: str, user: str, awkward: Path, hello: Path, workspace: Workspace) -> None:
    if (kind, user) == ("docker", USER):
        return  # the daemon answers root here
    cli, store, recipe = Cli(workspace, user), new_store(awkward, hello, user), write_recipe(awkward)
    cwd, local = awkward / "here: x", awkward / "lo:c,al"
    for folder in (cwd, local, awkward / "da:ta"):
        folder.mkdir()
        give(folder, user)
    (awkward / "da:ta/x").write_text("text")
    image_format = kind if kind in ("docker", "podman") else "sif"
    cli.image(store, recipe, "--format", image_format, "--no-verify", cwd=cwd)
    options = {
        "copy-local": ["--copy-local"],
        "live": ["--live"],
        "docker": ["--runtime", "docker"],
        "podman": ["--runtime", "podman"],
    }.get(kind, [])
    if kind == "published":
        shared = awkward / "sh:a,red"
        cli.run("--store", store, "publish", recipe, "--to", shared, "--no-verify", cwd=cwd)
        options = ["--sif", str(shared / "images/mine/current")]
    env = {"EKIBEN_CACHE": str(awkward / "ca:che"), "TMPDIR": str(local)}
    done = cli.run(
        "--store", store, "run", recipe, "--cpu", *options, "copy", "--", "../da:ta/x", "../out:1", cwd=cwd, env=env
    )
    assert "done" in done.stdout
    assert (awkward / "out:1/result").read_text() == f"text {cwd}"
    assert (awkward / "out:1/result").stat().st_uid == (os.geteuid() if user == ME else cwd.stat().st_uid)


@pytest.mark.parametrize("user", [ME, USER])
def test_make_a_base(user: str, awkward: Path, workspace: Workspace) -> None:
    """apt takes no quotes in a path, and root's mmdebstrap runs it in the store."""
    recipe = write_recipe(awkward)
    content = json.loads((recipe / "recipe.yaml").read_text())
    (recipe / "recipe.yaml").write_text(json.dumps({**content, "layer": "base", "test": "", "tasks": {}}))
    store = awkward / "s:t/store"
    store.parent.mkdir()
    give(store.parent, user)
    image = Cli(workspace, user).image(
        store, recipe, "--format", "sif", "--no-verify", "-o", awkward / "o:u,t.sif", cwd=awkward
    )
    assert "base" in image["built"]
    assert not list(Path("/tmp").glob("ekiben-mmdebstrap-*"))
