"""A layer whose build stage compiles a small package with gcc, as images/*.def do theirs with nvcc; and wheels made by
hand.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.fat_elf import elf, fatbin
from support.sample_recipe import SampleRecipe

WITH_WHEEL = """\
Bootstrap: localimage
From: walls.sif
Stage: build

%arguments
    capabilities=8.0

%files
    files/source /opt/source

%post
    echo compile for {{ capabilities }}

%labels
    org.ekiben.wheel tiny

Bootstrap: localimage
From: ground.sif
Stage: runtime

%files from build
    /opt/wheels/tiny /opt/wheels/tiny

%post
    echo install

%test
    true
"""
INPUTS: dict[str, Any] = {
    "platform": "linux/amd64",
    "suite": "bookworm",
    "python": "3.11",
    "torch": "2.11.0",
    "cuda": "13.0",
    "cxx11_abi": True,
    "capabilities": ["9.0"],
}
TAG = "cp311-cp311-linux_x86_64"


def compiled(sample: SampleRecipe) -> SampleRecipe:
    """own: ground ← roof, which takes a wheel of a stage on walls."""
    sample.write("images/roof.def", WITH_WHEEL)
    sample.write("files/source/tiny.c", "int tiny;\n")
    sample.stack(arguments={})
    return sample


def write_wheel(folder: Path, files: Mapping[str, bytes], *, name: str = "tiny", tag: str = TAG, bad: str = "") -> Path:
    """A wheel with a true RECORD, but for the file ``bad``."""
    info, rows = f"{name}-1.0.dist-info", []
    path = folder / f"{name}-1.0-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for path_inside, data in {f"{info}/METADATA": b"Name: tiny\n", **files}.items():
            archive.writestr(zipfile.ZipInfo(path_inside), data)
            checksum = hashlib.sha256(b"other" if path_inside == bad else data).digest()
            rows.append(f"{path_inside},sha256={base64.urlsafe_b64encode(checksum).rstrip(b'=').decode()},{len(data)}")
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), "\n".join([*rows, f"{info}/RECORD,,"]) + "\n")
    return path


def extension(*code: str) -> bytes:
    """A library with device code for just these architectures."""
    return elf(fatbin(code)) if code else elf(section=b".data")
