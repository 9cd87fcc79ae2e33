"""`image`: from a recipe to files, and what is refused before anything is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.sample_recipe import RunCli, SampleRecipe, seeded


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["hello", "--format", "sfi"], "--format: no format 'sfi'. Did you mean 'sif'?"),
        (["hello", "--engine", "dokcer"], "--engine: no engine 'dokcer'. Did you mean 'docker'?"),
        (["hello", "hello", "-o", "x.sif"], "-o names one file; build one recipe in one format, or leave -o out"),
        (["hello", "--format", "sif", "--format", "oci", "-o", "x"], "-o names one file"),
        (["hello", "-o", "no/folder/x.sif"], "-o no/folder/x.sif: there is no folder"),
        (["hello", "-o", "."], "-o .: is a folder; name a file in it"),
        (
            ["hello", "--offline"],
            "base, python, hello would have to be built; pass its sources with --bundle FILE",
        ),
    ],
)
def test_image_refuses_invalid_options(run_cli: RunCli, tmp_path: Path, argv: list[str], message: str) -> None:
    done = run_cli("--store", tmp_path / "store", "image", *argv, code=2)
    assert message in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "store").exists()


def test_a_mistake_in_the_last_recipe_is_reported_before_the_first_is_built(
    run_cli: RunCli, files_only: SampleRecipe, tmp_path: Path
) -> None:
    store = seeded(files_only, tmp_path / "store", "ground")
    run_cli("--store", store.root, "image", files_only.path, "helo", "--format", "sif", "--no-verify", code=2)
    assert store.images() == {}


def test_image_list_inspect_and_prune(run_cli: RunCli, files_only: SampleRecipe, tmp_path: Path) -> None:
    store = seeded(files_only, tmp_path / "store", "ground")
    at = ("--store", store.root)
    done = run_cli(
        *at, "image", files_only.path, "--format", "sif", "--no-verify", "--json", "-o", tmp_path / "own.sif"
    )
    result = json.loads(done.stdout)
    first, work = ("recipe", "stack", "name", "image", "size", "layers"), ("built", "artifacts", "checks")
    assert tuple(result) == (*first, *work, "data", "run")
    assert result["built"] == ["roof", "own"]
    assert [(item["kind"], item["created"]) for item in result["artifacts"]] == [("sif", True)]
    assert f"apptainer exec --nv {tmp_path}/own.sif greet" in result["run"]
    assert "own: 2 of 3 layers to build" in done.stderr

    again = run_cli(*at, "build", files_only.path, "--format", "sif", "--no-verify", "-o", tmp_path / "own.sif")
    assert "own: all 3 layers are stored" in again.stderr
    assert "(existing)" in again.stdout
    assert " exec --nv " in again.stdout

    plan = run_cli(*at, "plan", files_only.path).stdout.splitlines()
    assert [line.split()[:2] for line in plan] == [["CACHED", "ground"], ["CACHED", "roof"], ["CACHED", "own"]]
    rows = json.loads(run_cli(*at, "plan", files_only.path, "--json").stdout)
    assert [row["stored"] for row in rows] == [True, True, True]
    assert rows[1]["inputs"]["files"][0][0] == "/opt/data/data.txt"

    listed = json.loads(run_cli(*at, "list", "--json").stdout)
    assert {row["recipe"]: row["image"] for row in listed}["own"] == result["image"]
    assert "not built" in run_cli(*at, "list").stdout

    shown = json.loads(run_cli(*at, "inspect", "own", "--json").stdout)
    assert (shown["image"], [layer["name"] for layer in shown["layers"]]) == (
        result["image"],
        ["ground", "roof", "own"],
    )
    assert "task        greet" in run_cli(*at, "inspect", "own").stdout
    sif = json.loads(run_cli(*at, "inspect", tmp_path / "own.sif", "--json").stdout)
    assert [item["name"] for item in sif["objects"]] == ["definition", "layer 0", "layer 1", "layer 2"]

    assert run_cli(*at, "prune").stdout == "removed 0 blobs, 0 B\n"
    assert "would remove 5 blobs" in run_cli(*at, "prune", "own", "--dry-run").stdout
    assert "removed 5 blobs" in run_cli(*at, "prune", "own").stdout
    assert list((store.root / "blobs/sha256").iterdir()) == []


def test_several_recipes_are_a_list_in_json(run_cli: RunCli, files_only: SampleRecipe, tmp_path: Path) -> None:
    store = seeded(files_only, tmp_path / "store", "ground")
    argv = ("--store", store.root, "image", files_only.path, files_only.path, "--format", "sif", "--no-verify")
    first, second = json.loads(run_cli(*argv, "--json").stdout)
    assert (first["artifacts"][0]["created"], second["artifacts"][0]["created"]) == (True, False)
    assert run_cli(*argv).stdout.count("image   own  ") == 2


def test_image_writes_an_oci_archive(run_cli: RunCli, files_only: SampleRecipe, tmp_path: Path) -> None:
    store = seeded(files_only, tmp_path / "store", "ground")
    done = run_cli("--store", store.root, "image", files_only.path, "--format", "oci", "--no-verify")
    assert "docker load -i own.tar" in done.stdout
    assert (tmp_path / "own.tar").stat().st_size > 0


def test_without_a_daemon_an_archive_is_written(run_cli: RunCli, files_only: SampleRecipe, tmp_path: Path) -> None:
    store = seeded(files_only, tmp_path / "store", "ground")
    argv = ("--store", store.root, "image", files_only.path, "--format", "docker", "--no-verify")
    done = run_cli(*argv, env={"DOCKER_HOST": f"unix://{tmp_path}/none.sock"})
    assert "the docker image is written as an archive instead (--format oci)" in done.stderr
    assert "run     docker load -i own.tar" in done.stdout
    assert (tmp_path / "own.tar").stat().st_size > 0
