"""Remove stored layers that no image needs.

Images pulled from registries that nothing used lately are removed, too, and containers that killed commands left in
Docker, podman and buildah. Images named here are removed first. Compiled wheels stay. With --in, in a shared folder:
versions that are pinned, tagged (`current` is a tag) or were used lately stay.

\b
Examples:
  ekiben prune --dry-run
  ekiben prune hello --engines
  ekiben prune --in /groups/lab/ekiben --unused-for 60
"""

from __future__ import annotations

from pathlib import Path

import click

from ekiben.cli.context import Context
from ekiben.cli.options import Command, NameType, PathType, refuse_ignored
from ekiben.core.command_name import command_name
from ekiben.core.errors import EngineError, UsageError
from ekiben.core.files import format_size
from ekiben.core.printable import printable
from ekiben.publish.prune import prune as prune_published
from ekiben.store import damaged_records, prune

_DAYS = click.FloatRange(min=0)


@click.command("prune", cls=Command, help=__doc__)
@click.argument("images", nargs=-1, metavar="[IMAGE…]", type=NameType())
@click.option("--in", "folder", type=PathType(), metavar="DIR", help="Prune a folder that was published to instead.")
@click.option(
    "--unused-for",
    type=_DAYS,
    default=30.0,
    show_default=True,
    metavar="DAYS",
    help="Keep pulled images, and with --in versions, that were used in the last DAYS.",
)
@click.option(
    "--grace",
    type=_DAYS,
    default=7.0,
    show_default=True,
    metavar="DAYS",
    help="With --in: keep removed images in trash/ for DAYS, longer than the longest job.",
)
@click.option("--engines", is_flag=True, help="Also remove the layers that engines keep for the next build.")
@click.option(
    "--wheels",
    is_flag=True,
    help="Also remove compiled wheels that no image was made with (imported ones stay), and unfinished compilations.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be removed; remove nothing.")
@click.pass_obj
def command(
    context: Context,
    /,
    images: tuple[str, ...],
    folder: Path | None,
    unused_for: float,
    grace: float,
    engines: bool,
    wheels: bool,
    dry_run: bool,
) -> None:
    """Prune the store, or a shared folder."""
    if folder:
        refuse_ignored("is about your own store; leave it out, or leave out --in", "engines", "wheels")
        prune_shared(folder.absolute(), images, unused_for, grace, dry_run)
        return
    refuse_ignored("is for a shared folder, which --in names", "grace")
    if engines and dry_run:
        raise UsageError("--engines removes immediately; omit --dry-run or --engines")
    if engines:
        remove_cached_images()
        if not images and not wheels and not context.store.root.exists():  # engines keep layers of other stores, too
            return
    removed = prune(context.store, untag=images, wheels=wheels, dry_run=dry_run)
    for path in damaged_records(context.store, images):
        name = path.stem
        heals = "Building the image" if path.parent.name == "refs" else "Building an image with its layer"
        forgets = f"`{command_name()} prune {name}`" if path.parent.name == "refs" else "removing the file"
        click.echo(
            printable(
                f"warning: {path} is damaged, and may name any layer: none is removed. {heals} writes it again,"
                f" {forgets} removes it and what only it names"
            ),
            err=True,
        )
    total = sum(count for _, count in removed)
    click.echo(f"{'would remove' if dry_run else 'removed'} {len(removed)} blobs, {format_size(total)}")
    remove_pulled(context, unused_for, dry_run)
    remove_abandoned(dry_run)


def remove_pulled(context: Context, unused_for: float, dry_run: bool) -> None:
    """Remove the images of registries that nothing used for so many days, and print their references."""
    from ekiben.artifacts.pulled import prune_pulled

    for reference, size in prune_pulled(context.store, unused_for, dry_run=dry_run):
        verb = "would remove" if dry_run else "removed"
        click.echo(printable(f"{verb} {reference}, pulled from its registry, {format_size(size)}"))


def remove_cached_images() -> None:
    """Remove the layers that engines keep as images, and print how many."""
    from ekiben.executors import by_preference

    for name, executor in by_preference():
        try:
            if executor.unavailable() is None and (count := executor.remove_cached_images()):
                click.echo(f"removed {count} layer images of {name}")
        except EngineError as error:  # an image that a container uses keeps no other image
            click.echo(printable(f"warning: {error}. {error.hint or ''}".rstrip()), err=True)


def remove_abandoned(dry_run: bool) -> None:
    """Remove the containers and images that this user's killed commands left in engines, and print their names."""
    from ekiben.executors import by_preference

    for name, executor in by_preference():
        for left in executor.remove_abandoned(dry_run=dry_run):
            verb = "would remove" if dry_run else "removed"
            click.echo(printable(f"{verb} {left} of {name}, which a killed command left"))


def prune_shared(folder: Path, names: tuple[str, ...], unused_for: float, grace: float, dry_run: bool) -> None:
    """Prune a folder that was published to, and print what happens to each version."""
    decisions, aside, removed = prune_published(
        folder, names=names, unused_for=unused_for, grace=grace, dry_run=dry_run
    )
    would = "would be " if dry_run else ""
    for one in decisions:
        click.echo(
            printable(f"{'keep  ' if one.keep else 'remove'}  {one.file}  {format_size(one.size)}  {one.reason}")
        )
    if not grace:  # includes what was just removed, except with --dry-run
        click.echo(f"{format_size(removed + aside if dry_run else removed)} {would}removed")
        return
    click.echo(
        f"{format_size(aside)} {would}quarantined, to be removed in {grace:g} {'day' if grace == 1 else 'days'}; "
        f"{format_size(removed)} of before {would}removed"
    )
