"""What the agents of images in files share: ``From: PATH`` or ``From: PATH:NAME``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ekiben.builder.bases._image import image_entries
from ekiben.core.errors import DefinitionError, FetchError

if TYPE_CHECKING:
    from ekiben.builder.image_files import ImageInFile
    from ekiben.formats.layer import LayerEntry
    from ekiben.resolve.graph import Layer

Open = Callable[[Path, str, str], AbstractContextManager["ImageInFile"]]  # path, name, platform


def path_problems(header: Mapping[str, str]) -> list[str]:
    """Return the problems of From:, which names a file."""
    source = header.get("from", "")
    if not path_of(header):
        return [f"Bootstrap: {header['bootstrap']} needs 'From: PATH'"]
    return [f"From: {source}: write the file's path, as /home/NAME/image.tar"] if source.startswith("~") else []


def path_of(header: Mapping[str, str]) -> str:
    """Return the path in From:, which ends at the first colon."""
    return header.get("from", "").partition(":")[0]


def image_digest(path: Path, header: Mapping[str, str], arch: str, open_image: Open) -> str:
    """Return the digest of the image that From: names. Raises DefinitionError for what is no such base."""
    try:
        index = path / "index.json"
        status = (index if index.is_file() else path).stat()
        version = status.st_ino, status.st_size, status.st_mtime_ns
        return _digest(path, header["from"].partition(":")[2], arch, open_image, version)
    except (OSError, ValueError, FetchError) as error:
        raise DefinitionError(f"From: {path}: {_reason(error)}") from error


@functools.lru_cache(maxsize=64)
def _digest(path: Path, name: str, arch: str, open_image: Open, version: tuple[int, int, int]) -> str:
    """Return the digest; of a file that stays the same (``version``), it is read once in a process."""
    with open_image(path, name, f"linux/{arch}") as image:
        if image.config.architecture not in (arch, ""):
            raise DefinitionError(
                f"From: {path} is an image for {image.config.architecture}, and the stack's is {arch}"
            )
        return image.digest


def image_file_entries(layer: Layer, staging: Path, notes: dict[str, Any], open_image: Open) -> Iterator[LayerEntry]:
    """Yield the files of the image. Raises FetchError when it is damaged, or another one than the key's."""
    assert layer.stage is not None
    notes["executor"] = "image file"
    header = layer.stage.header
    path = Path(header["file"])
    try:
        with open_image(path, header["from"].partition(":")[2], str(layer.inputs["platform"])) as image:
            if image.digest != header["digest"]:
                raise FetchError(f"{path} was changed since its key was computed", hint="build again")
            yield from image_entries(image.config.config, image.layers(staging), staging, layer.epoch, str(path))
    except (OSError, ValueError) as error:
        raise FetchError(f"{path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"it {error}"
