"""Write all sources of an image into one file.

With it, `build --offline` builds the image on a machine without a network.

\b
Examples:
  ekiben bundle lora-opencalm -o lora-opencalm.bundle
  ekiben bundle hello --include models/open-calm-3b
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ekiben.builder.build import BuildContext, Options, stored_image
from ekiben.bundle.write import SECTIONS, write_bundle
from ekiben.cli.context import Context
from ekiben.cli.options import (
    Command,
    OutputFile,
    RecipeOptions,
    RecipeType,
    engine_option,
    include_option,
    json_option,
    progress_option,
    recipe_options_with,
)
from ekiben.core.command_name import command_name
from ekiben.core.files import format_size
from ekiben.core.output import check_output_file


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleResult:
    """A bundle that was written. ``size`` in bytes; ``counts``: the files of each kind of source."""

    recipe: str
    file: Path
    size: int
    counts: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        return {"file": str(self.file), "size": self.size, **self.counts}

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of the text output."""
        counts = self.counts
        yield (
            f"{self.file}  {format_size(self.size)}: {counts['debs'] - 2} Debian packages, "
            f"{counts['wheels']} Python packages, {counts['include']} files included"
        )
        yield f"use it  {command_name()} build {self.recipe} --offline --bundle {shlex.quote(str(self.file))}"


@click.command("bundle", cls=Command, help=__doc__)
@click.argument("recipe", type=RecipeType())
@click.option("-o", "--output", type=OutputFile(), metavar="FILE", help="Write it here (default: ./RECIPE.bundle).")
@click.option("--compiler", is_flag=True, help="Add the sources of build stages, to compile for other GPUs there.")
@engine_option("What fetches the packages.")
@recipe_options_with(
    include_option(
        "Add a model or data set, a file or a folder; the recipe may use it, too. May repeat.",
    )
)
@progress_option
@json_option
@click.pass_obj
def command(
    context: Context, /, recipe: str, output: Path | None, compiler: bool, engine: str, recipe_options: RecipeOptions
) -> None:
    """Gather the sources of a stored image."""
    resolved = recipe_options.resolve(recipe)
    image = stored_image(resolved, context.store)
    file = check_output_file(output or Path(f"{image.name}.bundle"))
    options = Options(engine=engine, mirror=recipe_options.mirror)
    build_context = BuildContext(resolved, context.store, options, context.progress)
    index = write_bundle(build_context, image, file, snapshots=recipe_options.included, compiler=compiler)
    counts = {section: sum(name.startswith(f"{section}/") for name in index.files) for section in SECTIONS}
    context.print(BundleResult(recipe=resolved.cli_args, file=file, size=file.stat().st_size, counts=counts))
