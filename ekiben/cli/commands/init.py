"""Make a recipe of your own, or of a project.

In a new folder it has a task that runs on a CPU in a second, and a layer for the packages of its requirements.txt. In
the folder of a project the tasks are its scripts: recipe.yaml, a layer and a page are added, and nothing is changed.
From a Dockerfile, its layers do what the Dockerfile says, and the files that it copies are in context/. From
a definition file: that file, and what its %files copies. On an image of others, its layer adds what that image's Python
lacks.

\b
Examples:
  ekiben init mine
  ekiben init experiments/mine --from huggingface
  ekiben init . --dry-run                 of the project in this folder
  ekiben init mine --from ./Dockerfile --build-arg VERSION=2
  ekiben init mine --from solver.def
  ekiben init mine --from docker://nvcr.io/nvidia/pytorch:25.10-py3
  ekiben init mine --from ./base.sif --dry-run
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import click

from ekiben.builder.build import Options
from ekiben.cli.context import Context
from ekiben.cli.options import Command, NameType, PathType, TextType, bind_arguments, refuse_ignored
from ekiben.core.atomic import is_vacant
from ekiben.core.command_name import command_name
from ekiben.core.errors import UsageError
from ekiben.core.paths import PROJECT_ROOT
from ekiben.core.printable import printable
from ekiben.project.base import base_reader
from ekiben.project.create import create_recipe
from ekiben.project.dockerfile import Conversion, convert, find_dockerfile
from ekiben.project.existing import ProjectRecipe, plan_recipe, write_recipe
from ekiben.project.from_definition import create_from_definition
from ekiben.project.on_base import BaseRequest, create_on_base, find_base_request
from ekiben.project.shipped import shipped_tasks


@click.command("init", cls=Command, help=__doc__)
@click.argument("folder", type=PathType(), metavar="[DIR]", default=".")
@click.option(
    "--from",
    "source",
    type=NameType(),
    metavar="LAYER|IMAGE|DOCKERFILE|FOLDER|FILE.def",
    help=(
        "The layer below the recipe's own: python, pytorch, huggingface, …; or an image as docker://HOST/NAME:TAG, a"
        " SIF, an OCI folder or archive; or a Dockerfile, the folder with one, or a definition file. Default: python;"
        " of a project, the layer that has what it imports."
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
@click.option(
    "--recipe",
    type=NameType(),
    metavar="NAME",
    help="Take the tasks of a recipe of Ekiben's, as hello or lora-opencalm; on an image only.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print what would be written into a project, or on an image, and write nothing."
)
@click.pass_obj
def command(
    context: Context,
    /,
    folder: Path,
    source: str | None,
    arguments: tuple[str, ...],
    target: str | None,
    stack: str,
    name: str | None,
    recipe: str | None,
    dry_run: bool,
) -> None:
    """Write the files, and print what to do next."""
    if source and (base := find_base_request(source, stack)) is not None:
        refuse_ignored(f"is for a Dockerfile, and --from {source} is an image", "arguments", "target")
        refuse_ignored(f"is for a project, and --from {source} is an image", "name")
        tasks = shipped_tasks(recipe, stack) if recipe else None
        _on_base(context, folder, replace(base, is_dry=dry_run, tasks=tasks))
        return
    refuse_ignored("is for an image, and " + (f"--from {source} is none" if source else "--from names none"), "recipe")
    definition = Path(source) if source and source.endswith(".def") else None
    dockerfile = _dockerfile(source) if source and not definition else None
    if dockerfile is None:
        below = f"--from {source} is none" if source else "--from names none"
        refuse_ignored(f"is for a Dockerfile, and {below}", "arguments", "target")
    if not dockerfile and not definition and folder.is_dir() and not is_vacant(folder):
        _of_project(plan_recipe(folder, name=name or "", layer=source or "", stack=stack), folder, dry_run=dry_run)
        return
    refuse_ignored("is for a folder with a project, of which a recipe is made there", "name")
    refuse_ignored("is for a folder with a project, of which a recipe is made there, or for an image", "dry_run")
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
        _show(planned.texts)
    else:
        write_recipe(planned)
    name = shlex.quote(str(folder) if "/" in str(folder) or str(folder) in (".", "..") else f"./{folder}")
    steps = [*([] if planned.is_locked else [f"lock {name}"]), f"build {name}", f"run {name} {planned.task}"]
    _report([] if dry_run else [str(path) for path in planned.texts], planned.notes, [] if dry_run else steps)


def _on_base(context: Context, folder: Path, request: BaseRequest) -> None:
    """Write the files of a recipe on an image of others, or print what is in them."""
    created = create_on_base(folder, request, base_reader(context.store, Options(), context.progress))
    if request.is_dry:
        _show(created.texts)
    name = " ".join(filter(None, [shlex.quote(str(folder)), request.include_option]))
    task = request.tasks.task if request.tasks else "train"
    steps = [f"lock {name}", f"build {name}", f"run {name} {task}"]
    written = [] if request.is_dry else [str(path) for path in created.texts]
    _report(written, map(printable, created.notes), [] if request.is_dry else steps)


def _show(texts: Mapping[Path, str]) -> None:
    for path, text in texts.items():
        click.echo(f"{path}:\n{printable(textwrap.indent(text, '    '))}")


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
