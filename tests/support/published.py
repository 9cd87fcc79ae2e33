"""Publish versions of a sample recipe's image."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ekiben.publish.publish import Published, PublishOptions, publish
from ekiben.store import Image, Store
from support.sample_recipe import SampleRecipe, image_of, quiet


@dataclass(frozen=True)
class Lab:
    """A shared folder, and the recipe and store of somebody who publishes there."""

    recipe: SampleRecipe
    store: Store
    folder: Path

    def image(self) -> Image:
        return image_of(self.recipe, self.store)

    def put(self, **options: Any) -> Published:
        return publish(self.image(), self.store, self.folder, PublishOptions(check=False, **options), quiet())

    def put_next(self, **options: Any) -> Published:
        """Publish a further version: the data were edited."""
        self.recipe.write("files/data.txt", f"{time.time_ns()}\n")
        return self.put(**options)


def unused(shared_dir: Path, days: float) -> None:
    for path in shared_dir.glob("images/*/*"):
        os.utime(path, (time.time() - days * 86400,) * 2, follow_symlinks=False)


def version(done: Published) -> str:
    return done.sif.stem.removeprefix("own-")
