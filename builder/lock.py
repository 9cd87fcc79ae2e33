"""Writes a stack's lock files: what each layer asks for, resolved on top of the layers below.

Python packages   LAYER.in → LAYER.lock, with hashes, by uv. ``# exclude-newer: DATE`` in an .in file resolves as of then.
Sources           NAME-source.in → NAME-source.lock: what a build stage compiles, one source distribution with its hash.
Debian packages   a definition's Include: and its `apt-get install` lines → apt.lock, with versions, by apt; and the moment,
                  for the snapshot archive.
SHA256SUMS        of all of them: a lock that was edited by hand is noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from builder.debootstrap import apt_sources, preferences
from builder.definition import Definition, Stage, read_definition
from builder.errors import DefinitionError, DriftError, FetchError
from builder.files import read_yaml, write_whole
from builder.process import ProcessError, run, which
from builder.recipe import HOUSE
from builder.stack import SUMS, UNLOCKED, AptLock, Stack, StackFile, find_stack

_PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==(\S+)", re.MULTILINE)
_LOCAL = re.compile(r"^([A-Za-z0-9][\w.-]*)==\S+\+\S+", re.MULTILINE)  # torch==2.2.0+cu118: of an index of its own
_SOURCE = (
    "-source"  # NAME-source.in: a source distribution that a build stage compiles; its requirements are others' matter
)
_DATE = re.compile(r"^# exclude-newer: (\S+)", re.MULTILINE)
_INSTALL = re.compile(r"\bapt-get\b[^;&|\n]*?\binstall\b([^;&|<>\n]*)")
_CHOSEN = re.compile(r"^Inst (\S+) (?:\[\S+\] )?\((\S+) ", re.MULTILINE)


def refresh(name: str, *, check: bool, keep: bool = False, mirror: str | None = None) -> Iterator[str]:
    """Lock every layer of a stack, lowest first; yields a line per change. With ``check`` nothing is written.

    ``name``: a stack of images/stacks/, or the path of one elsewhere. ``keep``: what is locked stays as long as it fits.
    Errors: FetchError when an index or a mirror does not answer; DriftError (``check``) when a lock is out of date.
    """
    folder = Path(name).resolve()
    stack = (
        Stack(folder, read_yaml(folder / "stack.yaml", StackFile))
        if "/" in name
        else find_stack(name, [HOUSE / "images"])
    )
    definitions = _definitions(stack)
    locked: dict[Path, str] = {}
    changes = 0
    for source in sorted(stack.folder.glob("*.in"), key=lambda path: (_depth(definitions, path.stem), path.stem)):
        target = source.with_suffix(".lock")
        old = target.read_text() if target.exists() else ""
        under = [stack.folder / f"{layer}.lock" for layer in reversed(_below(definitions, source.stem))]
        below = "".join(locked[lock] for lock in under if lock in locked)
        locked[target] = _resolve(source, below, old if check or keep else "", stack)
        for line in _differences(old, locked[target]):
            changes += 1
            yield f"{_shown(target)}: {line}"
    _check_versions(stack, "".join(locked.values()))
    apt_lock = stack.folder / "apt.lock"
    try:
        before = stack.apt_lock()
        now = _resolve_debian(stack, definitions, before if check or keep else AptLock(), mirror)
        for line in _apt_differences(before, now):
            changes += 1
            yield f"{_shown(apt_lock)}: {line}"
        if now.layers != before.layers:
            locked[apt_lock] = _apt_text(stack, now)
    except FileNotFoundError:
        yield f"{_shown(apt_lock)}: left as it is: there is no apt-get here to ask"
    edited = list(_sum_problems(stack)) if check else []
    yield from edited
    if changes + len(edited) and check:
        raise DriftError(
            f"{changes + len(edited)} of {stack.name}'s locked things are not what its definitions and .in files give today",
            hint=f"build.py lock {name} --keep",
        )
    if not check:
        for target, text in locked.items():
            if not target.exists() or target.read_text() != text:
                write_whole(target, text)
        if (text := _sums(stack)) != ((stack.folder / SUMS).read_text() if (stack.folder / SUMS).exists() else ""):
            write_whole(stack.folder / SUMS, text)
    if not changes:
        yield f"{stack.name}: up to date"


def _shown(path: Path) -> Path:
    return path.relative_to(HOUSE) if path.is_relative_to(HOUSE) else path


def _definitions(stack: Stack) -> dict[str, Definition]:
    """Every definition file this stack can bind, by layer."""
    folders = dict.fromkeys([HOUSE / "images", stack.folder.parent.parent])
    arguments = {**stack.file.arguments, "stack": str(stack.folder)}
    return {path.stem: read_definition(path, root=folder.parent, arguments=arguments)
            for folder in folders for path in sorted(folder.glob("*.def"))}  # fmt: skip


def _depth(definitions: Mapping[str, Definition], layer: str) -> int:
    return len(_below(definitions, layer))


def _below(definitions: Mapping[str, Definition], layer: str) -> list[str]:
    """The layers that ``layer`` stands on, nearest first."""
    found: list[str] = []
    while layer in definitions and (parent := definitions[layer].final.parent) and parent not in found:
        found.append(layer := parent)
    return found


# -- Python packages ------------------------------------------------------------------------------------------------------


def _resolve(source: Path, below: str, old: str, stack: Stack) -> str:
    """``source``'s lock. A requirement with a local version, when no index here has it, is named as not locked."""
    absent = [line.removeprefix(UNLOCKED) for line in below.splitlines() if line.startswith(UNLOCKED)]
    try:
        text = _compile(source, below, old, stack, absent)
    except FetchError:
        here = [match[0] for match in _LOCAL.finditer(source.read_text())]
        if not here:
            raise
        text = "".join(f"{UNLOCKED}{line}\n" for line in here) + _compile(source, below, old, stack, [*absent, *here])
    return text


def _compile(source: Path, below: str, old: str, stack: Stack, absent: Sequence[str]) -> str:
    uv = Path(sys.executable).with_name("uv")
    with tempfile.TemporaryDirectory(prefix="ekiben-lock-") as folder:
        constraints, overrides, out = (Path(folder) / name for name in ("below.txt", "absent.txt", "out.lock"))
        constraints.write_text(below)
        overrides.write_text("".join(f"{line} ; python_version < '3'\n" for line in absent))  # that is: nowhere
        if old:
            out.write_text(old)  # uv keeps what is there as long as it still fits: only what must change shows
        date = _DATE.search(source.read_text())
        try:
            run([uv, "pip", "compile", "--quiet", "--generate-hashes", "--no-emit-index-url", "--no-header", "--no-annotate",
                 "--python-version", stack.file.python, "--python-platform", "x86_64-manylinux_2_28",
                 *(["--no-deps"] if source.stem.endswith(_SOURCE) else ["--only-binary", ":all:"]),
                 *(["--exclude-newer", date[1]] if date else []), "--override", overrides,
                 "--constraints", constraints, source, "--output-file", out],
                env={"UV_SYSTEM_CERTS": "1", **os.environ})  # fmt: skip
        except ProcessError as error:
            raise FetchError(f"{source} could not be resolved:\n{error.stderr.strip()}") from error
        known = {match[1].lower() for match in _PIN.finditer(below)}
        blocks = re.split(r"^(?=\S)", out.read_text(), flags=re.MULTILINE)
        return "".join(block for block in blocks if (match := _PIN.match(block)) and match[1].lower() not in known)


def _check_versions(stack: Stack, text: str) -> None:
    """Whether the locks are of the torch and the CUDA that stack.yaml speaks of. Errors: DefinitionError."""
    pins = {match[1]: match[2] for match in _PIN.finditer(text.lower())}
    where = f"{_shown(stack.folder / 'stack.yaml')}"
    torch = pins.get("torch", stack.file.torch)
    if torch.partition("+")[0] != stack.file.torch:
        raise DefinitionError(f"{where}: torch: {stack.file.torch}, but the .in files resolve to torch {torch}",
                              hint=f"ask for torch=={stack.file.torch} in an .in file, or say torch: {torch}")  # fmt: skip
    for name, version in pins.items():
        if re.fullmatch(r"nvidia-cuda-runtime(-cu\d+)?", name) and not f"{version}.".startswith(f"{stack.file.cuda}."):
            raise DefinitionError(f"{where}: cuda: {stack.file.cuda}, but torch {torch} comes with {name} {version}",
                                  hint=f"say cuda: {'.'.join(version.split('.')[:2])}, or ask for a torch that is built for {stack.file.cuda}")  # fmt: skip


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


# -- Debian packages ------------------------------------------------------------------------------------------------------


def asked_packages(definition: Definition) -> list[str]:
    """The Debian packages that a definition names: in Include:, and in the `apt-get install` lines of its scripts."""
    return packages_of(definition.stages)


def packages_of(stages: Iterable[Stage]) -> list[str]:
    words: list[str] = []
    for stage in stages:
        words += stage.header.get("include", "").replace(",", " ").split()
        for match in _INSTALL.finditer(stage.post.replace("\\\n", " ")):
            with contextlib.suppress(ValueError):
                words += [
                    word for word in shlex.split(match[1], comments=True) if re.fullmatch(r"[a-z0-9][a-z0-9.+-]+", word)
                ]
    return list(dict.fromkeys(words))


def _resolve_debian(stack: Stack, definitions: Mapping[str, Definition], pins: AptLock, mirror: str | None) -> AptLock:
    """What apt would install today for each layer, beyond the layers below. Errors: FetchError; FileNotFoundError
    without apt-get."""
    chains = {name: [name, *_below(definitions, name)] for name in definitions}
    chains = {name: chain for name, chain in chains.items()
              if chain[-1] in definitions and definitions[chain[-1]].final.bootstrap == "debootstrap"
              and (len(chain) == 1 or asked_packages(definitions[name]))}  # fmt: skip
    if not chains:
        return AptLock()
    if which("apt-get") is None or which("dpkg") is None:
        raise FileNotFoundError("apt-get")
    sources = apt_sources(stack.file.suite, mirror)
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="ekiben-apt-") as folder:
        settings = _apt_settings(Path(folder), sources, preferences(pins.packages))
        _apt(settings, "update")
        for name, chain in sorted(chains.items(), key=lambda item: (len(item[1]), item[0])):
            words = [word for layer in chain for word in asked_packages(definitions[layer])]
            # What mmdebstrap's minbase is: https://manpages.debian.org/bookworm/mmdebstrap/mmdebstrap.1.en.html
            told = _apt(settings, "install", "--simulate", "?essential", "?priority(required)", "apt", *words)
            lower = {package for layer in chain[1:] for package in found.get(layer, {})}
            found[name] = {
                package: version for package, version in sorted(_CHOSEN.findall(told)) if package not in lower
            }
    return AptLock(f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}", found)


def _apt_settings(folder: Path, sources: str, pins: str) -> dict[str, str]:
    """An apt of its own in ``folder``, on a system with nothing installed; its archive keys are the host's."""
    for path in ("lists/partial", "cache/archives/partial"):
        (folder / path).mkdir(parents=True)
    (folder / "status").touch()
    (folder / "sources.list").write_text(sources)
    (folder / "preferences").write_text(pins)
    lines = [f'Dir::State "{folder}/";', f'Dir::State::lists "{folder}/lists";', f'Dir::State::status "{folder}/status";',
             f'Dir::Cache "{folder}/cache";', f'Dir::Etc::sourcelist "{folder}/sources.list";',
             f'Dir::Etc::sourceparts "{folder}/none";', f'Dir::Etc::preferences "{folder}/preferences";',
             f'Dir::Etc::preferencesparts "{folder}/none";', 'APT::Install-Recommends "false";', 'APT::Sandbox::User "root";',
             'APT::Architecture "amd64";', 'APT::Architectures:: "amd64";', 'Acquire::Languages "none";',
             'Acquire::Retries "3";', 'Dir::Log "/dev";', 'APT::Get::List-Cleanup "false";']  # fmt: skip
    (folder / "none").mkdir()
    (folder / "apt.conf").write_text("\n".join(lines) + "\n")
    return {**os.environ, "APT_CONFIG": str(folder / "apt.conf"), "LC_ALL": "C"}


def _apt(settings: Mapping[str, str], *words: str) -> str:
    done = run(["apt-get", "--quiet=2" if words[0] == "update" else "--quiet", *words], env=settings, check=False)
    if done.returncode:
        raise FetchError(f"apt-get {words[0]} failed:\n{(done.stderr or done.stdout).strip()}",
                         hint="another mirror is given with --mirror URI")  # fmt: skip
    return done.stdout


def _apt_differences(before: AptLock, now: AptLock) -> Iterator[str]:
    for layer in dict.fromkeys([*now.layers, *before.layers]):
        for line in _version_differences(before.layers.get(layer, {}), now.layers.get(layer, {})):
            yield f"[{layer}] {line}"


def _apt_text(stack: Stack, lock: AptLock) -> str:
    lines = [
        f"# Debian {stack.file.suite}, what each layer adds; written by build.py lock {stack.name}",
        f"snapshot: {lock.snapshot}",
    ]
    for layer, packages in lock.layers.items():
        lines += ["", f"[{layer}]", *(f"{name}={version}" for name, version in packages.items())]
    return "\n".join(lines) + "\n"


# -- All of them ----------------------------------------------------------------------------------------------------------


def _sums(stack: Stack) -> str:
    files = sorted(path for pattern in ("*.in", "*.lock") for path in stack.folder.glob(pattern))
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


def _sum_problems(stack: Stack) -> Iterator[str]:
    """Files whose content `build.py lock` did not write, or read."""
    path = stack.folder / SUMS
    before, now = (dict(line.split("  ")[::-1] for line in text.splitlines())
                   for text in (path.read_text() if path.exists() else "", _sums(stack)))  # fmt: skip
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            yield f"{_shown(stack.folder / name)}: is not as `build.py lock` left it"
