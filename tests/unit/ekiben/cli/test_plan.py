"""`plan`, and the mistakes in a recipe's files that it reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.sample_recipe import RunCli, SampleRecipe


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["helo"], "no recipe 'helo'. Did you mean 'hello'?"),
        (["helo"], "hint: a recipe elsewhere is given as a path"),
        (["./helo"], "./helo: no recipe.yaml there"),
        (["hello", "--build-arg", "python"], "--build-arg python: expected NAME=VALUE"),
        (["hello", "--build-arg", "=x"], "--build-arg : expected NAME=VALUE"),
    ],
)
def test_plan_refuses_invalid_arguments(run_cli: RunCli, tmp_path: Path, argv: list[str], message: str) -> None:
    done = run_cli("--store", tmp_path / "store", "plan", *argv, code=2)
    assert message in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--build-arg", "pyhton=3.12"],
            "argument 'pyhton' is bound but no layer of 'hello' declares it. Did you mean 'python'?",
        ),
        (["--stack", "cu1300"], "--stack: no stack 'cu1300'. Did you mean 'cu130'?"),
    ],
)
def test_plan_refuses_unknown_names(run_cli: RunCli, tmp_path: Path, argv: list[str], message: str) -> None:
    assert message in run_cli("--store", tmp_path / "store", "plan", "hello", *argv, code=3).stderr


def test_all_problems_of_files_are_reported_at_once(run_cli: RunCli, sample: SampleRecipe, tmp_path: Path) -> None:
    sample.replace("images/walls.def", "%post", "%pots")
    sample.replace("images/walls.def", "{{ word }} > /word", "{{ wrd }}")
    lines = run_cli("--store", tmp_path / "store", "plan", sample.path, code=3).stderr.splitlines()
    assert len(lines) == 2
    assert all(f"{sample.path}/images/walls.def:" in line for line in lines)


def test_plan_for_another_processor_runs_anywhere(run_cli: RunCli, tmp_path: Path) -> None:
    plans = {
        arch: json.loads(run_cli("--store", tmp_path / "store", "plan", "hello", "--arch", arch, "--json").stdout)
        for arch in ("amd64", "arm64")
    }
    assert [layer["layer"] for layer in plans["arm64"]] == ["base", "python", "hello"]
    assert {layer["inputs"]["platform"] for layer in plans["arm64"]} == {"linux/arm64"}
    assert not {layer["cache_key"] for layer in plans["arm64"]} & {layer["cache_key"] for layer in plans["amd64"]}
    refused = run_cli("--store", tmp_path / "store", "plan", "hello", "--arch", "arm64", "--stack", "cu124", code=2)
    assert "--arch arm64: stack cu124 is locked for amd64 only" in refused.stderr
