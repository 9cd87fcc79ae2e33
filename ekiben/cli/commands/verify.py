"""Test an image again, or check its signature.

Of a recipe's image: every blob's digest, and every %test in the finished image on the runtimes here. Of a file, or an
image in a registry: that it is intact, and signed by a key you know.

\b
Examples:
  ekiben verify lora-opencalm
  ekiben verify lora-opencalm --rebuild --engine docker      build it again, name the files that differ
  ekiben verify ./lora-opencalm.sif                          intact, and signed by a key of your keyring?
  ekiben verify registry.example.org/lab/lora-opencalm:1.2 --key lab.asc
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from ekiben.artifacts.reproduce import Comparison, rebuild, refuse_differences
from ekiben.builder.build import BuildContext, Options, image_name
from ekiben.builder.verify import Check, verify_image
from ekiben.cli.context import Context
from ekiben.cli.named import file_of
from ekiben.cli.options import (
    Command,
    PathType,
    RecipeOptions,
    RecipeType,
    engine_option,
    json_option,
    progress_option,
    recipe_options,
    refuse_ignored,
    signature_options,
)
from ekiben.core.errors import FetchError
from ekiben.core.pgp_key import Key
from ekiben.core.printable import printable
from ekiben.images import not_in_registry, registry_reference
from ekiben.inspect.describe import drift_of
from ekiben.resolve.graph import ResolvedRecipe
from ekiben.signing.check import check_image
from ekiben.store import Image


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """An image that passed its tests again."""

    image: Image
    checks: Sequence[Check]

    def to_json(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        checks = [{"runtime": check.runtime, "seconds": check.seconds} for check in self.checks]
        return {"image": self.image.image_id, "drift": drift_of(self.image.layers), "checks": checks}

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of the text output."""
        yield from (f"drift   {line}" for line in drift_of(self.image.layers))
        yield from (f"passed under {check.runtime}, {check.seconds:.0f} s" for check in self.checks)


@dataclass(frozen=True, slots=True)
class SignedResult:
    """A file or an image in a registry, and who signed it."""

    image: str
    signers: Sequence[Key]

    def to_json(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        return {"image": self.image, "signed": [asdict(key) for key in self.signers]}

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of the text output."""
        yield from (f"{self.image}  signed by {key}" for key in self.signers)


@dataclass(frozen=True, slots=True)
class RebuildResult:
    """An image that was built again, in ``seconds``."""

    comparison: Comparison
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        done = self.comparison
        layers = [
            {
                "name": item.name,
                "same": item.same,
                "diff_id": [item.before.diff_id, item.after.diff_id],
                "digest": [item.before.digest, item.after.digest],
                "executor": [item.before.executor, item.after.executor],
                "seconds": item.after.seconds,
                "differing": list(item.differing),
            }
            for item in done.layers
        ]
        return {"same": done.same, "image": done.image_ids, "sif": done.sif_digests, "layers": layers}

    def to_lines(self) -> Iterator[str]:
        """Yield what is printed of an image that came out the same."""
        done = self.comparison
        yield (
            f"the same again, in {self.seconds:.0f} s: {len(done.layers)} layers, "
            f"config {done.image_ids[0][:19]}, SIF {done.sif_digests[0][:19]}"
        )


@click.command("verify", cls=Command, help=__doc__)
@click.argument("recipe", metavar="IMAGE|REF", type=RecipeType())
@click.option("--sif", type=PathType(), metavar="FILE", help="Test this file (default: ./RECIPE.sif when it exists).")
@click.option("--rebuild", "again", is_flag=True, help="Build it in an empty store instead, and compare every byte.")
@engine_option("With --rebuild: what runs the scripts.")
@signature_options
@recipe_options
@progress_option
@json_option
@click.pass_obj
def command(
    context: Context,
    /,
    recipe: str,
    sif: Path | None,
    again: bool,
    engine: str,
    require_signature: bool,
    signer: str | None,
    recipe_options: RecipeOptions,
) -> None:
    """Check the signature, rebuild, or run the tests."""
    image = _file_or_reference(context, recipe, recipe_options)
    if image is not None:
        _refuse_options_of_recipes()
        try:
            context.print(SignedResult(*check_image(image, signer)))
        except FetchError as error:
            reference = registry_reference(image)
            raise (not_in_registry(image, reference, error) if reference else error) from error
        return
    is_signature_required = require_signature or signer is not None
    if not again:
        refuse_ignored("is for --rebuild", "engine")
    elif not is_signature_required:
        refuse_ignored("is not tested by --rebuild", "sif")
    resolved = recipe_options.resolve(recipe)
    if is_signature_required:
        signed = SignedResult(*check_image(str(sif or f"{image_name(resolved)}.sif"), signer))
        for line in signed.to_lines():
            click.echo(printable(line), err=context.json)
    if again:
        rebuild_and_compare(context, resolved, Options(engine=engine, mirror=recipe_options.mirror))
        return
    context.print(VerifyResult(*verify_image(resolved, context.store, sif)))


def _file_or_reference(context: Context, name: str, options: RecipeOptions) -> str | None:
    """Return the file or the registry's image that is meant, None for a recipe's image."""
    if registry_reference(name):  # its signature is there, too
        _refuse_options_of_recipes()
        return name
    if name.endswith(".sif"):
        _refuse_options_of_recipes()
    sif = file_of(context, name, options, "verified")
    return str(sif) if sif else None


def _refuse_options_of_recipes() -> None:
    refuse_ignored(
        "is for a recipe's image; of a file or a reference, integrity and signature are checked",
        "sif",
        "again",
        "engine",
        "stack",
        "gpu_arch",
        "arguments",
    )


def rebuild_and_compare(context: Context, resolved: ResolvedRecipe, options: Options) -> None:
    """Print the comparison.

    Raises VerifyError when the image came out differently; its JSON is printed all the same.
    """
    began = time.monotonic()
    comparison = rebuild(
        BuildContext(resolved, context.store, options, context.progress), user_root=context.default_store
    )
    result = RebuildResult(comparison, time.monotonic() - began)
    if context.json:
        context.print(result)
    refuse_differences(resolved.recipe.name, comparison)
    if not context.json:
        context.print(result)
