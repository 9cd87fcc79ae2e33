"""List recipes, stored images, published images.

Published images are those of the shared folder (--shared, EKIBEN_SHARED or `shared:` in config.yaml). Who published one
is the owner of its SIF there, who removed it the owner of the record of that.

\b
Examples:
  ekiben list
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from ekiben.cli.context import Context
from ekiben.cli.options import Command, json_option
from ekiben.core.command_name import command_name
from ekiben.core.errors import EkibenError
from ekiben.spec.recipe import find_recipe, recipe_folders

_SHOWN_REMOVALS = 10


@dataclass(frozen=True, slots=True)
class ListedImage:
    """``image`` is an image's id; None: it is not built."""

    recipe: str
    description: str
    image: str | None


@dataclass(frozen=True, slots=True)
class ListedVersion:
    """A published version, or one that was: ``state`` is "published", "removed", or why its record cannot be used.

    ``by`` published or removed it at ``time``; ``recorded_by``: who wrote its record again, "" where nobody else did.
    """

    name: str
    file: str
    description: str
    by: str
    time: str
    state: str
    recorded_by: str = ""


@dataclass(frozen=True, slots=True)
class ListResult:
    """Recipes by name, then images of other recipes; versions by image, the oldest first."""

    images: Sequence[ListedImage]
    versions: Sequence[ListedVersion] = ()
    shared: Path | None = None

    def to_json(self) -> list[dict[str, Any]]:
        """Return the object that --json prints."""
        return [*map(asdict, self.images), *map(asdict, self.versions)]

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of the text output."""
        removed = [item for item in self.versions if item.state == "removed"]
        shown = [item for item in self.versions if item.state != "removed"] + removed[-_SHOWN_REMOVALS:]
        names = [image.recipe for image in self.images] + [item.name for item in shown]
        width = max(map(len, names), default=0)
        for image in self.images:
            yield f"{image.recipe:<{width}}  {(image.image or 'not built')[:19]:<19}  {image.description}"
        if shown:
            yield f"\nin {self.shared}:"
        for item in shown:
            when = f"{'removed' if item.state == 'removed' else 'published'} {item.time[:10]} by {item.by}"
            note = "" if item.state in ("published", "removed") else f"  ({item.state})"
            note += f"  (record written again by {item.recorded_by})" if item.recorded_by else ""
            yield f"{item.name:<{width}}  {when}  {item.description}{note}".rstrip()
        if any(item.state not in ("published", "removed") for item in shown):
            yield f"\n`{command_name()} publish --repair {self.shared}` writes missing records again"


@click.command("list", cls=Command, help=__doc__)
@json_option
@click.pass_obj
def command(context: Context, /) -> None:
    """Look at the recipes by name, at the store, and at the shared folder."""
    stored = {name: ref["config"] for name, ref in context.store.images().items()}
    recipes = recipe_folders()
    images = [ListedImage(name, _description(name), stored.get(name)) for name in recipes]
    images += [ListedImage(name, "", image) for name, image in stored.items() if name not in recipes]
    shared = context.settings.shared
    context.print(ListResult(images, _versions(shared) if shared else [], shared))


def _versions(shared: Path) -> list[ListedVersion]:
    from ekiben.images.published import image_folders, read_records, removals, unrecorded_versions
    from ekiben.store.shared import open_shared

    listed = []
    for folder in image_folders(open_shared(shared).folder):
        listed += [
            ListedVersion(
                f"{item.name}:{item.version}",
                item.file,
                item.description,
                item.by,
                item.published,
                "published",
                item.recorded_by,
            )
            for item in read_records(folder)[0]
        ]
        listed += [
            ListedVersion(f"{item.name}:{item.version}", item.file, "", item.by, item.written, item.reason)
            for item in unrecorded_versions(folder)
        ]
        listed += [
            ListedVersion(_removed_name(item.file, folder.name), item.file, "", item.by, item.removed, "removed")
            for item in removals(folder)
        ]
    return listed


def _removed_name(file: str, image: str) -> str:
    return f"{image}:{file.removeprefix(f'{image}-').rpartition('-')[0]}"


def _description(name: str) -> str:
    """Return what a recipe says of itself; of one that is wrong, the reason: others are to be listed all the same."""
    try:
        return find_recipe(name).file.description
    except EkibenError as error:
        return str(error).splitlines()[0]
