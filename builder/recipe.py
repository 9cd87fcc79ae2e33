"""A recipe: which top layer, which stack, which tasks. A folder of recipes/, or a path to one elsewhere."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field
from pathlib import Path

from builder.errors import DefinitionError, UsageError, nearest
from builder.files import read_yaml

HOUSE = Path(__file__).resolve().parent.parent
_NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")  # what a Docker repository name may be
_TASK = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    """``runs_on``, in a job of a cluster: ``gpus``: a process for every GPU of every node; ``gpu``: one process; ``cpu``: one
    process, and no GPU is asked for."""

    entrypoint: str
    config: str | None = None
    help: str
    runs_on: str = "gpu"

    def __post_init__(self) -> None:
        if self.runs_on not in ("gpus", "gpu", "cpu"):
            raise ValueError(f"runs_on: gpus, gpu or cpu is wanted, not '{self.runs_on}'")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFile:
    name: str
    description: str
    stack: str
    layer: str
    tasks: dict[str, TaskFile]
    modules: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    test: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError("name: a recipe's name is lower-case letters, digits, '.', '_' and '-'")
        for task, about in self.tasks.items():
            if not _TASK.fullmatch(task):
                raise ValueError(f"tasks.{task}: a task is a command: letters, digits, '.', '_' and '-'")
            if "\n" in about.help:
                raise ValueError(f"tasks.{task}.help: one line is wanted")
        for name in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"environment: '{name}' is no name for a variable: letters, digits and '_'")


@dataclass(frozen=True, slots=True)
class Recipe:
    folder: Path
    file: RecipeFile

    @property
    def name(self) -> str:
        return self.file.name

    def image_name(self, stack: str | None = None) -> str:
        """What its image is called, in the store, as a file and as a Docker tag; another stack's own name comes behind."""
        return self.name if stack in (None, self.file.stack) else f"{self.name}-{stack}"

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
            if not _is_plain(inside):
                problems.append(f"{self.folder / 'recipe.yaml'}: {inside} is no path below {self.folder}; "
                                "keep the file there, and name it without '..' or a leading '/'")  # fmt: skip
            elif not path.resolve().is_file():
                problems.append(f"{self.folder / 'recipe.yaml'}: {inside} is named but {path} is not a file")
        if problems:
            raise DefinitionError("\n".join(problems))
        return wanted


def _is_plain(path: str) -> bool:
    return posixpath.normpath(path) == path and not path.startswith(("/", "../"))


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
