"""Make a recipe of your own in a new folder.

It has a task that runs on a CPU in a second, and a layer for the packages of its requirements.txt. From a Dockerfile,
its layers do what the Dockerfile says, and the files that it copies are in context/.

\b
Examples:
  ekiben init mine
  ekiben init experiments/mine --from huggingface
  ekiben init mine --from ./Dockerfile --build-arg VERSION=2
"""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from ekiben.cli.options import Command, NameType, PathType, TextType, bind_arguments, refuse_ignored
from ekiben.core.command_name import command_name
from ekiben.core.errors import UsageError
from ekiben.core.paths import PROJECT_ROOT
from ekiben.project.create import create_recipe
from ekiben.project.dockerfile import Conversion, convert, find_dockerfile


@click.command("init", cls=Command, help=__doc__)
@click.argument("folder", type=PathType(), metavar="DIR")
@click.option(
    "--from",
    "source",
    default="python",
    show_default=True,
    type=NameType(),
    metavar="LAYER|DOCKERFILE|FOLDER",
    help="The layer below the recipe's own: python, pytorch, huggingface, …; or a Dockerfile, or the folder with one.",
)
@click.option(
    "--build-arg",
    "arguments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set an ARG of the Dockerfile; may repeat.",
)
@click.option("--target", type=TextType(), metavar="STAGE", help="The stage of the Dockerfile that becomes the image.")
@click.option(
    "--stack", default="cu130", show_default=True, type=NameType(), metavar="STACK", help="The stack of versions."
)
def command(folder: Path, source: str, arguments: tuple[str, ...], target: str | None, stack: str) -> None:
    """Write the files, and print what to do next."""
    name = shlex.quote(str(folder))
    if (dockerfile := _dockerfile(source)) is not None:
        request = Conversion(
            dockerfile=dockerfile, stack=stack, arguments=bind_arguments(arguments), target=target or ""
        )
        written, notes = convert(folder, request)
        steps = [f"lock {name}", f"build {name}", f"run {name}"]
    else:
        refuse_ignored(f"is for a Dockerfile, and --from {source} is a layer", "arguments", "target")
        written, notes = create_recipe(folder, layer=source, stack=stack), []
        steps = [f"lock {name}", f"build {name}", f"run {name} train"]
    for path in written:
        click.echo(path)
    for note in notes:
        click.echo(f"note    {note}", err=True)
    for step in steps:
        click.echo(f"next    {command_name()} {step}", err=True)


def _dockerfile(source: str) -> Path | None:
    """Return the Dockerfile that --from names; None for a layer. Raises UsageError for a path to something else."""
    path = Path(source)
    dockerfile = find_dockerfile(path)
    is_path = "/" in source or path.is_file() or source in (".", "..")
    if dockerfile is None and is_path:
        raise UsageError(
            f"--from {source}: no Dockerfile" + (" in this folder" if path.is_dir() else " there"),
            hint="name the file; its folder is the build context",
        )
    is_layer = (PROJECT_ROOT / "images" / f"{source}.def").is_file()
    return None if is_layer and not is_path else dockerfile
