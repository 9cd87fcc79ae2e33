"""Write a recipe as a file for other tools.

A Dockerfile and a definition file build the image without Ekiben; their folder holds the files they copy, too.
compose.yaml and .devcontainer/devcontainer.json start the image that `ekiben build` loaded into Docker, as you.

\b
Examples:
  ekiben render lora-opencalm --to dockerfile -o context
  ekiben render lora-opencalm --to def
  ekiben render lora-opencalm --to compose           then: docker compose run --rm train
"""

from __future__ import annotations

from pathlib import Path

import click

from ekiben.cli.options import Command, NearestChoice, OutputFolder, RecipeOptions, RecipeType, recipe_options
from ekiben.core.printable import printable
from ekiben.resolve.docker_files import write_compose, write_devcontainer
from ekiben.resolve.render import render

_WRITERS = {"compose": write_compose, "devcontainer": write_devcontainer}


@click.command("render", cls=Command, help=__doc__)
@click.argument("recipe", type=RecipeType())
@click.option(
    "--to", "kind", type=NearestChoice(["dockerfile", "def", *_WRITERS]), required=True, help="Which kind of file."
)
@click.option(
    "-o",
    "--output",
    type=OutputFolder(),
    metavar="DIR",
    help="An empty folder (default: ./RECIPE-KIND). For compose and devcontainer any folder (default: this one).",
)
@recipe_options
def command(recipe: str, kind: str, output: Path | None, recipe_options: RecipeOptions) -> None:
    """Write it, and print where it is."""
    resolved = recipe_options.resolve(recipe)
    if kind in _WRITERS:
        click.echo(_WRITERS[kind](resolved, output or Path()))
    else:
        click.echo(render(resolved, kind, output or Path(f"{Path(recipe).name}-{kind}")))
        for path in resolved.included_files:
            click.echo(f"included  {printable(str(path))}", err=True)
