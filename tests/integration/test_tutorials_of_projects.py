"""The tutorials that begin with what a user has, followed by their text: a project, and a definition file."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest

from test_dockerfile import base
from workspaces import ME, ROOT, BuiltImage, Cli, Workspace, share_layers

__all__ = ["base"]
pytestmark = pytest.mark.covers("docs/tutorials", "ekiben/project", "ekiben/cli/commands/init.py")
PROGRAMS = ("ekiben ", "apptainer ", "EKIBEN_PROCESSES=2 ekiben ")


def tutorial(name: str) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return the files that a tutorial shows, and its commands with the output below each."""
    files, numbered = (ROOT / f"docs/tutorials/{name}.md").read_text(encoding="utf-8").split("\n1. ")
    texts = [
        textwrap.dedent(text).strip("\n") + "\n" for text in re.findall(r"(?:^(?: {4}.*)?\n)+", files, re.MULTILINE)
    ]
    commands: list[tuple[str, list[str]]] = []
    for line in re.findall(r"^ {8}(.+)$", numbered, re.MULTILINE):
        if line.startswith(PROGRAMS):
            commands.append((line, []))
        elif not line.startswith("cd "):
            commands[-1][1].append(line)
    return [text for text in texts if text.strip()], commands


def follow(commands: list[tuple[str, list[str]]], cli: Cli, folder: Path, store: Path) -> None:
    """Run the commands; each line that is shown begins one of the output."""
    for line, expected in commands:
        variables, _, command = line.rpartition("ekiben ")
        env = {"EKIBEN_STORE": str(store), **dict(item.split("=") for item in variables.split())}
        if line.startswith("apptainer"):
            argv = shlex.split(line)
            output = subprocess.check_output([argv[0], "-q", *argv[1:]], cwd=folder, text=True)
        else:
            output = cli.run(*shlex.split(command), cwd=folder, env=env).stdout
        for shown in expected:
            assert any(item.startswith(shown) for item in output.splitlines()), f"{line}\n{output}"


def test_definition_file(base: str, workspace: Workspace, cli: Cli) -> None:
    (definition, script), commands = tutorial("definition-file")
    folder = workspace.folder("tutorial")
    (folder / "lab").mkdir()
    name = base.partition("@")[0] + ":1"
    (folder / "lab/solver.def").write_text(definition.replace("registry.example.org/lab/base:1", name))
    (folder / "lab/solve.sh").write_text(script)
    assert [line.split()[1] for line, _ in commands] == ["init", "lock", "build", "run", "run"]
    follow(commands, cli, folder, folder / "store")


def test_project(lora_opencalm: BuiltImage, workspace: Workspace, cli: Cli) -> None:
    """It trains, as two processes too, and resumes at the step at which a signal has ended it."""
    files, commands = tutorial("bring-your-project")
    folder, store = workspace.folder("project") / "tiny-gpt", workspace.store(ME, "project") / "store"
    folder.mkdir()
    for name, text in zip(("requirements.txt", "prepare.py", "train.py"), files, strict=True):
        (folder / name).write_text(text)
    share_layers(lora_opencalm.store, store, ["base", "python", "compiler", "pytorch"], ME)
    assert [re.sub(".*ekiben ", "", line).split()[0] for line, _ in commands] == [
        "init",
        "build",
        *["run"] * 3,
        "submit",
    ]
    commands = [(line.replace("--dry-run", "--dry-run --scheduler slurm"), shown) for line, shown in commands]
    follow(commands, cli, folder, store)
    env = {"EKIBEN_STORE": str(store), "EKIBEN_PROCESSES": "2"}
    with cli.start("run", ".", "train", "--steps", "1000000", cwd=folder, env=env) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith("step 60 ") for line in lines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75
    done = cli.run("run", ".", "train", "--steps", "61", cwd=folder, env=env)
    (resumed,) = re.findall(r"^resumed at step (\d+)$", done.stdout, re.MULTILINE)
    assert int(resumed) >= 60
