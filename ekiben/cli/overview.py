"""What can be done here: printed when no command is given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ekiben.core.command_name import command_name
from ekiben.spec.recipe import recipe_folders


def overview() -> Iterator[str]:
    """Yield a few lines: the recipes that are here, and the commands to go on with."""
    known, here = sorted(recipe_folders()), _recipes_in(Path())
    shown = here[0] if here else "hello" if "hello" in known else (known or ["RECIPE"])[0]
    if here:
        yield f"Recipes in this folder: {', '.join(here)}"
    if known:
        yield f"Recipes by name:        {', '.join(known)}"
    yield ""
    width = len(f"{command_name()} build {shown}")
    for arguments, purpose in (
        (f"plan {shown}", "show what would be built, and why"),
        (f"build {shown}", "build it, verify it, and show how to run it"),
        ("doctor", "check what can be built and run on this machine"),
        ("--help", "list all commands"),
    ):
        yield f"  {command_name()} {arguments}".ljust(width + 2) + f"   {purpose}"


def _recipes_in(folder: Path) -> list[str]:
    """Name recipes as a command takes them: the folder itself, and folders in it."""
    names = [path.parent.name for path in sorted(folder.glob("*/recipe.yaml"))]
    return [*(["."] if (folder / "recipe.yaml").is_file() else []), *(f"./{name}" for name in names)]
