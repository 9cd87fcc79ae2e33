"""A recipe: which top layer, which stack, which tasks. A folder of recipes/, or a path to one elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import field_validator

from builder.errors import DefinitionError, UsageError, nearest
from builder.files import Strict, read_yaml

HOUSE = Path(__file__).resolve().parent.parent
_NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")  # what a Docker repository name may be


class TaskFile(Strict):
    entrypoint: str
    config: str | None = None
    help: str


class RecipeFile(Strict):
    name: str
    description: str
    stack: str
    layer: str
    tasks: dict[str, TaskFile]
    modules: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    labels: dict[str, str] = {}
    test: str = ""

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("a recipe's name is lower-case letters, digits, '.', '_' and '-'")
        return name


@dataclass(frozen=True, slots=True)
class Recipe:
    folder: Path
    file: RecipeFile

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def image_folders(self) -> tuple[Path, ...]:
        """Where definitions and stacks are looked for, nearest first."""
        return (self.folder / "images", HOUSE / "images")

    def task(self, name: str) -> TaskFile:
        if name not in self.file.tasks:
            raise UsageError(f"recipe '{self.name}' has no task '{name}'." + nearest(name, self.file.tasks))
        return self.file.tasks[name]

    def members(self) -> dict[str, Path]:
        """What ships in the image: path below /opt/ekiben/recipe → the file. Errors: DefinitionError."""
        wanted = {"recipe.yaml": self.folder / "recipe.yaml"}
        problems = []
        scripts = sorted({task.entrypoint for task in self.file.tasks.values()} | set(self.file.modules))
        for script in scripts:
            places = [self.folder / "entrypoints" / script, HOUSE / "entrypoints" / script]
            wanted[f"entrypoints/{script}"] = next((place for place in places if place.is_file()), places[0])
        for file in sorted({task.config for task in self.file.tasks.values() if task.config} | set(self.file.data)):
            wanted[file] = self.folder / file
        for inside, path in wanted.items():
            if not path.resolve().is_file():
                problems.append(f"{self.folder / 'recipe.yaml'}: {inside} is named but {path} is not a file")
        if problems:
            raise DefinitionError("\n".join(problems))
        return wanted


def recipe_folders() -> dict[str, Path]:
    """The folder is the registry: every recipes/<name>/recipe.yaml of this repository."""
    return {path.parent.name: path.parent for path in sorted((HOUSE / "recipes").rglob("recipe.yaml"))}


def find_recipe(name: str) -> Recipe:
    """``name`` in recipes/, or a path to a recipe's folder (or its recipe.yaml). Errors: UsageError, DefinitionError."""
    if "/" in name or name in (".", ".."):
        folder = Path(name).resolve()
        folder = folder.parent if folder.name == "recipe.yaml" else folder
        if not (folder / "recipe.yaml").is_file():
            raise UsageError(f"{name}: no recipe.yaml there")
    else:
        known = recipe_folders()
        if name not in known:
            raise UsageError(
                f"no recipe '{name}'." + nearest(name, known), hint="a recipe elsewhere is given as a path"
            )
        folder = known[name]
    return Recipe(folder, read_yaml(folder / "recipe.yaml", RecipeFile))
