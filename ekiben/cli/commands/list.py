"""List recipes and stored images.

\b
Example:
  ekiben list
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click

from ekiben.cli.context import Context
from ekiben.cli.options import Command, json_option
from ekiben.core.errors import EkibenError
from ekiben.spec.recipe import find_recipe, recipe_folders


@dataclass(frozen=True, slots=True)
class ListedImage:
    """``image`` is an image's id; None: it is not built."""

    recipe: str
    description: str
    image: str | None


@dataclass(frozen=True, slots=True)
class ListResult:
    """Recipes by name, then images of other recipes."""

    images: Sequence[ListedImage]

    def to_json(self) -> list[dict[str, Any]]:
        """Return the object that --json prints."""
        return [asdict(image) for image in self.images]

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of the text output."""
        width = max((len(image.recipe) for image in self.images), default=0)
        for image in self.images:
            yield f"{image.recipe:<{width}}  {(image.image or 'not built')[:19]:<19}  {image.description}"


@click.command("list", cls=Command, help=__doc__)
@json_option
@click.pass_obj
def command(context: Context, /) -> None:
    """Look at the recipes by name, and at the store."""
    stored = {name: ref["config"] for name, ref in context.store.images().items()}
    recipes = recipe_folders()
    images = [ListedImage(name, _description(name), stored.get(name)) for name in recipes]
    images += [ListedImage(name, "", image) for name, image in stored.items() if name not in recipes]
    context.print(ListResult(images))


def _description(name: str) -> str:
    """Return what a recipe says of itself; of one that is wrong, the reason: others are to be listed all the same."""
    try:
        return find_recipe(name).file.description
    except EkibenError as error:
        return str(error).splitlines()[0]
