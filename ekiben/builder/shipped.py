"""The layers that are Ekiben's: by their definitions, files and arguments, at any versions of Debian's packages."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace

from ekiben.core.errors import EkibenError
from ekiben.core.paths import PROJECT_ROOT
from ekiben.resolve.graph import Layer
from ekiben.resolve.keys import hash_inputs
from ekiben.resolve.resolve import resolve_layers
from ekiben.spec.recipe import read_recipe
from ekiben.spec.stack import stacks
from ekiben.store import StoredLayer

_RECIPE, _LAYER = "recipes/lora-opencalm", "huggingface"
_VARYING = ("parent", "packages", "tools", "epoch")  # signed packages of Debian, and the time of files


def is_shipped(layer: Layer | StoredLayer, arch: str) -> bool:
    """Return whether a layer's definition is that of a layer up to `huggingface` on one of Ekiben's stacks."""
    return hash_inputs(layer.inputs) == layer.cache_key and _definition(layer) in _shipped(arch)


@functools.cache
def _shipped(arch: str) -> frozenset[str]:
    recipe = read_recipe(PROJECT_ROOT / _RECIPE)
    known: set[str] = set()
    for stack in stacks([PROJECT_ROOT / "images"]):
        with contextlib.suppress(EkibenError):  # it may not be locked for this architecture
            known.update(map(_definition, resolve_layers(recipe, replace(stack, arch=arch), _LAYER)))
    return frozenset(known)


def _definition(layer: Layer | StoredLayer) -> str:
    return hash_inputs({name: value for name, value in layer.inputs.items() if name not in _VARYING})
