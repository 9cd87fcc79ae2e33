"""The users and groups that Apptainer and SingularityCE show in a container.

They make /etc/passwd and /etc/group of those in a SIF's primary partition, with a line for whoever runs it, whatever
the overlay partitions hold:
https://github.com/apptainer/apptainer/blob/v1.4.5/internal/pkg/runtime/engine/apptainer/container_linux.go
(addIdentityMount). Where layers above the first one change these files, a partition with the merged ones alone is the
primary one, below all layers.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from ekiben.formats.changeset import Lower
from ekiben.formats.layer import Entry, LayerEntry, write_entries
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.formats.squashfs.writer import SquashfsWriter

_FILES = ("etc/group", "etc/passwd")


def users_partition(layers: Sequence[SquashfsReader], epoch: int) -> bytes:
    """Return a squashfs of the merged /etc/passwd and /etc/group of ``layers``, bottom first; b"" where the first has
    the same.

    Equal files give equal bytes: nothing is compressed. Raises StoreError for a damaged layer.
    """
    merged = _read(Lower(layers[::-1]))
    if merged == _read(Lower(layers[:1])):
        return b""
    entries: list[LayerEntry] = [(Entry(path, "dir", mtime=epoch), None) for path in ("", "etc")]
    entries += [(Entry(path, "file", 0o644, mtime=epoch, size=len(data)), [data]) for path, data in merged.items()]
    out = io.BytesIO()
    write_entries(entries, SquashfsWriter(out, threads=1, epoch=epoch, level=0))
    return out.getvalue()


def _read(tree: Lower) -> dict[str, bytes]:
    entries = ((path, tree.lookup(path)) for path in _FILES)
    return {path: tree.read_file(path) for path, entry in entries if entry is not None and entry.kind == "file"}
