"""One file is enough: a layer, a recipe, a stack, a base. Each is added to a project's folder and used by its name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ekiben.builder.bases import load_base
from ekiben.formats.sif import read_sif
from ekiben.spec.definition import BASES_GROUP, SCRATCH, agent_names
from support.sample_recipe import RECIPE, STACK, RunCli

ROOT = Path(__file__).resolve().parents[4]
AGENT = '''
"""A base with one file."""

from ekiben.formats.layer import Entry


def header_problems(header):
    return [] if header.get("from") else ["Bootstrap: lab needs 'From:'"]


def key_inputs(header):
    return {"bootstrap": "lab", "from": header["from"]}


def entries(layer, staging, notes, sources, log):
    notes["executor"] = "lab"
    yield Entry("", "dir", mtime=layer.epoch), None
    yield Entry("word", "file", 0o644, mtime=layer.epoch, size=5), [layer.stage.header["from"].encode()]
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with the builder, and one recipe `small` of one layer on one stack."""
    project = tmp_path / "project"
    shutil.copytree(ROOT / "ekiben", project / "ekiben", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "build.py", project / "build.py")
    (project / "entrypoints").mkdir()
    add_stack(project, "tiny")
    add_recipe(project, "small", layer="low")
    (project / "images/low.def").write_text("Bootstrap: debootstrap\nOSVersion: bookworm\n")
    return project


def add_stack(project: Path, name: str, **changes: Any) -> None:
    folder = project / "images/stacks" / name
    folder.mkdir(parents=True)
    (folder / "stack.yaml").write_text(json.dumps({**STACK, "name": name, "arguments": {}, **changes}))


def add_recipe(project: Path, name: str, **changes: Any) -> None:
    folder = project / "recipes" / name
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(json.dumps({**RECIPE, "name": name, "tasks": {}, "test": "", **changes}))


def planned(run_cli: RunCli, project: Path, *args: str) -> dict[str, str]:
    """Layer → cache key."""
    told = run_cli("--store", project / "store", "plan", *args, "--json", root=project).stdout
    return {row["layer"]: row["cache_key"] for row in json.loads(told)}


def test_a_definition_file_is_enough_for_a_layer(project: Path, run_cli: RunCli) -> None:
    (project / "images/high.def").write_text("Bootstrap: localimage\nFrom: low.sif\n\n%post\n    echo high\n")
    add_recipe(project, "tall", layer="high")
    small, tall = planned(run_cli, project, "small"), planned(run_cli, project, "tall")
    assert [*tall] == ["low", "high", "tall"]
    assert tall["low"] == small["low"]


def test_a_folder_is_enough_for_a_recipe(project: Path, run_cli: RunCli) -> None:
    before = run_cli("list", root=project, env={"EKIBEN_STORE": str(project / "store")}).stdout
    add_recipe(project, "chatbot", layer="low", description="talks")
    after = run_cli("list", root=project, env={"EKIBEN_STORE": str(project / "store")}).stdout
    assert "chatbot" not in before
    assert "talks" in after
    assert [*planned(run_cli, project, "chatbot")] == ["low", "chatbot"]


def test_a_folder_is_enough_for_a_stack(project: Path, run_cli: RunCli) -> None:
    add_stack(project, "later", epoch=1_800_000_000)
    assert planned(run_cli, project, "small", "--stack", "later")["low"] != planned(run_cli, project, "small")["low"]
    stderr = run_cli("plan", "small", "--stack", "latr", root=project, code=3).stderr
    assert "no stack 'latr'. Did you mean 'later'?" in stderr


def image_with_lab(project: Path, run_cli: RunCli, **env: str) -> None:
    (project / "images/low.def").write_text("Bootstrap: lab\nFrom: hello\n")
    out = project / "small.sif"
    argv = ("--store", project / "store", "image", "small", "--format", "sif", "--no-verify", "-o", out)
    run_cli(*argv, root=project, env=env)
    assert len(read_sif(out).layers) == 2
    (project / "images/low.def").write_text("Bootstrap: lab\n")
    assert "low.def:1: Bootstrap: lab needs 'From:'" in run_cli("plan", "small", root=project, env=env, code=3).stderr


def test_a_module_is_enough_for_a_base(project: Path, run_cli: RunCli) -> None:
    (project / "ekiben/builder/bases/lab.py").write_text(AGENT)
    image_with_lab(project, run_cli)


def test_a_distribution_can_offer_a_base(project: Path, tmp_path: Path, run_cli: RunCli) -> None:
    info = tmp_path / "lib/lab_bases-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-bases\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{BASES_GROUP}]\nlab = lab_bases\n")
    (tmp_path / "lib/lab_bases.py").write_text(AGENT)
    image_with_lab(project, run_cli, PYTHONPATH=str(tmp_path / "lib"))


def test_unknown_base_names_the_nearest(project: Path, run_cli: RunCli) -> None:
    (project / "images/low.def").write_text("Bootstrap: dokcer\nFrom: hello\n")
    told = run_cli("plan", "small", root=project, code=3).stderr
    assert "low.def:1: 'Bootstrap: dokcer' is not supported. Did you mean 'docker'?" in told


@pytest.mark.parametrize("name", agent_names())
def test_every_base_fits_the_protocol(name: str) -> None:
    base = load_base(name)
    assert bool(base.header_problems({"bootstrap": name})) == (name != SCRATCH)
    header = {"bootstrap": name, "from": "x", "osversion": "x", "mirrorurl": "m", "digest": "sha256:x"}
    assert base.key_inputs(header)["bootstrap"] == name.removesuffix("-archive" if name == "oci-archive" else "")
    assert "mirrorurl" not in base.key_inputs(header)
    assert callable(base.entries)
