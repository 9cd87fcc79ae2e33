"""Options come before the task; what follows its name is the task's."""

from __future__ import annotations

import click
import pytest

from ekiben.cli import root
from ekiben.cli.options import TaskCommand
from support.sample_recipe import RunCli

CTX = click.Context(root)


def arranged(command: str, line: str) -> list[str]:
    parser = root.get_command(CTX, command)
    assert isinstance(parser, TaskCommand)
    return parser.arrange(click.Context(parser, info_name=command), line.split())


@pytest.mark.parametrize(
    ("command", "line", "expected"),
    [
        ("run", "hello", "-- hello"),
        ("run", "hello train --dry-run --cpu x", "-- hello train --dry-run --cpu x"),
        ("run", "--cpu hello --dry-run train --help", "--cpu --dry-run -- hello train --help"),
        ("run", "--bind /a hello --bind /b train -- x", "--bind /a --bind /b -- hello train x"),
        ("run", "hello train --cpu --bind /b -- --dry-run", "--cpu --bind /b -- hello train --dry-run"),
        ("run", "hello train --data x -- y", "-- hello train --data x -- y"),
        ("run", "hello train --", "-- hello train"),
        ("run", "-- hello --cpu", "-- hello --cpu"),
        ("run", "--help", "--help"),
        ("shell", "hello -- git log -- file", "-- hello git log -- file"),
        ("shell", "hello python3 -c x", "-- hello python3 -c x"),
        ("shell", "hello grep -- -x", "-- hello grep -- -x"),
        ("submit", "--nodes 2 hello train --x + merge --y", "--nodes 2 -- hello train --x + merge --y"),
        ("submit", "hello --nodes 2 -- train --x + merge", "--nodes 2 -- hello train --x + merge"),
        ("submit", "hello train --nodes 2 --time 1h --", "--nodes 2 --time 1h -- hello train"),
        ("submit", "--again 12", "--again 12"),
        ("doctor", "--site abci-3.0 hello train --data x", "--site abci-3.0 -- hello train --data x"),
    ],
)
def test_options_and_arguments_are_separated(command: str, line: str, expected: str) -> None:
    assert arranged(command, line) == expected.split()


@pytest.mark.parametrize("command", ["run", "shell", "submit", "doctor"])
def test_mistyped_option_is_named_with_the_nearest(run_cli: RunCli, command: str) -> None:
    option = {"run": "--copylocal", "shell": "--bnd", "submit": "--gpus-per-nod", "doctor": "--sitee"}[command]
    assert f"No such option '{option}'. " in run_cli(command, option, "hello", "hello", code=2).stderr
    assert f"No such option '{option}'. " in run_cli(command, "hello", option, "hello", code=2).stderr


def test_option_after_the_task_is_noted(run_cli: RunCli) -> None:
    shown = run_cli("submit", "--scheduler", "slurm", "--dry-run", "hello", "hello", "--nodes", "2", "--json")
    assert "note: --nodes is the task's; options of submit come before the image" in shown.stderr
    assert "set_task() { task=(hello --nodes 2 --json); }" in shown.stdout
