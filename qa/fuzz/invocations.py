"""Wrong command lines, made from the program's own commands and options: each must end with one sentence and an exit
code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click

from ekiben.cli import root

_NAME = "x" * 300  # longer than a file's name may be
_NUMBERS = ("x", "", "1.5.2", "-", "0x10", "²")
_TEXTS = {
    "--env": ("1X=2", "=x", "A B=1", "NOT_SET_ANYWHERE"),
    "--seeds": (",", "1,,2", "1,1", ""),
    "--time": ("x", "1:99", "0", "-1"),
    "--grace-period": ("x", "-1"),
    "--memory": ("x", "0", "-1G", "64"),
    "--gpu-arch": ("x", "99", ""),
    "--version": ("", "a b", "../x", _NAME),
    "--tag": ("", "a/b", "current.sif", _NAME),
    "--site": ("no-such-site", "~nobody99/x.yaml", _NAME),
    "--stack": ("no-such-stack", "", _NAME),
    "--layer": ("no-such-layer", "", _NAME),
    "--build-arg": ("x", "", "=x"),
    "--again": ("no-such-run", _NAME),
}
_MADE = {("--runs", "no/such/file"), ("--to", "no/such/file")}  # folders that are made


def commands(
    group: click.Group | None = None, way: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield the names of each command, and the command."""
    group = group or root
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*way, name))
        elif command:
            yield (*way, name), command


def wrong_paths(folder: Path) -> Iterator[str]:
    """Yield paths that no file can be read from; they are made below ``folder``."""
    pipe, circle = folder / "pipe", folder / "circle"
    if not pipe.exists():
        os.mkfifo(pipe)
        circle.symlink_to("circle")
    yield from (str(pipe), str(circle), "no/such/file", _NAME, "", "/dev/null/x", "~nobody99/x")


def wrong_values(parameter: click.Parameter, folder: Path) -> Iterator[str]:
    """Yield values that a parameter has to refuse."""
    kind, name = parameter.type, parameter.opts[0]
    if isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        yield from _NUMBERS
        if isinstance(kind, click.IntRange | click.FloatRange) and kind.min is not None:
            yield str(int(kind.min) - 1)
    elif isinstance(kind, click.Choice):
        yield from ("no-such-choice", "")
    elif name in _TEXTS:
        yield from _TEXTS[name]
    elif isinstance(kind, click.Path):
        yield from (path for path in wrong_paths(folder) if (name, path) not in _MADE)


def invocations(folder: Path, recipe: str) -> Iterator[list[str]]:
    """Yield wrong command lines, each with one mistake; ``recipe`` is one that exists."""
    for argv, command in commands():
        yield [*argv, "--no-such-option"]
        arguments = [
            recipe if item.name == "recipe" else "x"
            for item in command.params
            if isinstance(item, click.Argument) and item.required
        ]
        dry = ["--dry-run"] if any("--dry-run" in item.opts for item in command.params) else []
        for parameter in command.params:
            if isinstance(parameter, click.Argument):
                continue
            option = parameter.opts[0]
            if getattr(parameter, "is_flag", False):
                yield [*argv, f"{option}=x", *arguments]
                continue
            yield [*argv, *arguments, option]
            for value in wrong_values(parameter, folder):
                option_argv = [f"{option}={value}"] if option.startswith("--") else [option, value]
                yield [*argv, *dry, *option_argv, *arguments]
        if arguments:
            yield list(argv)
        if arguments and argv != ("init",):  # which makes a folder
            yield from ([*argv, *dry, value, *arguments[1:]] for value in wrong_paths(folder))
