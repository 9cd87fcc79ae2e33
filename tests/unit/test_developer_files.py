"""Files that only developers use: the hooks of pre-commit and the development container."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def lint_commands() -> list[str]:
    """Return the commands that `make lint` runs, in their order."""
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    done = subprocess.run(["make", "--dry-run", "lint"], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    joined = done.stdout.replace("\\\n", " ")
    return [" ".join(command.split()) for command in re.split(r"&&|\n", joined) if command.strip()]


def test_hooks_run_the_commands_of_make_lint() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert [hook["entry"] for hook in hooks] == lint_commands()
    assert {(hook["language"], hook["pass_filenames"]) for hook in hooks} == {("system", False)}
    assert len({hook["id"] for hook in hooks}) == len(hooks)


@pytest.mark.parametrize(
    ("path", "is_checked"),
    [
        ("ekiben/api.py", True),
        ("pyproject.toml", True),
        ("requirements-dev.lock", True),
        ("docs/index.md", False),
        ("images/stacks/cu130/requirements.lock", False),
    ],
)
def test_hooks_run_for_changes_that_their_tools_read(path: str, is_checked: bool) -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert bool(re.search(config["files"], path)) is is_checked


def test_the_development_container_runs_a_target_of_make() -> None:
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    program, target = container["postCreateCommand"].split()
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert (program, target) == ("make", "setup")
    assert target in targets
    interpreter = container["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert interpreter == "${containerWorkspaceFolder}/.venv/bin/python"
