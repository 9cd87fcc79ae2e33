"""Write a stack's lock files: the requirements of each layer, resolved on top of the layers below.

Python packages   LAYER.in → LAYER.lock, with hashes, by uv. ``# exclude-newer: DATE`` in an .in file resolves as of
                  then.
Sources           NAME-source.in → NAME-source.lock: what a build stage compiles, one source distribution with its hash.
Debian packages   a definition's Include: and its `apt-get install` lines → apt.lock, with versions, by apt; and the
                  moment, for the snapshot archive.
NAME.arm64.lock   beside NAME.lock where it differs for that architecture; NAME.lock is amd64's, and all others' where
                  it does not.
SHA256SUMS        of all of them: a lock that was edited by hand is noticed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

from ekiben.core.atomic import write_files
from ekiben.core.command_name import command_name
from ekiben.core.errors import DefinitionError, FetchError, LockMismatchError, UsageError
from ekiben.core.files import read_source
from ekiben.core.paths import IS_INSTALLED, PROJECT_ROOT
from ekiben.core.process import ProcessError, run, which
from ekiben.packages.apt import apt_sources, preferences
from ekiben.packages.requirements import RequirementsFile, compile_lock, read_requirements
from ekiben.spec.definition import Definition, Stage, read_definition
from ekiben.spec.source_folders import SourceFolders, included_paths
from ekiben.spec.stack import (
    UNLOCKED,
    AptLock,
    Stack,
    arch_lock,
    find_stack,
    lock_for,
    read_apt_lock,
    read_stack,
    shared_lock,
)
from ekiben.spec.sums import SUMS, format_sums

_PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==(\S+)", re.MULTILINE)
_LOCAL = re.compile(r"^([A-Za-z0-9][\w.-]*)==\S+\+\S+", re.MULTILINE)  # torch==2.2.0+cu118: of an index of its own
_SOURCE = (  # NAME-source.in: a source distribution that a build stage compiles; its requirements are locked elsewhere
    "-source"
)
_INSTALL = re.compile(r"\bapt-get\b[^;&|\n]*?\binstall\b([^;&|<>\n]*)")
_CHOSEN = re.compile(r"^Inst (\S+) (?:\[\S+\] )?\((\S+) ", re.MULTILINE)


def refresh(
    name: str,
    *,
    check: bool,
    keep: bool = False,
    mirror: str | None = None,
    arch: str | None = None,
    included: Iterable[Path] = (),
) -> Iterator[str]:
    """Lock every layer of a stack, lowest first; yields a line per change. With ``check`` nothing is written.

    ``name``: a stack of images/stacks/, or the path of one elsewhere. ``keep``: what is locked stays as long as it
    fits. ``arch``: lock for this architecture only, not for all that stack.yaml names. ``included``: what it may use
    outside its images/ folder. Raises FetchError when an index or a mirror does not answer; LockMismatchError when
    ``check`` finds a lock out of date.
    """
    stack = open_stack(name, included)
    if IS_INSTALLED and not check and stack.folder.is_relative_to(PROJECT_ROOT):
        raise UsageError(
            f"stack '{stack.name}' is part of the installed Ekiben, and cannot be locked there",
            hint=(
                f"lock a copy of {stack.folder} in your recipe's images/stacks/, or a recipe's own packages:"
                f" {command_name()} lock ./RECIPE"
            ),
        )
    if arch and arch not in stack.file.architectures:
        raise UsageError(
            f"--arch {arch}: {short_path(stack.folder / 'stack.yaml')} has architectures:"
            f" [{', '.join(stack.file.architectures)}]",
            hint=f"add {arch} there, then lock",
        )
    definitions = _definitions(stack, included)
    locked: dict[Path, str] = {}
    changes = 0
    for architecture in (
        sorted(stack.file.architectures) if arch is None else [arch]
    ):  # amd64 first: the other architectures keep its versions
        bound = replace(stack, arch=architecture)
        for line in _lock_python(bound, definitions, locked, _sources(stack.folder, included), keep=check or keep):
            changes += 1
            yield line
        try:
            for line in _lock_debian(bound, definitions, locked, mirror, keep=check or keep):
                changes += 1
                yield line
        except FileNotFoundError:
            yield f"{short_path(stack.folder / 'apt.lock')}: left as it is: there is no apt-get here to ask"
    edited = list(_sum_problems(stack)) if check else []
    yield from edited
    if changes + len(edited) and check:
        raise LockMismatchError(
            f"{changes + len(edited)} locks of {stack.name} differ from its definitions and .in files",
            hint=f"{command_name()} lock {name} --keep",
        )
    if not check:
        _write_locks(stack, locked)
    if not changes:
        yield f"{stack.name}: up to date"


def _write_locks(stack: Stack, locked: Mapping[Path, str]) -> None:
    """Write changed locks; a lock of an architecture that equals amd64's is removed."""
    written, needless = dict[Path, str](), list[Path]()
    for target, text in locked.items():
        if target != (shared := shared_lock(target)) and text == locked.get(shared, _read(shared)):
            needless.append(target)
        elif _read(target) != text:
            written[target] = text
    if (text := _sums(stack, written, needless)) != _read(stack.folder / SUMS):
        written[stack.folder / SUMS] = text
    write_files(written)
    for target in needless:
        target.unlink(missing_ok=True)


def _read(path: Path) -> str:
    return read_source(path, default="")


def open_stack(name: str, included: Iterable[Path] = ()) -> Stack:
    """Read a stack of images/stacks/, or the one whose path ``name`` is. Raises DefinitionError."""
    folder = Path(name).resolve()
    if "/" in name:
        return read_stack(folder, _sources(folder, included))
    return find_stack(name, [PROJECT_ROOT / "images"])


def short_path(path: Path) -> Path:
    """Return ``path`` relative to the project where it lies in it."""
    return path.relative_to(PROJECT_ROOT) if path.is_relative_to(PROJECT_ROOT) else path


def _sources(stack: Path, included: Iterable[Path]) -> SourceFolders:
    """Return where the files of the stack in a folder, images/stacks/NAME, may lie: in images/."""
    return SourceFolders(stack.parent.parent, included_paths(included))


def _definitions(stack: Stack, included: Iterable[Path]) -> dict[str, Definition]:
    """Return every definition file that this stack can bind, by layer."""
    folders = dict.fromkeys([PROJECT_ROOT / "images", stack.folder.parent.parent])
    arguments = {**stack.file.arguments, "stack": str(stack.folder)}
    sources = _sources(stack.folder, included)
    for folder in folders:
        for path in folder.glob("*.def"):
            sources.check(path)
    return {
        path.stem: read_definition(path, root=folder.parent, arguments=arguments)
        for folder in folders
        for path in sorted(folder.glob("*.def"))
    }


def _depth(definitions: Mapping[str, Definition], layer: str) -> int:
    return len(_below(definitions, layer))


def _below(definitions: Mapping[str, Definition], layer: str) -> list[str]:
    """Return the layers below ``layer``, nearest first."""
    layers: list[str] = []
    while layer in definitions and (parent := definitions[layer].final.parent) and parent not in layers:
        layers.append(layer := parent)
    return layers


# -- Python packages
# ------------------------------------------------------------------------------------------------------


def _lock_python(
    stack: Stack,
    definitions: Mapping[str, Definition],
    locked: dict[Path, str],
    sources: SourceFolders,
    *,
    keep: bool,
) -> Iterator[str]:
    """Lock each .in file for the stack's architecture, into ``locked``; yields a line per change.

    What amd64 has in ``locked``, or else on the disk, is kept for another architecture: only what is not there may
    differ.
    """
    texts: dict[Path, str] = {}
    for source in sorted(stack.folder.glob("*.in"), key=lambda path: (_depth(definitions, path.stem), path.stem)):
        shared = source.with_suffix(".lock")
        target = arch_lock(shared, stack.arch)
        old = _read(lock_for(shared, stack.arch))
        kept = old if keep else ""
        if target != shared:
            kept = _blocks_beyond(kept, known := locked.get(shared, _read(shared))) + known
        under = [stack.folder / f"{layer}.lock" for layer in reversed(_below(definitions, source.stem))]
        below = "".join(texts[lock] for lock in under if lock in texts)
        texts[shared] = locked[target] = _resolve(source, below, kept, stack, sources)
        if target == shared or texts[shared] != known or target.exists():
            yield from (f"{short_path(target)}: {line}" for line in _differences(old, texts[shared]))
    _check_versions(stack, "".join(texts.values()))


def _blocks_beyond(text: str, known: str) -> str:
    """Return the blocks of a lock for packages that are not in ``known``."""
    names = {canonicalize_name(match[1]) for match in _PIN.finditer(known)}
    return "".join(
        block
        for block in re.split(r"^(?=\S)", text, flags=re.MULTILINE)
        if (match := _PIN.match(block)) and canonicalize_name(match[1]) not in names
    )


def _resolve(source: Path, below: str, old: str, stack: Stack, sources: SourceFolders) -> str:
    """``source``'s lock. A requirement with a local version, when no index here has it, is named as not locked."""
    checked = read_requirements(source, sources)
    absent = [line.removeprefix(UNLOCKED) for line in below.splitlines() if line.startswith(UNLOCKED)]
    try:
        text = _compile(source, checked, below, old, stack, absent)
    except FetchError:
        here = [match[0] for match in _LOCAL.finditer(read_source(source))]
        if not here:
            raise
        text = "".join(f"{UNLOCKED}{line}\n" for line in here) + _compile(
            source, checked, below, old, stack, [*absent, *here]
        )
    return text


def _compile(source: Path, checked: RequirementsFile, below: str, old: str, stack: Stack, absent: Sequence[str]) -> str:
    wheels_only = not source.stem.endswith(_SOURCE)
    try:
        text = compile_lock(checked, stack, below=below, absent=absent, old=old, wheels_only=wheels_only)
    except ProcessError as error:
        raise FetchError(f"{source} could not be resolved:\n{error.stderr.strip()}") from error
    return _blocks_beyond(text, below)


def _check_versions(stack: Stack, text: str) -> None:
    """Raise DefinitionError when the locks are of another torch or CUDA than stack.yaml says."""
    pins: dict[str, str] = {canonicalize_name(match[1]): match[2] for match in _PIN.finditer(text)}
    where = f"{short_path(stack.folder / 'stack.yaml')}"
    torch = pins.get("torch", stack.file.torch)
    if Version(torch).public != Version(stack.file.torch).public:
        raise DefinitionError(
            f"{where}: torch: {stack.file.torch}, but the .in files resolve to torch {torch}",
            hint=f"require torch=={stack.file.torch} in an .in file, or write torch: {torch}",
        )
    if "torch" in pins and not any(name.startswith("nvidia-cuda-runtime") for name in pins):
        raise DefinitionError(
            f"{where}: the index has torch {torch} for {stack.arch} without CUDA",
            hint=f"take {stack.arch} out of architectures: there, or require another torch",
        )
    cuda = Version(stack.file.cuda).release
    for name, version in pins.items():
        if re.fullmatch(r"nvidia-cuda-runtime(-cu\d+)?", name) and Version(version).release[: len(cuda)] != cuda:
            raise DefinitionError(
                f"{where}: cuda: {stack.file.cuda}, but torch {torch} comes with {name} {version}",
                hint=(
                    f"say cuda: {'.'.join(version.split('.')[:2])}, or require a torch that is built for"
                    f" {stack.file.cuda}"
                ),
            )


def _differences(old: str, new: str) -> Iterator[str]:
    before, after = ({match[1]: match[2] for match in _PIN.finditer(text)} for text in (old, new))
    yield from _version_differences(before, after)
    for line in sorted({*new.splitlines()} - {*old.splitlines()}):
        if line.startswith(UNLOCKED):
            yield f"{line.removeprefix(UNLOCKED)} is not locked: no index here has it"
    if before == after and old != new and UNLOCKED not in old + new:
        yield "hashes changed"


def _version_differences(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield f"{name} {before.get(name, '(new)')} → {after.get(name, '(gone)')}"


# -- Debian packages
# ------------------------------------------------------------------------------------------------------


def asked_packages(definition: Definition) -> list[str]:
    """Return the Debian packages that a definition names: in Include:, and in `apt-get install` lines."""
    return packages_of(definition.stages)


def packages_of(stages: Iterable[Stage]) -> list[str]:
    """Return the Debian packages that stages name, each once."""
    names: list[str] = []
    for stage in stages:
        names += stage.header.get("include", "").replace(",", " ").split()
        for match in _INSTALL.finditer(stage.post.replace("\\\n", " ")):
            with contextlib.suppress(ValueError):
                names += [
                    word for word in shlex.split(match[1], comments=True) if re.fullmatch(r"[a-z0-9][a-z0-9.+-]+", word)
                ]
    return list(dict.fromkeys(names))


def _lock_debian(
    stack: Stack, definitions: Mapping[str, Definition], locked: dict[Path, str], mirror: str | None, *, keep: bool
) -> Iterator[str]:
    """Lock the Debian packages for the stack's architecture, into ``locked``; yields a line per change."""
    shared = stack.folder / "apt.lock"
    target, before = arch_lock(shared, stack.arch), stack.apt_lock()
    now = _resolve_debian(stack, definitions, before if keep else AptLock(), mirror)
    if target != shared:
        common = locked.get(shared, _read(shared))
        if now.layers == read_apt_lock(shared, common).layers:
            if target.exists():
                locked[target] = common
            return
        if not target.exists():
            before = read_apt_lock(shared, common)
    yield from (f"{short_path(target)}: {line}" for line in _apt_differences(before, now))
    if now.layers != before.layers:
        locked[target] = _apt_text(stack, now)


def _resolve_debian(stack: Stack, definitions: Mapping[str, Definition], pins: AptLock, mirror: str | None) -> AptLock:
    """Return the packages that apt would install today for each layer, beyond the layers below.

    Raises FetchError when the mirror does not answer, FileNotFoundError when there is no apt-get.
    """
    layers_of = {name: [name, *_below(definitions, name)] for name in definitions}
    layers_of = {
        name: layers
        for name, layers in layers_of.items()
        if layers[-1] in definitions
        and definitions[layers[-1]].final.bootstrap == "debootstrap"
        and (len(layers) == 1 or asked_packages(definitions[name]))
    }
    if not layers_of:
        return AptLock()
    asked = {
        name: [word for layer in layers for word in asked_packages(definitions[layer])]
        for name, layers in layers_of.items()
    }
    packages: dict[str, dict[str, str]] = {}
    with _apt_for(stack, pins, mirror) as settings:
        for name, layers in sorted(layers_of.items(), key=lambda item: (len(item[1]), item[0])):
            chosen = _simulate(settings, asked[name])
            lower = {package for layer in layers[1:] for package in packages.get(layer, {})}
            packages[name] = {package: version for package, version in chosen.items() if package not in lower}
    return AptLock(f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}", packages)


def debian_versions(stack: Stack, lists: Iterable[Iterable[str]]) -> list[dict[str, str]]:
    """Return what apt would install today for each list of names, with all dependencies, as name → version.

    Raises FetchError when the mirror does not answer or lacks one, FileNotFoundError when there is no apt-get.
    """
    with _apt_for(stack, stack.apt_lock(), None) as settings:
        return [_simulate(settings, names) for names in lists]


@contextlib.contextmanager
def _apt_for(stack: Stack, pins: AptLock, mirror: str | None) -> Iterator[dict[str, str]]:
    """Yield the environment of an apt that knows the stack's suite and has nothing installed."""
    if which("apt-get") is None or which("dpkg") is None:
        raise FileNotFoundError("apt-get")
    sources = apt_sources(stack.file.suite, mirror)
    with tempfile.TemporaryDirectory(prefix="ekiben-apt-") as folder:
        settings = _apt_settings(Path(folder), sources, preferences(pins.packages), stack.arch)
        _apt(settings, "update")
        yield settings


def _simulate(settings: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    # What mmdebstrap's minbase is: https://manpages.debian.org/bookworm/mmdebstrap/mmdebstrap.1.en.html
    stdout = _apt(settings, "install", "--simulate", "?essential", "?priority(required)", "apt", *names)
    return dict(sorted(_CHOSEN.findall(stdout)))


def _apt_settings(folder: Path, sources: str, pins: str, arch: str) -> dict[str, str]:
    """Write settings of an apt with nothing installed into ``folder``; its archive keys are the host's."""
    for path in ("lists/partial", "cache/archives/partial"):
        (folder / path).mkdir(parents=True)
    (folder / "status").touch()
    (folder / "sources.list").write_text(sources, encoding="utf-8")
    (folder / "preferences").write_text(pins, encoding="utf-8")
    lines = [
        f'Dir::State "{folder}/";',
        f'Dir::State::lists "{folder}/lists";',
        f'Dir::State::status "{folder}/status";',
        f'Dir::Cache "{folder}/cache";',
        f'Dir::Etc::sourcelist "{folder}/sources.list";',
        f'Dir::Etc::sourceparts "{folder}/none";',
        f'Dir::Etc::preferences "{folder}/preferences";',
        f'Dir::Etc::preferencesparts "{folder}/none";',
        'APT::Install-Recommends "false";',
        'APT::Sandbox::User "root";',
        f'APT::Architecture "{arch}";',
        f'APT::Architectures:: "{arch}";',
        'Acquire::Languages "none";',
        'Acquire::Retries "3";',
        'Dir::Log "/dev";',
        'APT::Get::List-Cleanup "false";',
    ]
    (folder / "none").mkdir()
    (folder / "apt.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {**os.environ, "APT_CONFIG": str(folder / "apt.conf"), "LC_ALL": "C"}


def _apt(settings: Mapping[str, str], *args: str) -> str:
    done = run(["apt-get", "--quiet=2" if args[0] == "update" else "--quiet", *args], env=settings, check=False)
    if done.returncode:
        raise FetchError(
            f"apt-get {args[0]} failed:\n{(done.stderr or done.stdout).strip()}",
            hint="another mirror is given with --mirror URI",
        )
    return done.stdout


def _apt_differences(before: AptLock, now: AptLock) -> Iterator[str]:
    for layer in dict.fromkeys([*now.layers, *before.layers]):
        for line in _version_differences(before.layers.get(layer, {}), now.layers.get(layer, {})):
            yield f"[{layer}] {line}"


def _apt_text(stack: Stack, lock: AptLock) -> str:
    lines = [
        (
            f"# Debian {stack.file.suite}{'' if stack.arch == 'amd64' else f' for {stack.arch}'}, what each layer adds;"
            f" written by ekiben lock {stack.name}"
        ),
        f"snapshot: {lock.snapshot}",
    ]
    for layer, packages in lock.layers.items():
        lines += ["", f"[{layer}]", *(f"{name}={version}" for name, version in packages.items())]
    return "\n".join(lines) + "\n"


# -- All of them
# ----------------------------------------------------------------------------------------------------------


def _sums(stack: Stack, written: Mapping[Path, str], needless: Collection[Path] = ()) -> str:
    """Return SHA256SUMS after ``written`` is written and ``needless`` is removed."""
    existing = {path for pattern in ("*.in", "*.lock") for path in stack.folder.glob(pattern)}
    names = {path.name for path in (existing | set(written)) - set(needless) if path.parent == stack.folder}
    return format_sums(stack.folder, sorted(names), written)


def _sum_problems(stack: Stack) -> Iterator[str]:
    """Yield a line for each file that was edited since `lock` wrote or read it."""
    path = stack.folder / SUMS
    before, now = (
        dict(line.split("  ")[::-1] for line in text.splitlines()) for text in (_read(path), _sums(stack, {}))
    )
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            yield f"{short_path(stack.folder / name)}: is not as `{command_name()} lock` left it"
