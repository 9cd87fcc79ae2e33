"""Sign an image.

IMAGE is FILE.sif, or a recipe, whose SIF in this folder is signed. The file gets the signature beside those that it
has, and is replaced atomically; a job that has it open keeps the former one. Published images are not changed: -o
writes a signed copy. An image in a registry is signed there.

\b
Examples:
  ekiben sign lora-opencalm
  ekiben sign ./lora-opencalm.sif --key you@example.org
  ekiben sign lora-opencalm:2026.11.27 -o lora-opencalm.sif
  ekiben sign registry.example.org/lab/lora-opencalm:1.2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from ekiben.cli.context import Context
from ekiben.cli.named import find_named
from ekiben.cli.options import (
    Command,
    OutputFile,
    RecipeType,
    TextType,
    find_signing_key,
    image_options,
    include_option,
    json_option,
)
from ekiben.core.command_name import command_name
from ekiben.core.errors import StoreError, UsageError
from ekiben.core.pgp_key import Key
from ekiben.images import ImageOptions, registry_reference
from ekiben.registry.client import Registry
from ekiben.run.image import NamedImage, is_published_file
from ekiben.signing import gpg
from ekiben.signing.registry import sign_pushed
from ekiben.signing.sif import sign_file


@dataclass(frozen=True, slots=True)
class SignResult:
    """``image``: a file, or a reference by digest; ``is_new``: the key had not signed it before."""

    image: str
    key: Key
    is_new: bool

    def to_json(self) -> dict[str, Any]:
        """Return what --json prints."""
        return {"path": self.image, "signed": asdict(self.key), "created": self.is_new}

    def to_lines(self) -> Iterator[str]:
        """Yield what is printed."""
        yield f"signed  {self.image}  by {self.key}{'' if self.is_new else '  (existing)'}"


@click.command("sign", cls=Command, help=__doc__)
@click.argument("image", metavar="IMAGE", type=RecipeType())
@click.option(
    "--key",
    type=TextType(),
    metavar="NAME|FINGERPRINT",
    help="The secret key, as gpg knows it (default: your key of require_signature, gpg's default, or your only one).",
)
@click.option("-o", "--output", type=OutputFile(), metavar="FILE", help="Write the signed image here.")
@image_options
@include_option()
@json_option
@click.pass_obj
def command(
    context: Context,
    /,
    image: str,
    key: str | None,
    output: Path | None,
    stack: str | None,
    layers: tuple[str, ...],
    included: tuple[Path, ...],
) -> None:
    """Find the file and the key, and sign."""
    if output is None and (reference := registry_reference(image)):
        signer = find_signing_key(context, key, "--key") or gpg.find_key(option="--key")
        registry = Registry(reference)
        _, digest = registry.fetch_manifest()
        is_new = sign_pushed(registry, digest, signer)
        context.print(SignResult(f"{str(reference).partition('@')[0]}@{digest}", signer, is_new))
        return
    named = find_named(context, image, ImageOptions(stack=stack, layers=layers, included=included))
    sif = _file_to_sign(named, image, output)
    signer = find_signing_key(context, key, "--key") or gpg.find_key(option="--key")
    with context.progress.step(f"sign {sif}", total=sif.stat().st_size):
        is_new = sign_file(sif, output or sif, signer, context.progress.count)
    context.print(SignResult(str(output or sif), signer, is_new))


def _file_to_sign(image: NamedImage, reference: str, output: Path | None) -> Path:
    """Return the file itself, not a link to it."""
    if not image.sif.is_file():
        raise StoreError(f"{image.sif} is not there", hint=image.build_hint)
    if image.is_published and output is None:
        raise UsageError(
            f"{reference} is published, and a published file is not changed; -o FILE writes a signed copy",
            hint=f"{command_name()} publish {reference} --to DIR --sign publishes a signed version beside it",
        )
    sif = image.sif.resolve()
    if output is None and is_published_file(sif):
        raise UsageError(
            f"{sif} is published, and a published file is not changed; -o FILE writes a signed copy",
            hint=f"{command_name()} publish {sif} --to DIR --sign publishes a signed version beside it",
        )
    return sif
