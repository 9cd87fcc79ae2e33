"""Compare an image with its recipe as it is now: whether it lacks an edit made since it was built."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ekiben.core.checked import MAX_JSON
from ekiben.core.decisions import log_decision
from ekiben.core.errors import EkibenError
from ekiben.core.files import open_regular
from ekiben.core.paths import RECIPE_HOME
from ekiben.formats.layer import File
from ekiben.formats.sif import read_sif
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.inspect.metadata import IMAGE_METADATA, ImageMetadata
from ekiben.resolve.graph import ResolvedRecipe
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import Recipe
from ekiben.store import Store

_RECIPE = RECIPE_HOME.lstrip("/")
_DEFFILE = ".singularity.d/Singularity"
_MOST_PATHS = 100_000
_DEEPEST = 100  # folders


@dataclass(frozen=True, slots=True)
class RecipeState:
    """Whether an image is what its recipe describes now; what differs, for a message.

    ``files``: those that ship with the recipe, as scripts and settings; ``below``: definition files and layers.
    """

    kind: Literal["same", "edited", "unknown"]
    files: tuple[str, ...] = ()
    below: tuple[str, ...] = ()


_UNKNOWN = RecipeState("unknown")


def state_of_sif(sif: Path, recipe: Recipe, stack: str | None = None) -> RecipeState:
    """Compare a SIF with its recipe on ``stack``. Only the recipe's files and the keys of layers are read."""
    try:
        layers = read_sif(sif).layers
        if not layers:  # of another builder, as below
            return _UNKNOWN
        with open_regular(sif) as stream:
            top = SquashfsReader(stream, layers[-1].offset)
            if top.lookup(IMAGE_METADATA) is None:
                return _UNKNOWN  # of another builder
            metadata = ImageMetadata.parse(top.read_file(IMAGE_METADATA, MAX_JSON))
            resolved = _resolve(recipe, stack, metadata)
            known = {key for _, key in metadata.layers}
            # With --build-arg, keys depend on values that the image does not have.
            by_key = () if metadata.arguments else _changed_layers(resolved, known)
            below = [*_changed_definitions(top, resolved), *by_key]
            return _state(_changed_files(top, resolved), below)
    except (EkibenError, OSError, ValueError) as error:
        return _unknown(str(sif), error)


def state_in_engine(image_id: str, name: str, recipe: Recipe, store: Store, stack: str | None = None) -> RecipeState:
    """Compare an engine's image, called ``name`` in the store, with its recipe on ``stack``.

    Unknown where the store has no record of this image, or it was built with --gpu-arch or --build-arg.
    """
    try:
        record = store.image(name)
        if record is None or record["config"] != image_id or record.get("is_custom"):
            return _UNKNOWN
        resolved = resolve(recipe, stack=stack)
        is_same_top = resolved.top.cache_key in record["keys"]
        below = [*_changed_layers(resolved, record["keys"])]
        return _state([] if is_same_top or below else ["the recipe's own files"], below)
    except (EkibenError, OSError, KeyError) as error:
        return _unknown(name, error)


def _state(files: Iterable[str], below: Iterable[str]) -> RecipeState:
    changed = tuple(files), tuple(below)
    return RecipeState("edited" if any(changed) else "same", *changed)


def _unknown(image: str, error: Exception) -> RecipeState:
    log_decision(f"{image} and its recipe", "not compared", str(error))
    return _UNKNOWN


def _resolve(recipe: Recipe, stack: str | None, metadata: ImageMetadata) -> ResolvedRecipe:
    """Resolve the recipe for the compute capabilities that the image was compiled for."""
    resolved = resolve(recipe, stack=stack)
    compiled = {str(one) for wheel in metadata.compiled for one in _capabilities(wheel.data)}
    known = {key for _, key in metadata.layers}
    if not compiled or all(layer.cache_key in known for layer in resolved.layers[:-1]):
        return resolved
    return resolve(recipe, stack=stack, gpu_arch=",".join(sorted(compiled)))


def _capabilities(wheel: Mapping[str, object]) -> Iterator[object]:
    listed = wheel.get("capabilities")
    yield from listed if isinstance(listed, list) else ()


def _changed_layers(resolved: ResolvedRecipe, known: Collection[str]) -> Iterator[str]:
    """Yield the lowest layer whose key is not ``known``: with it, the keys of those above differ."""
    lowest = next((layer.name for layer in resolved.layers[:-1] if layer.cache_key not in known), None)
    if lowest:
        yield f"what layer {lowest} is made of"


def _changed_definitions(top: SquashfsReader, resolved: ResolvedRecipe) -> Iterator[str]:
    """Yield the definition files whose text is not in the image's."""
    text = top.read_file(_DEFFILE, MAX_JSON).decode("utf-8", "surrogateescape")
    for definition in resolved.definitions:
        if f"# {definition.name}\n{definition.text.strip()}\n" not in text:
            yield definition.path.name


def _changed_files(top: SquashfsReader, resolved: ResolvedRecipe) -> Iterator[str]:
    """Yield the files that ship with the recipe and are not the same in the image.

    What this program writes of its own is left out: another version of it is no edit.
    """
    files = {file.destination.lstrip("/"): file for file in resolved.top.files if file.source}
    for path, file in files.items():
        if not _has(top, path, file):
            yield path.removeprefix(f"{_RECIPE}/")
    for path in _paths_below(top, _RECIPE):
        if path not in files:
            yield f"{path.removeprefix(f'{_RECIPE}/')} (removed)"


def _has(top: SquashfsReader, path: str, file: File) -> bool:
    entry = top.lookup(path)
    if entry is None or (entry.kind, entry.size, entry.mode) != ("file", file.size, file.mode):
        return False
    return hashlib.sha256(top.read_file(path)).hexdigest() == file.sha256()


def _paths_below(top: SquashfsReader, folder: str) -> Iterator[str]:
    """Yield the paths of files. Raises ValueError for more than any recipe has: the file may be anybody's."""
    folders, count = [folder], 0
    while folders:
        for entry in top.children(folders.pop()):
            count += 1
            if count > _MOST_PATHS or entry.path.count("/") > _DEEPEST:
                raise ValueError(f"/{folder} has more files, or deeper folders, than a recipe has")
            if entry.kind == "dir":
                folders.append(entry.path)
            else:
                yield entry.path
