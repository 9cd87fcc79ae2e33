"""The same image again: in an empty store, by another user, with and without root; and an image that does not come
out.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workspaces import ME, USER, Cli, NewStore, RecipeFolder, Workspace

pytestmark = pytest.mark.covers("ekiben/artifacts", "ekiben/builder", "ekiben/store")


def test_rebuild_by_another_user_is_identical(user_cli: Cli, workspace: Workspace, hello: Path) -> None:
    argv = ("--store", hello, "verify", "hello", "--rebuild", "--engine", "apptainer", "--json")
    done = user_cli.run(*argv, env={"EKIBEN_STORE": str(workspace.store(USER, "own"))})
    about = json.loads(done.stdout)
    assert about["same"] is True
    assert [layer["name"] for layer in about["layers"]] == ["base", "python", "hello"]
    assert all(
        layer["diff_id"][0] == layer["diff_id"][1] and layer["digest"][0] == layer["digest"][1]
        for layer in about["layers"]
    )
    assert about["image"][0] == about["image"][1]
    assert about["sif"][0] == about["sif"][1]


def test_files_that_differ_are_named(cli: Cli, recipe_folder: RecipeFolder, new_store: NewStore) -> None:
    recipe_folder.layer("when", "base", "mkdir /opt/when\ndate +%s%N >/opt/when/it-was\necho same >/opt/when/kept\n")
    recipe_folder.top("when")
    store = new_store(ME, "base")
    made = cli.image(
        store, recipe_folder.path, "--engine", "apptainer", "--format", "sif", "--no-verify", cwd=recipe_folder.path
    )
    assert made["built"] == ["when", "own"]
    done = cli.run("--store", store, "verify", recipe_folder.path, "--rebuild", "--engine", "apptainer", code=8)
    assert "own: 1 of 3 layers differ:" in done.stderr
    assert "layer when:" in done.stderr
    assert "1 entries differ" in done.stderr
    assert "opt/when/it-was: content" in done.stderr
    assert "kept" not in done.stderr
    assert not list(store.parent.glob("rebuild-*"))
