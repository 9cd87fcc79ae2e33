"""Build a recipe's layers, export its image and run its tests: used by all commands and by the Python interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ekiben.artifacts.export import build_and_export
from ekiben.artifacts.exporters import Artifact, ExportOptions
from ekiben.builder.plan import Action, BuildContext
from ekiben.builder.verify import Check, verify, verify_as_sif
from ekiben.store import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """What to make.

    ``formats``: by default a SIF, and an image of Docker where its daemon answers; ``output``: the file (default: the
    image's name, in this folder); ``squash``: a SIF of one partition; ``rewrite``: rewrite the last layer of the SIF
    that is there; ``verify``: run the tests.
    """

    formats: Sequence[str] = ()
    output: Path | None = None
    squash: bool = False
    rewrite: bool = False
    verify: bool = True


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """What was made, and the tests that passed in it."""

    image: Image
    artifacts: list[Artifact]
    checks: list[Check]


def make_image(context: BuildContext, request: BuildRequest, actions: Sequence[Action] | None = None) -> BuiltImage:
    """Build what is missing as ``actions`` say (by default plan()'s), export it, and run the tests in each export.

    A new SIF, and an engine's image, takes the name of the one that is there when it has passed. Raises VerifyError
    when a test fails, and what build_and_export() raises.
    """
    store, progress, checks = context.store, context.progress, dict[str, list[Check]]()

    def check(image: Image, artifact: Artifact) -> None:
        sifs, loaded = ([Path(artifact.ref)], []) if artifact.kind == "sif" else ([], [artifact.kind])
        checks[artifact.kind] = verify(image, store, progress, sifs=sifs, loaded=loaded)

    def check_layers(image: Image) -> None:
        with progress.step(f"verify {image.name}"):
            passed = verify_as_sif(image, store, progress.output)
        checks["sif"] = [passed] if passed else []

    image, artifacts = build_and_export(
        context,
        actions,
        formats=request.formats,
        output=request.output,
        options=ExportOptions(
            squash=request.squash,
            rewrite=request.rewrite,
            with_sha256=request.verify,
            check=check if request.verify else None,
            check_layers=check_layers if request.verify else None,
        ),
    )
    if request.verify and not checks:  # an archive is not run
        checks["stored"] = verify(image, store, progress)
    return BuiltImage(image, artifacts, [item for passed in checks.values() for item in passed])
