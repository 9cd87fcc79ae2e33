"""Recipes on images of others: NVIDIA's kind, conda's, Python's own, and a SIF."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from stand_ins import REGISTRY, TORCH, conda, ngc, plain, push
from workspaces import Cli, Workspace, need

TUTORIAL = Path(__file__).resolve().parents[2] / "docs/tutorials/base-image.md"
pytestmark = pytest.mark.covers("ekiben/project", "ekiben/builder/bases", "docs/tutorials")

# What /usr/local/bin/train and `python` in the image import: from where, by which interpreter.
_IMPORTS = "import sys, six, rich; print(sys.executable, rich.__file__)"


@pytest.fixture(scope="module")
def layers(hello: Path) -> list[Path]:
    """The squashfs files of the layers `base` and `python`."""
    records = [json.loads(path.read_text()) for path in (hello / "keys").iterdir()]
    digests = {record["name"]: record["digest"] for record in records}
    return [hello / "blobs/sha256" / digests[name].removeprefix("sha256:") for name in ("base", "python")]


def sbom_of(cli: Cli, store: Path, image: Path) -> dict[str, tuple[str, str]]:
    """Return package → version and the layer that brought it."""
    components = json.loads(cli.run("--store", store, "sbom", image).stdout)["components"]
    return {
        item["name"]: (item["version"], properties["ekiben:layer"])
        for item in components
        for properties in [{entry["name"]: entry["value"] for entry in item.get("properties", [])}]
        if "ekiben:layer" in properties
    }


@pytest.mark.guard
def test_on_an_image_of_nvidias_kind(layers: list[Path], tmp_path: Path, workspace: Workspace, cli: Cli) -> None:
    need("skopeo")
    reference = push(ngc(), layers, "ngc", tmp_path)
    store, folder = workspace.folder("store"), workspace.folder("ngc")
    shown = cli.run("--store", store, "init", "mine", "--from", f"docker://{reference}", "--dry-run", cwd=folder)
    assert "mine/images/mine-base.def:\n    Bootstrap: docker\n    From: 127.0.0.1:5000/" in shown.stdout
    assert [*folder.iterdir()] == []
    created = cli.run("--store", store, "init", "mine", "--from", f"docker://{reference}", cwd=folder)
    assert f"note    torch {TORCH} for CUDA 13.0, with code for sm_80 sm_90" in created.stderr
    # rich wants markdown-it-py>=2.2.0, which the constraints of the image hold at 2.2.0; torchmetrics wants torch.
    (folder / "mine/requirements.txt").write_text("rich\ntabulate\ntorch\ntorchmetrics\n")
    locked = cli.run("--store", store, "lock", "mine", cwd=folder).stdout
    assert "markdown-it-py (new) → 2.2.0" in locked and "torchmetrics (new)" in locked
    assert not [line for line in locked.splitlines() if ".lock: torch (" in line or "numpy" in line]
    image = folder / "mine.sif"
    cli.run("--store", store, "build", "mine", "--format", "sif", "-o", image, cwd=folder)
    run = ["apptainer", "-s", "exec", image, "python", "-c", _IMPORTS]
    printed = subprocess.run(run, check=True, capture_output=True, text=True, cwd="/").stdout
    assert printed == "/usr/bin/python /usr/local/lib/python3.11/dist-packages/rich/__init__.py\n"
    assert "results/" in cli.run("--store", store, "run", image, "train", cwd=folder).stdout
    parts = sbom_of(cli, store, image)
    assert parts["torch"] == (TORCH, "mine-base") and parts["numpy"] == ("1.26.4", "mine-base")
    assert parts["libc6"][1] == "mine-base" and parts["rich"][1] == "mine-packages"
    judged = cli.run("--store", store, "doctor", image, "--site", "server-v100s", cwd=folder, code=None)
    assert "is not among what libtorch_cuda.so has code for (sm_80 sm_90)" in judged.stdout
    assert "stand on another image" in judged.stdout and "--stack" not in judged.stdout
    (folder / "mine/requirements.txt").write_text("numpy>=2\n")
    refused = cli.run("--store", store, "lock", "mine", cwd=folder, code=3).stderr
    assert "the layer 'mine-base' has numpy 1.26.4, and you ask for numpy>=2" in refused


@pytest.mark.parametrize("kind", ["oci", "oci-archive", "docker-archive", "oras"])
def test_each_kind_of_image_is_read(
    kind: str, layers: list[Path], tmp_path: Path, workspace: Workspace, cli: Cli
) -> None:
    need("skopeo", "apptainer")
    source = push(plain(), layers, "plain-kinds", tmp_path)
    folder, store = workspace.folder("kind"), workspace.folder("store")
    location = str(folder / ("image" if kind == "oci" else "image.tar"))
    if kind == "oras":
        sif, location = folder / "image.sif", f"oras://{source.replace('plain-kinds', 'plain-sif')}"
        environment = {**os.environ, "APPTAINER_NOHTTPS": "1"}
        for command in (["build", sif, f"docker://{source}"], ["push", sif, location]):
            subprocess.run(["apptainer", "-q", *command], check=True, env=environment)
    else:
        name = "image:v1" if kind == "docker-archive" else "v1"
        copy = ["skopeo", "copy", "--quiet", "--src-tls-verify=false", f"docker://{source}"]
        subprocess.run([*copy, f"{kind}:{location}:{name}"], check=True)
    created = cli.run("--store", store, "init", "mine", "--from", location, cwd=folder)
    assert "note    Python 3.11.2 in /usr/local/bin/python3, glibc 2.36, 1 package\n" in created.stderr
    assert f"Bootstrap: {kind}\n" in (folder / "mine/images/mine-base.def").read_text()
    include = [] if kind == "oras" else ["--include", location]
    locked = cli.run("--store", store, "lock", "mine", *include, cwd=folder).stdout
    assert "tabulate (new)" in locked


@pytest.mark.parametrize(("kind", "prefix"), [("conda", "/opt/conda"), ("plain", "/usr/local")], ids=["conda", "plain"])
def test_on_a_python_elsewhere(
    kind: str, prefix: str, layers: list[Path], tmp_path: Path, workspace: Workspace, cli: Cli
) -> None:
    """The packages go to that Python, also one that has no wheel."""
    need("skopeo")
    reference = push({"conda": conda, "plain": plain}[kind](), layers, kind, tmp_path)
    store, folder = workspace.folder("store"), workspace.folder(kind)
    created = cli.run("--store", store, "init", "mine", "--from", f"docker://{reference}", cwd=folder)
    assert f"note    Python 3.11.2 in {prefix}/bin/python3, glibc 2.36" in created.stderr
    (folder / "mine/requirements.txt").write_text("tabulate\nsqlitedict\n")
    cli.run("--store", store, "lock", "mine", cwd=folder)
    image = folder / "mine.sif"
    cli.run("--store", store, "build", "mine", "--format", "sif", "-o", image, cwd=folder)
    script = 'head -n 1 "$(command -v tabulate)"; python -c "import sqlitedict; print(sqlitedict.__file__)"'
    run = ["apptainer", "-s", "exec", image, "sh", "-c", script]
    printed = subprocess.run(run, check=True, capture_output=True, text=True, cwd="/").stdout
    assert printed == f"#!{prefix}/bin/python3\n{prefix}/lib/python3.11/site-packages/sqlitedict.py\n"


def test_a_recipe_of_ekibens_on_a_base(layers: list[Path], tmp_path: Path, workspace: Workspace, cli: Cli) -> None:
    need("skopeo")
    reference = push(plain(), layers, "plain-hello", tmp_path)
    store, folder = workspace.folder("store"), workspace.folder("hello")
    cli.run("--store", store, "init", "mine", "--from", f"docker://{reference}", "--recipe", "hello", cwd=folder)
    cli.run("--store", store, "lock", "mine", cwd=folder)
    image = folder / "mine.sif"
    cli.run("--store", store, "build", "mine", "--format", "sif", "-o", image, cwd=folder)
    assert "mine, run by apptainer" in cli.run("--store", store, "run", image, "hello", cwd=folder).stdout


def test_on_a_sif_of_apptainer(layers: list[Path], tmp_path: Path, workspace: Workspace, cli: Cli) -> None:
    need("skopeo", "apptainer")
    push(conda(), layers, "conda-sif", tmp_path)
    store, folder = workspace.folder("store"), workspace.folder("sif")
    (folder / "base.def").write_text(f"Bootstrap: docker\nFrom: {REGISTRY}/ekiben-test/conda-sif:v1\n")
    build = ["apptainer", "-q", "build", folder / "base.sif", folder / "base.def"]
    subprocess.run(
        build, check=True, env={"APPTAINER_NOHTTPS": "1", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin"}
    )
    created = cli.run("--store", store, "init", "mine", "--from", "base.sif", cwd=folder)
    assert "Python 3.11.2 in /opt/conda/bin/python" in created.stderr
    include = ["--include", str(folder / "base.sif")]
    assert f"lock mine {' '.join(include)}" in created.stderr
    cli.run("--store", store, "lock", "mine", *include, cwd=folder)
    image = folder / "mine.sif"
    cli.run("--store", store, "build", "mine", *include, "--format", "sif", "-o", image, cwd=folder)
    assert "results/" in cli.run("--store", store, "run", image, "train", cwd=folder).stdout


def test_a_missing_image_leaves_nothing(workspace: Workspace, cli: Cli) -> None:
    store, folder = workspace.folder("store"), workspace.folder("none")
    source = f"docker://{REGISTRY}/ekiben-test/none:v1"
    refused = cli.run("--store", store, "init", "mine", "--from", source, cwd=folder, code=7).stderr
    assert "ekiben-test/none:v1" in refused and "Traceback" not in refused
    assert [*folder.iterdir()] == []


def test_commands_of_the_tutorial_run(layers: list[Path], tmp_path: Path, workspace: Workspace, cli: Cli) -> None:
    need("skopeo")
    reference = push(ngc(), layers, "ngc-tutorial", tmp_path)
    folder, shown = workspace.folder("tutorial"), list[tuple[str, list[str]]]()
    for line in re.findall(r"^ {8}(.+)$", TUTORIAL.read_text(encoding="utf-8"), re.MULTILINE):
        if line.startswith(("ekiben ", "printf ", "echo ")):
            shown.append((line.replace("nvcr.io/nvidia/pytorch:25.10-py3", reference), []))
        else:
            shown[-1][1].append(line.strip())
    assert [line.split()[1] for line, _ in shown if line.startswith("ekiben ")] == [
        "init",
        "lock",
        "build",
        "run",
        "doctor",
        "lock",
    ]
    for line, expected in shown:
        if line.startswith("ekiben "):
            fails = line.split()[1] == "doctor" or expected[:1] == [
                "the layer 'mine-base' has numpy 1.26.4, and you ask for numpy>=2"
            ]
            done = cli.run(*line.split()[1:], cwd=folder, env={"EKIBEN_STORE": str(folder / "store")}, code=None)
            assert (done.returncode != 0) == fails, done.stderr
            assert set(expected) <= {text.strip() for text in (done.stdout + done.stderr).splitlines()}, line
        else:
            subprocess.run(["sh", "-c", line], check=True, cwd=folder)
