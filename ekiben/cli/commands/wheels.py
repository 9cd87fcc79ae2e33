"""List, export and import compiled wheels.

\b
Examples:
  ekiben wheels list
  ekiben wheels export flash-attn -o /media/stick
  ekiben wheels import mine /media/stick/flash_attn-2.8.3-cp311-cp311-linux_x86_64.whl
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from ekiben.builder.build import BuildContext, Options
from ekiben.builder.build import import_wheel as build_with_wheel
from ekiben.builder.wheels import export_wheel as write_wheel
from ekiben.builder.wheels import find_wheel
from ekiben.cli.context import Context
from ekiben.cli.options import (
    CommandGroup,
    NameType,
    OutputFolder,
    PathType,
    RecipeOptions,
    RecipeType,
    TextType,
    engine_option,
    json_option,
    recipe_options,
)
from ekiben.core.command_name import command_name
from ekiben.core.files import format_size
from ekiben.store import StoredResult


@dataclass(frozen=True, slots=True)
class WheelsResult:
    """The compiled wheels of a store."""

    wheels: Sequence[StoredResult]

    def to_json(self) -> list[dict[str, Any]]:
        """Return the object that --json prints."""
        return [asdict(wheel) for wheel in self.wheels]

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of the text output."""
        for item in self.wheels:
            origin = "" if item.origin == "compiled" else f"{item.origin}, "
            seconds = f"compiled in {item.seconds:.0f} s" if item.seconds else "compiled elsewhere"
            yield (
                f"{item.wheel:<12}  {item.key[:12]}  torch {item.input_text('torch')}  CUDA {item.input_text('cuda')} "
                f" Python {item.input_text('python')}  for {' '.join(item.capabilities)}  {format_size(item.size)} "
                f" {origin}{seconds}"
            )


@click.group("wheels", cls=CommandGroup, help=__doc__)
def command() -> None:
    """Hold the commands below together."""


@command.command("list")
@json_option
@click.pass_obj
def list_wheels(context: Context, /) -> None:
    """List the wheels.

    A line names the package, what it is compiled for, its size, and what compiling took.

    \b
    Example:
      ekiben wheels list
    """
    wheels = [item for item in context.store.results() if item.wheel]
    context.print(WheelsResult(wheels))
    if not wheels and not context.json:
        context.log(f"no compiled wheels here; `{command_name()} build` compiles what a recipe needs")


@command.command("export")
@click.argument("name", metavar="PACKAGE|KEY", type=NameType())
@click.option("-o", "--output", type=OutputFolder(), metavar="DIR", default=".", help="A folder (default: this one).")
@click.pass_obj
def export_wheel(context: Context, /, name: str, output: Path) -> None:
    """Write a wheel for a machine without a compiler.

    Keep it together with its record, <wheel>.json.

    \b
    Example:
      ekiben wheels export deepspeed -o /media/stick
    """
    click.echo(write_wheel(context.store, find_wheel(context.store, name), output))


@command.command("import")
@click.argument("recipe", type=RecipeType())
@click.argument("wheel", metavar="FILE.whl", type=PathType())
@click.option("--sha256", type=TextType(), metavar="HASH", help="Refuse a file with another hash.")
@engine_option("What runs the layer's %test.")
@recipe_options
@click.pass_obj
def import_wheel(
    context: Context, /, recipe: str, wheel: Path, sha256: str | None, engine: str, recipe_options: RecipeOptions
) -> None:
    """Import a wheel that was compiled elsewhere.

    It is tested in the layer of RECIPE that would compile it, then stored.

    \b
    Examples:
      ekiben wheels import mine /media/stick/deepspeed-0.19.8-cp311-cp311-linux_x86_64.whl
      ekiben wheels import mine apex-0.1-cp311-cp311-linux_x86_64.whl --sha256 4f2a…
    """
    resolved = recipe_options.resolve(recipe)
    options = Options(engine=engine, mirror=recipe_options.mirror)
    stored = build_with_wheel(BuildContext(resolved, context.store, options, context.progress), wheel, sha256)
    click.echo(
        f"{stored.wheel} {stored.key[:12]}: verified and stored; the next build of {resolved.recipe.name} uses it"
    )
