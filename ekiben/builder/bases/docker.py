"""A base out of a registry: ``Bootstrap: docker``. All layers of the image become one.

``From:`` names it by a digest, or by a tag that bases.lock binds to one.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ekiben.builder.base_config import config_layer
from ekiben.builder.bases._reference import reference_problems
from ekiben.core.checked import Fields
from ekiben.core.errors import FetchError, LayerError
from ekiben.formats.base_config import BaseConfig
from ekiben.formats.changeset import unordered_entries
from ekiben.formats.squashfs.reader import merged_layer

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
    """Return the header without what only a mirror or a stage is named by, and that it has a configuration."""
    inputs = {name: value for name, value in header.items() if value and name not in ("mirrorurl", "stage")}
    return {**inputs, "config": "1"}  # the image's own configuration is in the layer


def entries(
    layer: Layer, staging: Path, notes: dict[str, Any], sources: PackageSources, log: Callable[[str], None]
) -> Iterator[LayerEntry]:
    """Yield the files of the image. Raises FetchError."""
    import zstandard

    from ekiben.formats.changeset import Lower
    from ekiben.formats.foreign_tar import spool_tar, unpacked_limit
    from ekiben.formats.layer import write_entries
    from ekiben.formats.squashfs.reader import SquashfsReader
    from ekiben.formats.squashfs.writer import SquashfsWriter
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

    with contextlib.ExitStack() as stack:
        fields, archives = image_layers(reference, staging, str(layer.inputs["platform"]), count)
        try:
            config = BaseConfig.parse_oci(Fields(fields))
        except ValueError as error:
            raise FetchError(f"{reference}: the config of the image {error}") from error
        readers: list[SquashfsReader] = []
        for number, (archive, size) in enumerate(archives):
            with (staging / "spool.tar").open("w+b") as spool, (staging / f"{number}.squashfs").open("w+b") as out:
                try:
                    spool_tar(archive, spool, limit=unpacked_limit(size))
                    members = unordered_entries(
                        io.BytesIO(), spool, Lower(readers[::-1]), epoch=layer.epoch, placeholders=number == 0
                    )
                    write_entries(members, SquashfsWriter(out, epoch=layer.epoch))
                except (
                    gzip.BadGzipFile,
                    zlib.error,
                    zstandard.ZstdError,
                    tarfile.TarError,
                    LayerError,
                    EOFError,
                    ValueError,
                    OverflowError,
                ) as error:
                    raise FetchError(
                        f"{reference}: layer {number + 1} of the image cannot be unpacked: {error}"
                    ) from error
            readers.append(SquashfsReader(stack.enter_context((staging / f"{number}.squashfs").open("rb"))))
        out = stack.enter_context((staging / "config.squashfs").open("w+b"))
        readers.append(config_layer(config.files(), readers, out, layer.epoch))
        yield from merged_layer(readers)
