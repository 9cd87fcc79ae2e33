"""SIF files with layers of a few bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ekiben.formats.layer import Entry, write_entries
from ekiben.formats.partition import Partition
from ekiben.formats.sif import SifHeader, write_sif
from ekiben.formats.squashfs.writer import SquashfsWriter

ID = "16a32244-9987-5dce-ac50-bdb65147262d"
DEFFILE = "Bootstrap: localimage\nFrom: python.sif\n"


def blob(path: Path, data: bytes) -> Partition:
    path.write_bytes(data)
    return Partition(path, 0, len(data), "sha256:" + hashlib.sha256(data).hexdigest())


def squashfs(path: Path, name: str) -> Partition:
    with path.open("w+b") as out:
        write_entries([(Entry("", "dir"), None), (Entry(name, "file", size=4), [b"data"])], SquashfsWriter(out))
    return blob(path, path.read_bytes())


def make(
    out: Path, *partitions: Partition, deffile: str = DEFFILE, arch: str = "amd64", epoch: int = 1_700_000_000
) -> None:
    write_sif(out, partitions, SifHeader(ID, deffile, arch, epoch))
