"""A SIF as a base: its environment, labels and scripts hold in images on it, as with Apptainer."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from ekiben.artifacts.export import export
from ekiben.core.environment import platform
from ekiben.core.errors import DefinitionError, FetchError, UsageError
from ekiben.core.progress import Progress
from ekiben.inspect.image_info import image_of_sif
from ekiben.registry.client import Registry
from ekiben.registry.reference import Reference
from ekiben.resolve.render import deffile, dockerfile
from support.image_files import SmallImage, write_folder
from test_definition_corpus import HEADER, Lab, lab
from test_environment_scripts import docker, run, sif_of, variables
from test_registry_base import REGISTRY
from workspaces import Cli, need

__all__ = ["docker", "lab"]
pytestmark = pytest.mark.covers("ekiben/builder/bases", "ekiben/builder", "ekiben/resolve", "ekiben/formats")

BASES = {
    "all": """
%post
    echo 'export POSTED=1' >>$APPTAINER_ENVIRONMENT
    echo "LP of post" >>$APPTAINER_LABELS
%environment
    export A=base
    export B=$A-x
    export A=again PATH=/opt/base/bin:$PATH
    export HERE=$PWD QUOTED='a "b" $c'
    [ ! -d /etc ] || PRESENT=yes; export PRESENT
%labels
    L base
    M two words
%runscript
    #!/bin/bash
    echo "run of the base: $A" "$@" $#; env -0 | sort -z | grep -zc ^A=
%startscript
    echo start of the base
%test
    echo "test of the base: $A"
%help
    Help of the base.
""",
    "nothing": "",
    "environment": "\n%environment\n    export A=base\n",
    "apps": """
%environment
    export A=base
%apprun foo
    echo app $A $SCIF_APPNAME
%appenv foo
    A=app; export A
""",
}
CHILDREN = {
    "plain": "",
    "post": "\n%post\n    env -0 >/opt/posted\n    echo 'export LATE=1' >>$SINGULARITY_ENVIRONMENT\n",
    "environment": "\n%environment\n    export A=child:$A\n    export PATH=/child:$PATH\n%labels\n    N new\n",
    "scripts": '\n%runscript\n    echo own "$@"\n%startscript\n    echo own start\n%help\n    own help\n',
}
ON_IT = "Bootstrap: localimage\nFrom: ./theirs.sif\n"


def sif_of_apptainer(lab: Lab, text: str) -> None:
    """theirs.sif in the recipe's folder, which Apptainer builds of this definition."""
    lab.recipe.write("theirs.def", text)
    out = lab.out / "theirs.sif"
    lab.apptainer("build", "--force", "--fakeroot", out, "theirs.def")
    (lab.recipe.path / "theirs.sif").write_bytes(out.read_bytes())


def of_image(lab: Lab, caller: Mapping[str, str], *args: str | Path) -> dict[str, str]:
    """The variables, but for those of apps: Apptainer keeps those of the last definition file alone."""
    return {name: value for name, value in run(lab, caller, *args).items() if not name.endswith("_foo")}


def labels(lab: Lab, image: Path) -> dict[str, str]:
    data = json.loads(lab.apptainer("inspect", "--json", "--labels", image))["data"]["attributes"]["labels"]
    ours = ("org.", "com.")
    return {name: value for name, value in data.items() if not name.startswith(ours)}


def inspected(lab: Lab, image: Path, *options: str) -> str:
    return lab.apptainer("inspect", *options, image)


@pytest.mark.parametrize("child", CHILDREN)
@pytest.mark.parametrize("base", BASES)
def test_scripts_of_a_sif_hold_on_it(base: str, child: str, lab: Lab) -> None:
    sif_of_apptainer(lab, HEADER + BASES[base])
    text = ON_IT + CHILDREN[child]
    _, image = lab.build(text)
    ours, theirs = sif_of(lab, image), lab.sandbox(text)
    for caller in ({}, {"A": "of the caller", "APPTAINERENV_A": "forced"}):
        for command in (("exec", "IMAGE", "env", "-0"), ("exec", "--app", "foo", "IMAGE", "env", "-0")):
            if "--app" in command and base != "apps":
                continue
            at = command.index("IMAGE")
            shown = [of_image(lab, caller, *command[:at], path, *command[at + 1 :]) for path in (ours, theirs)]
            assert shown[0] == shown[1] != {}, command
    assert labels(lab, ours) == labels(lab, theirs)
    commands = [("run", "IMAGE", "x y", "z")] if "%runscript" in BASES[base] + CHILDREN[child] else []
    commands += [("run", "--app", "foo", "IMAGE")] if base == "apps" else []
    for argv in commands:
        assert lab.try_apptainer(argv, ours) == lab.try_apptainer(argv, theirs)
    tests = [lab.try_apptainer(("test", "IMAGE"), path) for path in (ours, theirs)]
    if base == "all":
        line = next(line for line in tests[1][1].splitlines() if line.startswith("test of the base: "))
        assert line in tests[0][1].splitlines()
        assert "Help of the base." in inspected(lab, ours, "--helpfile")
        started = [lab.try_apptainer(("exec", "IMAGE", "/.singularity.d/startscript"), path) for path in (ours, theirs)]
        assert started[0] == started[1]
    if child == "post":
        posted = [lab.try_apptainer(("exec", "IMAGE", "cat", "/opt/posted"), path)[1] for path in (ours, theirs)]
        seen = [variables(text.encode()) for text in posted]
        names = {"A", "B", "PATH", "HERE", "QUOTED", "PRESENT", "POSTED"}
        assert [{name: one.get(name) for name in names} for one in seen[:1]] == [
            {name: one.get(name) for name in names} for one in seen[1:]
        ]
    assert image_of_sif(ours, lab.store, Progress(quiet=True)).image.config == image.config


def test_an_image_of_ours_is_a_base(lab: Lab) -> None:
    """On a SIF, on a SIF: each one's environment, in its order; the program of the lowest."""
    sif_of_apptainer(lab, HEADER + BASES["all"])
    _, image = lab.build(f"{ON_IT}\n%environment\n    export A=second:$A SECOND=2\n%labels\n    S second\n")
    first = sif_of(lab, image)
    (lab.recipe.path / "theirs.sif").write_bytes(first.read_bytes())
    _, image = lab.build(f"{ON_IT}\n%environment\n    export A=third:$A\n")
    sif = sif_of(lab, image)
    shown = run(lab, {}, "exec", sif, "env", "-0")
    assert (shown["A"], shown["B"], shown["SECOND"]) == ("third:second:again", "base-x", "2")
    assert lab.try_apptainer(("run", "IMAGE", "x"), sif) == (0, "run of the base: third:second:again x 1\n1\n")
    assert "test of the base" in lab.try_apptainer(("test", "IMAGE"), sif)[1]
    assert labels(lab, sif) == {"L": "base", "LP": "of post", "M": "two words", "S": "second"}
    assert "Help of the base." in inspected(lab, sif, "--helpfile")
    assert image.labels["org.opencontainers.image.title"] == lab.recipe.path.name


def test_sif_in_a_registry_is_a_base(lab: Lab, cli: Cli) -> None:
    """Apptainer pushes it; its tag is locked, and the image is that on the same SIF as a file."""
    folder, name = lab.recipe.path, f"{REGISTRY}/ekiben-test/sif-base"
    sif_of_apptainer(lab, HEADER + BASES["all"])
    lab.apptainer("push", "--no-https", folder / "theirs.sif", f"oras://{name}:1")
    _, local = lab.build(ON_IT + CHILDREN["environment"])
    text = f"Bootstrap: oras\nFrom: {name}:1\n{CHILDREN['environment']}"
    with pytest.raises(DefinitionError, match="is not locked"):
        lab.resolve(text)
    cli.run("lock", folder, cwd=folder)
    locked = json.loads((folder / "bases.lock").read_text())
    assert list(locked) == [f"oras://{name}:1"]
    digest = locked[f"oras://{name}:1"][platform()]
    assert "name the same images" in cli.run("lock", folder, "--outdated", cwd=folder).stdout
    resolved, image = lab.build(text)
    assert [layer.diff_id for layer in image.layers[:-1]] == [layer.diff_id for layer in local.layers[:-1]]
    ours, theirs = sif_of(lab, image), lab.sandbox(text, "--no-https")
    shown = [run(lab, {}, "exec", path, "env", "-0") for path in (ours, theirs)]
    assert shown[0] == shown[1] != {}
    assert lab.resolve(text.replace(":1", f":1@{digest}")).layers[0].cache_key == resolved.layers[0].cache_key
    with pytest.raises(UsageError, match="cannot begin with a SIF"):
        dockerfile(resolved)
    rendered = deffile(resolved).split("\n")
    assert f"From: {name}:1@{digest}" in rendered
    (folder / "bases.lock").write_text(json.dumps({f"oras://{name}:1": {platform(): f"sha256:{'0' * 64}"}}))
    with pytest.raises(FetchError, match="404"):
        lab.build(text)
    with pytest.raises(FetchError, match="is not a SIF"):
        lab.build(f"Bootstrap: oras\nFrom: {pushed_image()}\n")


def pushed_image() -> str:
    """An image of layers in the registry, by its digest."""
    tiny = f"{REGISTRY}/ekiben-test/not-a-sif"
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), SmallImage().layout())
        argv = ["skopeo", "copy", "-q", "--dest-tls-verify=false", f"oci:{folder}:small", f"docker://{tiny}:1"]
        subprocess.run(argv, check=True)
    registry = Registry(Reference.parse(f"{tiny}:1"))
    return f"{tiny}@{registry.fetch_manifest()[1]}"


def test_docker_image_on_a_sif(lab: Lab, docker: str) -> None:
    sif_of_apptainer(lab, HEADER + BASES["all"])
    _, image = lab.build(f"{ON_IT}\n%environment\n    export A=child:$A\n")
    export(image, lab.store, Progress(quiet=True), formats=("docker",))
    argv = ["docker", "run", "--rm", "--network", "none", "-w", "/srv", docker]
    shown = variables(subprocess.run([*argv, "env", "-0"], capture_output=True, check=True).stdout)
    assert {name: shown[name] for name in ("A", "B", "HERE", "PRESENT", "POSTED")} == {
        "A": "child:again",
        "B": "base-x",
        "HERE": "/srv",
        "PRESENT": "yes",
        "POSTED": "1",
    }


@pytest.mark.parametrize("engine", ["docker", "buildah", "podman"])
def test_other_engines_make_the_same_layers(engine: str, lab: Lab, cli: Cli) -> None:
    need(engine)
    sif_of_apptainer(lab, HEADER + BASES["all"])
    _, image = lab.build(ON_IT + CHILDREN["post"] + CHILDREN["environment"])
    for layer in image.layers:
        (lab.store.root / "keys" / f"{layer.cache_key}.json").unlink()
    argv = ("--engine", engine, "--format", "oci", "-o", lab.out / f"sif-{engine}.tar", "--no-verify")
    built = cli.image(lab.store.root, lab.recipe.path, *argv, cwd=lab.recipe.path)
    assert built["image"] == image.image_id
