"""Write an image's SBOM (CycloneDX 1.6).

It names the packages, their licences, layers and dependencies. RECORD.json is the file beside a published SIF; its
SBOM (.cdx.json) is there, too. The same image always has the same SBOM.

\b
Examples:
  ekiben sbom lora-opencalm -o lora-opencalm.cdx.json
  ekiben sbom ./lora-opencalm.sif
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from ekiben.cli.context import Context
from ekiben.cli.named import readable_image
from ekiben.cli.options import Command, OutputFile, RecipeType
from ekiben.core.files import atomic_write
from ekiben.inspect.sbom import sbom_of

_KINDS = {"Debian's": "pkg:deb/", "Python's": "pkg:pypi/", "of a repository": "pkg:generic/"}


@click.command("sbom", cls=Command, help=__doc__)
@click.argument("image", metavar="IMAGE|RECORD.json", type=RecipeType())
@click.option("-o", "--output", type=OutputFile(), metavar="FILE", help="Write it here (default: it is printed).")
@click.pass_obj
def command(context: Context, /, image: str, output: Path | None) -> None:
    """Write the SBOM to a file, or print it."""
    name = image if image.endswith(".json") else readable_image(context, image)
    document = sbom_of(name, context.store, context.progress)
    if output is None:
        click.echo(document, nl=False)
        return
    atomic_write(output, document)
    purls = [str(item.get("purl", "")) for item in json.loads(document)["components"]]
    counts = {kind: sum(purl.startswith(prefix) for purl in purls) for kind, prefix in _KINDS.items()}
    click.echo(f"{output}  packages: {', '.join(f'{count} {kind}' for kind, count in counts.items() if count)}")
