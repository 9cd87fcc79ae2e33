"""A name that means nothing gets the same sentence from each command that takes an image."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ekiben.store import Store
from support.programs import write_program
from support.sample_recipe import RECIPE, RunCli, SampleRecipe, image_of
from support.small_sifs import small_sif

READERS = ("inspect", "sbom", "verify", "diff")
STARTERS = ("run", "exec", "shell", "doctor", "sign", "publish")


def argv_of(command: str, name: str) -> list[str]:
    after = {"diff": ["x.sif"], "exec": ["true"], "publish": ["--to", "lab"]}
    return [command, name, *after.get(command, [])]


@pytest.mark.parametrize("command", [*READERS, *STARTERS])
def test_each_command_names_what_is_missing(command: str, run_cli: RunCli, tmp_path: Path) -> None:
    small_sif(tmp_path / "x.sif")
    (tmp_path / "folder.sif").mkdir()
    os.mkfifo(tmp_path / "pipe.sif")
    for name, message in {
        "./folder.sif": "./folder.sif is a folder, not a SIF file",
        "./pipe.sif": "./pipe.sif is not a regular file",
        "./gone.sif": "./gone.sif is not there",
        "nosuch": "no recipe 'nosuch'",
        "..": "..: no recipe.yaml there, and it is not a SIF file",
        "a\nb": "no recipe 'a\\nb'",
        "http://x/y.sif": "http://x/y.sif is a file of a web server, and is not fetched",
        "127.0.0.1:1/x:": "127.0.0.1:1/x:: the tag after the colon is missing",
    }.items():
        assert f"{message}" in run_cli(*argv_of(command, name), code=2).stderr, name


@pytest.mark.parametrize("command", [*READERS[:3], *STARTERS[:3]])
def test_a_registry_that_does_not_answer_is_no_folder_here(command: str, run_cli: RunCli, tmp_path: Path) -> None:
    at_store = ("--store", str(tmp_path / "store"))
    refused = run_cli(*at_store, *argv_of(command, "127.0.0.1:1/x"), code=7).stderr
    assert "127.0.0.1:1/x: there is no such file or folder here, and no image in the registry 127.0.0.1:1: " in refused


def test_a_reader_names_the_store_and_the_recipes(
    run_cli: RunCli, files_only: SampleRecipe, store: Store, tmp_path: Path
) -> None:
    image_of(files_only, store)
    at_store = ("--store", str(store.root))
    assert f"no image 'owm' in {store.root}. Did you mean 'own'?" in run_cli(*at_store, "inspect", "owm", code=2).stderr
    assert f"no image 'other' in {store.root}; no recipe 'other'" in run_cli(*at_store, "sbom", "other", code=2).stderr
    assert (
        run_cli(*at_store, "inspect", str(files_only.path)).stdout
        == run_cli(*at_store, "inspect", RECIPE["name"]).stdout
    )


def test_a_mistyped_option_gets_the_nearest_one(run_cli: RunCli) -> None:
    for argv, near in ((("submit", "--nodez", "2"), "--nodes"), (("notebook", "--prot", "1"), "--port")):
        assert f"Did you mean {near}?" in run_cli(*argv, "hello", code=2).stderr.replace("'", "")


def test_without_a_runtime_a_build_is_no_help(run_cli: RunCli, tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path / "bin")}
    write_program(tmp_path / "bin/other", "#!/bin/sh\n")
    assert "build hello" in run_cli("run", "hello", "hello", env=env, code=4).stderr.splitlines()[-1]
    small_sif(tmp_path / "hello.sif")
    for options in ((), ("--runtime", "apptainer")):
        refused = run_cli("run", *options, "hello", "hello", env=env, code=4).stderr
        assert refused.splitlines()[-1] == "hint: sh ekiben/bootstrap.sh --engine"
