"""A small file system of a test's own: what a full disk does can be tried on it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mount_tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs on ``folder``, which is made, for as long as the context lasts. Skips where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


@contextmanager
def mount_xfs(folder: Path) -> Iterator[Path]:
    """Mount an XFS of 400 MB on ``folder``, which is created: its files can share blocks. Skips where it cannot."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    if shutil.which("mkfs.xfs") is None:
        pytest.skip("xfsprogs is not installed (tests/services.sh install)")
    folder.mkdir()
    disk = folder.with_suffix(".img")
    with disk.open("wb") as stream:
        stream.truncate(400 << 20)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", disk], check=True)
    if subprocess.run(["mount", "-o", "loop", disk, folder], check=False).returncode:
        pytest.skip("this machine does not let root mount an XFS")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
        disk.unlink()
