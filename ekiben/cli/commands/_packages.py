"""What `add` and `remove` share: their arguments, and how they start."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from ekiben.builder.build import Options
from ekiben.cli.context import Context
from ekiben.cli.options import Function, NameType, engine_option, include_option, refuse_ignored
from ekiben.core.command_name import command_name
from ekiben.core.errors import UsageError
from ekiben.core.printable import printable
from ekiben.project.add import ChangeOptions, change_debian
from ekiben.project.base import base_reader
from ekiben.project.lock import find_local_recipe
from ekiben.project.sources import SourceSettings, source_builder
from ekiben.spec.recipe import Recipe

Change = Callable[[Recipe, tuple[str, ...], ChangeOptions], Iterator[str]]


def package_options(function: Function) -> Function:
    """Add the arguments PACKAGE… [FOLDER] and the options of both commands."""
    decorators: list[Callable[[Any], Any]] = [
        click.argument("arguments", nargs=-1, required=True, metavar="PACKAGE… [FOLDER]", type=NameType()),
        click.option("--apt", is_flag=True, help="They are Debian packages, of the layer's `apt-get install` line."),
        click.option("--dry-run", is_flag=True, help="Print what would change, and change nothing."),
        click.option("--no-lock", is_flag=True, help="Edit the list, and do not lock."),
        click.option("--only-binary", is_flag=True, help="Refuse packages without a wheel."),
        engine_option("What builds the sources of packages without a wheel."),
        include_option(),
    ]
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def change_packages(context: Context, arguments: tuple[str, ...], change: Change, **options: Any) -> None:
    """Add or remove packages, and print what changed."""
    packages, recipe = _split(arguments, options["included"])
    is_dry = options["dry_run"]
    if options["apt"]:
        reason = "is for Python packages; a recipe's Debian packages are not locked"
        refuse_ignored(reason, "no_lock", "only_binary", "engine")
        removes = click.get_current_context().info_name == "remove"
        lines = change_debian(recipe, packages, removes=removes, options=ChangeOptions(is_dry=is_dry))
    else:
        engine = None if is_dry else (context.store, Options(engine=options["engine"]), context.progress)
        build, read = (source_builder(*engine), base_reader(*engine)) if engine else (None, None)
        settings = SourceSettings(build, context.store.downloads, options["only_binary"], read)
        lines = change(
            recipe, packages, ChangeOptions(is_dry=is_dry, is_locked=not options["no_lock"], settings=settings)
        )
    for line in lines:
        click.echo(printable(line))
    if is_dry:
        click.echo("nothing was changed: --dry-run", err=True)
    else:
        click.echo(
            f"next    {command_name()} build {'.' if len(packages) == len(arguments) else shlex.quote(arguments[-1])}",
            err=True,
        )


def _split(arguments: tuple[str, ...], included: tuple[Path, ...]) -> tuple[tuple[str, ...], Recipe]:
    """Return the packages, and the recipe: of the folder that the last word names, else of this folder.

    Raises UsageError.
    """
    *packages, last = arguments
    if recipe := find_local_recipe(last, included):
        if not packages:
            raise UsageError(f"{last} is the recipe, and no package is named")
        return tuple(packages), recipe
    if recipe := find_local_recipe(".", included):
        return arguments, recipe
    raise UsageError(
        "no recipe is in this folder: it has no recipe.yaml",
        hint=f"name the recipe's folder last: {command_name()} {click.get_current_context().info_name} {last} ./RECIPE",
    )
