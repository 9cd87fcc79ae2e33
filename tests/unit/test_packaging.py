"""What pyproject.toml says of the package is in step with the rest of the repository."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import ekiben

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_dependencies_are_the_lines_of_requirements_in() -> None:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "requirements.in").read_text().splitlines())
    assert PROJECT["project"]["dependencies"] == [line for line in lines if line]


def test_every_folder_that_ships_as_data_is_included_in_wheel_and_sdist() -> None:
    targets = PROJECT["tool"]["hatch"]["build"]["targets"]
    folders = {"images", "recipes", "entrypoints", "sites"}
    assert targets["wheel"]["sources"] == {name: f"ekiben/_data/{name}" for name in folders}
    for target in ("wheel", "sdist"):
        assert {f"/{name}" for name in (*folders, "ekiben")} <= {*targets[target]["include"]}


def test_the_version_of_the_command_line_is_that_of_the_package() -> None:
    for start in (["-m", "ekiben"], ["build.py"]):
        done = subprocess.run(
            [sys.executable, *start, "--version"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout == f"ekiben {ekiben.__version__}\n"
