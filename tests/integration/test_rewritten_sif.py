"""build --in-place: the last layer of a SIF is rewritten in its file, once it is tested."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from ekiben.core.errors import VerifyError
from workspaces import ME, USER, Cli, NewStore, RecipeFolder, Workspace, need

pytestmark = pytest.mark.covers("ekiben/artifacts", "ekiben/formats", "ekiben/builder")


@pytest.fixture(params=[ME, USER])
def builder(request: pytest.FixtureRequest, workspace: Workspace) -> Cli:
    need("apptainer")
    return Cli(workspace, request.param)


def write_recipe(recipe_folder: RecipeFolder) -> Path:
    """Return the file whose text the recipe's test needs."""
    marker = recipe_folder.path / "configs/marker.txt"
    settings = {
        "name": recipe_folder.path.name,
        "description": "a test",
        "stack": "cu130",
        "layer": "base",
        "tasks": {},
        "data": ["configs/marker.txt"],
        "test": 'grep . "$EKIBEN_RECIPE/configs/marker.txt"\n',
    }
    marker.parent.mkdir()
    (recipe_folder.path / "recipe.yaml").write_text(json.dumps(settings))
    return marker


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_an_edit_is_tested_and_rewritten_in_the_file(
    builder: Cli, recipe_folder: RecipeFolder, new_store: NewStore, workspace: Workspace
) -> None:
    marker, store, out = (
        write_recipe(recipe_folder),
        new_store(builder.user, "base"),
        workspace.folder("out", builder.user),
    )
    sif, anew = out / "x.sif", out / "anew.sif"
    common = ("--store", store, "build", recipe_folder.path, "--format", "sif", "-o")

    def build(text: str, *options: str, code: int | None = 0) -> tuple[str, bool]:
        """Return the messages, and whether it is the same file."""
        marker.write_text(text)
        inode = sif.stat().st_ino if sif.exists() else 0
        done = builder.run(*common, sif, *options, cwd=out, code=code)
        return done.stderr, sif.stat().st_ino == inode

    build("first\n")
    messages, is_same = build("second\n", "--in-place")
    assert is_same, messages
    assert f"write {sif}" not in messages
    builder.run(*common, anew, cwd=out)
    assert sha256(sif) == sha256(anew)
    before = sha256(sif)
    messages, is_same = build("", "--in-place", code=VerifyError.exit_code)  # the recipe's test fails
    assert is_same and sha256(sif) == before
    assert f"{sif} is left as it was" in messages
    with subprocess.Popen(["apptainer", "exec", sif, "sleep", "60"]) as running:
        try:
            for _ in range(600):
                if subprocess.run(["pgrep", "-P", str(running.pid)], capture_output=True, check=False).returncode == 0:
                    break
            messages, is_same = build("third\n", "--in-place")
        finally:
            running.kill()
    assert not is_same
    assert "written anew, not rewritten: somebody has it open: the image is running" in messages
    sif.rename(out / ".x.sif.0123.rewrite.locked.part")  # as a kill leaves it
    messages, _ = build("fourth\n", "--in-place")
    assert f"{sif} was being rewritten when its build was killed; it is written again" in messages
    assert not list(out.glob(".x.sif*"))
