"""Makes a new recipe's folder from the files in template/, which have its layout."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from pathlib import Path

from ekiben.core.atomic import is_vacant, new_folder
from ekiben.core.errors import UsageError, nearest
from ekiben.core.paths import PROJECT_ROOT
from ekiben.spec.definition import read_definition
from ekiben.spec.recipe import RecipeFile, recipe_folders
from ekiben.spec.stack import find_stack

TEMPLATE = Path(__file__).with_name("template")
_IMAGES = PROJECT_ROOT / "images"
_INSTALLER = "python"  # the layer that brings /opt/ekiben/install.py, which the new layer runs


class TemplateText(string.Template):
    """Definition files and scripts have $ and {{ }} of their own."""

    delimiter = "@"


def create_recipe(folder: Path, *, layer: str = _INSTALLER, stack: str = "cu130") -> list[Path]:
    """Create ``folder``, a recipe of the same name with a layer on top of ``layer``.

    Returns the files that were written.

    Raises:
        UsageError: ``folder`` has something in it or cannot be written, or its name is none for a recipe, or there is
            no such layer.
        DefinitionError: there is no such stack.
    """
    name = folder.absolute().name
    check_name(name)
    check_layer(layer)
    find_stack(stack, [_IMAGES], asked_by="--stack")
    if not is_vacant(folder):
        raise UsageError(f"{folder} exists and is not empty", hint="name a new folder")
    values = {"name": name, "layer": layer, "stack": stack}
    texts: dict[str, str] = {}
    for source in sorted(path for path in TEMPLATE.rglob("*") if path.is_file()):
        inside = str(source.relative_to(TEMPLATE))
        target = inside.replace("layer.def", f"{name}-packages.def").replace(".py.txt", ".py")
        texts[target] = TemplateText(source.read_text(encoding="utf-8")).substitute(values)
    with new_folder(folder) as fresh:
        for target, text in texts.items():
            (fresh / target).parent.mkdir(parents=True, exist_ok=True)
            (fresh / target).write_text(text, encoding="utf-8")
    return [folder / target for target in texts]


def check_name(name: str) -> None:
    """Raise UsageError for a name that no recipe of a user can have."""
    try:
        RecipeFile(name=name, description="", stack="", layer="", tasks={})
    except ValueError as error:
        raise UsageError(f"'{name}' cannot be a recipe: {error}") from error
    if name in recipe_folders():
        raise UsageError(
            f"Ekiben has a recipe '{name}', and two images cannot have one name", hint="choose another name"
        )


def layer_text(values: Mapping[str, str]) -> str:
    """Return the definition file of the layer that installs a recipe's packages."""
    return TemplateText((TEMPLATE / "images/layer.def").read_text(encoding="utf-8")).substitute(values)


def check_layer(layer: str) -> None:
    """Raise UsageError for a layer that is none, or has no Python."""
    known = {path.stem for path in _IMAGES.glob("*.def")}
    if layer not in known:
        raise UsageError(f"--from {layer}: there is no such layer." + nearest(layer, known))
    if _INSTALLER not in (layers := [*_and_below(layer)]):
        raise UsageError(
            f"--from {layer}: it has no Python ({' on '.join(layers)}), so no package can be installed on it",
            hint=f"--from {_INSTALLER}, or a layer above it",
        )


def _and_below(layer: str) -> Iterator[str]:
    """Yield ``layer`` and the layers below it, nearest first."""
    parent: str | None = layer
    while parent:
        yield parent
        parent = read_definition(_IMAGES / f"{parent}.def", root=PROJECT_ROOT).final.parent
