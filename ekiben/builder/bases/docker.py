"""A base out of a registry: ``Bootstrap: docker``. All layers of the image become one.

``From:`` names it by a digest, or by a tag that bases.lock binds to one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ekiben.builder.bases._image import image_entries
from ekiben.builder.bases._reference import reference_problems

if TYPE_CHECKING:
    from ekiben.formats.layer import LayerEntry
    from ekiben.packages.host_config import PackageSources
    from ekiben.resolve.graph import Layer


def header_problems(header: Mapping[str, str]) -> list[str]:
    """Return the problems of From:, Registry: and Namespace:, which name an image together."""
    if not header.get("from"):
        return ["Bootstrap: docker needs 'From:'"]
    return reference_problems(image_reference(header))


def image_reference(header: Mapping[str, str]) -> str:
    """Return what Registry:, Namespace: and From: name together, as Apptainer combines them."""
    return "/".join(value for name in ("registry", "namespace", "from") if (value := header.get(name)))


def key_inputs(header: Mapping[str, str]) -> dict[str, str]:
    """Return the header without mirrors and stage names, and note that the base has a configuration."""
    inputs = {name: value for name, value in header.items() if value and name not in ("mirrorurl", "stage")}
    return {**inputs, "config": "1"}  # the image's own configuration is in the layer


def entries(
    layer: Layer, staging: Path, notes: dict[str, Any], sources: PackageSources, log: Callable[[str], None]
) -> Iterator[LayerEntry]:
    """Yield the files of the image. Raises FetchError."""
    from ekiben.registry.layers import image_layers
    from ekiben.registry.reference import Reference

    assert layer.stage is not None
    notes["executor"] = "registry"
    reference = Reference.parse(layer.stage.header["from"])
    received = 0

    def count(size: int) -> None:
        nonlocal received
        received += size
        log(f"{reference.repository}: {received / 1e6:.0f} MB")

    config, archives = image_layers(reference, staging, str(layer.inputs["platform"]), count)
    yield from image_entries(config, archives, staging, layer.epoch, str(reference))
