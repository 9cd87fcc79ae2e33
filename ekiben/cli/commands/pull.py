"""Pull an image from a registry as a SIF file.

The image may have been pushed as SIF or as a Docker image. An interrupted download of a SIF is resumed.

\b
Examples:
  ekiben pull registry.example.org/lab/lora-opencalm:1.2-sif
  ekiben pull registry.example.org/lab/lora-opencalm:1.2 -o /tmp/image.sif
  ekiben pull registry.example.org/lab/lora-opencalm:1.2 --require-signature --key lab.asc
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ekiben.artifacts.exporters import Artifact
from ekiben.artifacts.pull import pull
from ekiben.cli.context import Context
from ekiben.cli.options import Command, OutputFile, TextType, json_option, signature_options
from ekiben.core.files import format_size
from ekiben.core.pgp_key import Key
from ekiben.registry.reference import Reference
from ekiben.run.image import shipped_recipe
from ekiben.run.printed import sif_lines
from ekiben.signing.gpg import known_keys


@dataclass(frozen=True, slots=True)
class PullResult:
    """``digest`` is the manifest's; ``task`` is the first of the image's recipe, or stands for any command."""

    artifact: Artifact
    digest: str
    signer: Key | None
    task: str

    def to_json(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        item, key = self.artifact, self.signer
        signed = {"fingerprint": key.fingerprint, "user": key.user} if key else None
        return {"path": item.ref, "size": item.size, "manifest": self.digest, "created": item.created, "signed": signed}

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of the text output."""
        item = self.artifact
        existing = "" if item.created else "  (existing)"
        yield f"pulled  {item.ref}  {format_size(item.size)}  {self.digest[:19]}{existing}"
        if self.signer:
            yield f"signed  by {self.signer}"
        yield from (f"run     {line}" for line in sif_lines(item.ref, self.task))


@click.command("pull", cls=Command, help=__doc__)
@click.argument("reference", metavar="REF", type=TextType())
@click.option("-o", "--output", type=OutputFile(), metavar="FILE", help="Write the SIF here (default: ./NAME.sif).")
@signature_options
@json_option
@click.pass_obj
def command(
    context: Context, /, reference: str, output: Path | None, require_signature: bool, signer: str | None
) -> None:
    """Pull, with the keys that have to have signed it."""
    with known_keys(signer) if require_signature or signer else nullcontext() as keys:
        artifact, digest, signed_by = pull(
            Reference.parse(reference), context.store, output, context.progress, keys=keys
        )
        context.print(PullResult(artifact, digest, signed_by, _first_task(Path(artifact.ref))))


def _first_task(sif: Path) -> str:
    with suppress(ValueError):
        if recipe := shipped_recipe(sif):
            return next(iter(recipe.tasks), "COMMAND")
    return "COMMAND"
