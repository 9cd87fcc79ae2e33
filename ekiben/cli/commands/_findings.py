"""What doctor finds before something is run: problems stop it, the rest is printed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import click

from ekiben.cli.context import Context
from ekiben.core.errors import StoreError
from ekiben.core.printable import printable
from ekiben.doctor.consult import check_here, check_image, known_stacks
from ekiben.doctor.findings import Finding, refuse
from ekiben.doctor.image_requirements import requirements_of_sif
from ekiben.run.image import NamedImage
from ekiben.run.site import SiteFile
from ekiben.store import Store


def check_this_machine(context: Context, program: str, image: NamedImage, *, gpu: bool) -> None:
    """Check that ``program`` can run the image here. Raises IncompatibleHostError when it cannot."""
    try:
        store = context.store
    except StoreError:  # running needs none: what the image requires is read again each time
        store = Store(Path(os.devnull))
    _report(check_here(store, program, image, gpu=gpu, log=context.log))


def check_compute_nodes(context: Context, site: SiteFile, sif: Path, *, gpu: bool) -> None:
    """Check that a site's compute nodes can run the image. Raises IncompatibleHostError when they cannot."""
    requirements = requirements_of_sif(sif, context.store, context.log, gpu=gpu)
    _report(check_image(site, requirements, known_stacks(), gpu=gpu))


def _report(findings: Iterable[Finding]) -> None:
    findings = list(findings)
    refuse(findings)
    for finding in findings:
        if finding.level == "warning":
            click.echo(
                printable(f"{finding.topic}: {finding.message}" + (f" ({finding.fix})" if finding.fix else "")),
                err=True,
            )
