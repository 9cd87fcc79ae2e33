"""A small file system of a test's own: what a full disk does can be tried on it."""

from __future__ import annotations

import os
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
