"""Find the image that a command line names, for commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ekiben.cli.context import Context
from ekiben.cli.options import RecipeOptions, refuse_ignored
from ekiben.core.command_name import command_name
from ekiben.core.errors import EngineError, UsageError, nearest
from ekiben.core.printable import single_line

if TYPE_CHECKING:
    from ekiben.images import ImageOptions
    from ekiben.registry.reference import Reference
    from ekiben.run.image import NamedImage, PulledImage


def find_named(context: Context, reference: str, options: ImageOptions) -> NamedImage:
    """Find the image that a command line names; a line says which, where two have the name.

    Raises UsageError, DefinitionError, StoreError.
    """
    from ekiben.images import find_image

    options = replace(options, shared=lambda: context.settings.shared, pull=lambda named: _pull(context, named))
    image = find_image(reference, options)
    if image.note:
        context.log(image.note)
    return with_policy(context, replace(image, may_pull=not context.offline))


def file_of(context: Context, reference: str, options: RecipeOptions, verb: str) -> Path | None:
    """Return the SIF of an image that no recipe here builds: a file, a published one, one of a registry; else None.

    ``verb``: what is done to it, for messages. Raises UsageError, StoreError, FetchError.
    """
    from ekiben.images import ImageOptions

    named = ImageOptions(stack=options.stack, layers=options.layers, included=options.included)
    image = find_named(context, reference, named)
    if image.recipe is not None:
        return None
    refuse_ignored(f"is for building a recipe's image, and {reference} is built", "arch", "gpu_arch", "arguments")
    if not image.sif.is_file():
        raise EngineError(f"{reference} is a Docker image that was not made by Ekiben, and is not {verb}")
    from ekiben.formats.sif import read_runnable_sif

    read_runnable_sif(image.sif)
    return image.sif


def _pull(context: Context, reference: Reference) -> PulledImage:
    from ekiben.artifacts.pulled import pull_once

    return pull_once(reference, context.store, context.progress, offline=context.offline)


def with_policy(context: Context, image: NamedImage) -> NamedImage:
    """Return an image with the signature that the settings require before it is run."""
    if (policy := context.settings.require_signature) is None:
        return image
    from ekiben.signing.policy import required_signature

    return replace(image, signature=required_signature(policy, context.store, context.progress))


def readable_image(context: Context, reference: str) -> str:
    """Return what open_image() reads: the path of a SIF, or the name of an image in the store, of a recipe, say.

    Raises UsageError for what is neither in the store nor anything that find_image() finds; DefinitionError,
    EngineError, StoreError, FetchError.
    """
    from ekiben.images import ImageOptions

    store = context.store
    if "/" not in reference and not reference.endswith(".sif") and store.image(reference):
        return reference
    try:
        image = find_named(context, reference, ImageOptions())
    except UsageError as error:
        if not str(error).startswith("no recipe"):
            raise
        here = f"no image '{single_line(reference)}' in {store.root}"
        close = nearest(reference, store.images())
        if "Did you mean" in close:
            raise UsageError(f"{here}.{close}", hint=f"{command_name()} list names the images there") from error
        raise UsageError(f"{here}; {error}", hint=error.hint) from error
    if image.recipe is not None:
        return image.name
    if not image.sif.is_file():
        raise EngineError(f"{reference} is a Docker image that was not made by Ekiben, and is not read")
    path = str(image.sif)
    return path if "/" in path or path.endswith(".sif") else f"./{path}"
