"""Publish versions of a sample recipe's image."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from ekiben.publish.publish import Published, publish
from ekiben.store import Store
from support.sample_recipe import SampleRecipe, image_of, quiet


def put(files_only: SampleRecipe, store: Store, shared_dir: Path, **options: Any) -> Published:
    return publish(image_of(files_only, store), store, shared_dir, quiet(), check=False, **options)


def put_next(files_only: SampleRecipe, store: Store, shared_dir: Path, **options: Any) -> Published:
    """A further version: the data were edited."""
    (files_only.path / "files/data.txt").write_text(f"{time.time_ns()}\n")
    return put(files_only, store, shared_dir, **options)


def unused(shared_dir: Path, days: float) -> None:
    for path in shared_dir.glob("images/*/*"):
        os.utime(path, (time.time() - days * 86400,) * 2, follow_symlinks=False)


def version(done: Published) -> str:
    return done.sif.stem.removeprefix("own-")
