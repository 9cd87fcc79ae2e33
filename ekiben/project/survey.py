"""Find what a project of Python has to run: scripts, packages, console scripts, requirements. Nothing of it is run."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ekiben.core.checked import TASK, read_regular
from ekiben.core.errors import UsageError
from ekiben.core.files import format_size

_MAX_FILE, _MAX_FILES, _MAX_FOLDER = 1 << 20, 2000, 20 << 20  # bytes, files, bytes
_LEFT_OUT = {"tests", "test", "docs", "build", "dist", "venv", "env", "node_modules", "images", "entrypoints", "wandb"}
_NOT_RUN = re.compile(r"(setup|conftest|noxfile|tasks|test_.*|.*_test|__init__|test)\.py")
# Names of scripts below the first folder that are started, and not only imported.
_STARTED = re.compile(
    r"(pre)?train\w*|finetune\w*|main|run\w*|prepare\w*|preprocess\w*|eval\w*|sample|generate|infer\w*|test|export"
)
_DISTRIBUTED = re.compile(
    r"torch\.distributed|init_process_group|LOCAL_RANK|DistributedDataParallel|\baccelerate\b|\bdeepspeed\b|fully_shard"
)
_GPU = re.compile(r"\bcuda\b|^\s*(?:import|from) (?:torch|jax|tensorflow)\b", re.MULTILINE)
_DATA = ("configs", "config", "conf")


@dataclass(frozen=True, slots=True)
class Entrypoint:
    """A program of the project: the name of its task, its command, how it is launched, and one line of help.

    ``has_help``: --help ends it, and starts nothing.
    """

    name: str
    command: str
    launch: str
    help: str
    has_help: bool = False


@dataclass(slots=True)
class Project:
    """What a folder has. ``code`` and ``data`` ship in the image; ``imports`` are the top-level modules that its code
    imports and does not have; ``required`` are the lines of ``requirements``; ``notes`` say what is not used."""

    folder: Path
    entrypoints: list[Entrypoint] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)
    requirements: str = ""
    required: list[str] = field(default_factory=list)
    written_requirements: str = ""
    imports: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Module:
    path: Path
    inside: str
    text: str
    tree: ast.Module | None

    @property
    def is_started(self) -> bool:
        """Return whether it does something when Python runs it."""
        return bool(re.search(r"^if __name__ *== *['\"]__main__['\"]", self.text, re.MULTILINE)) or (
            "/" not in self.inside and bool(re.search(r"^\w+ *= *argparse\.ArgumentParser", self.text, re.MULTILINE))
        )

    @property
    def has_help(self) -> bool:
        """Return whether --help prints a text."""
        return "argparse.ArgumentParser(" in self.text

    @property
    def summary(self) -> str:
        """Return the first line of its docstring."""
        text = ast.get_docstring(self.tree) if self.tree else None
        return text.strip().splitlines()[0][:100] if text and text.strip() else ""

    def imports(self) -> Iterator[str]:
        """Yield the top-level names of the modules that it imports."""
        for node in ast.walk(self.tree) if self.tree else ():
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                yield node.module.partition(".")[0]


def survey(folder: Path) -> Project:
    """Return what ``folder`` has to run. Raises UsageError for a pyproject.toml that cannot be read."""
    project = Project(folder)
    modules = list(_modules(folder, project.notes))
    packages = _packages(folder)
    project.code = [*packages, *(item.inside for item in modules if "/" not in item.inside)]
    pyproject = _read_pyproject(folder)
    detected = [*_console_scripts(pyproject, modules), *_scripts(project, modules, packages)]
    project.entrypoints = _named(sorted(detected, key=lambda item: (not item.name.startswith("train"), item.name)))
    project.data = [name for name in _DATA if name not in packages and _is_small(folder / name, project.notes)]
    local = {Path(path).stem for path in project.code} | {Path(item.inside).parts[0] for item in modules}
    local |= {item.path.stem for item in modules}
    names = {name for item in modules for name in item.imports()}
    project.imports = names - local - sys.stdlib_module_names - {"__future__"}
    _find_requirements(project, pyproject)
    _note_unused(project, modules)
    return project


def _modules(folder: Path, notes: list[str]) -> Iterator[_Module]:
    """Yield the project's modules, nearest first; links, hidden and built files are left out."""
    pending, count = [folder], 0
    while pending:
        at = pending.pop(0)
        for path in sorted(at.iterdir()):
            name = path.name
            if path.is_symlink() or name.startswith(".") or name == "__pycache__" or name.endswith(".egg-info"):
                continue
            if path.is_dir():
                if not (at == folder and name in _LEFT_OUT) and not (path / "pyvenv.cfg").exists():
                    pending.append(path)
            elif name.endswith(".py") and not _NOT_RUN.fullmatch(name):
                count += 1
                if count > _MAX_FILES:
                    notes.append(f"only the first {_MAX_FILES} modules were read")
                    return
                if module := _read_module(path, folder, notes):
                    yield module


def _read_module(path: Path, folder: Path, notes: list[str]) -> _Module | None:
    inside = path.relative_to(folder).as_posix()
    try:
        text = read_regular(path, max_size=_MAX_FILE).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        notes.append(f"{inside}: not read: {getattr(error, 'strerror', None) or error}")
        return None
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    return _Module(path, inside, text, tree)


def _packages(folder: Path) -> list[str]:
    """Return the packages of the folder and of its src/."""
    return [
        path.parent.relative_to(folder).as_posix()
        for pattern in ("*/__init__.py", "src/*/__init__.py")
        for path in sorted(folder.glob(pattern))
        if path.parent.name not in _LEFT_OUT and not path.parent.is_symlink()
    ]


def _read_pyproject(folder: Path) -> dict[str, Any]:
    path = folder / "pyproject.toml"
    try:
        return tomllib.loads(read_regular(path, max_size=_MAX_FILE).decode("utf-8"))
    except FileNotFoundError:
        return {}
    except RecursionError as error:
        raise UsageError(f"{path}: cannot be read: it nests too deep") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _table(value: object, *keys: str) -> dict[str, Any]:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _console_scripts(pyproject: dict[str, Any], modules: Iterable[_Module]) -> Iterator[Entrypoint]:
    by_name = {item.inside.removeprefix("src/").removesuffix(".py").replace("/", "."): item for item in modules}
    for name, target in _table(pyproject, "project", "scripts").items():
        module, _, function = str(target).partition(":")
        if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", str(target)) or not TASK.fullmatch(name):
            continue
        first = function.partition(".")[0]
        command = f"python -c 'import sys; from {module} import {first}; sys.exit({function}())'"
        detected = by_name.get(module)
        yield Entrypoint(
            name, command, _launch(detected.text if detected else "", name), (detected and detected.summary) or target
        )


def _scripts(project: Project, modules: list[_Module], packages: list[str]) -> Iterator[Entrypoint]:
    for item in modules:
        package = next((name for name in packages if item.inside.startswith(f"{name}/")), None)
        stem, parent = item.path.stem, item.path.parent.name
        if package:
            if stem != "__main__" and not (item.is_started and _STARTED.fullmatch(stem)):
                continue
            dotted = item.inside.removeprefix("src/").removesuffix(".py").removesuffix("/__main__").replace("/", ".")
            around = "".join(other.text for other in modules if other.inside.startswith(f"{package}/"))
            name = parent if stem == "__main__" else stem
            yield Entrypoint(
                name, f"python -m {dotted}", _launch(around, name), item.summary or f"run {dotted}", item.has_help
            )
        elif item.is_started and ("/" not in item.inside or _STARTED.fullmatch(stem)):
            if "/" in item.inside and item.inside not in project.code:
                project.code.append(item.inside)
            command = f"python {item.inside}" if re.fullmatch(r"[\w./-]+", item.inside) else f"python '{item.inside}'"
            yield Entrypoint(
                stem, command, _launch(item.text, stem), item.summary or f"run {item.inside}", item.has_help
            )


def _launch(text: str, name: str) -> str:
    if not _GPU.search(text) or name.startswith("prep"):
        return "cpu"
    return "per-gpu" if _DISTRIBUTED.search(text) else "single"


def _named(detected: Iterable[Entrypoint]) -> list[Entrypoint]:
    """Return entrypoints whose names are different commands, and none of the system's."""
    result: dict[str, Entrypoint] = {}
    for item in detected:
        name = re.sub(r"[^A-Za-z0-9._-]", "-", item.name).lstrip("-._") or "run"
        if any((Path(folder) / name).exists() for folder in ("/usr/bin", "/bin")):
            name = f"{name}-project"
        base, number = name, 2
        while name in result:
            name, number = f"{base}-{number}", number + 1
        result[name] = replace(item, name=name, help=" ".join(item.help.split()))
    return list(result.values())


def _is_small(folder: Path, notes: list[str]) -> bool:
    if not folder.is_dir() or folder.is_symlink():
        return False
    size = count = 0
    for path in folder.rglob("*"):
        count += 1
        size += path.lstat().st_size
        if size > _MAX_FOLDER or count > _MAX_FILES:
            notes.append(
                f"{folder.name}/: more than {format_size(_MAX_FOLDER)} or {_MAX_FILES} files, and not in the image"
            )
            return False
    return count > 0


def _find_requirements(project: Project, pyproject: dict[str, Any]) -> None:
    folder = project.folder
    further = sorted(path.name for path in folder.glob("requirements*.txt") if path.name != "requirements.txt")
    if (folder / "requirements.txt").is_file():
        project.requirements = "requirements.txt"
    elif _table(pyproject, "project").get("dependencies"):
        project.requirements = "pyproject.toml"
    elif len(further) == 1:
        project.requirements, project.written_requirements, further = "requirements.txt", f"-r {further[0]}\n", []
    if project.written_requirements:
        project.required = [*_required(folder, project.written_requirements.split()[1], pyproject)]
    elif project.requirements:
        project.required = [*_required(folder, project.requirements, pyproject)]
    if further:
        project.notes.append(f"{', '.join(further)}: not used; a line '-r FILE' in requirements.txt uses one")


def _required(folder: Path, name: str, pyproject: dict[str, Any], depth: int = 0) -> Iterator[str]:
    """Yield the requirements of a file, and of those that it names by -r."""
    if name == "pyproject.toml":
        yield from (str(line) for line in _table(pyproject, "project").get("dependencies", ()))
        return
    try:
        text = read_regular(folder / name, max_size=_MAX_FILE).decode("utf-8", "replace")
    except (OSError, ValueError):
        return  # `lock` says what is wrong
    for line in text.splitlines():
        if depth < 5 and (match := re.match(r"\s*-r\s*(\S+)", line)):
            yield from _required(folder, match[1], pyproject, depth + 1)
        elif line.strip() and not line.lstrip().startswith(("#", "-")):
            yield line.split(" #")[0].strip()


def _note_unused(project: Project, modules: Iterable[_Module]) -> None:
    folder = project.folder
    for item in modules:
        if item.is_started and re.search(r"(dirname|Path)\((os\.path\.abspath\()?__file__", item.text):
            project.notes.append(f"{item.inside}: uses __file__, whose folder is read-only in the image")
    for name in ("uv.lock", "poetry.lock", "Pipfile.lock", "environment.yml"):
        if (folder / name).is_file():
            way = "its versions are not taken" if project.requirements else "`lock` prints the command that converts it"
            project.notes.append(f"{name}: not used; {way}")
    for path in sorted([*folder.glob("Dockerfile*"), *folder.glob("*.def")]):
        if path.is_file():
            way = f"`init NAME --from {path.name}` makes a recipe of it in a new folder"
            project.notes.append(f"{path.name}: not used; {way}")
    if (folder / "data").is_dir() and not any(name.startswith("data") for name in project.data):
        project.notes.append("data/: not in the image; tasks read it in the folder where they are started")
