"""Check whether an image will run, and why not.

On this machine, or on a site's compute nodes from a login node without GPU. Exit code 10 when it will fail. What an
image requires is read from its layers; only with TASK something is run: its --dry-run, without a GPU, for the memory it
expects.

\b
Examples:
  ekiben doctor                              can one build here, which stacks run on these GPUs
  ekiben doctor lora-opencalm                this image on this machine
  ekiben doctor --site abci-3.0 lora-opencalm
  ekiben doctor --site abci-2.0 lora-opencalm train --data=talk.jsonl
  ekiben doctor --record -o ~/.config/ekiben/sites/mine.yaml
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from ekiben.cli.commands._start import engines
from ekiben.cli.context import Context
from ekiben.cli.named import find_named
from ekiben.cli.options import (
    NameType,
    PathType,
    RecipeOptions,
    RecipeType,
    TaskCommand,
    json_option,
    recipe_options,
    refuse_ignored,
)
from ekiben.core.command_name import command_name
from ekiben.core.errors import IncompatibleHostError, UsageError
from ekiben.core.files import atomic_write
from ekiben.core.output import check_output_file
from ekiben.doctor.consult import Subject, ask_task, consult
from ekiben.doctor.findings import Section, report, text, worst
from ekiben.doctor.record import profile_text, record_site
from ekiben.images import ImageOptions
from ekiben.run.launch import choose_target
from ekiben.run.site import find_site


@dataclass(frozen=True, slots=True)
class DoctorResult:
    """What doctor found, in sections."""

    sections: Sequence[Section]

    @property
    def will_fail(self) -> bool:
        """Whether what was asked about cannot run."""
        return any(
            worst(section.findings) == "error" and section.is_decisive
            for section in self.sections
            if section.check != "suit"
        )

    def to_json(self) -> Any:
        """Return the object that --json prints."""
        return report(self.sections)

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of the text output."""
        yield text(self.sections)


@click.command("doctor", cls=TaskCommand, help=__doc__)
@click.argument("image", required=False, metavar="[IMAGE]", type=RecipeType())
@click.argument("argv", nargs=-1, metavar="[TASK [ARGS…]]", type=click.UNPROCESSED)
@click.option(
    "--site",
    type=NameType(),
    metavar="NAME|FILE",
    help="Check the compute nodes of this site, of sites/ or by its profile, instead of this machine.",
)
@click.option("--record", is_flag=True, help="Write this machine's site profile; best in a job on a compute node.")
@click.option(
    "-o",
    "--output",
    type=PathType(),
    metavar="FILE",
    help="With --record: the file (default: it is printed). Else: where the image would be written.",
)
@recipe_options
@json_option
@click.pass_obj
def command(
    context: Context,
    /,
    image: str | None,
    argv: tuple[str, ...],
    site: str | None,
    record: bool,
    output: Path | None,
    recipe_options: RecipeOptions,
) -> None:
    """Record this machine, or check it or a site."""
    if record:
        if image or site or context.json:
            raise UsageError("--record describes this machine; leave out the image, --site and --json")
        refuse_ignored(
            "is of no use to --record, which describes this machine", "stack", "layers", "gpu_arch", "arguments"
        )
        record_machine(context, output)
        return
    of_recipe = "is for a recipe's image; name the recipe"
    if image is None or image.endswith(".sif"):
        refuse_ignored(of_recipe, "stack", "layers", "gpu_arch", "arguments", "included")
    options = ImageOptions(stack=recipe_options.stack, layers=recipe_options.layers, included=recipe_options.included)
    named = find_named(context, image, options) if image else None
    if named and named.recipe is None:
        refuse_ignored(of_recipe, "gpu_arch", "arguments")
    if site:
        refuse_ignored("is about building on this machine, and --site checks others", "output")
    if output and not output.is_dir():
        check_output_file(output, f"-o {output}")  # an image could not be written there
    site_file = find_site(site).file if site else None
    subject = None
    if image and named:
        if argv:
            named.launch_of(argv[0])
        subject = Subject(
            named,
            image,
            recipe_options.resolve,
            choose=lambda: choose_target(named, engines()),
            task=argv[0] if argv else "",
            ask=(lambda target: ask_task(target, argv, context.environment)) if argv else None,
        )
    sections = consult(context.store, subject, site_file, output or Path(), context.log)
    result = DoctorResult(sections)
    context.print(result)
    if result.will_fail:
        raise click.exceptions.Exit(IncompatibleHostError.exit_code)


def record_machine(context: Context, output: Path | None) -> None:
    """Write this machine's profile to ``output``, or print it."""
    if output:
        output = check_output_file(output, f"-o {output}")
    host = socket.gethostname()
    site = record_site(output.stem if output else host.split(".")[0], context.environment)
    profile = profile_text(
        site,
        f"Recorded by `{command_name()} doctor --record` on {host}, {datetime.now(UTC):%Y-%m-%d}. "
        "What could not be seen is left out.",
    )
    if output is None:
        click.echo(profile, nl=False)
        return
    atomic_write(output, profile)
    click.echo(output)
