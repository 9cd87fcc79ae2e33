"""Make a recipe of your own, in a new folder or of a project.

In a new folder it has a task that runs on a CPU in a second, and a layer for the packages of its requirements.txt. In
the folder of a project the tasks are its scripts: recipe.yaml, a layer and a page are added, and nothing is changed.
From a Dockerfile, its layers do what the Dockerfile says, and the files that it copies are in context/. From
a definition file: that file, and what its %files copies.

\b
Examples:
  ekiben init mine
  ekiben init experiments/mine --from huggingface
  ekiben init . --dry-run                 of the project in this folder
  ekiben init mine --from ./Dockerfile --build-arg VERSION=2
  ekiben init mine --from solver.def
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

import click

from ekiben.cli.options import Command, NameType, PathType, TextType, bind_arguments, refuse_ignored
from ekiben.core.atomic import is_vacant
from ekiben.core.command_name import command_name
from ekiben.core.errors import UsageError
from ekiben.core.paths import PROJECT_ROOT
from ekiben.project.create import create_recipe
from ekiben.project.dockerfile import Conversion, convert, find_dockerfile
from ekiben.project.existing import ProjectRecipe, plan_recipe, write_recipe
from ekiben.project.from_definition import create_from_definition


@click.command("init", cls=Command, help=__doc__)
@click.argument("folder", type=PathType(), metavar="[DIR]", default=".")
@click.option(
    "--from",
    "source",
    type=NameType(),
    metavar="LAYER|DOCKERFILE|FOLDER|FILE.def",
    help=(
        "The layer below the recipe's own: python, pytorch, huggingface, …; or a Dockerfile, the folder with one, or a"
        " definition file. Default: python; of a project, the layer that has what it imports."
    ),
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
@click.option("--name", type=NameType(), metavar="NAME", help="The name of a project's recipe. Default: its folder's.")
@click.option("--dry-run", is_flag=True, help="Print what would be written into a project, and write nothing.")
def command(
    folder: Path,
    source: str | None,
    arguments: tuple[str, ...],
    target: str | None,
    stack: str,
    name: str | None,
    dry_run: bool,
) -> None:
    """Write the files, and print what to do next."""
    definition = Path(source) if source and source.endswith(".def") else None
    dockerfile = _dockerfile(source) if source and not definition else None
    if dockerfile is None:
        below = f"--from {source} is none" if source else "--from names none"
        refuse_ignored(f"is for a Dockerfile, and {below}", "arguments", "target")
    if not dockerfile and not definition and folder.is_dir() and not is_vacant(folder):
        _of_project(plan_recipe(folder, name=name or "", layer=source or "", stack=stack), folder, dry_run=dry_run)
        return
    refuse_ignored("is for a folder with a project, of which a recipe is made there", "name", "dry_run")
    shown = shlex.quote(str(folder))
    notes: list[str] = []
    steps = [f"lock {shown}", f"build {shown}", f"run {shown}"]
    if definition:
        written = create_from_definition(folder, definition, stack=stack)
    elif dockerfile:
        request = Conversion(
            dockerfile=dockerfile, stack=stack, arguments=bind_arguments(arguments), target=target or ""
        )
        written, notes = convert(folder, request)
    else:
        written = create_recipe(folder, layer=source or "python", stack=stack)
        steps[-1] += " train"
    _report([str(path) for path in written], notes, steps)


def _of_project(planned: ProjectRecipe, folder: Path, *, dry_run: bool) -> None:
    """Write the files of a project's recipe, or print what is in them."""
    if dry_run:
        for path, text in planned.texts.items():
            click.echo(f"{path}:")
            click.echo("".join(f"    {line}\n" for line in text.splitlines()))
    else:
        write_recipe(planned)
    name = shlex.quote(str(folder) if "/" in str(folder) or str(folder) in (".", "..") else f"./{folder}")
    steps = [*([] if planned.is_locked else [f"lock {name}"]), f"build {name}", f"run {name} {planned.task}"]
    _report([] if dry_run else [str(path) for path in planned.texts], planned.notes, [] if dry_run else steps)


def _report(written: Iterable[str], notes: Iterable[str], steps: Iterable[str]) -> None:
    for line in written:
        click.echo(line)
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
