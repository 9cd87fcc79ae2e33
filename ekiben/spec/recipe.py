"""A recipe: which top layer, which stack, which tasks.

A folder of recipes/ or of a folder that config.yaml names, or a path.
"""

from __future__ import annotations

import functools
import os
import posixpath
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ekiben.core.checked import NAME, TASK, Fields, check_variables, read_regular
from ekiben.core.decisions import is_logging, log_decision
from ekiben.core.environment import host_arch
from ekiben.core.errors import DefinitionError, UsageError, nearest
from ekiben.core.files import parse_yaml, read_yaml, tree_paths
from ekiben.core.paths import PROJECT_ROOT
from ekiben.core.printable import single_line
from ekiben.core.settings import read_settings
from ekiben.spec.container import ContainerConfig
from ekiben.spec.source_folders import SourceFolders, follow, included_paths
from ekiben.spec.task_command import parse_command, search_folders

LAUNCH = ("per-gpu", "single", "cpu")
_FORMER_LAUNCH = {"gpus": "per-gpu", "gpu": "single", "cpu": "cpu"}  # values of runs_on
LIBRARY = "ekiben_tasks"  # the tasks' library, a package in entrypoints/
# Start a node's processes, for the library and for jobs.
LAUNCHER = ("launch_node.py", "launch_alone.py", "launch_group.py", "launch_network.py")
_LIBRARY_IMPORT = re.compile(rb"^\s*(?:from|import)\s+" + LIBRARY.encode() + rb"\b", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    """``launch``, in a job of a cluster: ``per-gpu``: a process for every GPU of every node; ``single``: one process;
    ``cpu``: one process, and no GPU is requested. ``runs_on`` is its former name, with ``gpus``, ``gpu`` and
    ``cpu``. It has an ``entrypoint`` of entrypoints/, or a ``command``."""

    entrypoint: str = ""
    command: str = ""
    config: str | None = None
    help: str
    launch: str = ""
    runs_on: str | None = None

    def __post_init__(self) -> None:
        if self.runs_on is not None and (self.launch or self.runs_on not in _FORMER_LAUNCH):
            raise ValueError(f"runs_on: is the former name of launch; write launch: {', '.join(LAUNCH)}")
        if bool(self.entrypoint) == bool(self.command):
            raise ValueError(
                "write entrypoint: with a script of entrypoints/, or command: with a program, and not both"
            )
        if self.command and self.config:
            raise ValueError(f"config: is for an entrypoint; write it into the command, as --config {self.config}")
        object.__setattr__(self, "launch", self.launch or _FORMER_LAUNCH.get(self.runs_on or "", "single"))
        if self.launch not in LAUNCH:
            raise ValueError(f"launch: should be {', '.join(LAUNCH[:-1])} or {LAUNCH[-1]} (found: '{self.launch}')")
        if self.command:
            parse_command(self.command, self.launch)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFile:
    """The content of a recipe.yaml."""

    name: str
    description: str
    stack: str
    layer: str
    tasks: dict[str, TaskFile]
    default_task: str = ""
    modules: tuple[str, ...] | None = None  # a former key: its error tells the replacement
    code: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    docker: ContainerConfig | None = None
    test: str = ""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError("name: a recipe's name is lower-case letters, digits, '.', '_' and '-'")
        if self.modules is not None:
            raise ValueError(
                "modules: is no longer a key of a recipe; delete it. The library of the tasks, ekiben_tasks, and "
                "the recipe's own entrypoints/ ship complete"
            )
        for task, task_file in self.tasks.items():
            if not TASK.fullmatch(task):
                raise ValueError(f"tasks.{task}: a task is a command: letters, digits, '.', '_' and '-'")
            if "\n" in task_file.help:
                raise ValueError(f"tasks.{task}.help: should be one line")
        if self.default_task and self.default_task not in self.tasks:
            raise ValueError(
                f"default_task: there is no task '{self.default_task}'." + nearest(self.default_task, self.tasks)
            )
        if self.docker and self.docker.entrypoint and self.tasks:
            raise ValueError(
                "docker.entrypoint: `docker run IMAGE TASK` would give the task to this program; leave out the"
                " entrypoint, or the tasks"
            )
        check_variables(self.environment)
        for key, paths in (("code", self.code), ("data", self.data)):
            if "." in paths:
                raise ValueError(f"{key}: '.' would be all of the folder; name the files and folders in it")


@dataclass(frozen=True, slots=True)
class ShippedRecipe:
    """The recipe.yaml in an image: keys of a later version are ignored."""

    name: str
    description: str
    tasks: Mapping[str, ShippedTask]
    stack: str = ""
    docker: ContainerConfig | None = None

    @classmethod
    def parse(cls, data: bytes) -> ShippedRecipe:
        """Parse the fields. Raises ValueError for a wrong one."""
        fields = Fields.of(parse_yaml(data))
        return cls(
            fields.name("name"),
            fields.text("description", ""),
            {
                task: ShippedTask.parse(Fields.of(value, f"tasks.{task}"))
                for task, value in fields.tasks("tasks").items()
            },
            fields.text("stack", ""),
            ContainerConfig.parse(fields.object("docker")) if "docker" in fields else None,
        )


@dataclass(frozen=True, slots=True)
class ShippedTask:
    """A task with the files it needs in the image; ``launch`` as in TaskFile. One with a command has no entrypoint."""

    entrypoint: str
    help: str
    launch: str

    @classmethod
    def parse(cls, fields: Fields) -> ShippedTask:
        """Parse the fields. Raises ValueError for a wrong one."""
        launch = fields.text("launch", "") or _FORMER_LAUNCH.get(fields.text("runs_on", ""), "single")
        entrypoint = "" if fields.text("command", "") else fields.text("entrypoint")
        return cls(entrypoint, fields.text("help", ""), launch if launch in LAUNCH else "single")


@dataclass(frozen=True)  # no slots: cached_property
class Recipe:
    """A recipe's folder and what its recipe.yaml holds.

    ``layers``: those added to the recipe's, in this order, in an image of another name. ``added_layer``: one
    more, at the top, where the recipe does not have it anyway. ``included``: files and folders elsewhere that it
    may use.
    """

    folder: Path
    file: RecipeFile
    added_layer: str | None = None
    layers: tuple[str, ...] = ()
    included: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """Return the recipe's name; with added layers, RECIPE-LAYER."""
        return "-".join([self.file.name, *self.layers, *([self.added_layer] if self.added_layer else [])])

    def cli_args(self, stack: str | None = None, arch: str | None = None) -> str:
        """Return how a command line names the recipe, by its folder where its name does not find it, with the layers
        added to it, another stack, another architecture than this host's, and included paths."""
        other = [f"--stack {stack}"] if stack not in (None, self.file.stack) else []
        other += [f"--arch {arch}"] if arch not in (None, host_arch()) else []
        folders = [folder.resolve() for folder in _folders_by_name().get(self.folder.name, [])]
        name = self.folder.name if folders == [self.folder.resolve()] else shlex.quote(str(self.folder))
        other += [f"--include {shlex.quote(str(path))}" for path in self.included]
        return " ".join([name, *(f"--layer {layer}" for layer in self.layers), *other])

    def image_name(self, stack: str | None = None, arch: str | None = None) -> str:
        """Return the image's name in the store, as a file and as a Docker tag.

        Another stack's name is appended, and an architecture (default: this host's) other than amd64.
        """
        name = self.name if stack in (None, self.file.stack) else f"{self.name}-{stack}"
        return name if (arch or host_arch()) == "amd64" else f"{name}-{arch or host_arch()}"

    @property
    def image_folders(self) -> tuple[Path, ...]:
        """Return the folders that are searched for definitions and stacks, nearest first."""
        return (self.folder / "images", PROJECT_ROOT / "images")

    @functools.cached_property
    def sources(self) -> SourceFolders:
        """Return the folders in which its files may lie."""
        return SourceFolders(self.folder, self.included)

    def task(self, name: str) -> TaskFile:
        """Return the task of that name. Raises UsageError when there is none."""
        if name not in self.file.tasks:
            raise UsageError(f"recipe '{self.name}' has no task '{name}'." + nearest(name, self.file.tasks))
        return self.file.tasks[name]

    @property
    def search_folders(self) -> list[str]:
        """Return the folders below the recipe's from which its commands import modules; "" is the recipe's."""
        code = self.file.code
        return search_folders(code, [path for path in code if _is_file(self.folder / path / "__init__.py")])

    def members(self) -> dict[str, Path]:
        """Return the files that ship in the image, by path below /opt/ekiben/recipe. Raises DefinitionError."""
        files = {"recipe.yaml": self.folder / "recipe.yaml", **self._scripts()}
        problems = []
        configs = {task.config for task in self.file.tasks.values() if task.config}
        for file in sorted({*configs, *self.file.data, *self.file.code}):
            tree = _tree(self.folder / file) if file not in configs and _is_plain(file) else {}
            files |= {f"{file}/{name}": path for name, path in tree.items()} or {file: self.folder / file}
        for inside, path in files.items():
            if not _is_plain(inside):
                problems.append(
                    f"{self.folder / 'recipe.yaml'}: {inside} is not a path below {self.folder}; "
                    "keep the file there, and name it without '..' or a leading '/'"
                )
            elif not _is_file(path):
                problems.append(f"{self.folder / 'recipe.yaml'}: {inside} is named but {path} is {_defect(path)}")
        if problems:
            raise DefinitionError("\n".join(problems))
        for path in files.values():
            self.sources.check_file(path)
        return files

    def _scripts(self) -> dict[str, Path]:
        """Return all of the recipe's entrypoints/, the tasks' scripts, and the tasks' library where one uses it."""
        scripts = {f"entrypoints/{inside}": path for inside, path in _tree(self.folder / "entrypoints").items()}
        uses_library = any(self._imports_library(path) for path in scripts.values() if path.suffix == ".py")
        tasks = self.file.tasks.values()
        if any(task.command and task.launch == "per-gpu" for task in tasks):
            scripts |= {f"entrypoints/{name}": PROJECT_ROOT / "entrypoints" / name for name in LAUNCHER}
        for script in sorted({task.entrypoint for task in tasks if task.entrypoint}):
            ours, shipped = self.folder / "entrypoints" / script, PROJECT_ROOT / "entrypoints" / script
            if _is_file(ours) or not _is_file(shipped):
                scripts[f"entrypoints/{script}"] = ours
            else:
                scripts[f"entrypoints/{script}"] = shipped
                uses_library = True
        if uses_library:
            library = {
                f"{LIBRARY}/{inside}": path
                for inside, path in _tree(PROJECT_ROOT / "entrypoints" / LIBRARY).items()
                if path.suffix == ".py"
            }
            library |= {name: PROJECT_ROOT / "entrypoints" / name for name in LAUNCHER}
            scripts = {f"entrypoints/{inside}": path for inside, path in library.items()} | scripts
        return scripts

    def _imports_library(self, path: Path) -> bool:
        """Return whether a script imports the tasks' library. Raises DefinitionError when it cannot be read."""
        self.sources.check_file(path)
        try:
            return _LIBRARY_IMPORT.search(read_regular(path, follow=True)) is not None
        except (OSError, ValueError) as error:
            raise DefinitionError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _tree(folder: Path) -> dict[str, Path]:
    """Path below ``folder`` → the file, but for bytecode and for hidden files (of editors, notebooks, desktops)."""
    paths = tree_paths(folder) if folder.is_dir() else []
    files = {path.relative_to(folder): path for path in paths if path.is_file()}
    return {
        inside.as_posix(): path
        for inside, path in files.items()
        if not any(name == "__pycache__" or name.startswith(".") for name in inside.parts)
    }


def _is_file(path: Path) -> bool:
    """Also of a name that no file can have."""
    try:
        return path.resolve().is_file()
    except (OSError, RuntimeError, ValueError):  # too long, a circle of links, a NUL
        return False


def _defect(path: Path) -> str:
    return "a folder without files" if path.is_dir() else "not a file"


def _is_plain(path: str) -> bool:
    return posixpath.normpath(path) == path and not path.startswith(("/", "../"))


def recipe_folders() -> dict[str, Path]:
    """Return every recipe by name: of this project, then of the folders that config.yaml names."""
    return {name: folders[0] for name, folders in sorted(_folders_by_name().items())}


def _folders_by_name() -> dict[str, list[Path]]:
    known: dict[str, list[Path]] = {}
    for root in (PROJECT_ROOT / "recipes", *read_settings(os.environ).recipes):
        for path in sorted(root.rglob("recipe.yaml")):
            folders = known.setdefault(path.parent.name, [])
            if path.parent.resolve() not in [folder.resolve() for folder in folders]:
                folders.append(path.parent)
    return known


def find_recipe(name: str, included: Iterable[Path] = ()) -> Recipe:
    """Find ``name`` among recipe_folders(), else as a folder here, or take it as the path of a recipe's folder (or of
    its recipe.yaml).

    ``included``: files and folders elsewhere that it may use. Raises UsageError when there is none, or several of one
    name, or nothing to include; DefinitionError when it is not a recipe.
    """
    if "/" in name or name in (".", ".."):
        folder, reason = follow(Path(name)), "named by its path"
        folder = folder.parent if folder.name == "recipe.yaml" else folder
        if not (folder / "recipe.yaml").is_file():
            hint = "make a recipe of it: init NAME --from FILE.def" if folder.suffix == ".def" else None
            raise UsageError(f"{single_line(name)}: no recipe.yaml there", hint=hint)
    else:
        known = _folders_by_name()
        if name not in known and (Path(name) / "recipe.yaml").is_file():
            return find_recipe(f"./{name}", included)
        if name not in known:
            gone = [folder for folder in read_settings(os.environ).recipes if not folder.is_dir()]
            hint = "a recipe elsewhere is given as a path"
            hint += (
                f"; recipes: in config.yaml names {', '.join(map(str, gone))}: there is no such folder" if gone else ""
            )
            raise UsageError(f"no recipe '{single_line(name)}'." + nearest(name, known), hint=hint)
        if len(known[name]) > 1:
            folders = ", ".join(map(str, known[name]))
            raise UsageError(f"there are several recipes '{name}': {folders}", hint="name one of them by its path")
        folder, reason = known[name][0], _folder_source(known[name][0])
        if (Path(name) / "recipe.yaml").is_file() and follow(Path(name)) != follow(folder):
            _warn(f"{name} is the recipe in {folder}; the one in this folder is ./{name}")
    log_decision(f"recipe {name}", folder, reason)
    recipe = read_recipe(folder, included)
    for name, task in recipe.file.tasks.items():
        if task.runs_on is not None:
            _warn(
                f"{folder / 'recipe.yaml'}: tasks.{name}: write launch: {task.launch} for runs_on: {task.runs_on}, "
                "its former name, which the next release no longer reads"
            )
    return recipe


def read_recipe(folder: Path, included: Iterable[Path] = ()) -> Recipe:
    """Read the recipe in ``folder``. Raises UsageError, DefinitionError."""
    sources = SourceFolders(folder, included_paths(included))
    sources.check(folder / "recipe.yaml")
    return Recipe(folder, read_yaml(folder / "recipe.yaml", RecipeFile), included=sources.included)


def _folder_source(folder: Path) -> str:
    """Return which setting makes the recipe in ``folder`` known by its name; for -v."""
    if not is_logging():
        return ""
    settings = read_settings(os.environ)
    is_configured = any(folder.is_relative_to(root) for root in settings.recipes)
    return f"in a folder of recipes, from {settings.sources['recipes']}" if is_configured else "a recipe of Ekiben"


@functools.cache
def _warn(line: str) -> None:
    """Print a warning once."""
    sys.stderr.write(f"warning: {line}\n")
