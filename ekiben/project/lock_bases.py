"""Locks the bases that definitions name by a tag: bases.lock says which image each tag names today.

The registry is asked with the credentials that other programs keep (ekiben.registry.auth).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ekiben.core.command_name import command_name
from ekiben.core.errors import DefinitionError, FetchError, LockMismatchError, UsageError
from ekiben.core.files import atomic_write
from ekiben.core.paths import PROJECT_ROOT
from ekiben.spec.bases_lock import BASES_LOCK, Digests, agent_of, format_bases_lock, read_bases_lock, tags_of
from ekiben.spec.definition import Definition, read_definition
from ekiben.spec.recipe import Recipe
from ekiben.spec.source_folders import SourceFolders
from ekiben.spec.stack import Stack, find_stack
from ekiben.spec.sums import REQUIREMENTS


@dataclass(frozen=True, slots=True)
class Bases:
    """What one bases.lock pins: ``tags`` has each reference with a definition that names it.

    ``name`` is how a command line names its recipe or stack; ``left_out`` says which definitions cannot be read.
    """

    name: str
    path: Path
    tags: Mapping[str, Definition]
    architectures: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    def platforms(self, arch: str | None) -> list[str]:
        """Return the platforms to lock for. Raises UsageError for another than the stack's."""
        if arch and arch not in self.architectures:
            raise UsageError(f"--arch {arch}: the stack is locked for {', '.join(self.architectures)} only")
        return [f"linux/{name}" for name in ([arch] if arch else self.architectures)]


def recipe_bases(recipe: Recipe) -> Bases:
    """Read which bases the definitions in a recipe's own images/ name.

    Raises DefinitionError; a definition that the recipe does not use is left out where it cannot be read.
    """
    asked_by = str(recipe.folder / "recipe.yaml")
    stack = find_stack(recipe.file.stack, recipe.image_folders, asked_by=asked_by, sources=recipe.sources)
    recipe.sources.check(recipe.folder / BASES_LOCK)
    definitions: dict[Path, Definition] = {}
    broken: dict[Path, DefinitionError] = {}
    paths = sorted((recipe.folder / "images").glob("*.def"))
    for path in paths:
        try:
            definitions[path] = _definition(path, stack, recipe.sources)
        except DefinitionError as error:
            broken[path] = error
    for path in _used(recipe, definitions):
        if path in broken:
            raise broken[path]
    left_out = tuple(f"{_short(path)} is not used and left out: {error}" for path, error in broken.items())
    tags = tags_of(definitions.values())
    return Bases(str(recipe.folder), recipe.folder / BASES_LOCK, tags, stack.file.architectures, left_out)


def _used(recipe: Recipe, definitions: Mapping[Path, Definition]) -> list[Path]:
    """Return the paths of the recipe's layers in its own images/, as far as ``definitions`` have been read."""
    folder = recipe.folder / "images"
    waiting, used = [recipe.file.layer, *recipe.layers], list[Path]()
    while waiting:
        path = folder / f"{waiting.pop()}.def"
        if path in used:
            continue
        used.append(path)
        if path in definitions:
            waiting += [stage.parent for stage in definitions[path].stages if stage.parent]
    return used


def stack_bases(name: str, stack: Stack) -> Bases:
    """Read which bases the definitions beside a stack's folder, and Ekiben's own, name. Raises DefinitionError."""
    folders = {PROJECT_ROOT / "images", stack.folder.parent.parent}
    # In a recipe's folder, the definitions are the recipe's own, and so is their lock.
    folders = {folder for folder in folders if not (folder.parent / "recipe.yaml").is_file()}
    definitions = [
        _definition(path, stack, SourceFolders(folder)) for folder in folders for path in sorted(folder.glob("*.def"))
    ]
    return Bases(name, stack.folder / BASES_LOCK, tags_of(definitions), stack.file.architectures)


def _definition(path: Path, stack: Stack, sources: SourceFolders) -> Definition:
    arguments = {
        **stack.file.arguments,
        "stack": str(stack.folder),
        "capabilities": " ".join(stack.file.compute_capabilities),
    }
    sources.check(path)
    return read_definition(path, root=path.parent.parent, arguments=arguments)


def lock_bases(bases: Bases, *, check: bool = False, keep: bool = False, arch: str | None = None) -> Iterator[str]:
    """Lock each tag for each platform that its image has; yields a line for each change.

    Args:
        check: write nothing and ask no registry; fail when a tag is not locked.
        keep: keep what is locked, and add what is not.
        arch: lock for this architecture only.

    Raises:
        UsageError: the stack is not for ``arch``.
        DefinitionError: bases.lock is damaged.
        FetchError: a registry does not answer, or has no image for any of the platforms.
        LockMismatchError: ``check``, and something is not locked, or locked and not named.
    """
    yield from bases.left_out
    old = read_bases_lock(bases.path, bases.name)
    new: dict[str, dict[str, str]] = {}
    platforms = bases.platforms(arch) if bases.tags else []
    for reference in sorted(bases.tags):
        had = dict(old.get(reference, {}))
        if check or (keep and had and (arch is None or f"linux/{arch}" in had)):
            new[reference] = had
            continue
        asked = _ask(reference, platforms, bases.tags[reference])
        new[reference] = {**had, **asked} if arch else asked
    if bases.left_out:  # they may name what is locked
        new |= {reference: dict(digests) for reference, digests in old.items() if reference not in new}
    lines = list(_changes(bases.path, old, new))
    missing = [reference for reference, digests in new.items() if not digests]
    yield from lines
    if check and (lines or missing):
        what = f"no digest of {', '.join(missing)}" if missing else "digests that no definition asks for"
        raise LockMismatchError(
            f"{bases.path} has {what}", hint=f"{command_name()} lock {shlex.quote(bases.name)} --keep"
        )
    if not check and lines:
        if new:
            atomic_write(bases.path, format_bases_lock(new))
        else:
            bases.path.unlink()
    if bases.tags and not lines:
        yield f"{_short(bases.path)}: up to date"


def has_packages(recipe: Recipe) -> bool:
    """Return whether a recipe asks for Python packages, too."""
    return any((recipe.folder / name).is_file() for name in REQUIREMENTS)


def _ask(reference: str, platforms: Iterable[str], asked_by: Definition) -> dict[str, str]:
    """Return the digest of each of ``platforms`` that the image has now. Raises FetchError where it has none."""
    from ekiben.registry.client import Registry
    from ekiben.registry.reference import Reference

    if ask := getattr(agent_of(reference, asked_by), "locked_digests", None):
        digests: dict[str, str] = ask(reference, platforms)
        if not digests:
            raise FetchError(f"{asked_by.path}: {reference} is not a program for {', '.join(platforms)}")
        return digests
    available = Registry(Reference.parse(reference)).platform_digests()
    digests = {platform: digest for platform in platforms if (digest := available.get(platform, available.get("", "")))}
    if not digests:
        raise FetchError(
            f"{asked_by.path}: From: {reference} has no image for {', '.join(platforms)};"
            f" it has {', '.join(sorted(available)) or 'none'}"
        )
    return digests


def _changes(path: Path, old: Digests, new: Digests) -> Iterator[str]:
    for reference in sorted(old.keys() | new.keys()):
        before, after = old.get(reference, {}), new.get(reference, {})
        for platform in sorted(before.keys() | after.keys()):
            was, now = before.get(platform, "(new)"), after.get(platform, "(gone)")
            if was != now:
                yield f"{_short(path)}: {reference} {platform} {was} → {now}"


def outdated_bases(bases: Bases) -> Iterator[str]:
    """Ask the registries which locked tags name another image by now; yields a line for each, and for what is not
    locked.

    Raises DefinitionError for a damaged bases.lock, FetchError when a registry does not answer.
    """
    locked = read_bases_lock(bases.path, bases.name)
    for reference, definition in sorted(bases.tags.items()):
        if digests := locked.get(reference):
            now = _ask(reference, digests, definition)
            yield from _changes(bases.path, {reference: digests}, {reference: now})
        else:
            yield f"{_short(bases.path)}: {reference} is not locked"


def _short(path: Path) -> Path:
    return path.relative_to(PROJECT_ROOT) if path.is_relative_to(PROJECT_ROOT) else path
