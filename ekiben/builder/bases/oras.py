"""A base out of a SIF in a registry: ``Bootstrap: oras``, ``From: HOST/NAME:TAG``.

``From:`` names it by a digest, or by a tag that bases.lock binds to one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ekiben.builder.bases._reference import reference_problems
from ekiben.builder.bases.localimage import read_sif_base, sif_entries
from ekiben.core.errors import DefinitionError, FetchError, StoreError
from ekiben.core.files import open_regular
from ekiben.formats.base_config import SIF_CONFIG

if TYPE_CHECKING:
    from ekiben.formats.layer import LayerEntry
    from ekiben.packages.host_config import PackageSources
    from ekiben.resolve.graph import Layer

_SCHEME = "oras://"
_MEDIA_SIF = "application/vnd.sylabs.sif.layer.v1.sif"


def header_problems(header: Mapping[str, str]) -> list[str]:
    """Return the problems of From:, which names an artifact of a registry."""
    if not header.get("from"):
        return ["Bootstrap: oras needs 'From: HOST/NAME:TAG'"]
    return reference_problems(image_reference(header))


def image_reference(header: Mapping[str, str]) -> str:
    """Return the name of the artifact; in bases.lock it differs from that of a Docker image."""
    return _SCHEME + header["from"].removeprefix(_SCHEME).removeprefix("//")


def key_inputs(header: Mapping[str, str]) -> dict[str, str]:
    """Return the digest of the artifact, whatever its name is, and that the SIF's scripts hold."""
    return {"bootstrap": header["bootstrap"], "digest": header["from"].rpartition("@")[2], "config": SIF_CONFIG}


def entries(
    layer: Layer, staging: Path, notes: dict[str, Any], sources: PackageSources, log: Callable[[str], None]
) -> Iterator[LayerEntry]:
    """Yield the files of the SIF. Raises FetchError."""
    from ekiben.registry.client import Registry
    from ekiben.registry.reference import Reference

    assert layer.stage is not None
    notes["executor"] = "registry"
    reference = Reference.parse(layer.stage.header["from"])
    platform = str(layer.inputs["platform"])
    received = 0

    def count(size: int) -> None:
        nonlocal received
        received += size
        log(f"{reference.repository}: {received / 1e6:.0f} MB")

    registry = Registry(reference)
    layers = registry.manifest(platform).layers
    if len(layers) != 1 or layers[0].media_type != _MEDIA_SIF:
        raise FetchError(f"{reference} is not a SIF", hint="of a Docker image: Bootstrap: docker")
    path = staging / "base.sif"
    registry.blob(layers[0].digest, path, count, layers[0].size)
    try:
        info = read_sif_base(path, platform.partition("/")[2])
        with open_regular(path) as stream, (staging / "config.squashfs").open("w+b") as out:
            yield from sif_entries(stream, info, out, layer)
    except (DefinitionError, StoreError, ValueError) as error:
        raise FetchError(
            f"{reference}: cannot be read as a base: {error}", hint=getattr(error, "hint", None)
        ) from error
