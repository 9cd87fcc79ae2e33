"""Publish an image to a shared folder.

IMAGE is a recipe: its missing layers are built first, and others build on them. FILE.sif, a published NAME[:VERSION]
or an image of a registry is copied as it is, with its signatures. With --modulefile, Environment Modules and Lmod find
this version and later ones below DIR/modulefiles. With --repair, records that somebody removed from DIR or damaged are
written again, each from its image; nothing else is published.

\b
Examples:
  ekiben publish lora-opencalm --to /groups/lab/ekiben
  ekiben publish lora-opencalm --to /groups/lab/ekiben --version 1.2 --tag stable --modulefile
  ekiben publish lora-opencalm --to /groups/lab/ekiben --sign you@example.org
  ekiben publish --repair /groups/lab/ekiben
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from ekiben.builder.build import BuildContext, Options, build
from ekiben.cli.context import Context
from ekiben.cli.named import file_of
from ekiben.cli.options import (
    Command,
    PathType,
    RecipeOptions,
    RecipeType,
    TextType,
    engine_option,
    find_signing_key,
    json_option,
    key_for_file,
    recipe_options,
    refuse_ignored,
    sign_option,
)
from ekiben.core.checked import TASK
from ekiben.core.command_name import command_name
from ekiben.core.errors import UsageError
from ekiben.core.files import format_size
from ekiben.publish.file import publish_file
from ekiben.publish.publish import Published, PublishOptions, open_destination, publish
from ekiben.publish.repair import RepairedVersion, repair
from ekiben.run.printed import sif_lines
from ekiben.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishResult:
    """``recipe``: "" where a file was published; ``task`` is the first of the recipe, or stands for any command;
    ``is_current``: the link `current` points to the version now.
    """

    recipe: str
    task: str
    folder: Path
    published: Published
    is_current: bool

    def to_json(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        done = self.published
        files = {"path": str(done.sif), "bytes_copied": done.bytes_copied, "module": done.module}
        return {**done.record.data, "by": done.record.by, **files}

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of the text output."""
        done = self.published
        sif = done.sif.with_name("current") if self.is_current else done.sif
        copied = f", {format_size(done.bytes_copied)} of layers copied" if done.created else "  (existing)"
        yield f"published  {done.sif}  {format_size(done.record.size)}{copied}"
        if done.record.signature:
            yield f"signed     by {done.record.signature}"
        yield from (f"run        {line}" for line in sif_lines(sif, self.task))
        if done.module:
            module = done.module.rpartition("/")[0] if self.is_current else done.module
            yield (
                f"module     module use {shlex.quote(f'{self.folder}/modulefiles')}; module load {shlex.quote(module)}"
            )
        if self.recipe:
            yield f"build on   EKIBEN_SHARED={shlex.quote(str(self.folder))} {command_name()} build {self.recipe}"
        if done.created and (self.folder / "catalog").is_dir():
            yield (
                f"catalog    {command_name()} catalog {shlex.quote(str(self.folder))}   # adds this version to the"
                " pages"
            )


@dataclass(frozen=True, slots=True)
class RepairResult:
    """The versions that had no usable record."""

    versions: Sequence[RepairedVersion]

    def to_json(self) -> list[dict[str, str]]:
        """Return what --json prints."""
        return [asdict(version) for version in self.versions]

    def to_lines(self) -> Iterator[str]:
        """Yield what is printed."""
        yield from (
            f"repaired   {item.file}" if not item.reason else f"no record  {item.file}: {item.reason}"
            for item in self.versions
        )
        if not self.versions:
            yield "every version has its record"


@click.command("publish", cls=Command, help=__doc__)
@click.argument("recipe", metavar="IMAGE", required=False, type=RecipeType())
@click.option("--to", "folder", type=PathType(), metavar="DIR", help="The folder colleagues read.")
@click.option(
    "--repair", "damaged", type=PathType(), metavar="DIR", help="Publish nothing; write missing records of DIR again."
)
@click.option("--version", type=TextType(), metavar="VERSION", help="Default: the date, as 2026.11.21.")
@click.option(
    "--tag",
    "tags",
    multiple=True,
    type=TextType(),
    metavar="TAG",
    help="Add a link NAME next to `current`; may repeat. Its image is never pruned.",
)
@click.option("--pin", is_flag=True, help="Never prune this version.")
@click.option("--no-current", is_flag=True, help="Leave the link `current` as it is.")
@click.option("--modulefile", is_flag=True, help="Offer its tasks as commands, for `module load`; see above.")
@click.option("--no-verify", is_flag=True, help="Do not run the %test scripts in the SIF before others see it.")
@sign_option
@engine_option("What builds.")
@recipe_options
@json_option
@click.pass_obj
def command(
    context: Context,
    /,
    recipe: str | None,
    folder: Path | None,
    damaged: Path | None,
    version: str | None,
    tags: tuple[str, ...],
    pin: bool,
    no_current: bool,
    modulefile: bool,
    no_verify: bool,
    sign: str | None,
    engine: str,
    recipe_options: RecipeOptions,
) -> None:
    """Check the folder and the key, build, publish; or repair a folder."""
    if damaged:
        _repair(context, damaged.absolute())
        return
    if not recipe or not folder:
        missing = "argument 'IMAGE'" if not recipe else "option '--to'"
        raise UsageError(f"Missing {missing}", hint=f"{command_name()} publish IMAGE --to DIR")
    names = PublishOptions(
        version=version, tags=tags, pin=pin, current=not no_current, check=not no_verify, module=modulefile
    )
    sif = file_of(context, recipe, recipe_options, "published")
    if sif is not None:
        key = key_for_file(context, sif, sign)
        done = publish_file(sif, context.store, folder.absolute(), context.progress, replace(names, key=key))
        _print(context, folder.absolute(), done, not no_current)
        return
    resolved, store, folder = recipe_options.resolve(recipe), context.store, folder.absolute()
    # Checked before the build, which takes minutes.
    open_destination(folder, names)
    key = find_signing_key(context, sign)
    options = Options(engine=engine, mirror=recipe_options.mirror, registry=context.settings.registry)
    image = build(BuildContext(resolved, store, options, context.progress))
    published = publish(image, store, folder, replace(names, key=key), context.progress)
    task = next(iter(resolved.recipe.file.tasks), "COMMAND")
    context.print(
        PublishResult(
            recipe=resolved.cli_args, task=task, folder=folder, published=published, is_current=not no_current
        )
    )


def _print(context: Context, folder: Path, published: Published, is_current: bool) -> None:
    """Print what was published of a file."""
    record = published.record
    # A colleague may have written the record of a version that was there.
    task = next((name for name in record.tasks if TASK.fullmatch(name)), "COMMAND")
    context.print(PublishResult(recipe="", task=task, folder=folder, published=published, is_current=is_current))


def _repair(context: Context, folder: Path) -> None:
    """Print what was repaired; exit with 1 where a record could not be written."""
    refuse_ignored("publishes an image, and --repair none", "recipe", "folder", "version", "tags", "pin", "sign")
    result = RepairResult(repair(folder, Store(context.settings.store), context.progress))
    context.print(result)
    if any(item.reason for item in result.versions):
        raise click.exceptions.Exit(1)
