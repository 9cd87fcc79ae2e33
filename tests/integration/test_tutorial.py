"""The tutorial of a recipe of one's own, followed by its text: each command, and what it shows of the output."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from workspaces import ME, Cli, NewStore, Workspace

pytestmark = pytest.mark.covers("docs/tutorials", "ekiben/project", "ekiben/cli")
TUTORIAL = Path(__file__).resolve().parents[2] / "docs/tutorials/own-recipe.md"


def steps() -> list[tuple[str, list[str]]]:
    """Return each numbered step's command, and the lines of output that the tutorial shows below it."""
    found: list[tuple[str, list[str]]] = []
    numbered = TUTORIAL.read_text(encoding="utf-8").split("Now change things")[0]
    for line in re.findall(r"^ {8}(.+)$", numbered, re.MULTILINE):
        if line.startswith("ekiben "):
            found.append((line.removeprefix("ekiben "), []))
        else:
            found[-1][1].append(line.strip())
    return found


def test_commands_of_the_tutorial_run(workspace: Workspace, new_store: NewStore, cli: Cli) -> None:
    store, folder = new_store(ME, "base", "python"), workspace.folder("tutorial")
    assert [command.split()[0] for command, _ in steps()] == ["init", "lock", "plan", "build", "run"]
    for command, shown in steps():
        done = cli.run(*command.split(), cwd=folder, env={"EKIBEN_STORE": str(store)})
        printed = {re.sub(r"\s+[0-9a-f]{12}\s+", " ", line).strip() for line in done.stdout.splitlines()}
        assert {re.sub(r"\s+[0-9a-f]{12}\s+", " ", line) for line in shown} <= printed, command
    assert (folder / "mine.sif").is_file()
    assert {path.name for path in (folder / "results").iterdir()} == {"metrics.jsonl", "model.json"}
