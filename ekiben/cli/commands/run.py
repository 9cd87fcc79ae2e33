"""Run a task of a recipe's image.

With Apptainer or SingularityCE and the SIF, else with Docker. Of your environment the image gets what a job needs: its
scheduler's variables, NCCL's, proxies, HF_TOKEN; not LD_LIBRARY_PATH or PYTHONPATH.

\b
Examples:
  ekiben run lora-opencalm train -- --smoke
  ekiben run lora-opencalm train --copy-local -- --data=/groups/mine/talk.jsonl --output=/scratch/me/run
  ekiben run lora-opencalm train --live -- --smoke     (edited scripts, no new image)
  ekiben run hello --cpu
  ekiben run hello --runtime podman
"""

from __future__ import annotations

import click

from ekiben.cli.commands._start import StartOptions, start_image, start_options
from ekiben.cli.context import Context
from ekiben.cli.options import Command, RecipeType
from ekiben.spec.recipe import find_recipe


@click.command("run", cls=Command, help=__doc__, context_settings={"ignore_unknown_options": True})
@click.argument("recipe", type=RecipeType())
@click.argument("argv", nargs=-1, metavar="[TASK] [-- ARGS…]", type=click.UNPROCESSED)
@start_options
@click.pass_obj
def command(context: Context, /, recipe: str, argv: tuple[str, ...], start: StartOptions) -> None:
    """Check the machine, then become the container runtime."""
    recipe_spec = find_recipe(recipe, start.included)
    if argv:
        recipe_spec.task(argv[0])
    start_image(context, recipe_spec, argv, start, executes=False)
