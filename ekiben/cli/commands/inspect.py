"""Show what an image or a SIF file is made of.

\b
Examples:
  ekiben inspect lora-opencalm
  ekiben inspect ./lora-opencalm.sif --json
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import click

from ekiben.cli.context import Context
from ekiben.cli.named import readable_image
from ekiben.cli.options import Command, RecipeType, json_option
from ekiben.inspect.describe import ImageDescription, SifDescription, describe
from ekiben.inspect.text import format_description


@dataclass(frozen=True, slots=True)
class InspectResult:
    """``image`` as describe() returns it."""

    image: ImageDescription | SifDescription

    def to_json(self) -> Mapping[str, Any]:
        """Return the object that --json prints."""
        return self.image

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of the text output."""
        yield format_description(self.image)


@click.command("inspect", cls=Command, help=__doc__)
@click.argument("image", metavar="IMAGE", type=RecipeType())
@json_option
@click.pass_obj
def command(context: Context, /, image: str) -> None:
    """Describe it."""
    context.print(InspectResult(describe(readable_image(context, image), context.store)))
