"""A bundle, and an image built from it where there is no network at all."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from workspaces import ME, Cli, Workspace

pytestmark = pytest.mark.covers("ekiben/bundle", "ekiben/packages")


def test_offline_build_gives_the_same_image(cli: Cli, hello: Path, workspace: Workspace) -> None:
    folder = workspace.folder("bundle")
    (folder / "model").mkdir()
    (folder / "model/weights").write_bytes(b"0123")
    argv = ("bundle", "hello", "-o", "hello.bundle", "--include", "model", "--engine", "apptainer", "--json")
    about = json.loads(cli.run("--store", hello, *argv, cwd=folder).stdout)
    assert about["wheels"] >= 2
    assert about["debs"] > 100
    assert about["include"] == 1

    store = workspace.store(ME, "offline")
    alone = ("unshare", "--net")
    refused = cli.run("--store", store, "image", "hello", "--offline", cwd=folder, code=2, prefix=alone)
    assert "pass its sources with --bundle" in refused.stderr
    options = ("--engine", "apptainer", "--format", "sif", "-o", "off.sif", "--json")
    argv = ("image", "hello", "--bundle", "hello.bundle", *options)
    made = json.loads(cli.run("--store", store, *argv, cwd=folder, prefix=alone).stdout)
    assert made["built"] == ["base", "python", "hello"]
    assert made["data"] == ["hello-data/model"]
    assert (folder / "hello-data/model/weights").read_bytes() == b"0123"
    online = cli.image(hello, "hello", "--engine", "apptainer", "--format", "sif", "-o", folder / "on.sif", cwd=folder)
    assert made["layers"] == online["layers"]
    assert made["image"] == online["image"]
    digests = {hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("off.sif", "on.sif")}
    assert len(digests) == 1
    assert not list((store.parent / "cache-root").glob("bundle-*"))
    shutil.rmtree(store)
