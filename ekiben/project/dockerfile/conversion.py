"""Make a recipe's folder from a Dockerfile and its build context."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from ekiben.core.atomic import is_vacant, new_folder
from ekiben.core.environment import ARCHITECTURES, host_arch
from ekiben.core.errors import DefinitionError, UsageError
from ekiben.core.files import open_regular
from ekiben.core.paths import PROJECT_ROOT
from ekiben.project.create import check_name
from ekiben.project.dockerfile.base_config import BaseConfig, fetch_config
from ekiben.project.dockerfile.context import FOLDER, BuildContext
from ekiben.project.dockerfile.definitions import definition_files
from ekiben.project.dockerfile.evaluate import evaluate
from ekiben.project.dockerfile.evaluation import Evaluation, Settings
from ekiben.project.dockerfile.ignore import read_ignore
from ekiben.project.dockerfile.reader import read_dockerfile
from ekiben.spec.container import ContainerConfig
from ekiben.spec.stack import find_stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What to convert: ``arguments`` are --build-arg's, ``target`` the stage that becomes the image.

    ``base_config`` returns what an image sets; by default its registry is asked.
    """

    dockerfile: Path
    stack: str = "cu130"
    arguments: Mapping[str, str] = field(default_factory=dict)
    target: str = ""
    arch: str = ""
    base_config: Callable[[str], BaseConfig] | None = None


def convert(folder: Path, conversion: Conversion) -> tuple[list[Path], list[str]]:
    """Write ``folder``, a recipe of the same name, and return its files, and notes of what is not used.

    Raises DefinitionError that lists what cannot be converted, UsageError: ``folder`` has something in it.
    """
    if not is_vacant(folder):
        raise UsageError(f"{folder} exists and is not empty", hint="name a new folder")
    name, path = folder.absolute().name, conversion.dockerfile
    check_name(name)
    find_stack(conversion.stack, [PROJECT_ROOT / "images"], asked_by="--stack")
    arch = conversion.arch or host_arch()
    platform = f"linux/{arch}"
    assert arch in ARCHITECTURES.values()
    dockerfile = read_dockerfile(path)
    settings = Settings(
        arguments=conversion.arguments,
        target=conversion.target,
        arch=arch,
        base_config=conversion.base_config or (lambda reference: fetch_config(reference, platform)),
    )
    context = BuildContext(path.absolute().parent, read_ignore(path))
    evaluation = evaluate(dockerfile, context, settings)
    try:
        definitions = definition_files(evaluation, name)
    except ValueError as error:
        raise DefinitionError(f"{path}: {error}") from error
    texts = {f"images/{layer}.def": text for layer, text in definitions.items()}
    texts["recipe.yaml"] = _recipe(name, conversion, [*definitions][-1], evaluation.final.container_config())
    texts["README.md"] = _readme(name, evaluation, [*definitions])
    with new_folder(folder) as fresh:
        for inside, text in texts.items():
            (fresh / inside).parent.mkdir(parents=True, exist_ok=True)
            (fresh / inside).write_text(text, encoding="utf-8")
        _copy_context(context, fresh / FOLDER)
    written = [folder / inside for inside in texts]
    return [*written, *([folder / FOLDER] if context.used else [])], evaluation.notes


def _copy_context(context: BuildContext, folder: Path) -> None:
    for inside, source in sorted(context.used.items()):
        target = folder / inside
        if source is None:
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_regular(source) as content, target.open("wb") as out:
            shutil.copyfileobj(content, out)
        target.chmod(0o755 if source.stat().st_mode & 0o100 else 0o644)


def _recipe(name: str, conversion: Conversion, layer: str, docker: ContainerConfig) -> str:
    content = {
        "name": name,
        "description": f"From {conversion.dockerfile.name}",
        "stack": conversion.stack,
        "layer": layer,
        "tasks": {},
        **({"docker": dict(docker.key())} if docker.key() else {}),
    }
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _readme(name: str, evaluation: Evaluation, layers: list[str]) -> str:
    lines = [
        f"# {name}",
        "",
        f"From `{evaluation.dockerfile.path.name}`, which is not read again: edit the files here.",
        "",
        f"    ekiben lock {name}                          # which image each tag of a base names",
        f"    ekiben plan {name}                          # what would be built, and why",
        f"    ekiben build {name}                         # the image: {name}.sif",
        f"    ekiben run {name}                           # what CMD and ENTRYPOINT start",
        "",
        "| file | what it is |",
        "|---|---|",
        "| `recipe.yaml` | the name, the layer on top; add tasks here |",
        *(f"| `images/{layer}.def` | a layer |" for layer in layers),
        *([f"| `{FOLDER}/` | the files that COPY and ADD name |"] if evaluation.context.used else []),
    ]
    if evaluation.notes:
        lines += ["", "Other than with Docker:", "", *(f"- {note}" for note in evaluation.notes)]
    return "\n".join(lines) + "\n"
