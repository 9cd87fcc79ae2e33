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


def small_sif(path: Path) -> Path:
    """Write a SIF that a runtime could start."""
    path.parent.mkdir(parents=True, exist_ok=True)
    layer = path.with_suffix(".layer")
    make(path, squashfs(layer, "data"))
    layer.unlink()
    return path


def broken_sifs(folder: Path) -> dict[str, str]:
    """Write files in ``folder`` that no runtime starts; return name → what is wrong with it."""
    good = small_sif(folder / "good.sif").read_bytes()
    (folder / "good.sif").unlink()
    where = next(item for item in range(0, len(good), 4096) if good[item : item + 4] == b"hsqs")
    files = {
        "empty.sif": (b"", "not a SIF file"),
        "text.sif": (b"#!/bin/sh\necho hello\n" * 1000, "not a SIF file"),
        "short.sif": (good[:-1000], "truncated: data object 2 ends behind the file's "),
        "table.sif": (good[:6000], "truncated: "),
        "zeros.sif": (good[:where] + bytes(len(good) - where), "damaged: data object 2 is not a squashfs"),
        "data.sif": (good[:4096] + bytes(len(good) - 4096), "there is no image in this SIF"),
    }
    for name, (data, _) in files.items():
        (folder / name).write_bytes(data)
    return {name: message for name, (_, message) in files.items()}
