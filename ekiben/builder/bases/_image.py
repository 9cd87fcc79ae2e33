"""The files of an image of layers, wherever it comes from, as one layer."""

from __future__ import annotations

import contextlib
import gzip
import io
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ekiben.builder.base_config import config_layer
from ekiben.core.checked import Fields
from ekiben.core.errors import FetchError, LayerError
from ekiben.formats.base_config import BaseConfig
from ekiben.formats.changeset import unordered_entries
from ekiben.formats.squashfs.reader import merged_layer

if TYPE_CHECKING:
    from ekiben.formats.layer import LayerEntry
    from ekiben.formats.squashfs.reader import SquashfsReader


def image_entries(
    config: Mapping[str, Any], archives: Iterable[tuple[IO[bytes], int]], staging: Path, epoch: int, name: str
) -> Iterator[LayerEntry]:
    """Yield the files of an image, and those of its configuration.

    Args:
        config: what a container of it starts with, unchecked.
        archives: the tar of each layer, bottom first, and the bytes that it has packed.
        staging: a folder for the files on the way.
        epoch: seconds since 1970.
        name: of the image, in errors.

    Raises FetchError.
    """
    import zstandard

    from ekiben.formats.changeset import Lower
    from ekiben.formats.foreign_tar import spool_tar, unpacked_limit
    from ekiben.formats.layer import write_entries
    from ekiben.formats.squashfs.reader import SquashfsReader
    from ekiben.formats.squashfs.writer import SquashfsWriter

    with contextlib.ExitStack() as stack:
        try:
            base = BaseConfig.parse_oci(Fields(config))
        except ValueError as error:
            raise FetchError(f"{name}: the config of the image {error}") from error
        readers: list[SquashfsReader] = []
        for number, (archive, size) in enumerate(archives):
            with (staging / "spool.tar").open("w+b") as spool, (staging / f"{number}.squashfs").open("w+b") as out:
                try:
                    spool_tar(archive, spool, limit=unpacked_limit(size))
                    members = unordered_entries(
                        io.BytesIO(), spool, Lower(readers[::-1]), epoch=epoch, placeholders=number == 0
                    )
                    write_entries(members, SquashfsWriter(out, epoch=epoch))
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
                    raise FetchError(f"{name}: layer {number + 1} of the image cannot be unpacked: {error}") from error
            readers.append(SquashfsReader(stack.enter_context((staging / f"{number}.squashfs").open("rb"))))
        out = stack.enter_context((staging / "config.squashfs").open("w+b"))
        readers.append(config_layer(base.files(), readers, out, epoch))
        yield from merged_layer(readers)
