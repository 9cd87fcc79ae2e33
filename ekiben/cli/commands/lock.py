"""Update the lock files of a stack or of your recipe.

They name Python packages with hashes, Debian packages with versions,
and the images that `From:` names by a tag with digests.

\b
Examples:
  ekiben lock
  ekiben lock cu130 --check
  ekiben lock ./mine                        what mine/requirements.txt asks for, on the layers below
  ekiben lock --arch arm64                  what differs for arm64, in NAME.arm64.lock
  ekiben lock cu130 --keep                  after a line was added to an .in file
  ekiben lock cu130 --outdated              what has a newer release; nothing is changed
  ekiben lock ./mine --outdated             and which tags of bases have moved
  ekiben lock cu130 --advisories all.zip    what has a known advisory: osv.dev's PyPI/all.zip
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from ekiben.builder.build import Options
from ekiben.cli.context import Context
from ekiben.cli.options import (
    Command,
    NameType,
    PathType,
    TextType,
    arch_option,
    engine_option,
    include_option,
    refuse_ignored,
)
from ekiben.core.errors import LockMismatchError
from ekiben.core.printable import printable
from ekiben.packages.lock import open_stack, refresh, short_path
from ekiben.packages.outdated import find_advisories, find_newer, read_locks
from ekiben.project.base import base_reader
from ekiben.project.lock import find_local_recipe, lock_recipe
from ekiben.project.lock_bases import Bases, has_packages, lock_bases, outdated_bases, recipe_bases, stack_bases
from ekiben.project.sources import SourceSettings, source_builder


@click.command("lock", cls=Command, help=__doc__)
@click.argument("stack", default="cu130", metavar="[STACK|FOLDER|RECIPE]", type=NameType())
@click.option("--check", is_flag=True, help="Change nothing; print outdated locks, and exit with 9 if there are any.")
@click.option("--keep", is_flag=True, help="Keep every version that still fits, and add only what is new.")
@click.option("--outdated", is_flag=True, help="Change nothing; print which Python packages have a newer release.")
@click.option(
    "--advisories",
    type=PathType(),
    metavar="FILE|FOLDER",
    help=(
        "Change nothing; print known advisories of the locked versions, from a database in the OSV format. "
        "Exit with 9 if there is one."
    ),
)
@arch_option("Lock for this processor only (default: all that stack.yaml names).")
@click.option("--mirror", type=TextType(), metavar="URI", help="A Debian archive (default: apt's on this machine).")
@click.option("--only-binary", is_flag=True, help="Refuse packages without a wheel (default: their sources are built).")
@engine_option("What builds the sources of packages without a wheel.")
@include_option()
@click.pass_obj
def command(
    context: Context,
    /,
    stack: str,
    check: bool,
    keep: bool,
    outdated: bool,
    advisories: Path | None,
    mirror: str | None,
    arch: str | None,
    only_binary: bool,
    engine: str,
    included: tuple[Path, ...],
) -> None:
    """Update, check, or compare."""
    recipe = find_local_recipe(stack, included)
    bases = recipe_bases(recipe) if recipe else stack_bases(stack, open_stack(stack, included))
    if outdated or advisories:
        refuse_ignored(
            "is for writing lock files; --outdated and --advisories only read them", "check", "keep", "mirror", "arch"
        )
        if outdated and bases.tags:
            _print_outdated(bases)
            if recipe and not has_packages(recipe):
                return
        if recipe:
            locks = read_locks(recipe.folder / "images", recipe.sources)
        else:
            locks = read_locks(open_stack(stack, included).folder)
        _compare(locks, outdated=outdated, advisories=advisories)
        return
    if check:
        refuse_ignored("is for writing lock files; --check keeps what is locked anyway", "keep")
    if recipe:
        refuse_ignored("is for a stack's Debian packages; a recipe of your own locks Python packages", "mirror")
    for line in lock_bases(bases, check=check, keep=keep, arch=arch):
        click.echo(printable(line))
    if recipe and bases.tags and not has_packages(recipe):
        return
    if recipe:
        engines = None if check else (context.store, Options(engine=engine), context.progress)
        build, read = (source_builder(*engines), base_reader(*engines)) if engines else (None, None)
        settings = SourceSettings(build, context.store.downloads, only_binary, read)
        lines = lock_recipe(recipe, check=check, keep=keep, arch=arch, settings=settings)
    else:
        refuse_ignored("is for a recipe of your own; a stack locks wheels alone", "only_binary", "engine")
        lines = refresh(stack, check=check, keep=keep, mirror=mirror, arch=arch, included=included)
    for line in lines:
        click.echo(printable(line))


def _print_outdated(bases: Bases) -> None:
    """Print which locked tags of bases name another image by now."""
    lines = list(outdated_bases(bases))
    for line in lines:
        click.echo(printable(line))
    if not lines:
        click.echo(f"{len(bases.tags)} locked tags of bases name the same images")


def _compare(locks: Mapping[Path, Mapping[str, str]], *, outdated: bool, advisories: Path | None) -> None:
    """Print newer releases and advisories of the versions in each lock file."""
    pinned = {name: version for versions in locks.values() for name, version in versions.items()}
    if outdated:
        newer = find_newer(pinned)
        for lock, versions in locks.items():
            for name in sorted(versions.keys() & newer.keys()):
                click.echo(printable(f"{short_path(lock)}: {name} {versions[name]} → {newer[name]}"))
        click.echo(f"{len(newer)} of {len(pinned)} locked packages have a newer release")
    if advisories:
        known = find_advisories(pinned, advisories)
        for advisory in known:
            where = next(lock for lock, versions in locks.items() if advisory.name in versions)
            click.echo(printable(f"{short_path(where)}: {advisory}"))
        if known:
            raise LockMismatchError(
                f"advisories of the locked versions are known: {len(known)}",
                hint="require a fixed version in the .in file, then lock with --keep",
            )
        click.echo(f"no advisory is known of {len(pinned)} locked packages")
