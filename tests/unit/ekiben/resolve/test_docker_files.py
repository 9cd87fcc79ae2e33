"""compose.yaml and devcontainer.json of a recipe."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from ekiben.core.errors import StoreError
from ekiben.resolve.docker_files import write_compose, write_devcontainer
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from support.sample_recipe import RunCli

ME = f"{os.getuid()}:{os.getgid()}"


@pytest.mark.parametrize(
    ("recipe", "stack", "image"), [("hello", None, "hello"), ("finetune", "cu124", "finetune-cu124")]
)
def test_compose_has_a_service_for_each_task(recipe: str, stack: str | None, image: str, tmp_path: Path) -> None:
    resolved = resolve(find_recipe(recipe), stack=stack)
    path = write_compose(resolved, tmp_path / "folder")
    services = yaml.safe_load(path.read_text())["services"]
    assert (path, services.keys()) == (tmp_path / "folder/compose.yaml", resolved.recipe.file.tasks.keys())
    for name, service in services.items():
        assert (service["image"], service["entrypoint"]) == (f"ekiben/{image}:latest", [name])
        assert service["pull_policy"] == "never"
        assert (service["user"], service["volumes"], service["working_dir"]) == (ME, [".:/work"], "/work")
        assert ("deploy" in service) == (resolved.recipe.file.tasks[name].launch != "cpu")


def test_devcontainer_names_the_image_and_the_user(tmp_path: Path) -> None:
    path = write_devcontainer(resolve(find_recipe("hello")), tmp_path)
    content = json.loads(path.read_text())
    assert path == tmp_path / ".devcontainer/devcontainer.json"
    assert (content["image"], content["runArgs"][:3]) == ("ekiben/hello:latest", ["--pull=never", "--user", ME])
    assert content["initializeCommand"][:3] == ["docker", "image", "inspect"]
    assert content["initializeCommand"][-1] == content["image"]


@pytest.mark.parametrize("kind", ["compose", "devcontainer"])
def test_a_file_that_exists_is_kept(run_cli: RunCli, tmp_path: Path, kind: str) -> None:
    (path,) = (tmp_path / line for line in run_cli("render", "hello", "--to", kind).stdout.splitlines())
    path.write_text("mine")
    assert f"{path.relative_to(tmp_path)} exists; remove it" in run_cli("render", "hello", "--to", kind, code=6).stderr
    assert path.read_text() == "mine"
    with pytest.raises(StoreError):
        (
            write_compose(resolve(find_recipe("hello")), path.parent)
            if kind == "compose"
            else write_devcontainer(resolve(find_recipe("hello")), tmp_path)
        )
