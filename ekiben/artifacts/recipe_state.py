"""Compare an image with its recipe as it is now: whether it lacks an edit made since it was built."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ekiben.core.checked import MAX_JSON
from ekiben.core.decisions import log_decision
from ekiben.core.errors import OR_SYNC, DefinitionError, EkibenError
from ekiben.core.files import open_regular
from ekiben.core.paths import RECIPE_HOME
from ekiben.formats.layer import File
from ekiben.formats.sif import read_sif
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.inspect.metadata import IMAGE_METADATA, ImageMetadata
from ekiben.resolve.graph import ResolvedRecipe
from ekiben.resolve.recipe_layer import shipped_files
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import Recipe
from ekiben.store import Store

_RECIPE = RECIPE_HOME.lstrip("/")
_DEFFILE = ".singularity.d/Singularity"
_MOST_PATHS = 100_000
_DEEPEST = 100  # folders


@dataclass(frozen=True, slots=True)
class RecipeState:
    """The comparison of an image with its recipe of today, for messages.

    ``files``: those that ship with the recipe, as scripts and settings; ``below``: definition files and layers;
    ``reason``: why not everything was compared; ``fix``: the step before a build, "" if a build suffices, None without
    a remedy.
    """

    kind: Literal["same", "edited", "unknown"]
    files: tuple[str, ...] = ()
    below: tuple[str, ...] = ()
    reason: str = ""
    fix: str | None = None


def state_of_sif(sif: Path, recipe: Recipe, stack: str | None = None) -> RecipeState:
    """Compare a SIF with its recipe on ``stack``. Only the recipe's files and the keys of layers are read."""
    try:
        layers = read_sif(sif).layers
        if not layers:  # built by another program, as below
            return _unknown(str(sif), "it was not built by Ekiben", fix="")
        with open_regular(sif) as stream:
            top = SquashfsReader(stream, layers[-1].offset)
            if top.lookup(IMAGE_METADATA) is None:
                return _unknown(str(sif), "it was not built by Ekiben", fix="")
            metadata = ImageMetadata.parse(top.read_file(IMAGE_METADATA, MAX_JSON))
            files = tuple(_changed_files(top, shipped_files(recipe)))
            try:
                resolved = _resolve(recipe, stack, metadata)
            except EkibenError as error:
                return _wrong_recipe(str(sif), error, files)
            known = {key for _, key in metadata.layers}
            # With --build-arg, keys depend on values that the image does not have.
            by_key = () if metadata.arguments else _changed_layers(resolved, known)
            below = [*_changed_definitions(top, resolved), *by_key]
            return _state(files, below)
    except DefinitionError as error:  # of the recipe's own files
        return _wrong_recipe(str(sif), error)
    except (EkibenError, OSError, ValueError) as error:
        return _unknown(str(sif), f"its content cannot be read: {error}", fix="")


def state_in_engine(image_id: str, name: str, recipe: Recipe, store: Store, stack: str | None = None) -> RecipeState:
    """Compare an engine's image, called ``name`` in the store, with its recipe on ``stack``.

    Unknown where the store has no record of this image, or it was built with --gpu-arch or --build-arg.
    """
    try:
        record = store.image(name)
        keys, config = (record["keys"], record["config"]) if record else ([], "")
    except (EkibenError, OSError, KeyError) as error:
        return _unknown(name, f"the store {store.root} cannot be read: {error}")
    if record is None:
        return _unknown(name, f"the store {store.root} has no record of {name}", fix="")
    if config != image_id:
        return _unknown(name, f"the image that was built last as {name} is not this one", fix="")
    if record.get("is_custom"):
        return _unknown(name, "it was built with --gpu-arch or --build-arg")
    try:
        resolved = resolve(recipe, stack=stack)
    except EkibenError as error:
        return _wrong_recipe(name, error)
    is_same_top = resolved.top.cache_key in keys
    below = [*_changed_layers(resolved, keys)]
    return _state([] if is_same_top or below else ["the recipe's own files"], below)


def _state(files: Iterable[str], below: Iterable[str]) -> RecipeState:
    changed = tuple(files), tuple(below)
    return RecipeState("edited" if any(changed) else "same", *changed)


def _unknown(image: str, reason: str, files: tuple[str, ...] = (), fix: str | None = None) -> RecipeState:
    log_decision(f"{image} and its recipe", "not compared", reason)
    return RecipeState("unknown", files, reason=reason, fix=fix)


def _wrong_recipe(image: str, error: EkibenError, files: tuple[str, ...] = ()) -> RecipeState:
    """Return the state of an image whose recipe cannot be built as it is now: it was edited since, most likely."""
    return _unknown(image, "; ".join(str(error).splitlines()), files, (error.hint or "mend that").removesuffix(OR_SYNC))


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


def _changed_files(top: SquashfsReader, shipped: Iterable[File]) -> Iterator[str]:
    """Yield the recipe's own files that are not the same in the image.

    Files that Ekiben itself adds are ignored: an upgrade of Ekiben is not an edit.
    """
    files = {file.destination.lstrip("/"): file for file in shipped}
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
    """Yield the paths of files. Raises ValueError for too many: the image may come from elsewhere."""
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
