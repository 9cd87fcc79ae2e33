"""Describe the layers and packages of an image of the store, or of a SIF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict, cast, final

from ekiben.core.command_name import command_name
from ekiben.formats.sif import DEFFILE, SIGNATURE, USERS, read_sif
from ekiben.inspect._records import stored_image
from ekiben.store import Store, StoredLayer

_KINDS = {DEFFILE: "definition", SIGNATURE: "signature"}


class LayerDescription(TypedDict, total=False):
    """One layer: all but name, cache_key, digest and size are absent when the store has no record of it any more."""

    name: str
    cache_key: str
    digest: str
    size: int
    diff_id: str
    unpacked: int
    executor: str
    seconds: float
    drift: Sequence[str]


class SifObject(TypedDict):
    """One object of a SIF; ``offset`` and ``size`` in bytes."""

    name: str
    offset: int
    size: int


@final
class ImageDescription(TypedDict):
    """An image of the store."""

    name: str
    image: str
    manifest: str
    stack: str
    created: str
    environment: list[str]
    labels: Mapping[str, str]
    tasks: Mapping[str, str]
    layers: list[LayerDescription]


@final
class SifDescription(TypedDict):
    """A SIF file."""

    name: str
    id: str
    arch: str
    size: int
    created: str
    objects: list[SifObject]


def describe(name: str, store: Store) -> ImageDescription | SifDescription:
    """Describe an image of the store by name, or a SIF by path. Raises UsageError, StoreError."""
    if name.endswith(".sif") or "/" in name:
        return _describe_sif(Path(name))
    image = stored_image(name, store, f"{command_name()} build {name}")
    layers = []
    for layer in image.layers:
        description: dict[str, Any] = {
            "name": layer.name,
            "cache_key": layer.cache_key,
            "digest": layer.digest,
            "size": layer.size,
        }
        if stored := store.layer(layer.cache_key):
            description |= {
                "diff_id": stored.diff_id,
                "unpacked": stored.tar_size,
                "executor": stored.executor,
                "seconds": stored.seconds,
                **stored.notes,
            }
        layers.append(cast(LayerDescription, description))
    return {
        "name": name,
        "image": image.config,
        "manifest": image.manifest,
        "stack": image.stack,
        "created": image.created,
        "environment": list(image.environment),
        "labels": image.labels,
        "tasks": image.tasks,
        "layers": layers,
    }


def _describe_sif(path: Path) -> SifDescription:
    info = read_sif(path)
    numbered = (layer for layer in info.layers if layer.name != USERS)
    layers = {layer.number: position for position, layer in enumerate(numbered)}
    objects: list[SifObject] = [
        {
            "name": (
                item.name
                or (f"layer {layers[item.number]}" if item.number in layers else _KINDS.get(item.data_type, "other"))
            ),
            "offset": item.offset,
            "size": item.size,
        }
        for item in info.descriptors
    ]
    return {
        "name": str(path),
        "id": info.id,
        "arch": info.arch,
        "size": path.stat().st_size,
        "created": _time(info.created),
        "objects": objects,
    }


def _time(seconds: int) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat()
    except (OverflowError, OSError, ValueError):  # a damaged header may contain anything
        return f"{seconds} s since 1970"


def drift_of(layers: Sequence[StoredLayer]) -> list[str]:
    """Return the packages that were not installed as locked, a line each."""
    return [f"{layer.name}: {line}" for layer in layers for line in layer.drift]
