"""An edited recipe: its own test runs in the new image; those of layers, which cannot see it, are not repeated."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from ekiben.core.errors import VerifyError
from workspaces import ME, USER, Cli, NewStore, RecipeFolder, Workspace, as_user, need

pytestmark = pytest.mark.covers("ekiben/builder", "ekiben/executors", "ekiben/artifacts")

# It passes only where the recipe's file cannot be seen, without naming its folder.
TEST = """
%test
    set -e
    test -e /opt/probe
    test -z "$(find /opt -name marker.txt)"
"""
PROGRAMS = {"sif": "apptainer", "docker": "docker", "podman": "podman"}
KINDS = [("sif", ME), ("sif", USER), ("docker", ME), ("podman", ME), ("podman", USER)]


@dataclass
class Output:
    """A kind of image, who builds it, and the ids of the images that were built."""

    kind: str
    cli: Cli
    images: list[str] = field(default_factory=list)


@pytest.fixture(params=KINDS, ids=lambda param: "-".join(param))
def output(request: pytest.FixtureRequest, workspace: Workspace) -> Iterator[Output]:
    """An output whose images are removed from their engine."""
    kind, user = request.param
    need(PROGRAMS[kind])
    output = Output(kind, Cli(workspace, user))
    yield output
    for image in output.images if kind != "sif" else ():
        argv = [kind, "rmi", "--force", image.removeprefix("sha256:")]
        subprocess.run(argv, cwd="/", env=output.cli.settings(), capture_output=True, check=False, **as_user(user))


def test_tests_of_layers_are_not_repeated(
    output: Output, recipe_folder: RecipeFolder, new_store: NewStore, workspace: Workspace
) -> None:
    kind, cli, images = output.kind, output.cli, output.images
    store, out = new_store(cli.user, "base"), workspace.folder("out", cli.user)
    recipe_folder.layer("probe", "base", "touch /opt/probe", TEST)
    marker = recipe_folder.path / "configs/marker.txt"
    settings = {
        "name": recipe_folder.path.name,
        "description": "a test",
        "stack": "cu130",
        "layer": "probe",
        "tasks": {},
        "data": ["configs/marker.txt"],
        "test": 'grep . "$EKIBEN_RECIPE/configs/marker.txt"\n',
    }
    marker.parent.mkdir()
    (recipe_folder.path / "recipe.yaml").write_text(json.dumps(settings))
    reused = []
    for text in ("first\n", "second\n"):
        marker.write_text(text)
        result = cli.image(store, recipe_folder.path, "--format", kind, cwd=out)
        images.append(result["image"])
        (check,) = result["checks"]
        reused.append(check["reused"])
    assert reused[0] is None
    assert (reused[1]["image"], reused[1]["tests"]) == (images[0], ["01-base.sh", "02-probe.sh"])
    assert images[0] != images[1]
    stdout = cli.run("--store", store, "build", recipe_folder.path, "--format", kind, cwd=out).stdout
    assert "same image)" in stdout
    marker.write_text("")
    failed = cli.run("--store", store, "build", recipe_folder.path, "--format", kind, cwd=out, code=None)
    assert failed.returncode == VerifyError.exit_code  # the recipe's test fails, and so does the complete run
    marker.write_text("second\n")
    if kind != "podman":  # verify looks there for no image
        assert (
            cli.run("--store", store, "verify", recipe_folder.path, cwd=out, code=None).returncode
            == VerifyError.exit_code
        )


def test_scripts_above_a_layer_that_came_out_as_before_are_not_run(
    recipe_folder: RecipeFolder, new_store: NewStore, cli: Cli, workspace: Workspace
) -> None:
    need("apptainer")
    store, out, name = new_store(ME, "base"), workspace.folder("out"), recipe_folder.path.name
    recipe_folder.layer("upper", "lower", "cat /lower >/upper; date +%N >/when")
    recipe_folder.top("upper")
    layers, built = [], []
    for post in ("echo x >/lower", "# a remark\necho x >/lower", "echo y >/lower"):
        recipe_folder.layer("lower", "base", post)
        result = cli.image(store, recipe_folder.path, "--format", "sif", "--engine", "apptainer", cwd=out)
        layers.append([layer["digest"] for layer in result["layers"]])
        built.append(result["built"])
    assert built == [["lower", "upper", name], ["lower", name], ["lower", "upper", name]]
    assert layers[0][:3] == layers[1][:3] != layers[2][:3]
