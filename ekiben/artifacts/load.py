"""Load an image into an engine that keeps images: it gets its name when its tests have passed there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from ekiben.artifacts.exporters import Artifact, ExportOptions
from ekiben.core.errors import EngineError, VerifyError
from ekiben.core.progress import Progress
from ekiben.executors import untested_name
from ekiben.store import Image


@dataclass(frozen=True, slots=True)
class Engine:
    """Operations on an engine's images: their ids by tag ("" where there is none); ``load`` imports the image under a
    tag; ``tag`` tags an id; ``untag`` removes a tag, and with its last one the image.
    """

    image_id: Callable[[str], str]
    load: Callable[[str], None]
    tag: Callable[[str, str], None]
    untag: Callable[[str], None]


def load_image(kind: str, image: Image, engine: Engine, options: ExportOptions, progress: Progress) -> Artifact:
    """Load the image and test it as ``options`` say. Until it has passed, ``image.tag`` stays what it was.

    Raises VerifyError when a test fails, EngineError.
    """
    if engine.image_id(image.tag) == image.image_id:
        known = Artifact(kind, image.tag, image.size, False)
        if options.check:
            options.check(image, known)
        return known
    artifact = Artifact(kind, image.tag, image.size, True)
    if not options.check:
        engine.load(image.tag)
        return artifact
    untested = untested_name(image.tag, image.image_id)
    engine.load(untested)
    try:
        options.check(image, artifact)
        engine.tag(image.image_id, image.tag)
    except VerifyError:
        progress.log(f"{image.tag} {'is left as it was' if engine.image_id(image.tag) else 'is not made'}")
        raise
    finally:
        with contextlib.suppress(EngineError):  # the daemon does not answer; the first error is reported
            engine.untag(untested)
    return artifact
