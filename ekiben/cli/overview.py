"""What can be done here: printed when no command is given."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from ekiben.core.command_name import command_name
from ekiben.core.errors import EkibenError
from ekiben.core.printable import single_line
from ekiben.images import ImageOptions, find_image
from ekiben.spec.recipe import recipe_folders
from ekiben.spec.sums import REQUIREMENTS

_SHOWN = 5  # images that are named
_WAYS_TO_BUILD = {
    "plan RECIPE": "show what would be built, and why",
    "build RECIPE": "build it, verify it, and show how to run it",
}


def overview() -> Iterator[str]:
    """Yield a few lines: the recipes in this folder, and the next commands."""
    known, here = sorted(recipe_folders()), _recipes_in(Path())
    sifs = sorted(f"./{path.name}" for path in Path().glob("*.sif") if path.is_file())
    names = [*here, *sifs, *(name for name in known if name == "hello"), *known, "RECIPE"]
    shown = next(name for name in names if name == single_line(name))  # a line can be pasted into a shell
    if sifs:
        yield f"Images in this folder:  {_first(sifs)}"
    if here:
        yield f"Recipes in this folder: {', '.join(map(single_line, here))}"
    if known:
        yield f"Recipes by name:        {', '.join(known)}"
    yield ""
    lines = [
        *_ways_to_run(shown),
        *(_WAYS_TO_BUILD if shown not in sifs else {}).items(),
        ("doctor", "check what can be built and run on this machine"),
        ("--help", "list all commands"),
    ]
    commands = [arguments.replace("RECIPE", shlex.quote(shown)) for arguments, _ in lines]
    width = max(map(len, commands))
    for arguments, (_, purpose) in zip(commands, lines, strict=True):
        yield f"  {command_name()} {arguments.ljust(width)}   {purpose}"


def _ways_to_run(shown: str) -> Iterator[tuple[str, str]]:
    """Yield how an image that is here is run, and how a recipe here gets other versions."""
    with contextlib.suppress(EkibenError):  # a build prints the error
        image = find_image(shown, ImageOptions())
        tasks = list(image.tasks or ())
        if image.sif.is_file():
            yield f"run RECIPE{f' {tasks[0]}' if tasks else ''}", f"run a task of {single_line(str(image.sif))}"
            yield "shell RECIPE", "open a shell in it"
        if image.recipe and any((image.recipe.folder / name).is_file() for name in REQUIREMENTS):
            yield "lock RECIPE", "lock its requirements after an edit"


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(single_line, names[:_SHOWN])) + more


def _recipes_in(folder: Path) -> list[str]:
    """Name recipes as a command takes them: the folder itself, and folders in it."""
    names = [path.parent.name for path in sorted(folder.glob("*/recipe.yaml"))]
    return [*(["."] if (folder / "recipe.yaml").is_file() else []), *(f"./{name}" for name in names)]
