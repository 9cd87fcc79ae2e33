"""Compare two images: layers, packages, files.

Also what differs in their environment, labels and tasks.

\b
Examples:
  ekiben diff lora-opencalm lora-opencalm-cu124
  ekiben diff last-year.sif ./lora-opencalm.sif --json
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import click

from ekiben.cli.context import Context
from ekiben.cli.named import readable_image
from ekiben.cli.options import Command, RecipeType, json_option
from ekiben.inspect.diff import ImageDiff, compare
from ekiben.inspect.image_reader import open_image
from ekiben.inspect.text import format_diff


@dataclass(frozen=True, slots=True)
class DiffResult:
    """``differences`` as compare() returns them."""

    differences: ImageDiff

    def to_json(self) -> Mapping[str, Any]:
        """Return the object that --json prints."""
        return self.differences

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of the text output."""
        yield format_diff(self.differences)


@click.command("diff", cls=Command, help=__doc__)
@click.argument("before", metavar="IMAGE", type=RecipeType())
@click.argument("after", metavar="IMAGE", type=RecipeType())
@json_option
@click.pass_obj
def command(context: Context, /, before: str, after: str) -> None:
    """Open both, and compare them."""
    names = [readable_image(context, name) for name in (before, after)]
    with open_image(names[0], context.store) as one, open_image(names[1], context.store) as other:
        differences = compare(one, other)
    context.print(DiffResult(differences))
