"""Locks the Python packages that a recipe's own layer adds to the layers below it.

requirements.txt or pyproject.toml → images/LAYER.lock, with hashes, by uv. Whatever the lock files of the layers below
pin is a constraint, and is not installed a second time. SHA256SUMS tells later whether either was edited.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ekiben.core.atomic import write_files
from ekiben.core.command_name import command_name
from ekiben.core.errors import DefinitionError, FetchError, LockMismatchError, UsageError
from ekiben.core.files import read_source
from ekiben.core.process import ProcessError
from ekiben.packages.requirements import RequirementsFile, read_requirements
from ekiben.project.base import find_base
from ekiben.project.explain import (
    Alternative,
    Constraint,
    find_constraints,
    find_held_back,
    find_limits,
    find_ways_out,
    resolved_version,
)
from ekiben.project.replace import Replaceable, cost_lines, find_replaceable, free, refuse_missing_lines
from ekiben.project.sources import Resolution, SourceSettings, resolve_packages
from ekiben.spec.base_packages import SUFFIX, BasePackages
from ekiben.spec.definition import Definition, read_definition
from ekiben.spec.recipe import Recipe, read_recipe
from ekiben.spec.source_folders import follow
from ekiben.spec.source_tree import read_tree
from ekiben.spec.sources import Source, format_sources, read_sources, sources_file
from ekiben.spec.stack import UNLOCKED, Stack, arch_lock, find_stack, lock_for, read_pins, stacks
from ekiben.spec.sums import REQUIREMENTS, SUMS, format_sums

_CONVERTED = (  # files of other tools, and the command that writes requirements.txt from each
    ("uv.lock", "uv export --no-hashes --no-emit-project --no-annotate -o requirements.txt"),
    (
        "pylock.toml",
        'python3 -c \'import tomllib; [print(p["name"], p["version"], sep="==") for p in'
        ' tomllib.load(open("pylock.toml", "rb"))["packages"]]\' > requirements.txt',
    ),
    ("poetry.lock", "poetry export --without-hashes -o requirements.txt"),
    ("Pipfile.lock", "pipenv requirements > requirements.txt"),
    ("environment.yml", "copy the list below `- pip:` to requirements.txt; of conda's packages name those of PyPI"),
)
_MAX_REPLACED = 3  # packages of the layers below whose replacement is tried
_MAX_LINES = 40  # of a message of uv that is printed
_WHEEL = "org.ekiben.wheel"  # label of a build stage: the package that it compiles for the layer


@dataclass(frozen=True, slots=True)
class Below:
    """The packages of the layers below. ``pins`` is the text of their locks; ``compiled`` are packages that no index
    has as a wheel, with their versions, "" where unknown; ``absent`` are requirements that the stack could not lock;
    ``base`` is what a base of others brings, whose packages are in ``pins``, too."""

    layers: tuple[str, ...]
    pins: str
    compiled: Mapping[str, str]
    absent: tuple[str, ...]
    by_layer: Mapping[str, str]  # the same pins, of each layer
    base: BasePackages | None = None

    @property
    def versions(self) -> dict[str, str]:
        """Return every package of the layers below, as name → version."""
        return {canonicalize_name(name): version for name, version, _ in read_pins(self.pins)} | dict(self.compiled)


def find_local_recipe(name: str, included: Iterable[Path] = ()) -> Recipe | None:
    """Return the recipe in the folder ``name``, or None where there is none.

    ``included``: files elsewhere that it may use.
    """
    folder = Path(name).absolute()
    return read_recipe(folder, included) if (folder / "recipe.yaml").is_file() else None


@dataclass(frozen=True, slots=True)
class Edits:
    """New texts of files of a recipe, which are written when they are locked; not with ``is_dry``, nor the lock."""

    files: Mapping[Path, str] = field(default_factory=dict)
    is_dry: bool = False


def lock_recipe(
    recipe: Recipe,
    *,
    check: bool = False,
    keep: bool = False,
    arch: str | None = None,
    settings: SourceSettings | None = None,
    edits: Edits | None = None,
) -> Iterator[str]:
    """Lock the packages of a recipe's own top layer; yields a line for each change.

    Args:
        check: write nothing, and fail when a change would be made.
        keep: keep each locked version that still fits.
        arch: lock for this architecture only (default: amd64, and those that have a lock already).
        settings: how packages without a wheel get one (default: they are refused).
        edits: the new text of the requirements (default: as they are).

    Raises:
        UsageError: the recipe has no layer or no requirements of its own, or all of these are in the layers below.
        DefinitionError: a definition is wrong, or the requirements do not go with the layers below.
        FetchError: no index answers.
        LockMismatchError: ``check``, and the lock is out of date.
        LayerError, EngineError: a package without a wheel could not be built.
    """
    settings, edits = settings or SourceSettings(only_binary=True), edits or Edits()
    source = requirements_of(recipe, edits.files)
    recipe.sources.check(source)
    asked_by = str(recipe.folder / "recipe.yaml")
    stack = find_stack(recipe.file.stack, recipe.image_folders, asked_by=asked_by, sources=recipe.sources)
    if arch and arch not in stack.file.architectures:
        raise UsageError(f"--arch {arch}: stack {stack.name} is locked for {', '.join(stack.file.architectures)} only")
    shared = recipe.folder / "images" / f"{recipe.file.layer}.lock"
    for path in (shared, *(arch_lock(shared, name) for name in stack.file.architectures)):
        recipe.sources.check(path)
        recipe.sources.check(sources_file(path))
    recipe.sources.check(recipe.folder / SUMS)
    further = [
        name
        for name in stack.file.architectures
        if arch_lock(shared, name) != shared and arch_lock(shared, name).exists()
    ]
    checked = read_requirements(source, recipe.sources, is_recipe=True, edits=edits.files)
    definition = recipe.folder / "images" / f"{recipe.file.layer}.def"
    refuse_missing_lines(checked, edits.files.get(definition) or _read(definition), definition)
    yield from _folder_notes(recipe, checked)
    locked: dict[Path, str] = {}
    changes: list[str] = []
    for name in [arch] if arch else ["amd64", *further]:
        bound = replace(stack, arch=name)
        lines = list(_lock_for(recipe, checked, bound, locked, settings=settings, keep=check or keep))
        yield from lines
        changes += lines
    written, needless = _differing(shared, {} if check else locked)
    sums = recipe.folder / SUMS
    text = _format_sums(recipe, checked, stack, {**edits.files, **written}, needless)
    if check:
        if changes or _read(sums) != text:
            raise LockMismatchError(
                f"{shared} differs from the resolution of {source.name} on the layers below",
                hint=f"{command_name()} lock {shlex.quote(str(recipe.folder))} --keep",
            )
    elif not edits.is_dry:
        write_files({**edits.files, **written, sums: text})
        for path in needless:
            path.unlink(missing_ok=True)
    if not changes:
        yield f"{recipe.name}: up to date"


def _differing(shared: Path, locked: Mapping[Path, str]) -> tuple[dict[Path, str], list[Path]]:
    """Return which of the locked files have another text than on the disk, and which are not needed."""
    written, needless = dict[Path, str](), list[Path]()
    for target, text in locked.items():
        common = shared if target.suffix == shared.suffix else sources_file(shared)
        if not text or (target != common and text == locked.get(common, _read(common))):
            needless.append(target)
        elif text != _read(target):
            written[target] = text
    return written, needless


def _format_sums(
    recipe: Recipe, checked: RequirementsFile, stack: Stack, texts: Mapping[Path, str], needless: Collection[Path]
) -> str:
    """Return SHA256SUMS as it is right once ``texts`` are written and ``needless`` files are gone."""
    source, *read = checked.files
    shared = recipe.folder / "images" / f"{recipe.file.layer}.lock"
    locks = [
        path
        for lock in dict.fromkeys((shared, *(arch_lock(shared, name) for name in stack.file.architectures)))
        for path in (lock, sources_file(lock))
        if path in texts or (path.exists() and path not in needless)
    ]
    home = follow(recipe.folder)
    inside = {recipe.folder / path.relative_to(home): path for path in read if path.is_relative_to(home)}
    lists = sorted((recipe.folder / "images").glob(f"*{SUFFIX}"))
    names = dict.fromkeys(str(path.relative_to(recipe.folder)) for path in (source, *inside, *locks, *lists))
    real = {path: texts[end] for path, end in inside.items() if end in texts}
    return format_sums(recipe.folder, names, {**texts, **real})


def _lock_for(
    recipe: Recipe,
    checked: RequirementsFile,
    stack: Stack,
    locked: dict[Path, str],
    *,
    settings: SourceSettings,
    keep: bool,
) -> Iterator[str]:
    """Lock for the stack's architecture, into ``locked``: file → text; yields a line for each change.

    Another than amd64 keeps its versions.
    """
    source = checked.files[0]
    shared = recipe.folder / "images" / f"{recipe.file.layer}.lock"
    target, old = arch_lock(shared, stack.arch), _read(lock_for(shared, stack.arch))
    definitions = definitions_below(recipe, stack)
    listed = find_base(recipe, definitions[0], stack, locked, settings.read_base)
    below = read_below(recipe, stack, listed.packages if listed else None)
    checked = _with_base(checked, below.base)
    _check_compiled(source, checked.requirements, below)
    replaced = _replaced(checked, definitions, below)
    if replaced:
        checked, pins_below = free(checked, below.pins, checked.replaced)
        below = replace(below, pins=pins_below)
    kept = (old if keep else "") if target == shared else locked.get(shared, _read(shared))
    known = read_sources(sources_file(lock_for(shared, stack.arch)))
    resolution = Resolution(
        recipe=recipe,
        stack=stack,
        checked=checked,
        below=below.pins,
        absent=[*below.absent, *below.compiled],
        old=kept and below.pins + kept,
        known=known,
        keep=keep or target != shared,
    )
    pins, sources = _compile(source, resolution, below, settings)
    if not pins and below.base is None:
        raise UsageError(
            f"{source}: every package in it is already in the layer '{below.layers[-1]}'",
            hint=(
                f"say `layer: {below.layers[-1]}` in {recipe.folder / 'recipe.yaml'}, and delete"
                f" {recipe.folder / 'images' / recipe.file.layer}.def"
            ),
        )
    if listed:
        old_list = locked.get(listed.path, _read(listed.path))
        locked[listed.path] = listed.text
        if old_list != listed.text:
            yield f"{recipe.folder.name}/{listed.path.relative_to(recipe.folder)}: lists the packages of another image"
    notes = "".join(f"# replaced: {item.name} {item.version} of the layer '{item.layer}'\n" for item in replaced)
    locked[target] = (
        f"# Packages of {source.name} on the layer '{below.layers[-1]}' of {stack.name}; written by `ekiben"
        f" lock`\n{notes}{pins}"
    )
    yield from _replacements(replaced, old, pins, checked, stack)
    locked[sources_file(target)] = format_sources(sources)
    yield from (
        f"{recipe.folder.name}/{sources_file(target).relative_to(recipe.folder)}: {item.name} {item.version} is built"
        f" from {_origin(item)}"
        for item in sources
        if item not in known
    )
    if not keep:
        yield from find_held_back(resolution, below.pins + pins, below.by_layer)
    yield from (
        f"{recipe.folder.name}/{target.relative_to(recipe.folder)}: {line}"
        for line in _differences(old, locked[target])
    )


def _replaced(checked: RequirementsFile, definitions: Sequence[Definition], below: Below) -> list[Replaceable]:
    """Return the packages of the layers below that the list replaces. Raises UsageError."""
    where = str(checked.files[0])
    return [find_replaceable(name, definitions, below.by_layer, below.compiled, where) for name in checked.replaced]


def _replacements(
    replaced: Sequence[Replaceable], old: str, pins: str, checked: RequirementsFile, stack: Stack
) -> Iterator[str]:
    """Yield what each new replacement costs, and a warning for one that changes nothing."""
    before, now = ({name: version for name, version, _ in read_pins(text)} for text in (old, pins))
    for item in replaced:
        if now.get(item.name) == item.version:
            yield f"warning: {item.name} {item.version} is what the layer '{item.layer}' has: nothing is replaced"
        elif now.get(item.name) != before.get(item.name):
            yield from cost_lines([item], pins, checked, stack)


def _origin(source: Source) -> str:
    return f"the commit {source.commit[:12]}" if source.commit else source.folder or "its source"


def _folder_notes(recipe: Recipe, checked: RequirementsFile) -> Iterator[str]:
    """Yield a line for the folders that the requirements name after -e, and for files that are left out of one."""
    if edited := [item.requirement.name for item in checked.local if item.is_editable]:
        yield (
            f"note: -e {', '.join(edited)}: the image holds a copy of the folder; lock and build again after an edit"
        )
    for item in checked.local:
        if untracked := read_tree(item.folder).untracked:
            more = f" and {len(untracked) - 3} more" if len(untracked) > 3 else ""
            yield (
                f"note: {item.folder}: left out, as git does not track it: {', '.join(untracked[:3])}{more}; `git add`"
                " takes it in"
            )


def _read(path: Path) -> str:
    return read_source(path, default="")


def requirements_of(recipe: Recipe, edits: Collection[Path] = ()) -> Path:
    """Return the list of a recipe's requirements, which may be among the files that are not written yet.

    Raises UsageError when it has none, or no layer of its own.
    """
    if not (recipe.folder / "images" / f"{recipe.file.layer}.def").is_file():
        raise UsageError(
            f"recipe '{recipe.name}' adds no layer of its own: {recipe.folder / 'images' / recipe.file.layer}.def is"
            " not there",
            hint=f"`{command_name()} init NAME` creates a recipe with such a layer, to copy it from",
        )
    for name in REQUIREMENTS:
        if (path := recipe.folder / name).is_file() or path in edits:
            return path
    convert = next((command for name, command in _CONVERTED if (recipe.folder / name).is_file()), None)
    raise UsageError(f"{recipe.folder}: has no {' or '.join(REQUIREMENTS)} to lock", hint=convert)


def _with_base(checked: RequirementsFile, base: BasePackages | None) -> RequirementsFile:
    """Return requirements with what a base has and the constraints of its pip."""
    if base is None:
        return checked
    constraints = (*checked.constraints, *(Requirement(item.line) for item in base.limits))
    return replace(checked, installed=base.packages, constraints=constraints)


def read_below(recipe: Recipe, stack: Stack, base: BasePackages | None = None) -> Below:
    """Read what the layers below the recipe's top layer install, from the lock files that their definitions copy;
    ``base`` is what the lowest one, a base of others, brings.

    Raises:
        DefinitionError: a definition is wrong, or a lock file below is missing.
    """
    definitions = definitions_below(recipe, stack)
    by_layer, compiled = dict[str, str](), dict[str, str]()
    for definition in definitions:
        for stage in definition.stages:
            locks = [
                lock_for(definition.root / copy.source, stack.arch)
                for copy in stage.files
                if copy.stage is None and copy.source.endswith(".lock")
            ]
            for lock in locks:
                recipe.sources.check(lock, f"{definition.path}: %files")
                if not lock.is_file():
                    raise DefinitionError(f"{definition.path}: %files: {lock} is not there")
            text = "".join(map(read_source, locks))
            if stage is definition.final:
                brought = base.pins if base and definition is definitions[0] else ""
                by_layer[definition.name] = brought + text
            elif name := stage.labels.get(_WHEEL):
                versions = {canonicalize_name(pin): version for pin, version, _ in read_pins(text)}
                compiled[canonicalize_name(name)] = versions.get(canonicalize_name(name), "")
    pins = "".join(by_layer.values())
    absent = tuple(line.removeprefix(UNLOCKED) for line in pins.splitlines() if line.startswith(UNLOCKED))
    return Below(tuple(item.name for item in definitions), pins, compiled, absent, by_layer, base)


def definitions_below(recipe: Recipe, stack: Stack) -> list[Definition]:
    """Return the definitions below the recipe's top layer, lowest first."""
    known = {path.stem: path for folder in reversed(recipe.image_folders) for path in sorted(folder.glob("*.def"))}
    arguments = {
        **stack.file.arguments,
        "stack": str(stack.folder),
        "capabilities": " ".join(stack.file.compute_capabilities),
    }
    definitions: list[Definition] = []
    name: str | None = recipe.file.layer
    while name is not None:
        if name not in known or name in [item.name for item in definitions]:
            problem = "is its own parent" if name in known else "is not a layer"
            raise DefinitionError(f"{recipe.folder / 'recipe.yaml'}: '{name}' below '{recipe.file.layer}' {problem}")
        recipe.sources.check(known[name])
        definitions.append(
            definition := read_definition(known[name], root=known[name].parent.parent, arguments=arguments)
        )
        name = definition.final.parent
    if len(definitions) < 2:
        raise DefinitionError(f"{definitions[0].path}: From: names no layer with Python, such as python.sif")
    return definitions[:0:-1]


def _check_compiled(source: Path, requirements: Sequence[Requirement], below: Below) -> None:
    """Compare the versions of compiled packages, which are not part of the resolution, with the requirements."""
    for asked in requirements:
        has = below.compiled.get(canonicalize_name(asked.name))
        if has and not asked.specifier.contains(has, prereleases=True):
            raise DefinitionError(f"{source}: asks for {asked}, and a layer below has {asked.name} {has}")


def _compile(source: Path, resolution: Resolution, below: Below, settings: SourceSettings) -> tuple[str, list[Source]]:
    """Resolve ``source`` and return the blocks of a lock file for what the layers below do not have, and the sources
    of packages without a wheel.
    """
    try:
        text, sources = resolve_packages(resolution, settings)
    except ProcessError as error:
        raise _explained(source, error.stderr.strip(), below, resolution) from error
    return _new_blocks(source, text, below.versions), sources


def _explained(source: Path, message: str, below: Below, resolution: Resolution) -> DefinitionError | FetchError:
    if "No solution found" in message and not re.search("fetch|network|could not be queried", message, re.IGNORECASE):
        constraints = [f"\n  {item}" for item in find_constraints(message, below.by_layer)]
        constraints += [f"\n  {item}" for item in find_limits(message, below.base)]
        ways: list[str] = []
        if constraints and not resolution.checked.replaced:
            ways += find_ways_out(resolution, lambda: _alternatives(resolution, below))
            ways += _replacing(source, resolution, below, find_constraints(message, below.by_layer))
        return DefinitionError(
            f"{source} does not go with the layers {', '.join(below.layers)}, or an index has no wheel for"
            f" it:{''.join(constraints)}\n{_shorten(message)}",
            hint=(
                "tested solutions: " + "; or ".join(ways)
                if ways
                else "ask for versions that go with what those layers have, or for another layer in the definition's"
                " From: line"
            ),
        )
    return FetchError(f"{source} could not be resolved:\n{message}")


def _replacing(source: Path, resolution: Resolution, below: Below, constraints: Iterable[Constraint]) -> Iterator[str]:
    """Yield the packages of the layers below that the recipe's layer can replace to resolve a conflict; each was
    tried."""
    recipe = resolution.recipe
    for item in list(constraints)[:_MAX_REPLACED]:
        name = canonicalize_name(item.name)
        try:
            find_replaceable(name, definitions_below(recipe, resolution.stack), below.by_layer, below.compiled, "")
        except UsageError:
            continue
        checked, pins = free(resolution.checked, below.pins, [name])
        if version := resolved_version(replace(resolution, checked=checked, below=pins, old=""), name):
            yield (
                f"`{command_name()} add --replace {name} {shlex.quote(str(source.parent))}`: the recipe's layer"
                f" installs {version} over the {item.version} of the layer '{item.layer}'"
            )


def _shorten(message: str) -> str:
    """Return a message of uv without its middle, where it goes through hundreds of versions."""
    lines = message.splitlines()
    left_out = len(lines) - _MAX_LINES
    if left_out <= 1:
        return message
    return "\n".join([*lines[: _MAX_LINES // 2], f"  … {left_out} lines …", *lines[-_MAX_LINES // 2 :]])


def _alternatives(resolution: Resolution, below: Below) -> Iterator[Alternative]:
    """Yield other layers as a base of the recipe's: lower ones of its stack, then the same ones of other stacks."""
    recipe, stack = resolution.recipe, resolution.stack
    definition = f"{recipe.folder / 'images' / recipe.file.layer}.def"
    for end in range(len(below.layers) - 1, 0, -1):
        pins = "".join(below.by_layer.get(name, "") for name in below.layers[:end])
        if pins:
            yield Alternative(f"`From: {below.layers[end - 1]}.sif` in {definition}", pins, below.absent)
    for other in stacks(recipe.image_folders, recipe.sources) if below.base is None else ():
        if other.name == stack.name or stack.arch not in other.file.architectures:
            continue
        with contextlib.suppress(DefinitionError):
            layers = read_below(recipe, replace(other, arch=stack.arch))
            change = f"`stack: {other.name}` in {recipe.folder / 'recipe.yaml'}"
            yield Alternative(change, layers.pins, (*layers.absent, *layers.compiled))


def _new_blocks(source: Path, resolved: str, known: Mapping[str, str]) -> str:
    kept = []
    for block in re.split(r"^(?=[^\s#])", resolved, flags=re.MULTILINE):
        pins: Sequence[tuple[str, str, list[str]]] = read_pins(block)
        if block.strip() and not block.startswith("#") and (not pins or not pins[0][2]):
            raise DefinitionError(
                f"{source}: {block.splitlines()[0]}: only packages of an index can be locked, with a version and hashes"
            )
        if pins and canonicalize_name(pins[0][0]) not in known:
            kept.append(block)
    return "".join(kept)


def _differences(old: str, new: str) -> Iterator[str]:
    before, after = ({name: (version, hashes) for name, version, hashes in read_pins(text)} for text in (old, new))
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name, ("(new)", [])), after.get(name, ("(gone)", []))
        if was[0] != now[0]:
            yield f"{name} {was[0]} → {now[0]}"
        elif was[1] != now[1]:
            yield f"{name} {now[0]}: hashes changed"
