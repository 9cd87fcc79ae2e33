"""A recipe in a folder of its own, and the lock of its packages."""

from __future__ import annotations

from pathlib import Path

from ekiben.project.lock import find_local_recipe, lock_recipe
from ekiben.spec.recipe import Recipe


def recipe_in(folder: Path) -> Recipe:
    recipe = find_local_recipe(str(folder))
    assert recipe is not None
    return recipe


def lock(folder: Path, requirements: str | None = None, *, check: bool = False, keep: bool = False) -> list[str]:
    if requirements is not None:
        (folder / "requirements.txt").write_text(requirements)
    return list(lock_recipe(recipe_in(folder), check=check, keep=keep))
