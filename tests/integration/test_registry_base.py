"""`Bootstrap: docker`: a base from a real registry, by digest."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from ekiben.core.environment import platform
from ekiben.formats.layer import Entry
from ekiben.formats.squashfs.reader import SquashfsReader
from workspaces import Cli, RecipeFolder, Workspace, need

pytestmark = pytest.mark.covers("ekiben/registry", "ekiben/builder/bases")

REGISTRY = "127.0.0.1:5000"


def tar_of(**files: str | None) -> bytes:
    """A layer: a name with a value is a file, with None a folder; ``_`` in a name stands for a slash."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name.replace("_", "/").replace("WH", ".wh."))
            if text is None:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            else:
                info.size = len(text)
            tar.addfile(info, io.BytesIO((text or "").encode()))
    return buffer.getvalue()


def blob(folder: Path, data: bytes) -> dict[str, object]:
    digest = hashlib.sha256(data).hexdigest()
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    (blobs / digest).write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image of three layers in the registry; its digest."""
    need("skopeo", "curl")
    subprocess.run(["curl", "-sf", f"http://{REGISTRY}/v2/"], check=True)
    folder = tmp_path_factory.mktemp("image")
    layers = [
        tar_of(etc=None, etc_keep="1", etc_gone="1", opt=None, opt_old="1"),
        tar_of(etc_WHgone="", etc_keep="22"),
        tar_of(opt=None, **{"opt_WH.wh..opq": ""}, opt_new="3"),
    ]
    media = "application/vnd.oci.image"
    system, architecture = platform().split("/")
    config = {
        "os": system,
        "architecture": architecture,
        "config": {"Env": ["FROM_BASE=yes"]},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + "0" * 64] * 3},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{media}.manifest.v1+json",
        "config": {"mediaType": f"{media}.config.v1+json", **blob(folder, json.dumps(config).encode())},
        "layers": [{"mediaType": f"{media}.layer.v1.tar+gzip", **blob(folder, layer)} for layer in layers],
    }
    described = blob(folder, json.dumps(manifest).encode())
    (folder / "index.json").write_text(
        json.dumps(
            {
                "schemaVersion": 2,
                "manifests": [
                    {
                        "mediaType": f"{media}.manifest.v1+json",
                        **described,
                        "annotations": {"org.opencontainers.image.ref.name": "v1"},
                    }
                ],
            }
        )
    )
    (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    subprocess.run(
        [
            "skopeo",
            "copy",
            "--quiet",
            "--preserve-digests",
            "--dest-tls-verify=false",
            f"oci:{folder}:v1",
            f"docker://{REGISTRY}/ekiben-test/tiny:v1",
        ],
        check=True,
    )
    return str(described["digest"])


def ground(recipe: RecipeFolder, source: str) -> None:
    (recipe.path / "images" / "ground.def").write_text(
        f"Bootstrap: docker\nFrom: {source}\n\n%files\n    a.txt /opt/mine\n"
    )
    (recipe.path / "a.txt").write_text("mine\n")
    recipe.top("ground")


@pytest.mark.guard
def test_registry_image_as_base(pushed: str, recipe_folder: RecipeFolder, workspace: Workspace, cli: Cli) -> None:
    ground(recipe_folder, f"{REGISTRY}/ekiben-test/tiny@{pushed}")
    store = workspace.folder("store")
    made = cli.image(store, recipe_folder.path, "--format", "sif", "--no-verify", cwd=recipe_folder.path)
    assert [layer["name"] for layer in made["layers"]] == ["ground-root", "ground", "own"]
    with (store / "blobs/sha256" / made["layers"][0]["digest"][7:]).open("rb") as stream:
        reader = SquashfsReader(stream)
        found = {entry.path: entry for entry in reader.entries()}
        assert reader.read_file("etc/keep") == b"22"
        assert reader.read_file("opt/new") == b"3"
        assert b"export FROM_BASE=yes" in reader.read_file(".singularity.d/env/10-docker2singularity.sh")
    assert "etc/gone" not in found and "opt/old" not in found
    assert isinstance(found["etc/resolv.conf"], Entry)  # for runtimes to mount over


def test_tag_is_pinned_by_the_lock(pushed: str, recipe_folder: RecipeFolder, workspace: Workspace, cli: Cli) -> None:
    folder, tiny = recipe_folder.path, f"{REGISTRY}/ekiben-test/tiny"
    ground(recipe_folder, f"tiny:v1\nRegistry: {REGISTRY}\nNamespace: ekiben-test")
    store = workspace.folder("store")
    refused = cli.run("--store", store, "image", folder, cwd=folder, code=3)
    assert "is not locked" in refused.stderr and f"lock {folder}" in refused.stderr
    assert pushed in cli.run("lock", folder, cwd=folder).stdout
    assert json.loads((folder / "bases.lock").read_text()) == {f"{tiny}:v1": {platform(): pushed}}
    assert "name the same images" in cli.run("lock", folder, "--outdated", cwd=folder).stdout
    made = cli.image(store, folder, "--format", "sif", "--no-verify", cwd=folder)
    shown = json.loads(cli.run("--store", store, "sbom", folder, cwd=folder).stdout)["metadata"]["component"]
    named = {item["name"]: item["value"] for item in shown["properties"] if item["name"].startswith("ekiben:base:")}
    assert named == {
        "ekiben:base:agent": "docker",
        "ekiben:base:digest": pushed,
        "ekiben:base:reference": f"{tiny}:v1",
    }
    doctor = cli.run("--store", store, "doctor", folder, cwd=folder, code=None).stdout
    assert f"it stands on docker {tiny}:v1 {pushed}" in " ".join(doctor.split())
    ground(recipe_folder, f"{tiny}:v1@{pushed}")
    again = cli.image(store, folder, "--format", "sif", "--no-verify", cwd=folder)
    assert made["layers"][:2] == again["layers"][:2]
    ground(recipe_folder, f"{tiny}:v1")
    other = f"sha256:{'0' * 64}"
    (folder / "bases.lock").write_text(json.dumps({f"{tiny}:v1": {platform(): other}}))
    assert f"{other} → {pushed}" in cli.run("lock", folder, "--outdated", cwd=folder).stdout
    ground(recipe_folder, f"{tiny}:v2")
    assert "v2: not there" in cli.run("lock", folder, cwd=folder, code=7).stderr


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (f"{REGISTRY}/ekiben-test/tiny@sha256:{'0' * 64}", "404"),
        (f"{REGISTRY}/ekiben-test/none@sha256:{'0' * 64}", "404"),
        ("127.0.0.1:9/ekiben-test/tiny@sha256:" + "0" * 64, "does not answer"),
    ],
)
def test_missing_registry_image_is_an_error(
    source: str, message: str, recipe_folder: RecipeFolder, workspace: Workspace, cli: Cli
) -> None:
    ground(recipe_folder, source)
    done = cli.run("--store", workspace.folder("store"), "image", recipe_folder.path, cwd=recipe_folder.path, code=7)
    assert message in done.stderr and source.partition("@")[0] in done.stderr
    assert "Traceback" not in done.stderr
