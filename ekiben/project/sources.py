"""Packages without a wheel, in the lock of a recipe's packages: find them, and build a wheel of each.

The resolution only ever sees wheels: of a package that has none its newest source is built, in a build stage on the
layers below, and uv resolves again with that wheel's metadata. LAYER.sources.json keeps that metadata, so that
a lock which is kept or checked builds nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from email.parser import BytesParser
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from ekiben.builder.build import BuildContext, Options, build_sources
from ekiben.core.checked import Fields
from ekiben.core.errors import DefinitionError, FetchError, LayerError
from ekiben.core.files import open_regular
from ekiben.core.process import ProcessError
from ekiben.core.progress import Progress
from ekiben.packages.git import find_commit
from ekiben.packages.requirements import GitRequirement, LocalRequirement, RequirementsFile, compile_lock
from ekiben.packages.sources import (
    build_requirements,
    choose_archive,
    fetch_archive,
    fetch_commit,
    has_submodules,
    keep_folder,
    lock_build,
)
from ekiben.project.base import ReadBase
from ekiben.resolve.graph import ResolvedRecipe
from ekiben.resolve.resolve import resolve_below
from ekiben.resolve.sources import source_copies
from ekiben.spec.recipe import Recipe
from ekiben.spec.source_folders import follow
from ekiben.spec.source_tree import read_tree
from ekiben.spec.sources import Source
from ekiben.spec.stack import Stack, read_pins
from ekiben.store import Store, StoredResult

_ALL = re.compile(r"all versions of (\S+) have no usable wheels")
_NEEDED = re.compile(r"Wheels are required for `([^`]+)`")
_MAX_SOURCES = 64  # packages without a wheel, of one recipe
_MAX_METADATA = 4 << 20  # bytes of a wheel's METADATA

BuildSource = Callable[[Recipe, Stack, Source], Source]  # raises LayerError, EngineError, FetchError


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """How packages without a wheel are handled. ``build`` gives a source its wheel; None where nothing may be built.
    ``cache`` is where archives are kept; ``only_binary`` refuses packages without a wheel. ``read_base`` reads a base
    of others; None where nothing may be fetched.
    """

    build: BuildSource | None = None
    cache: Path | None = None
    only_binary: bool = False
    read_base: ReadBase | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """What is resolved: requirements on the pins ``below`` for a stack. ``absent`` are requirements to leave out,
    ``old`` the last lock with those pins, ``known`` its sources; with ``keep`` they stay as long as they fit.
    """

    recipe: Recipe
    stack: Stack
    checked: RequirementsFile
    below: str
    absent: Sequence[str]
    old: str
    known: Sequence[Source]
    keep: bool

    def _requirements(self, sources: Iterable[Source]) -> tuple[Requirement, ...]:
        """Return the requirements, those of git repositories and folders with the version that was built."""
        versions = {source.name: source.version for source in sources}
        exact = []
        asked_for = [item.requirement for item in self.checked.git] + [item.requirement for item in self.checked.local]
        for asked in asked_for:
            extras = f"[{','.join(sorted(asked.extras))}]" if asked.extras else ""
            marker = f" ; {asked.marker}" if asked.marker else ""
            exact.append(Requirement(f"{asked.name}{extras}=={versions[canonicalize_name(asked.name)]}{marker}"))
        return (*self.checked.requirements, *exact)

    def compile(self, sources: Collection[Source]) -> str:
        """Return uv's lock, with wheels of ``sources``. Raises ProcessError."""
        with tempfile.TemporaryDirectory(prefix="ekiben-wheels-") as folder:
            for source in sources:
                _write_stub(source, Path(folder))
            options = (*self.checked.options, f"--find-links {Path(folder).as_uri()}")
            checked = replace(self.checked, options=options, requirements=self._requirements(sources))
            return compile_lock(checked, self.stack, below=self.below, absent=self.absent, old=self.old)


def resolve_packages(resolution: Resolution, settings: SourceSettings) -> tuple[str, list[Source]]:
    """Return uv's lock of the requirements, and the sources of packages in it that have no wheel.

    Raises ProcessError when there is no solution, DefinitionError, FetchError; what building raises.
    """
    git = {canonicalize_name(item.requirement.name): item for item in resolution.checked.git}
    local = {canonicalize_name(item.requirement.name): item for item in resolution.checked.local}
    if (git or local) and settings.only_binary:
        names = ", ".join([*git, *local])
        raise DefinitionError(f"{names}: a repository or a folder has no wheel; lock without --only-binary")
    chosen = {item.name: item for item in resolution.known if resolution.keep and not item.commit and not item.folder}
    for name, item in git.items():
        chosen[name] = _built(_choose_commit(resolution, name, item, settings), resolution, settings)
    for name, folder in local.items():
        chosen[name] = _built(_choose_folder(resolution, name, folder, settings), resolution, settings)
    tried: set[tuple[str, str]] = set()
    for _ in range(_MAX_SOURCES):
        try:
            text = resolution.compile(chosen.values())
            break
        except ProcessError as error:
            missing, versions = _without_wheel(error.stderr, chosen), ""
            if missing is None:
                missing, versions = _too_new(error.stderr, chosen.values())
            if not missing or settings.only_binary or (missing, versions) in tried:
                raise
            tried.add((missing, versions))
            chosen[missing] = _built(_choose(resolution, missing, settings, versions), resolution, settings)
    else:
        raise DefinitionError(f"more than {_MAX_SOURCES} packages have no wheel; that many are not built from source")
    locked: dict[str, str] = {canonicalize_name(name): version for name, version, _ in read_pins(text)}
    sources = [item for item in chosen.values() if locked.get(item.name) == item.version]
    return _with_hashes(text, sources), sources


def _without_wheel(message: str, chosen: Iterable[str]) -> str | None:
    """Return the next package that uv's message says has no wheel: one of which no version has, before others."""
    names = [canonicalize_name(name) for name in (*_ALL.findall(message), *_NEEDED.findall(message))]
    return next((name for name in names if name not in chosen), None)


def _too_new(message: str, chosen: Iterable[Source]) -> tuple[str, str]:
    """Return the source that another package wants in another version, and which; "" where there is none."""
    text = " ".join(message.split())
    for source in chosen:
        for versions in re.findall(rf"depends? on {re.escape(source.name)}([<>=!~][^\s,]*(?:,[<>=!~][^\s,]*)*)", text):
            with contextlib.suppress(InvalidSpecifier):
                specifiers = SpecifierSet(versions.rstrip(".;)"))
                if (
                    not source.commit
                    and not source.folder
                    and not specifiers.contains(source.version, prereleases=True)
                ):
                    return source.name, str(specifiers)
    return "", ""


def _choose_commit(resolution: Resolution, name: str, item: GitRequirement, settings: SourceSettings) -> Source:
    """Return a git repository as a source: the commit that was locked of the same branch or tag, with ``keep``."""
    assert settings.cache is not None
    for known in resolution.known if resolution.keep else ():
        asked = (name, item.repository, item.reference, item.subdirectory)
        if (known.name, known.repository, known.reference, known.subdirectory) == asked:
            return known
    commit = find_commit(item.repository, item.reference)
    file = fetch_commit(name, item.repository, commit, settings.cache)
    return Source(
        name=name,
        version="",
        file=f"{name}-{commit[:12]}.tar",
        sha256="",
        build=_locked_build(name, build_requirements(file, name, item.subdirectory), resolution),
        repository=item.repository,
        commit=commit,
        reference=item.reference,
        subdirectory=item.subdirectory,
        submodules=has_submodules(file),
    )


def _choose_folder(resolution: Resolution, name: str, item: LocalRequirement, settings: SourceSettings) -> Source:
    """Return a folder of the recipe's as a source; what its build needs stays as it was locked, with ``keep``."""
    assert settings.cache is not None
    file = keep_folder(read_tree(item.folder), settings.cache)
    inside = os.path.relpath(item.folder, follow(resolution.recipe.folder))
    source = Source(name=name, version="", file=f"{name}.tar", sha256=file.name, build=(), folder=inside)
    same = [known for known in resolution.known if (known.folder, known.sha256) == (inside, file.name)]
    if same and resolution.keep:
        return replace(source, build=same[0].build)
    return replace(source, build=_locked_build(name, build_requirements(file, name), resolution))


def _choose(resolution: Resolution, name: str, settings: SourceSettings, versions: str) -> Source:
    archive = choose_archive(resolution.checked, name, resolution.stack, versions)
    assert settings.cache is not None
    requires = build_requirements(fetch_archive(archive, settings.cache), name)
    build = _locked_build(name, requires, resolution)
    return Source(name=name, version=archive.version, file=archive.file, sha256=archive.sha256, build=build)


def _locked_build(name: str, requires: Sequence[str], resolution: Resolution) -> tuple[str, ...]:
    try:
        return lock_build(requires, resolution.checked, resolution.below, resolution.stack)
    except ProcessError as error:
        raise FetchError(f"{name}: what its build needs could not be resolved:\n{error.stderr.strip()}") from error


def _built(source: Source, resolution: Resolution, settings: SourceSettings) -> Source:
    """Return the source with its wheel: the locked one, where nothing changed."""
    same = [item for item in resolution.known if item.inputs == source.inputs]
    if same:
        return replace(
            same[0], repository=source.repository, reference=source.reference, folder=source.folder, file=source.file
        )
    if settings.build is None:
        raise FetchError(f"{source.name} has no wheel, and its source is not built here")
    return settings.build(resolution.recipe, resolution.stack, source)


def _with_hashes(text: str, sources: Iterable[Source]) -> str:
    """Return the lock with the hash of the one wheel that is built, for each of ``sources``."""
    built = {item.name: item for item in sources}
    blocks = []
    for block in re.split(r"^(?=[^\s#])", text, flags=re.MULTILINE):
        pins = read_pins(block)
        if pins and (source := built.get(canonicalize_name(pins[0][0]))):
            block = f"{source.name}=={source.version} \\\n    --hash=sha256:{source.wheel_sha256}\n"
        blocks.append(block)
    return "".join(blocks)


def _write_stub(source: Source, folder: Path) -> None:
    """Write a wheel that has the metadata of the built one and no content, for uv to resolve with."""
    lines = [f"Metadata-Version: 2.1\nName: {source.name}\nVersion: {source.version}"]
    lines += [f"Requires-Python: {source.python}"] if source.python else []
    extras = sorted({extra for line in source.requires for extra in re.findall(r"extra == [\"']([\w.-]+)", line)})
    lines += [
        *(f"Provides-Extra: {extra}" for extra in extras),
        *(f"Requires-Dist: {line}" for line in source.requires),
    ]
    info = "-".join(source.wheel.split("-")[:2]) + ".dist-info"
    with zipfile.ZipFile(folder / source.wheel, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        wheel.writestr(f"{info}/RECORD", "")


# -- building
# ------------------------------------------------------------------------------------------------------


def source_builder(store: Store, options: Options, progress: Progress) -> BuildSource:
    """Return what builds a source in a stage on the layers below a recipe's own, and reads its wheel."""

    def build(recipe: Recipe, stack: Stack, source: Source) -> Source:
        state = resolve_below(recipe, stack)
        resolved = ResolvedRecipe(
            recipe=recipe,
            stack=stack,
            definitions=(),
            layers=tuple(state.layers),
            environment=state.environment,
            labels={},
            deffile="",
        )
        assert recipe.file.layer
        copies = source_copies(recipe.file.layer, [source], state, stack, recipe.folder)
        (result,) = build_sources(BuildContext(resolved, store, options, progress), copies)
        return read_built(source, result, store)

    return build


def read_built(source: Source, result: StoredResult, store: Store) -> Source:
    """Return the source with its wheel's metadata. Raises LayerError when it is not a wheel of that package."""
    wheels = [file for file in result.files if file.path.endswith(".whl")]
    if len(wheels) != 1:
        raise LayerError(f"{source.name}: its build made {len(wheels)} wheels, and one is expected")
    (wheel,) = wheels
    name = wheel.path.rpartition("/")[2]
    try:
        with open_regular(store.blob_path(wheel.digest)) as file, zipfile.ZipFile(file) as archive:
            (path,) = [
                item for item in archive.namelist() if item.count("/") == 1 and item.endswith(".dist-info/METADATA")
            ]
            with archive.open(path) as content:
                metadata = BytesParser().parsebytes(content.read(_MAX_METADATA))
        requires = [str(Requirement(str(line))) for line in metadata.get_all("Requires-Dist", [])]
        built = replace(
            source,
            version=source.version or str(metadata.get("Version", "")),
            wheel=name,
            wheel_sha256=wheel.digest.removeprefix("sha256:"),
            requires=tuple(requires),
            python=str(metadata.get("Requires-Python", "")),
        )
        return Source.parse(Fields.of(built.to_json()))
    except (ValueError, zipfile.BadZipFile, InvalidRequirement, OSError) as error:
        raise LayerError(
            f"{source.name} {source.version}: its build made {name}, which is not its wheel: {error}"
        ) from error
