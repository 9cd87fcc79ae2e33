"""A base out of a SIF file: ``Bootstrap: localimage``, ``From: ./base.sif``. (``From: NAME.sif`` is the layer below.)

The key has the digest of its squashfs partitions: a SIF with the same files under another name is the same base.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ekiben.builder.base_config import config_layer
from ekiben.builder.sif_base import sif_files
from ekiben.core.errors import DefinitionError, FetchError, StoreError
from ekiben.core.files import open_regular
from ekiben.formats.base_config import SIF_CONFIG

if TYPE_CHECKING:
    from ekiben.formats.layer import LayerEntry
    from ekiben.formats.sif import SifInfo
    from ekiben.packages.host_config import PackageSources
    from ekiben.resolve.graph import Layer

_FILE_SYSTEMS = {2: "ext3", 3: "an archive", 4: "raw data", 5: "encrypted", 6: "encrypted"}
_CHUNK = 1 << 20


def header_problems(header: Mapping[str, str]) -> list[str]:
    """Return the problems of From:, which names a file."""
    return [] if header.get("from") else ["Bootstrap: localimage needs 'From:'"]


def image_file(header: Mapping[str, str]) -> str:
    """Return the path of the file, as the header writes it."""
    return header["from"]


def file_digest(path: Path, header: Mapping[str, str], arch: str) -> str:
    """Return the digest of the partitions of a SIF for ``arch``. Raises DefinitionError for other files."""
    try:
        status = path.stat()
        return _file_digest(path, arch, (status.st_ino, status.st_size, status.st_mtime_ns))
    except OSError as error:
        raise DefinitionError(f"From: {path}: cannot be read: {error.strerror}") from error
    except StoreError as error:
        raise DefinitionError(f"From: {error}") from error


@functools.lru_cache(maxsize=64)
def _file_digest(path: Path, arch: str, version: tuple[int, int, int]) -> str:
    """Return the digest; of a file of gigabytes that stays the same (``version``), it is computed once in a process."""
    info = read_sif_base(path, arch)
    with open_regular(path) as stream:
        return _digest(stream, info)


def read_sif_base(path: Path, arch: str) -> SifInfo:
    """Read the header of a SIF for ``arch`` whose partitions can be read. Raises StoreError, DefinitionError."""
    from ekiben.formats.sif import PARTITION, SQUASHFS, read_runnable_sif
    from ekiben.formats.squashfs.reader import SquashfsReader

    info = read_runnable_sif(path)
    if info.arch not in (arch, "unknown"):
        raise DefinitionError(f"From: {path} is an image for {info.arch}, and the stack's is {arch}")
    refused = [item for item in info.descriptors if item.data_type == PARTITION and item.file_system != SQUASHFS]
    if refused:
        kind = _FILE_SYSTEMS.get(refused[0].file_system, "of an unknown kind")
        raise DefinitionError(
            f"From: {path}: its data object {refused[0].number} is a partition that is {kind}, and only squashfs"
            " partitions can be a base",
            hint="`apptainer sandbox` it into a folder and build a plain SIF of that: apptainer build NEW.sif FOLDER/",
        )
    with open_regular(path) as stream:
        for item in info.layers:
            SquashfsReader(stream, item.offset)
    return info


def _digest(stream: BinaryIO, info: SifInfo) -> str:
    digest = hashlib.sha256()
    for item in info.layers:
        digest.update(item.size.to_bytes(8, "big"))
        for offset in range(item.offset, item.offset + item.size, _CHUNK):
            digest.update(os.pread(stream.fileno(), min(_CHUNK, item.offset + item.size - offset), offset))
    return f"sha256:{digest.hexdigest()}"


def key_inputs(header: Mapping[str, str]) -> dict[str, str]:
    """Return the digest of the file, whatever its name is, and that its scripts hold."""
    return {"bootstrap": header["bootstrap"], "digest": header["digest"], "config": SIF_CONFIG}


def entries(
    layer: Layer, staging: Path, notes: dict[str, Any], sources: PackageSources, log: Callable[[str], None]
) -> Iterator[LayerEntry]:
    """Yield the files of the SIF. Raises FetchError when its digest is not the key's."""
    assert layer.stage is not None
    notes["executor"] = "sif"
    path = Path(layer.stage.header["file"])
    with contextlib.ExitStack() as stack:
        try:
            info = read_sif_base(path, str(layer.inputs["platform"]).partition("/")[2])
            stream = stack.enter_context(open_regular(path))
            if _digest(stream, info) != layer.stage.header["digest"]:
                raise FetchError(f"{path} was changed since its key was computed", hint="build again")
            log(f"{path.name}: {len(info.layers)} partitions")
            yield from sif_entries(stream, info, stack.enter_context((staging / "config.squashfs").open("w+b")), layer)
        except (OSError, StoreError, ValueError) as error:
            raise FetchError(f"{path}: cannot be read as a base: {error}") from error


def sif_entries(stream: BinaryIO, info: SifInfo, out: BinaryIO, layer: Layer) -> Iterator[LayerEntry]:
    """Yield the files of an open SIF, with those by which its scripts hold, which are written to ``out``.

    Raises StoreError, OSError, ValueError.
    """
    from ekiben.formats.changeset import Lower
    from ekiben.formats.squashfs.reader import SquashfsReader, merged_layer

    readers = [SquashfsReader(stream, item.offset) for item in info.layers]
    files = sif_files(Lower(readers[::-1]))
    readers.append(config_layer(files, readers, out, layer.epoch))
    return merged_layer(readers)
