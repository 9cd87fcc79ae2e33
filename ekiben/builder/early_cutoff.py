"""Early cutoff: a layer is not built again where the layers below it were, and came out as they were before.

A layer's key has its parent's key, so that an edited remark in a %post changes the keys of all layers above. The
content of a layer depends on the files below it, not on their keys: where these are the same, and so are the other
inputs, the stored layer is what a build would make again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ekiben.builder.base_config import has_config
from ekiben.resolve.graph import Layer
from ekiben.resolve.keys import hash_inputs
from ekiben.store import Store, StoredLayer


def equal_layer(layer: Layer, lower: Sequence[StoredLayer], store: Store) -> StoredLayer | None:
    """Return the record of ``layer`` on ``lower`` with the blob of a stored layer that has the same inputs, on layers
    with the same files; None where there is none."""
    # Only scripts are worth it. With `writes`, the name of a file has the parent's key.
    # Outputs of build stages have keys of their own.
    if layer.kind != "post" or layer.copies or "writes" in layer.inputs:
        return None
    inputs = _without_parent(layer)
    for stored in store.layers():
        if (
            stored.name == layer.name
            and _without_parent(stored) == inputs
            and hash_inputs(stored.inputs) == stored.cache_key  # the record is what it says
            and _same_below(stored, lower, store)
        ):
            return replace(stored, cache_key=layer.cache_key, inputs=layer.inputs)
    return None


def _without_parent(layer: Layer | StoredLayer) -> str:
    return hash_inputs({name: value for name, value in layer.inputs.items() if name != "parent"})


def _same_below(layer: StoredLayer, lower: Sequence[StoredLayer], store: Store) -> bool:
    """Return whether ``layer`` was built on layers with the files and notes of ``lower``."""
    below = list(_below(layer, store))
    return (
        [(item.diff_id, item.notes) for item in below] == [(item.diff_id, item.notes) for item in reversed(lower)]
        and bool(below)
        and has_config(below[-1].inputs) == has_config(lower[0].inputs)
        and below[-1].inputs.get("parent") is None
    )


def _below(layer: StoredLayer, store: Store) -> Iterator[StoredLayer]:
    """Yield the layers that ``layer`` was built on, the highest first, as far as the store has their records."""
    while (parent := layer.inputs.get("parent")) is not None:
        for key in reversed(parent if isinstance(parent, list) else [parent]):
            record = store.layer(key) if isinstance(key, str) else None
            if record is None:
                return
            layer = record
            yield layer
