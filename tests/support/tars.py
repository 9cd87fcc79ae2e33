"""Tars as other programs write them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping


def plain_tar(files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> bytes:
    """Return a tar of ``files``, and of links by their targets."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return out.getvalue()
