"""Make a recipe of a project that is there: files are added to its folder, and none is changed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from ekiben.core.atomic import write_files
from ekiben.core.command_name import command_name
from ekiben.core.errors import UsageError
from ekiben.core.files import read_source
from ekiben.core.paths import PROJECT_ROOT
from ekiben.project.create import check_layer, check_name, layer_text
from ekiben.project.survey import Project, survey
from ekiben.spec.stack import Stack, find_stack, lock_for, read_pins

_BASES = ("python", "pytorch", "huggingface")  # each on the one before
# Packages for which a project gets the layer that has them.
_OF_LAYER = {
    **dict.fromkeys(("transformers", "datasets", "accelerate", "peft", "tokenizers", "bitsandbytes"), "huggingface"),
    **dict.fromkeys(("torch", "torchvision", "torchaudio"), "pytorch"),
}
# Of modules whose package has another name.
_PACKAGES = {
    "cv2": "opencv-python",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "yaml": "pyyaml",
    "dateutil": "python-dateutil",
    "google": "protobuf",
}


@dataclass(frozen=True, slots=True)
class ProjectRecipe:
    """What is written into a project: path → text; ``notes`` say what is not used, ``task`` is its first one."""

    texts: dict[Path, str]
    notes: list[str]
    task: str
    is_locked: bool


def plan_recipe(folder: Path, *, name: str = "", layer: str = "", stack: str = "cu130") -> ProjectRecipe:
    """Return the files that make a recipe of a project, which are not written yet.

    Raises UsageError: it has nothing to run, a file of that name is there, or its name is none for a recipe;
    DefinitionError: there is no such stack.
    """
    name = name or re.sub(r"[^a-z0-9._-]+", "-", folder.absolute().name.lower()).strip("-._")
    existing = folder / "recipe.yaml"
    if existing.exists():
        raise UsageError(f"{existing} exists: the folder is a recipe", hint="edit it, or delete it and init again")
    check_name(name)
    bound_stack = find_stack(stack, [PROJECT_ROOT / "images"], asked_by="--stack")
    project = survey(folder)
    if not project.entrypoints:
        raise UsageError(
            f"{folder} exists and is not empty, and nothing in it can be run: no script with `if __name__ =="
            " '__main__'`, no package with __main__.py, no console script in pyproject.toml",
            hint="name a new folder, or add such a script",
        )
    names = [canonicalize_name(item) for item in _requirement_names(project.required)]
    imported = [canonicalize_name(_PACKAGES.get(item, item)) for item in project.imports]
    below = layer or _layer_for([*names, *imported])
    check_layer(below)
    has_layer = bool(project.requirements) and _adds(project.required, below, bound_stack)
    project.notes += _missing(project, {*names, *_pins(below, bound_stack)})
    top = f"{name}-packages" if has_layer else below
    texts = {folder / "recipe.yaml": _recipe(name, project, stack, top)}
    if has_layer:
        values = {"name": name, "layer": below, "stack": stack}
        texts[folder / "images" / f"{top}.def"] = layer_text(values)
        if project.written_requirements:
            texts[folder / "requirements.txt"] = project.written_requirements
    readme = folder / ("EKIBEN.md" if (folder / "README.md").exists() else "README.md")
    texts[readme] = _readme(name, project, below, top if has_layer else "")
    for path in texts:
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} exists, and is not overwritten", hint="move it, or give another --name")
    return ProjectRecipe(texts, project.notes, project.entrypoints[0].name, not has_layer)


def write_recipe(planned: ProjectRecipe) -> None:
    """Write the files. Raises UsageError."""
    for path in planned.texts:
        path.parent.mkdir(parents=True, exist_ok=True)
    write_files(dict(planned.texts))


def _requirement_names(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if match := re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line):
            yield match[0]


def _layer_for(names: Iterable[str]) -> str:
    layers = {_OF_LAYER[name] for name in names if name in _OF_LAYER}
    return max(layers, key=_BASES.index, default=_BASES[0])


def _pins(layer: str, stack: Stack) -> dict[str, str]:
    """Return the packages of a layer and those below it, as its stack locks them; of other layers those of all."""
    layers = _BASES[: _BASES.index(layer) + 1] if layer in _BASES else (*_BASES, layer)
    pins: dict[str, str] = {}
    for item in layers:
        lock = lock_for(stack.folder / f"{item}.lock", stack.arch)
        text = read_source(lock, default="")
        pins |= {canonicalize_name(name): version for name, version, _ in read_pins(text)}
    return pins


def _adds(lines: Iterable[str], layer: str, stack: Stack) -> bool:
    """Return whether requirements ask for something that the layers below do not have."""
    pins = _pins(layer, stack)
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            return True  # `lock` says what is wrong
        version = pins.get(canonicalize_name(requirement.name))
        if requirement.marker and not requirement.marker.evaluate():
            continue
        if version is None or requirement.url or not requirement.specifier.contains(version, prereleases=True):
            return True
    return False


def _missing(project: Project, known: set[str]) -> Iterator[str]:
    missing = sorted(
        package
        for module in project.imports
        if canonicalize_name(package := _PACKAGES.get(module, module)) not in known
    )
    if missing:
        yield (
            f"imported, and neither required nor in the layers: {', '.join(missing)}; `{command_name()} add` adds"
            " what the tasks need"
        )


def _recipe(name: str, project: Project, stack: str, layer: str) -> str:
    tasks = {
        item.name: {"command": item.command, "help": item.help, "launch": item.launch} for item in project.entrypoints
    }
    content = {
        "name": name,
        "description": f"The project in {project.folder.absolute().name}",
        "stack": stack,
        "layer": layer,
        "code": project.code,
        **({"data": project.data} if project.data else {}),
        "tasks": tasks,
        "default_task": project.entrypoints[0].name,
    }
    tests = [f"{item.name} --help >/dev/null\n" for item in project.entrypoints if item.has_help]
    if tests:
        content["test"] = "".join(tests)
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)


def _readme(name: str, project: Project, below: str, layer: str) -> str:
    first = project.entrypoints[0]
    lines = [
        f"# {name}: image and jobs",
        "",
        "In this folder:",
        "",
        *([f"    ekiben lock .              # after a change of {project.requirements}"] if layer else []),
        f"    ekiben build .             # the image, tested: {name}.sif",
        f"    ekiben run . {first.name}",
        f"    ekiben submit . {first.name}    # on Slurm, Grid Engine, PBS or OAR",
        "",
        "| task | command | launched |",
        "|---|---|---|",
        *(f"| `{item.name}` | `{item.command}` | {item.launch} |" for item in project.entrypoints),
        "",
        "Tasks run in the folder where they are started, and read their data there. In the image, below"
        " `/opt/ekiben/recipe`, is",
        "what `code:` and `data:` of `recipe.yaml` name. `launch: per-gpu` starts a process for each GPU, with",
        "torchrun's variables; `single` starts one, `cpu` one without a GPU.",
    ]
    if layer:
        lines += ["", f"The layer `images/{layer}.def` installs {project.requirements} on the layer `{below}`."]
    return "\n".join(lines) + "\n"
