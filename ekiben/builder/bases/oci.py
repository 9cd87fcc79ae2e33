"""A base out of an OCI layout in a folder: ``Bootstrap: oci``, ``From: PATH`` or ``From: PATH:NAME``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ekiben.builder.bases._image_file import image_digest, image_file_entries, path_of, path_problems
from ekiben.builder.image_files import open_oci_folder

if TYPE_CHECKING:
    from ekiben.formats.layer import LayerEntry
    from ekiben.packages.host_config import PackageSources
    from ekiben.resolve.graph import Layer

header_problems = path_problems
image_file = path_of


def file_digest(path: Path, header: Mapping[str, str], arch: str) -> str:
    """Return the digest of the image. Raises DefinitionError for what is no such base."""
    return image_digest(path, header, arch, open_oci_folder)


def key_inputs(header: Mapping[str, str]) -> dict[str, str]:
    """Return the digest of the image, whatever the file's name is."""
    return {"bootstrap": "oci", "digest": header["digest"], "config": "1"}


def entries(
    layer: Layer, staging: Path, notes: dict[str, Any], sources: PackageSources, log: Callable[[str], None]
) -> Iterator[LayerEntry]:
    """Yield the files of the image. Raises FetchError."""
    yield from image_file_entries(layer, staging, notes, open_oci_folder)
