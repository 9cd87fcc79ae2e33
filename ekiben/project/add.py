"""Add packages to a recipe, and remove them: its list of requirements, or its layer's definition file, is edited and
locked as one, or stays as it was.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.utils import canonicalize_name

from ekiben.core.atomic import write_files
from ekiben.core.command_name import command_name
from ekiben.core.errors import FetchError, UsageError, nearest
from ekiben.core.files import read_source
from ekiben.packages.edit_definition import add_packages, check_package, installed_packages, remove_package
from ekiben.packages.edit_requirements import (
    Change,
    add_line,
    append_line,
    edit_project,
    name_of,
    parse_argument,
    remove_lines,
)
from ekiben.packages.lock import debian_versions, packages_of
from ekiben.packages.requirements import (
    match_folder,
    project_requirements,
    read_folder,
    read_requirements,
    replaced_names,
    requirement_lines,
)
from ekiben.project.base import known_base
from ekiben.project.lock import Edits, definitions_below, lock_recipe, read_below, requirements_of
from ekiben.project.replace import find_replaceable, remove_lines_of, write_lines
from ekiben.project.sources import SourceSettings
from ekiben.spec.definition import Definition
from ekiben.spec.recipe import Recipe
from ekiben.spec.source_folders import follow
from ekiben.spec.stack import Stack, find_stack
from ekiben.spec.sums import REQUIREMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeOptions:
    """``is_dry``: nothing is written; ``is_locked``: the lock is written, too; ``settings``: how packages without a
    wheel get one.
    """

    is_dry: bool = False
    is_locked: bool = True
    settings: SourceSettings = field(default_factory=SourceSettings)


@dataclass(slots=True)
class _Lists:
    """A recipe's lists of requirements: ``texts`` as they are, and as they become; ``lines`` say what changes."""

    recipe: Recipe
    source: Path
    texts: dict[Path, str]
    lines: list[str] = field(default_factory=list)

    def note(self, path: Path, change: Change) -> None:
        self.lines.append(f"{_short(self.recipe, path)}: {change}")

    def edits(self) -> dict[Path, str]:
        """Return the texts that differ from what is on the disk."""
        return {path: text for path, text in self.texts.items() if text != read_source(path, default="")}

    def having(self, name: str) -> list[Path]:
        """Return the lists that name a package."""
        return [
            path
            for path, text in self.texts.items()
            if path.suffix != ".def" and any(self.name_in(path, line) == name for line in _lines(path, text))
        ]

    def name_in(self, path: Path, line: str) -> str:
        """Return the canonical name of the package that a line of the list ``path`` asks for, also of a folder's."""
        if path.suffix != ".toml" and (folder := match_folder(line)):
            local = read_folder(folder, path.parent, self.recipe.sources, str(path))
            return canonicalize_name(local.requirement.name)
        return name_of(line)


def add_requirements(recipe: Recipe, requirements: Sequence[str], options: ChangeOptions) -> Iterator[str]:
    """Add requirements to a recipe's list, and lock it; yields a line for each change.

    Raises UsageError for what is none, and what lock_recipe() raises; nothing is changed then.
    """
    lists = _read_lists(recipe, is_created=True)
    folders = [(item, match) for item in requirements if (match := match_folder(item))]
    for item, match in folders:
        _add_folder(lists, item, match)
    indexed = [item for item in requirements if not match_folder(item)]
    names = {canonicalize_name(parse_argument(item).name): item for item in indexed}
    if len(names) < len(indexed):
        raise UsageError("a package is named twice on the command line")
    for name, item in names.items():
        path = next(iter(lists.having(name)), lists.source)
        if path.suffix == ".toml":
            _edit_project(lists, add=[item])
            continue
        lists.texts[path], change = add_line(lists.texts[path], item, str(_short(recipe, path)))
        if change:
            lists.note(path, change)
    yield from _apply(lists, options, _held_below(recipe, names))


def replace_packages(recipe: Recipe, requirements: Sequence[str], options: ChangeOptions) -> Iterator[str]:
    """Add requirements whose packages a layer below has, to be installed over those; yields a line for each change.

    Raises UsageError for one that no layer has or that cannot be replaced, and what lock_recipe() raises; nothing is
    changed then.
    """
    lists = _read_lists(recipe, is_created=True)
    stack = _stack(recipe)
    definitions = definitions_below(recipe, stack)
    below = read_below(recipe, stack, known_base(recipe, definitions[0], stack))
    path = recipe.folder / "images" / f"{recipe.file.layer}.def"
    packages = []
    for item in requirements:
        name = canonicalize_name(parse_argument(item).name)
        packages.append(find_replaceable(name, definitions, below.by_layer, below.compiled, f"--replace {item}"))
        target = next(iter(lists.having(name)), lists.source)
        if target.suffix == ".toml":
            _edit_project(lists, add=[item])
        else:
            lists.texts[target], change = add_line(lists.texts[target], item, str(_short(recipe, target)))
            if change:
                lists.note(target, change)
        if name not in replaced_names(lists.texts[lists.source], str(lists.source)):
            lists.texts[lists.source] = append_line(lists.texts[lists.source], f"# replace: {name}")
            lists.lines.append(f"{_short(recipe, lists.source)}: + # replace: {name}")
    text = read_source(path)
    lists.texts[path] = write_lines(text, packages, f"{recipe.file.layer}.lock", path)
    if lists.texts[path] != text:
        lists.lines.append(f"{_short(recipe, path)}: + lines that replace {', '.join(item.name for item in packages)}")
    yield from _apply(lists, options, [])


def remove_requirements(recipe: Recipe, names: Sequence[str], options: ChangeOptions) -> Iterator[str]:
    """Remove packages from a recipe's lists, and lock them; yields a line for each change.

    Raises UsageError for one that no list has, and what lock_recipe() raises; nothing is changed then.
    """
    lists = _read_lists(recipe)
    for item in names:
        folder = match_folder(item)
        local = read_folder(folder, Path.cwd(), recipe.sources, item) if folder else None
        name = canonicalize_name(local.requirement.name if local else parse_argument(item).name)
        paths = lists.having(name)
        if not paths:
            raise _not_asked(lists, name)
        for path in paths:
            if path.suffix == ".toml":
                _edit_project(lists, remove=[name])
                continue
            is_removed = functools.partial(_names, lists, path, name)
            lists.texts[path], changes = remove_lines(lists.texts[path], is_removed)
            for change in changes:
                lists.note(path, change)
        _keep_below(lists, name)
    yield from _apply(lists, options, [])


def _keep_below(lists: _Lists, name: str) -> None:
    """Remove what `add --replace` wrote for a package, which is that of the layer below again."""
    recipe, source = lists.recipe, lists.source
    if name not in replaced_names(lists.texts[source], str(source)):
        return
    kept = [item for item in replaced_names(lists.texts[source], str(source)) if item != name]
    lines = lists.texts[source].splitlines(keepends=True)
    lists.texts[source] = "".join(line for line in lines if not line.startswith("# replace:"))
    for item in kept:
        lists.texts[source] = append_line(lists.texts[source], f"# replace: {item}")
    path = recipe.folder / "images" / f"{recipe.file.layer}.def"
    lists.texts[path] = remove_lines_of(lists.texts.get(path, read_source(path)), name)
    lists.lines.append(f"{_short(recipe, source)}: - # replace: {name}")


def _names(lists: _Lists, path: Path, name: str, line: str) -> bool:
    return lists.name_in(path, line) == name


def _add_folder(lists: _Lists, item: str, match: re.Match[str]) -> None:
    """Add a line for a folder, whose path is from here, to the list. Raises UsageError, DefinitionError."""
    local = read_folder(match, Path.cwd(), lists.recipe.sources, item)
    source, name = lists.source, canonicalize_name(local.requirement.name)
    path = os.path.relpath(local.folder, follow(source.parent))
    if source.suffix == ".toml":
        raise UsageError(f"{item}: uv does not write a folder into {source.name}", hint=f"write {name} @ file:./{path}")
    if paths := lists.having(name):
        raise UsageError(
            f"{paths[0]} asks for {name} already", hint=f"remove that first: {command_name()} remove {name}"
        )
    extras = f"[{','.join(sorted(local.requirement.extras))}]" if local.requirement.extras else ""
    inside = path if path.startswith(".") else f"./{path}"
    line = f"{'-e ' if local.is_editable else ''}{inside}{extras}"
    lists.texts[source] = append_line(lists.texts[source], line)
    lists.note(source, Change("", line))


def _read_lists(recipe: Recipe, *, is_created: bool = False) -> _Lists:
    """Return the lists; with ``is_created`` an empty one where the recipe's layer installs a lock and has no list."""
    layer, new = recipe.file.layer, recipe.folder / REQUIREMENTS[0]
    definition = recipe.folder / "images" / f"{layer}.def"
    installs = definition.is_file() and f"{layer}.lock" in read_source(definition, errors="replace")
    is_missing = not any((recipe.folder / name).is_file() for name in REQUIREMENTS)
    source = requirements_of(recipe, [new] if is_created and installs and is_missing else [])
    if definition.is_file() and not installs:
        raise UsageError(
            f"{definition} installs no images/{layer}.lock, so {source.name} decides about nothing",
            hint=f"`{command_name()} init NAME` writes a layer that does: copy its %files and %post lines",
        )
    recipe.sources.check(source)
    if not source.exists():
        return _Lists(recipe, source, {source: ""})
    read = read_requirements(source, recipe.sources, is_recipe=True).files
    return _Lists(recipe, source, {path: read_source(path) for path in read if _is_inside(recipe, path)})


def _is_inside(recipe: Recipe, path: Path) -> bool:
    return follow(path).is_relative_to(follow(recipe.folder))


def _lines(path: Path, text: str) -> Iterator[str]:
    if path.suffix == ".toml":
        return (line for _, line in project_requirements(path, text))
    return (line for _, line in requirement_lines(text))


def _edit_project(lists: _Lists, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> None:
    path, text = lists.source, lists.texts[lists.source]
    lists.texts[path] = edit_project(text, path, add=add, remove=remove)
    before, after = ({name_of(line): line for line in _lines(path, content)} for content in (text, lists.texts[path]))
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            lists.note(path, Change(before.get(name, ""), after.get(name, "")))


def _apply(lists: _Lists, options: ChangeOptions, notes: Iterable[str]) -> Iterator[str]:
    """Lock and write the lists as one. The lines come when that has succeeded."""
    edits, recipe = lists.edits(), lists.recipe
    lines = [*notes, *lists.lines]
    if options.is_locked:
        lines += lock_recipe(recipe, keep=True, settings=options.settings, edits=Edits(edits, is_dry=options.is_dry))
    elif edits and not options.is_dry:
        write_files(edits)
    yield from lines
    if edits and not options.is_locked:
        yield f"not locked: `{command_name()} lock {shlex.quote(str(recipe.folder))} --keep` does it"


def _held_below(recipe: Recipe, names: Iterable[str]) -> Iterator[str]:
    """Yield a line for each package that a layer below has: it is not installed once more."""
    stack = _stack(recipe)
    below = read_below(recipe, stack, known_base(recipe, definitions_below(recipe, stack)[0], stack))
    versions = below.versions
    for name in names:
        if name in versions:
            yield f"{name}: the layers below have {versions[name] or 'it'}; it is not installed again"


def _not_asked(lists: _Lists, name: str) -> UsageError:
    known = [name_of(line) for path, text in lists.texts.items() for line in _lines(path, text)]
    lock = read_source(lists.recipe.folder / "images" / f"{lists.recipe.file.layer}.lock", default="")
    if re.search(rf"^{re.escape(name)}==", lock, re.MULTILINE | re.IGNORECASE):
        return UsageError(f"{name} is not in {lists.source}: it is locked because another package needs it")
    return UsageError(f"{name} is not in {lists.source}." + nearest(name, filter(None, known)))


# -- Debian packages
# ------------------------------------------------------------------------------------------------------


def change_debian(recipe: Recipe, names: Sequence[str], *, removes: bool, options: ChangeOptions) -> Iterator[str]:
    """Add Debian packages to the recipe's own layer, or remove them; yields a line for each change.

    apt is asked for them first, where it is here and the recipe's base is the stack's. Raises UsageError,
    DefinitionError, FetchError when no archive has one; nothing is changed then.
    """
    path = recipe.folder / "images" / f"{recipe.file.layer}.def"
    if not path.is_file():
        requirements_of(recipe)  # whose error names the missing file
    recipe.sources.check(path)
    old = text = read_source(path)
    lines = list[str]()
    has = installed_packages(text, path)
    for name in dict.fromkeys(map(check_package, names)):
        if removes and name not in has:
            raise UsageError(f"{path}: no `apt-get install` line names {name}." + nearest(name, has))
        if removes:
            text = remove_package(text, name, path)
            lines.append(f"{_short(recipe, path)}: - {name}")
        elif name not in has:
            lines.append(f"{_short(recipe, path)}: + {name}")
    if not removes and (new := [name for name in dict.fromkeys(names) if name not in has]):
        text = add_packages(text, new, path)
    below = definitions_below(recipe, _stack(recipe))
    before, after = ([*installed_packages(content, path)] for content in (old, text))
    lines += _debian_changes(_stack(recipe), below, before, after)
    if text != old and not options.is_dry:
        write_files({path: text})
    yield from lines or [f"{recipe.name}: up to date"]


def _debian_changes(
    stack: Stack, below: Sequence[Definition], before: Sequence[str], after: Sequence[str]
) -> Iterator[str]:
    """Yield what apt would install more, or less, with its version; a note where apt cannot be asked."""
    if before == after:
        return
    if below[0].final.bootstrap != "debootstrap":
        yield f"note: versions are those of {below[0].path.stem}'s own archives when the layer is built"
        return
    common = [name for item in below for name in packages_of(item.stages)]
    try:
        was, now = debian_versions(stack, [[*common, *names] for names in (before, after)])
    except FileNotFoundError:
        yield "note: there is no apt-get here to ask whether the archive has them"
        return
    except FetchError as error:
        unknown = re.findall(r"Unable to locate package (\S+)|Package '?(\S+?)'? has no installation", str(error))
        if not unknown:
            raise
        missing = ", ".join(first or second for first, second in unknown)
        raise UsageError(
            f"Debian {stack.file.suite} has no package {missing}", hint="`apt-cache search` finds names"
        ) from error
    changed = [name for name in sorted(was.keys() | now.keys()) if was.get(name) != now.get(name)]
    asked = [name for name in changed if name in {*before, *after}]
    for name in asked:
        yield f"{name} {was.get(name, '(new)')} → {now.get(name, '(gone)')}"
    if count := len(changed) - len(asked):
        yield f"and {count} package{'s' if count > 1 else ''} that {'are' if count > 1 else 'is'} needed for that"


def _stack(recipe: Recipe) -> Stack:
    asked_by = str(recipe.folder / "recipe.yaml")
    stack = find_stack(recipe.file.stack, recipe.image_folders, asked_by=asked_by, sources=recipe.sources)
    return replace(stack, arch="amd64")


def _short(recipe: Recipe, path: Path) -> Path:
    """Return a path of the recipe's as messages of `lock` name it: below the recipe's folder's name."""
    home = follow(recipe.folder)
    real = follow(path.parent) / path.name
    return recipe.folder.name / real.relative_to(home) if real.is_relative_to(home) else path
