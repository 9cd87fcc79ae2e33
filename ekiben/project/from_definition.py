"""Make a recipe's folder of a definition file: a copy of it, and of the files that its %files names."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import yaml

from ekiben.core.atomic import is_vacant, new_folder
from ekiben.core.errors import DefinitionError, UsageError
from ekiben.core.files import open_regular, read_source, tree_paths
from ekiben.core.paths import PROJECT_ROOT
from ekiben.project.create import check_name
from ekiben.spec.definition import LOCAL, PATHS, Definition, read_definition
from ekiben.spec.stack import find_stack


def create_from_definition(folder: Path, file: Path, *, stack: str = "cu130") -> list[Path]:
    """Create ``folder``, a recipe of the same name whose layer is ``file``; its %files are relative to its folder.

    Returns the files that were written.

    Raises:
        UsageError: ``folder`` has something in it or cannot be written, or its name is none for a recipe.
        DefinitionError: ``file`` cannot be read, or names files that are not there; or there is no such stack.
    """
    name = folder.absolute().name
    check_name(name)
    find_stack(stack, [PROJECT_ROOT / "images"], asked_by="--stack")
    if not is_vacant(folder):
        raise UsageError(f"{folder} exists and is not empty", hint="name a new folder")
    definition = read_definition(file, root=file.absolute().parent)
    sources = dict(_sources(definition))
    layer = f"{name}-image"
    content = {"name": name, "description": f"From {file.name}", "stack": stack, "layer": layer, "tasks": {}}
    texts = {
        f"images/{layer}.def": read_source(file),
        "recipe.yaml": yaml.safe_dump(content, sort_keys=False, allow_unicode=True),
        "README.md": _readme(name, layer, file),
    }
    with new_folder(folder) as fresh:
        for inside, text in texts.items():
            (fresh / inside).parent.mkdir(parents=True, exist_ok=True)
            (fresh / inside).write_text(text, encoding="utf-8")
        for inside, path in sources.items():
            (fresh / inside).parent.mkdir(parents=True, exist_ok=True)
            with open_regular(path) as stream, (fresh / inside).open("wb") as out:
                shutil.copyfileobj(stream, out)
            (fresh / inside).chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
    return [folder / inside for inside in (*texts, *sources)]


def _sources(definition: Definition) -> Iterator[tuple[str, Path]]:
    """Yield the files of %files, by their paths below the definition's folder."""
    for stage in definition.stages:
        if stage.bootstrap == LOCAL and stage.header["from"].startswith(PATHS):
            raise DefinitionError(
                f"{definition.path}: From: {stage.header['from']} is a file's path, which does not hold in a new"
                " folder; copy the definition into images/ of a recipe, and write the path there"
            )
        for copy in stage.files:
            if copy.stage is not None:
                continue
            where, path = f"{definition.path}:{copy.line}: %files", definition.root / copy.source
            if copy.source.startswith("/") or ".." in copy.source.split("/"):
                raise DefinitionError(f"{where}: {copy.source} is outside the definition's folder; copy it there first")
            files = (
                [path]
                if path.is_file()
                else [item for item in tree_paths(path) if item.is_file()]
                if path.is_dir()
                else []
            )
            if not files:
                raise DefinitionError(f"{where}: {path} is not there, or an empty folder")
            yield from ((item.relative_to(definition.root).as_posix(), item) for item in files)


def _readme(name: str, layer: str, file: Path) -> str:
    return f"""\
# {name}

From `{file.name}`, which is not read again: edit `images/{layer}.def`.

    ekiben lock {name}                          # which image each tag of a base names
    ekiben build {name}                         # the image, tested: {name}.sif
    ekiben run {name}                           # its %runscript

Cut the `%post` into layers to build less again: a second file in `images/` with `Bootstrap: localimage` and
`From: {layer}.sif`, which `layer:` of `recipe.yaml` names. Tasks are added there, too.
"""
