"""Build the site of the documents for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build_site(folder: Path) -> Path:
    """Build the site into ``folder`` and return it. A warning fails the test; without MkDocs the test is skipped."""
    if not find_spec("material"):
        pytest.skip("mkdocs-material is not installed (make lint installs it)")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # the theme's notice about its successor
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder
