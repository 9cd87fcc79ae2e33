"""Compare a recipe as it is now with what its image was built from."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ekiben.builder.build import stored_image
from ekiben.core.checked import Fields, parse_json
from ekiben.core.errors import EkibenError, VerifyError
from ekiben.core.inner_path import AnyPath
from ekiben.resolve.graph import ResolvedRecipe
from ekiben.resolve.resolve import resolve
from ekiben.run.image import read_in_sif
from ekiben.spec.recipe import Recipe
from ekiben.store import Store

IMAGE_METADATA = "opt/ekiben/image.json"  # in an image: ekiben/resolve/recipe_layer.py writes it
_RECIPE_FILES = "/opt/ekiben/recipe/"


@dataclass(frozen=True, slots=True)
class RecipeState:
    """Whether an image is what its recipe describes now.

    ``changed``: files of the recipe and layers that differ; empty where only the store could be asked.
    """

    kind: Literal["same", "edited", "unknown"]
    changed: Sequence[str] = ()
