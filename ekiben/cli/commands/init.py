"""Make a recipe of your own in a new folder.

It has a task that runs on a CPU in a second, and a layer for the packages of its requirements.txt.

\b
Examples:
  ekiben init mine
  ekiben init experiments/mine --from huggingface
"""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from ekiben.cli.options import Command, NameType, PathType
from ekiben.core.command_name import command_name
from ekiben.project.create import create_recipe


@click.command("init", cls=Command, help=__doc__)
@click.argument("folder", type=PathType(), metavar="DIR")
@click.option(
    "--from",
    "layer",
    default="python",
    show_default=True,
    type=NameType(),
    metavar="LAYER",
    help="The layer below the recipe's own: python, pytorch, huggingface, …",
)
@click.option(
    "--stack", default="cu130", show_default=True, type=NameType(), metavar="STACK", help="The stack of versions."
)
def command(folder: Path, layer: str, stack: str) -> None:
    """Write the files, and print what to do next."""
    for path in create_recipe(folder, layer=layer, stack=stack):
        click.echo(path)
    name = shlex.quote(str(folder))
    for arguments in (f"lock {name}", f"build {name}", f"run {name} train"):
        click.echo(f"next    {command_name()} {arguments}", err=True)
