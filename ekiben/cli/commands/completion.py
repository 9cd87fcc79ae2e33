"""Print the completion script of your shell.

\b
Examples:
  ekiben completion bash >> ~/.bashrc
  ekiben completion fish > ~/.config/fish/completions/ekiben.fish
"""

from __future__ import annotations

import shlex
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from ekiben.cli.options import COMPLETE_VAR, Command, NearestChoice
from ekiben.core.command_name import program_name


@click.command("completion", cls=Command, help=__doc__)
@click.argument("shell", type=NearestChoice(["bash", "zsh", "fish"]), metavar="bash|zsh|fish")
@click.pass_context
def command(ctx: click.Context, /, shell: str) -> None:
    """Print it for the program as it is called here."""
    shell_class = get_completion_class(shell)
    assert shell_class is not None
    name = Path(shlex.split(program_name())[-1]).name  # a shell completes a command by one word, such as build.py
    click.echo(shell_class(ctx.find_root().command, {}, name, COMPLETE_VAR).source())
