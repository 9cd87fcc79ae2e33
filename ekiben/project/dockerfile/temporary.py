"""A Dockerfile's recipe for the time of a build: only the layers of the conversion are kept."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ekiben.core.errors import UsageError
from ekiben.core.files import read_source
from ekiben.project.dockerfile.conversion import Conversion, convert
from ekiben.project.lock_bases import lock_bases, recipe_bases
from ekiben.spec.bases_lock import BASES_LOCK
from ekiben.spec.recipe import read_recipe


@contextlib.contextmanager
def temporary_recipe(conversion: Conversion, log: Callable[[str], None], *, offline: bool) -> Iterator[Path]:
    """Yield the folder of a recipe with the name of the build context, which is removed afterwards.

    A bases.lock beside the Dockerfile pins the tags of bases; without one the registry says what they name now, and a
    line shows it. Raises DefinitionError, FetchError; UsageError for a tag without a lock when ``offline``.
    """
    context = conversion.dockerfile.absolute().parent
    name = re.sub(r"[^a-z0-9]+", "-", context.name.lower()).strip("-") or "image"
    with tempfile.TemporaryDirectory(prefix="ekiben-dockerfile-") as parent:
        folder = Path(parent) / name
        _, notes = convert(folder, conversion)
        for note in notes:
            log(note)
        lock = context / BASES_LOCK
        if lock.is_file():
            (folder / BASES_LOCK).write_text(read_source(lock), encoding="utf-8")
        bases = recipe_bases(read_recipe(folder))
        if bases.tags and not lock.is_file():
            if offline:
                raise UsageError(
                    f"--offline: {conversion.dockerfile} names {', '.join(bases.tags)}, and a tag can move",
                    hint=f"write its digest, or put a {BASES_LOCK} beside the file",
                )
            for line in lock_bases(bases):
                log(line.partition(": ")[2])
        yield folder
