"""Commands that only read a recipe run nothing of it: each is started in the folder of a recipe whose every file would
leave a mark.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.sample_recipe import AS_SIF, SampleRecipe, seeded

ROOT = Path(__file__).resolve().parents[4]
PROGRAMS = (
    "git",
    "uv",
    "python3",
    "sh",
    "apt-get",
    "dpkg",
    "gpg",
    "nvidia-smi",
    "apptainer",
    "docker",
    "mmdebstrap",
    "sbatch",
)
MODULES = ("sitecustomize", "usercustomize", "conftest", "setup", "click", "yaml", "packaging", "requests", "tomllib")
READING = {
    "plan": ["plan", "."],
    "plan --gpu-arch": ["plan", ".", "--gpu-arch", "9.0"],
    "render": ["render", ".", "--to", "def", "-o", "../rendered"],
    "inspect": ["inspect", "cloned"],
    "inspect of a file": ["inspect", "./cloned.sif"],
    "list": ["list"],
    "doctor": ["doctor"],
    "doctor of a recipe": ["doctor", "."],
    "doctor of a file": ["doctor", "./cloned.sif"],
    "init": ["init", "../fresh"],
    "init inside": ["init", "fresh"],
    "diff": ["diff", "cloned", "./cloned.sif"],
    "sbom": ["sbom", "cloned"],
    "run --dry-run": ["run", "./", "--live", "--dry-run", "greet"],
}
MAY_FAIL = (
    "doctor",
    "doctor of a recipe",
    "doctor of a file",
    "run --dry-run",
    "sbom",
    "diff",
)  # what this machine lacks


def start(
    *argv: str | Path, cwd: Path, env: dict[str, str], program: Sequence[str | Path] = (ROOT / "build.py",)
) -> str:
    done = subprocess.run(
        [sys.executable, *program, *argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 2, 4, 8, 10), done.stderr
    return f"{done.returncode} {done.stdout}{done.stderr}"


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "ran"


@pytest.fixture
def hostile(sample: SampleRecipe, tmp_path: Path, mark: Path) -> SampleRecipe:
    shell, python = f"touch {mark}\n", f"open({str(mark)!r}, 'w')\n"
    sample.replace("images/walls.def", "echo {{ word }} > /word\n", f"echo {{{{ word }}}} > /word\n    {shell}")
    sample.replace("images/walls.def", "test -e /word\n", shell)
    sample.recipe(name="cloned", test=shell, description=f"$({shell.strip()}) `{shell.strip()}`")
    for name in (*(f"{module}.py" for module in MODULES), "entrypoints/greet.py", "entrypoints/conftest.py"):
        sample.write(name, python)
    for name in (
        *PROGRAMS,
        ".venv/bin/python",
        ".git/hooks/post-index-change",
        ".git/hooks/post-checkout",
        "fsmonitor",
    ):
        sample.write(name, f"#!/bin/sh\n{shell}cat\n", 0o755)
    sample.write(".venv/pyvenv.cfg", "home = /usr/bin\n")
    sample.write("uv.toml", f'[pip]\npython = "{sample.path}/python3"\n')
    sample.write(".gitattributes", "* filter=evil diff=evil\n")
    evil = f"{sample.path}/fsmonitor"
    settings = {
        "core.fsmonitor": evil,
        "core.pager": evil,
        "core.sshCommand": evil,
        "filter.evil.clean": evil,
        "filter.evil.process": evil,
        "diff.evil.textconv": evil,
        "diff.external": evil,
    }
    git = ["git", "-C", str(sample.path), "-c", "user.name=x", "-c", "user.email=x@localhost"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "recipe.yaml", "entrypoints/greet.py"], check=True)
    subprocess.run([*git, "-c", "core.hooksPath=/dev/null", "commit", "--quiet", "-m", "x"], check=True)
    for key, value in settings.items():
        subprocess.run([*git, "config", key, value], check=True)
    sample.write("entrypoints/greet.py", f"{python}# changed\n")
    mark.unlink(missing_ok=True)
    return sample


@pytest.fixture
def env(hostile: SampleRecipe, tmp_path: Path) -> dict[str, str]:
    """An environment in which the recipe's folder is one of those with recipes."""
    config = tmp_path / "config/ekiben/config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(f"recipes: [{hostile.path.parent}]\n")
    store = tmp_path / "store"
    seeded(hostile, store, "ground", "walls")
    return {**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "config"), "EKIBEN_STORE": str(store)}


@pytest.mark.parametrize("case", READING)
def test_reading_a_recipe_runs_none_of_it(hostile: SampleRecipe, env: dict[str, str], mark: Path, case: str) -> None:
    if {"cloned", "./cloned.sif"} & {*READING[case]} or "run" in case:
        assert start("image", "./", *AS_SIF, cwd=hostile.path, env=env)[0] == "0"
    shown = start(*READING[case], cwd=hostile.path, env=env)
    assert shown[0] == "0" or case in MAY_FAIL, shown
    assert not mark.exists()


def test_modules_in_the_working_folder_are_not_imported(hostile: SampleRecipe, env: dict[str, str], mark: Path) -> None:
    """`python -m ekiben` has that folder first where modules are looked for."""
    inherited = {**env, "PYTHONPATH": str(ROOT)}
    shown = start("plan", ".", cwd=hostile.path, env=inherited, program=("-m", "ekiben"))
    assert shown[0] == "0"
    assert not mark.exists()
