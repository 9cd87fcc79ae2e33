"""Make what a recipe asks for: build its layers, export the image, run its tests. The one way of all commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ekiben.artifacts.export import build_and_export
from ekiben.artifacts.exporters import Artifact, ExportOptions
from ekiben.builder.plan import Action, BuildContext
from ekiben.builder.verify import Check, verify
from ekiben.store import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """What to make.

    ``formats``: by default a SIF, and an image of Docker where its daemon answers; ``output``: the file (default: the
    image's name, in this folder); ``squash``: a SIF of one partition; ``verify``: run the tests.
    """

    formats: Sequence[str] = ()
    output: Path | None = None
    squash: bool = False
    verify: bool = True


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """What was made, and the tests that passed in it."""

    image: Image
    artifacts: list[Artifact]
    checks: list[Check]


def make_image(context: BuildContext, request: BuildRequest, actions: Sequence[Action] | None = None) -> BuiltImage:
    """Build what is missing as ``actions`` say (by default plan()'s), export it, and run the tests in each export.

    A new SIF takes the place of the one that is there when it has passed. Raises VerifyError when a test fails, and
    what build_and_export() raises.
    """
    store, progress, checks = context.store, context.progress, list[Check]()

    def check(image: Image, sif: Path) -> None:
        checks[:] = verify(image, store, progress, sifs=[sif])  # once more where an export was repeated

    image, artifacts = build_and_export(
        context,
        actions,
        formats=request.formats,
        output=request.output,
        options=ExportOptions(
            squash=request.squash, with_sha256=request.verify, check=check if request.verify else None
        ),
    )
    if request.verify:
        unchanged = [Path(item.ref) for item in artifacts if item.kind == "sif" and not item.created]
        loaded = [item.kind for item in artifacts if item.kind in ("docker", "podman")]
        if unchanged or loaded or not any(item.kind == "sif" for item in artifacts):
            checks += verify(image, store, progress, sifs=unchanged, loaded=loaded)
    return BuiltImage(image, artifacts, checks)
