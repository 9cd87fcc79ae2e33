"""Find the image that a user names.

What has a slash or ends in .sif is a path: of a recipe's folder, or of a SIF file. Where nothing is there, and it
begins with a registry's host or a scheme, it is an image in that registry. NAME is a recipe, else what was published
under this name; NAME:VERSION is a published version, or a tag's.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ekiben.core.checked import NAME
from ekiben.core.command_name import command_name
from ekiben.core.decisions import log_decision
from ekiben.core.errors import FetchError, StoreError, UsageError, nearest
from ekiben.core.inner_path import AnyPath, InnerPath
from ekiben.core.printable import single_line
from ekiben.images.published import (
    UnrecordedVersion,
    VersionRecord,
    image_folders,
    read_records,
    tags,
    unrecorded_versions,
)
from ekiben.registry.reference import Reference, is_reference
from ekiben.run.image import RECIPE_FOLDER, NamedImage, PulledImage, shipped_recipe
from ekiben.spec.recipe import Recipe, find_recipe, recipe_folders
from ekiben.store.shared import IMAGES, open_shared

CURRENT = "current"
_SHOWN = 20  # versions that a message names


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """Further options that select an image.

    ``stack`` and ``layers`` name another image of a recipe; ``included``: what it may use elsewhere; ``sif``: its file
    (default: the image's name, in this folder); ``added_layer``: see Recipe; ``shared``: returns the folder where
    colleagues publish, None where there is none; ``pull``: returns an image of a registry, None: it is refused.
    """

    stack: str | None = None
    layers: tuple[str, ...] = ()
    included: tuple[Path, ...] = ()
    sif: Path | None = None
    added_layer: str | None = None
    shared: Callable[[], Path | None] = lambda: None
    pull: Callable[[Reference], PulledImage] | None = None


def find_image(reference: str, options: ImageOptions) -> NamedImage:
    """Find the image of a recipe (its name or folder), a SIF file, a published NAME[:VERSION], or an image in a
    registry.

    Raises UsageError when there is none, DefinitionError for a recipe that is wrong, StoreError for a shared folder
    that cannot be read, FetchError for a registry that does not have it or does not answer.
    """
    if _is_path(reference):
        return _at_path(reference, options)
    name, colon, version = _split(reference)
    if colon:
        return _published_image(name, version, options)
    try:
        recipe = find_recipe(reference, options.included)
    except UsageError as error:
        if reference in recipe_folders() or (Path(reference) / "recipe.yaml").is_file():
            raise  # there is one, and something is wrong with it
        shared = options.shared()
        if _is_published(name, shared):
            return _published_image(name, "", options)
        if Path(reference).is_file():
            return _of_file(Path(reference), options)
        looked = f"; nothing is published as {single_line(name)} in {shared}" if shared else ""
        raise UsageError(f"{str(error).removesuffix('.')}{looked}", hint=error.hint) from error
    return replace(_of_recipe(recipe, options), note=_note_of_both(name, options.shared()))


def _split(reference: str) -> tuple[str, str, str]:
    """Return name, colon, version. Raises UsageError for a colon without a version."""
    name, colon, version = reference.partition(":")
    if colon and not version:
        raise UsageError(
            f"{single_line(reference)}: the version after the colon is missing",
            hint=f"{single_line(name)}:{CURRENT} is the newest published image; {name}, a recipe's if there is one",
        )
    return name, colon, version


def _is_path(reference: str) -> bool:
    return "/" in reference or reference.endswith(".sif") or reference in (".", "..")


def _at_path(reference: str, options: ImageOptions) -> NamedImage:
    if registry_reference(reference):
        return _in_registry(reference, options)
    path = Path(reference)
    if path.name == "recipe.yaml" or (path / "recipe.yaml").is_file():
        return _of_recipe(find_recipe(reference, options.included), options)
    if path.is_file():
        return _of_file(path, options)
    shown = single_line(reference)
    if path.exists() and not path.is_dir():
        raise UsageError(f"{shown} is not a regular file")
    if reference.endswith(".sif"):
        raise UsageError(f"{shown} is a folder, not a SIF file" if path.is_dir() else f"{shown} is not there")
    raise UsageError(f"{shown}: no recipe.yaml there, and it is not a SIF file")


def registry_reference(text: str) -> Reference | None:
    """Return the reference that a name is, None for a path. Raises UsageError for a scheme that is not read."""
    if not is_reference(text) or ("://" not in text and (text.endswith(".sif") or os.path.lexists(text))):
        return None
    if text.startswith(("http://", "https://")) and text.endswith(".sif"):
        raise UsageError(
            f"{single_line(text)} is a file of a web server, and is not fetched",
            hint="download it, and name the file; oras://HOST/NAME:TAG is an image in a registry",
        )
    return Reference.parse(text)


def _in_registry(text: str, options: ImageOptions) -> NamedImage:
    _refuse_options(options, f"{text} is in a registry")
    reference = Reference.parse(text)
    if options.pull is None:
        raise UsageError(
            f"{text} is in a registry, and a file is needed", hint=f"{command_name()} pull {text} -o NAME.sif"
        )
    try:
        pulled = options.pull(reference)
    except FetchError as error:
        raise not_in_registry(text, reference, error) from error
    stem = reference.repository.rpartition("/")[2]
    log_decision(f"image {text}", pulled.engine or pulled.sif, "of a registry")
    if not pulled.sif.is_file():
        return NamedImage(name=stem, sif=pulled.sif, tasks=None, pulled=pulled.engine, note=pulled.note)
    image = _named_file(pulled.sif)
    name = stem if image.tasks is None else image.name
    notes = "; ".join(filter(None, (pulled.note, image.note)))
    return replace(image, name=name, sha256=pulled.sha256, pulled=pulled.engine, note=notes)


def not_in_registry(text: str, reference: Reference, error: FetchError) -> FetchError:
    """Return the error for an image that a registry does not have; it also covers a name that may be a path."""
    if "://" in text:
        return error
    here = f"{text}: there is no such file or folder here, and no image in the registry {reference.host}"
    return FetchError(f"{here}: {error}", hint=error.hint)


def _of_recipe(recipe: Recipe, options: ImageOptions) -> NamedImage:
    layered = replace(recipe, layers=options.layers, added_layer=options.added_layer)
    name = layered.image_name(options.stack)
    return NamedImage(
        name=name,
        sif=options.sif or Path(f"{name}.sif"),
        tasks={task: file.launch for task, file in recipe.file.tasks.items()},
        recipe=layered,
        build_args=layered.cli_args(options.stack),
    )


def _of_file(sif: Path, options: ImageOptions) -> NamedImage:
    _refuse_options(options, f"{sif} is a file")
    return _named_file(sif)


def _refuse_options(options: ImageOptions, reason: str) -> None:
    for option, value in (
        ("--stack", options.stack),
        ("--layer", options.layers),
        ("--include", options.included),
        ("--sif", options.sif),
    ):
        if value:
            raise UsageError(f"{option} is for a recipe's image, and {reason}")


def _named_file(sif: AnyPath) -> NamedImage:
    """Return the image of a SIF, which a runtime opens by its path."""
    shipped, note, path = None, "", sif.path if isinstance(sif, InnerPath) else sif
    try:
        shipped = shipped_recipe(sif)
    except ValueError as error:
        note = f"the tasks of {sif} are not known: /{RECIPE_FOLDER}/recipe.yaml {error}"
    tasks = {task: file.launch for task, file in shipped.tasks.items()} if shipped else None
    stem = re.sub(r"[^a-z0-9._-]+", "-", path.stem.lower()).strip("-._") or "image"  # in names of jobs and folders
    return NamedImage(name=shipped.name if shipped else stem, sif=path, tasks=tasks, note=note)


# ------------------------------------------------------------------------------------------------- published


def _is_published(name: str, shared: Path | None) -> bool:
    """Return whether the shared folder has a version of this name."""
    if shared is None or not NAME.fullmatch(name):
        return False
    with contextlib.suppress(StoreError, OSError):  # not mounted, for example: only needed where a version is named
        return bool(read_records(open_shared(shared).folder / IMAGES / name)[0])
    return False


def _note_of_both(name: str, shared: Path | None) -> str:
    """Return a line that tells which image is used where a published one has the recipe's name."""
    with contextlib.suppress(OSError):
        if shared and (InnerPath.below(shared) / IMAGES / name / CURRENT).lexists():
            return f"{name} is this recipe's image; {name}:{CURRENT} is the one in {shared}"
    return ""


def _published_image(name: str, version: str, options: ImageOptions) -> NamedImage:
    shared = options.shared()
    _refuse_options(options, f"{name} is published")
    if shared is None:
        raise UsageError(
            f"{single_line(f'{name}:{version}')} is a published image, and no shared folder is known",
            hint="--shared DIR, or shared: in config.yaml",
        )
    if not NAME.fullmatch(name):
        raise UsageError(f"{single_line(name)}: an image's name is lower-case letters, digits, '.', '_' and '-'")
    folder = open_shared(shared).folder
    records, skipped = read_records(folder / IMAGES / name)
    _refuse_unrecorded(name, version or CURRENT, folder / IMAGES / name, records, shared)
    if not records:
        if skipped:
            raise StoreError(f"{name} in {shared}: {skipped[0][0]}: {skipped[0][1]}")
        known = [item.name for item in image_folders(folder) if read_records(item)[0]]
        raise UsageError(f"nothing is published as {name} in {shared}." + nearest(name, known))
    record = _version_of(name, version or CURRENT, records, tags(folder / IMAGES / name))
    sif = folder / IMAGES / name / record.file
    log_decision(f"image {name}", sif, f"published {record.published} in {shared}")
    return replace(_named_file(sif), name=name, sha256=record.sha256, is_published=True)


def _refuse_unrecorded(
    name: str, version: str, folder: InnerPath, records: Sequence[VersionRecord], shared: Path
) -> None:
    """Raise StoreError where the version exists without a record: its content is unknown.

    A file beside a version that has its record is not meant: a publisher was killed, or somebody planted it.
    """
    with contextlib.suppress(OSError):
        links = tags(folder)
        is_recorded = any(_is_version(record, version) for record in records)
        for item in unrecorded_versions(folder):
            if (
                item.file == Path(links[version]).name
                if version in links
                else not is_recorded and _is_version(item, version)
            ):
                raise StoreError(
                    f"{name}:{version} is {item.file} in {shared}, and {item.reason}",
                    hint=f"{command_name()} publish --repair {shared} writes it again from the image",
                )


def _is_version(item: VersionRecord | UnrecordedVersion, version: str) -> bool:
    return version in (item.version, item.stem.removeprefix(f"{item.name}-"))


def _version_of(name: str, version: str, records: list[VersionRecord], links: dict[str, str]) -> VersionRecord:
    """Return the record of a version, its newest one, or of a tag. ``records`` are oldest first."""
    by_file = {record.file: record for record in records}
    if version in links:
        if record := by_file.get(Path(links[version]).name):
            return record
        raise UsageError(f"{name}:{version} is a link to {links[version]}, which is not a published version")
    for record in reversed(records):
        if _is_version(record, version):
            return record
    known = [*dict.fromkeys(record.version for record in reversed(records)), *sorted(links)]
    raise UsageError(f"{name} has no version '{single_line(version)}'." + nearest(version, known[:_SHOWN]))
