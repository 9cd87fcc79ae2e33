"""The tasks of a recipe of Ekiben's, for a recipe on a base of others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from packaging.version import Version

from ekiben.core.errors import UsageError, nearest
from ekiben.core.files import read_source
from ekiben.core.paths import PROJECT_ROOT
from ekiben.spec.base_packages import BasePackages
from ekiben.spec.recipe import Recipe, read_recipe

_LISTS = {"python": "", "huggingface": "huggingface.in"}  # layer → what it has beside torch; "" for nothing
_PYTHON = Version("3.11")  # the oldest that the tasks run with
_TORCH = Version("2.6.0")  # the oldest of the stacks


@dataclass(frozen=True, slots=True)
class ShippedTasks:
    """``texts``: the files of a recipe's folder, without its recipe.yaml, whose text is ``recipe``."""

    name: str
    description: str
    task: str
    recipe: str
    texts: Mapping[str, str]
    is_on_torch: bool

    def recipe_text(self, name: str, layer: str) -> str:
        """Return recipe.yaml for a recipe of another name, on its own stack and layer."""
        lines = {"name": name, "stack": name, "layer": layer}
        text = self.recipe
        for key, value in lines.items():
            text = re.sub(rf"^{key}: .*$", f"{key}: {value}", text, count=1, flags=re.MULTILINE)
        return re.sub(
            r"^# yaml-language-server: .*$",
            "# yaml-language-server: $schema=recipe.schema.json",
            text,
            count=1,
            flags=re.MULTILINE,
        )

    def check(self, packages: BasePackages) -> list[str]:
        """Return what is to be known of the tasks on a base, a line each. Raises UsageError where they cannot run."""
        if Version(packages.minor) < _PYTHON:
            raise UsageError(
                f"--recipe {self.name}: its tasks need Python {_PYTHON}, and the base has {packages.version}",
                hint="choose a newer image",
            )
        if not self.is_on_torch:
            return []
        if not packages.torch:
            raise UsageError(
                f"--recipe {self.name}: its tasks need torch, and the base has none", hint="choose an image with torch"
            )
        is_old = Version(Version(packages.torch).base_version) < _TORCH
        return [f"the tasks were never run with a torch before {_TORCH}"] if is_old else []


def shipped_tasks(name: str, stack: str) -> ShippedTasks:
    """Return the tasks of a recipe of Ekiben's, with the packages that ``stack`` has for them.

    Raises UsageError for one that is none, or that cannot stand on a base.
    """
    folder = PROJECT_ROOT / "recipes"
    known = sorted(path.parent.name for path in folder.glob("*/recipe.yaml"))
    if name not in known:
        raise UsageError(f"--recipe {name}: Ekiben has no such recipe." + nearest(name, known))
    recipe = read_recipe(folder / name)
    if recipe.file.layer not in _LISTS:
        able = [other for other in known if read_recipe(folder / other).file.layer in _LISTS]
        raise UsageError(
            f"--recipe {name}: its layer '{recipe.file.layer}' is made for the torch of a stack",
            hint=f"on a base: {', '.join(able)}",
        )
    packages = _LISTS[recipe.file.layer]
    packages_text = read_source(PROJECT_ROOT / "images/stacks" / stack / packages) if packages else ""
    remark = f"# What the tasks of {name} import; a base's own versions stay. After a change: ekiben lock\n"
    lines = [line for line in packages_text.splitlines() if line and not line.startswith("#")]
    return ShippedTasks(
        name=name,
        description=recipe.file.description,
        task=recipe.file.default_task or next(iter(recipe.file.tasks)),
        recipe=read_source(recipe.folder / "recipe.yaml"),
        texts={**_members(recipe), "requirements.txt": remark + "".join(f"{line}\n" for line in lines)},
        is_on_torch=bool(packages),
    )


def _members(recipe: Recipe) -> dict[str, str]:
    """Return the recipe's own files, without the scripts, which stay Ekiben's."""
    return {
        inside: read_source(path)
        for inside, path in recipe.members().items()
        if inside != "recipe.yaml" and path.is_relative_to(recipe.folder)
    }
