"""Run a program in an image.

As `run` does it with a task: the same folders, environment and GPUs. IMAGE is a recipe (its name or folder),
FILE.sif, what colleagues published (NAME or NAME:VERSION), or a registry's image. Options come before IMAGE or
PROGRAM; what follows PROGRAM is the program's.

\b
Examples:
  ekiben exec lora-opencalm nvidia-smi
  ekiben exec lora-opencalm python check_data.py --rows 10
  ekiben exec --bind /data other.sif -- ls -l /data
"""

from __future__ import annotations

import click

from ekiben.cli.commands._start import StartOptions, build_or_compare, named_image, start_image, start_options
from ekiben.cli.context import Context
from ekiben.cli.options import RecipeType, TaskCommand
from ekiben.core.command_name import command_name
from ekiben.core.errors import UsageError


@click.command("exec", cls=TaskCommand, help=__doc__)
@click.argument("image", metavar="IMAGE", type=RecipeType())
@click.argument("argv", nargs=-1, metavar="PROGRAM [ARGS…]", type=click.UNPROCESSED)
@start_options
@click.pass_obj
def command(context: Context, /, image: str, argv: tuple[str, ...], start: StartOptions) -> None:
    """Check the machine, then become the container runtime with a program."""
    if not argv:
        raise UsageError(
            f"a program is missing: {command_name()} exec {image} PROGRAM", hint=f"{command_name()} shell {image}"
        )
    named = named_image(context, image, start)
    build_or_compare(context, named, start)
    start_image(context, named, argv, start, executes=True)
