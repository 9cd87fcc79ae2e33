"""Squashfs 4.0 in Python: how a layer is stored, once.

The OCI tar of a layer is not kept: it is made again from here, bit for bit.

    reader   SquashfsReader, SquashfsFile, compression; merged_layer, merged_entries of stacked layers
    writer   SquashfsWriter
    reuse    BlockReuse: compressed blocks of a former version

The names are loaded on first use: their modules bring compressors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ekiben.formats.squashfs.reader import (
        SquashfsFile,
        SquashfsReader,
        compression,
        merged_entries,
        merged_layer,
    )
    from ekiben.formats.squashfs.writer import SquashfsWriter

__all__ = ["SquashfsFile", "SquashfsReader", "SquashfsWriter", "compression", "merged_entries", "merged_layer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "SquashfsWriter":
        from ekiben.formats.squashfs import writer as module
    else:
        from ekiben.formats.squashfs import reader as module  # type: ignore[no-redef]
    return getattr(module, name)
