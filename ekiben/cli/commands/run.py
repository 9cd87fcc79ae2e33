"""Run a task of an image.

IMAGE is a recipe (its name or folder), FILE.sif, what colleagues published (NAME or NAME:VERSION), or a registry's
image (oras://HOST/NAME:TAG), which is pulled once. It runs with Apptainer or SingularityCE and the SIF, else with
Docker. Of your environment the image gets what a job needs: its scheduler's variables, NCCL's, proxies, HF_TOKEN; not
LD_LIBRARY_PATH or PYTHONPATH. Options come before IMAGE or TASK; what follows TASK is the task's.

\b
Examples:
  ekiben run lora-opencalm train --smoke
  ekiben run --copy-local lora-opencalm train --data=/groups/mine/talk.jsonl --output=/scratch/me/run
  ekiben run --live lora-opencalm train --smoke     (edited scripts, no new image)
  ekiben run --build lora-opencalm train --smoke    (build and test what was edited first)
  ekiben run --cpu hello
  ekiben run --runtime podman hello
  ekiben run other.sif train --smoke
  ekiben run --app foo other.sif a b      (%apprun foo of its definition file)
  ekiben run lora-opencalm:2026.11.27 train --smoke     (published in the shared folder)
"""

from __future__ import annotations

import click

from ekiben.cli.commands._start import StartOptions, build_or_compare, named_image, start_image, start_options
from ekiben.cli.context import Context
from ekiben.cli.options import RecipeType, TaskCommand, TextType
from ekiben.run.app import app_command


@click.command("run", cls=TaskCommand, help=__doc__)
@click.argument("image", metavar="IMAGE", type=RecipeType())
@click.argument("argv", nargs=-1, metavar="[TASK [ARGS…]]", type=click.UNPROCESSED)
@click.option(
    "--app",
    metavar="NAME",
    type=TextType(),
    help="Run a SCIF app of the image (%apprun); the arguments after IMAGE are the app's.",
)
@start_options
@click.pass_obj
def command(context: Context, /, image: str, argv: tuple[str, ...], app: str | None, start: StartOptions) -> None:
    """Check the machine, then become the container runtime."""
    named = named_image(context, image, start)
    if app is not None:
        build_or_compare(context, named, start)
        start_image(context, named, app_command(app, argv), start, executes=True)
        return
    if argv:
        named.launch_of(argv[0])
    build_or_compare(context, named, start)
    start_image(context, named, argv, start, executes=False)
