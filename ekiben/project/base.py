"""The base that a recipe's layers stand on: its packages, read out of its files and kept in LAYER.packages.json."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ekiben.builder.build import BuildContext, Options, ensure_layers
from ekiben.core.command_name import command_name
from ekiben.core.errors import DefinitionError, LockMismatchError, StoreError
from ekiben.core.progress import Progress
from ekiben.project.base_python import read_base
from ekiben.resolve.graph import Layer, ResolvedRecipe
from ekiben.resolve.resolve import resolve_below
from ekiben.spec.base_packages import BasePackages, format_base_packages, packages_file, read_base_packages
from ekiben.spec.definition import Definition
from ekiben.spec.recipe import Recipe
from ekiben.spec.stack import Stack
from ekiben.store import Store

ReadBase = Callable[[Recipe, Stack], BasePackages]  # raises what building a base raises, DefinitionError, StoreError


@dataclass(frozen=True, slots=True)
class ListedBase:
    """A base's packages, and the list of them: ``text`` is what belongs into ``path``."""

    packages: BasePackages
    path: Path
    text: str


def base_reader(store: Store, options: Options, progress: Progress) -> ReadBase:
    """Return what reads the base below a recipe's layers; its layer is kept in the store, as a build needs it."""

    def read(recipe: Recipe, stack: Stack) -> BasePackages:
        layer = _base_layer(recipe, stack)
        resolved = ResolvedRecipe(
            recipe=recipe,
            stack=stack,
            definitions=(),
            layers=(layer,),
            environment=layer.environment,
            labels={},
            deffile="",
        )
        (stored,) = ensure_layers(BuildContext(resolved, store, options, progress), [layer])
        try:
            with store.reader(stored.digest) as reader:
                return read_base(reader, _digest_of(layer))
        except OSError as error:
            raise StoreError(f"blob {stored.digest} cannot be read: {error.strerror}") from error

    return read


def _base_layer(recipe: Recipe, stack: Stack) -> Layer:
    return resolve_below(recipe, stack).layers[0]


def _digest_of(layer: Layer) -> str:
    """Return the digest of the image or file that a base's layer is made of."""
    source: Mapping[str, str] = layer.inputs["source"]
    return source.get("digest") or source["from"].partition("@")[2]


def known_base(recipe: Recipe, definition: Definition, stack: Stack) -> BasePackages | None:
    """Return the packages of the base that are listed beside ``definition``, whether it is still the same, or None.

    Raises DefinitionError.
    """
    path = recipe.sources.check(packages_file(definition.path))
    return read_base_packages(path).get(stack.platform) if path.is_file() else None


def find_base(
    recipe: Recipe, definition: Definition, stack: Stack, locked: Mapping[Path, str], read: ReadBase | None
) -> ListedBase | None:
    """Return the packages of the base that ``definition`` names, None where none are listed beside it.

    ``locked``: what is about to be written. A list of another image than bases.lock names is made anew by ``read``.
    Raises LockMismatchError without it; DefinitionError: the list is damaged, or the stack is not the base's.
    """
    path = recipe.sources.check(packages_file(definition.path))
    if not path.is_file():
        return None
    known = read_base_packages(path, locked.get(path, ""))
    packages = known.get(stack.platform)
    if packages is None or packages.digest != _digest_of(_base_layer(recipe, stack)):
        if read is None:
            raise LockMismatchError(
                f"{path} lists the packages of another image than {definition.path} names for {stack.platform}",
                hint=f"{command_name()} lock {shlex.quote(str(recipe.folder))} --keep",
            )
        packages = read(recipe, stack)
    _check_stack(stack, packages)
    return ListedBase(packages, path, format_base_packages({**known, stack.platform: packages}))


def _check_stack(stack: Stack, packages: BasePackages) -> None:
    """Raise DefinitionError where stack.yaml says something else of Python and the C library than the base has."""
    file = stack.file
    pairs = (
        ("python", file.python, f'"{packages.minor}"'),
        ("interpreter", file.interpreter, packages.python),
        ("libc", file.libc, packages.libc),
    )
    wrong = [(name, has) for name, value, has in pairs if value != has.strip('"')]
    if wrong:
        raise DefinitionError(
            f"{stack.folder / 'stack.yaml'}: is not of the base, which has "
            + ", ".join(f"{name} {has}" for name, has in wrong),
            hint="write there: " + ", ".join(f"{name}: {has}" for name, has in wrong),
        )
