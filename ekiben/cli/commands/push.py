"""Send an image to a registry.

IMAGE is a recipe, which is built where layers are missing, FILE.sif, a published NAME[:VERSION], or an image of another
registry; all but a recipe are sent as the SIF that they are. Blobs the registry has are not sent again; an interrupted
upload is resumed. The registry is asked whether it takes an upload before anything is built.

\b
Examples:
  ekiben push lora-opencalm registry.example.org/lab/lora-opencalm:1.2
  ekiben push lora-opencalm registry.example.org/lab/lora-opencalm:1.2-sif --format sif
  ekiben push lora-opencalm registry.example.org/lab/layers --format layers
  ekiben push lora-opencalm registry.example.org/lab/lora-opencalm:1.2 --sign
  ekiben push ./lora-opencalm.sif registry.example.org/lab/lora-opencalm:1.2-sif
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

from ekiben.artifacts.push import FORMATS, Pushed, PushRequest, check_push, push
from ekiben.artifacts.push_file import push_file
from ekiben.builder.build import BuildContext, Options, build
from ekiben.cli.context import Context
from ekiben.cli.named import file_of
from ekiben.cli.options import (
    Command,
    NearestChoice,
    RecipeOptions,
    RecipeType,
    TextType,
    find_signing_key,
    json_option,
    key_for_file,
    recipe_options,
    refuse_ignored,
    sign_option,
)
from ekiben.core.command_name import command_name
from ekiben.core.errors import UsageError
from ekiben.core.files import format_size
from ekiben.core.pgp_key import Key
from ekiben.registry.reference import Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """``use`` is the command that takes it from there."""

    pushed: Pushed
    key: Key | None
    use: str

    def to_json(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        done, key = self.pushed, self.key
        signed = {"fingerprint": key.fingerprint, "user": key.user} if key else None
        return {
            "ref": done.ref,
            "sent": done.sent,
            "mounted": done.mounted,
            "existing": done.existing,
            "signed": signed,
            "sbom": done.sbom,
        }

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of the text output."""
        done = self.pushed
        yield (
            f"pushed  {done.ref}  {format_size(done.sent)} sent, {done.mounted} blobs mounted, {done.existing} existing"
        )
        if self.key:
            yield f"signed  by {self.key}"
        if done.sbom:
            yield f"sbom    {done.sbom}"
        yield f"use     {self.use}"


@click.command("push", cls=Command, help=__doc__)
@click.argument("recipe", metavar="IMAGE", type=RecipeType())
@click.argument("reference", metavar="REF", type=TextType())
@click.option(
    "--format",
    "format_",
    type=NearestChoice(FORMATS),
    default="docker",
    show_default=True,
    help="For docker pull, for apptainer pull oras://, or layers by key for EKIBEN_REGISTRY.",
)
@sign_option
@click.option("--sbom", is_flag=True, help="Attach its SBOM (CycloneDX), as OCI 1.1 attaches artifacts.")
@recipe_options
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    recipe: str,
    reference: str,
    format_: str,
    sign: str | None,
    sbom: bool,
    recipe_options: RecipeOptions,
) -> None:
    """Find the key, ask the registry, build, push."""
    context = ctx.find_object(Context) or Context()
    if format_ == "layers":  # before anything is built; push() refuses it, too
        refuse_ignored("is for an image; layers have none, and are found by their keys", "sbom", "sign")
    target, progress = Reference.parse(reference), context.progress
    if (sif := file_of(context, recipe, recipe_options, "pushed")) is not None:
        if ctx.get_parameter_source("format_") is ParameterSource.COMMANDLINE and format_ != "sif":
            raise UsageError(f"--format {format_}: {recipe} is a SIF file, and is pushed as one: --format sif")
        check_push(PushRequest(target, "sif"))
        key = key_for_file(context, sif, sign)
        pushed = push_file(sif, context.store, PushRequest(target, "sif", key, sbom), progress)
        context.print(PushResult(pushed=pushed, key=key, use=f"apptainer pull oras://{target}"))
        return
    resolved, store = recipe_options.resolve(recipe), context.store
    options = Options(mirror=recipe_options.mirror, registry=context.settings.registry)
    key = find_signing_key(context, sign) if format_ != "layers" else None
    request = PushRequest(target, format_, key, sbom)
    check_push(request)  # checked before a build, which takes minutes
    pushed = push(build(BuildContext(resolved, store, options, progress)), store, request, progress)
    use = {
        "docker": f"docker pull {target}",
        "sif": f"apptainer pull oras://{target}",
        "layers": f"EKIBEN_REGISTRY={reference} {command_name()} build {resolved.cli_args}",
    }[format_]
    context.print(PushResult(pushed=pushed, key=key, use=use))
