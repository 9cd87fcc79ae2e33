"""Layers of any registry image: downloaded, decompressed, bottom first."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from ekiben.core.errors import FetchError
from ekiben.core.files import open_regular
from ekiben.registry.client import Registry
from ekiben.registry.reference import Reference


def unpacked(path: Path) -> IO[bytes]:
    """Open a layer's tar, uncompressed, with gzip or with zstd.

    Raises OSError; reading it raises FetchError where it is damaged.
    """
    stream = open_regular(path)
    start = stream.read(4)
    stream.seek(0)
    return cast(IO[bytes], _Unpacked(path.name, stream, start))


class _Unpacked:
    """A stream to read from front to end, and the file below it."""

    def __init__(self, name: str, file: IO[bytes], start: bytes) -> None:
        self._name, self._file, self._stream, self._broken = name, file, file, tuple[type[Exception], ...]()
        if start[:2] == b"\x1f\x8b":
            self._stream = cast(IO[bytes], gzip.GzipFile(fileobj=file))
            self._broken = (gzip.BadGzipFile, zlib.error, EOFError)
        elif start == b"\x28\xb5\x2f\xfd":
            import zstandard

            self._stream = cast(IO[bytes], zstandard.ZstdDecompressor().stream_reader(file))
            self._broken = (zstandard.ZstdError,)

    def read(self, size: int = -1) -> bytes:
        try:
            return self._stream.read(size)
        except self._broken as error:
            raise FetchError(f"{self._name}: the layer is damaged: it cannot be decompressed: {error}") from error

    def __enter__(self) -> _Unpacked:
        return self

    def __exit__(self, *failure: object) -> None:
        self._file.close()


def image_layers(
    reference: Reference, folder: Path, platform: str, on_bytes: Callable[[int], None]
) -> tuple[Mapping[str, Any], Iterator[tuple[IO[bytes], int]]]:
    """Return what a container of the image starts with, unchecked, and its layers, bottom first: the tar as a stream,
    and the bytes that it has packed.

    Each stream is gone when the next is asked for.
    """
    registry = Registry(reference)
    manifest = registry.manifest(platform)
    config = registry.config(manifest).config

    def streams() -> Iterator[tuple[IO[bytes], int]]:
        for number, layer in enumerate(manifest.layers):
            path = folder / f"layer-{number}"
            registry.blob(layer.digest, path, on_bytes, layer.size)
            with unpacked(path) as stream:
                yield stream, path.stat().st_size
            path.unlink()

    return config, streams()
