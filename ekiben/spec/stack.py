"""A stack: versions that work together, with their lock files, in images/stacks/<name>/."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

from ekiben.core.command_name import command_name
from ekiben.core.environment import ARCHITECTURES, host_arch
from ekiben.core.errors import DefinitionError, nearest
from ekiben.core.files import read_source, read_yaml
from ekiben.spec.source_folders import SourceFolders
from ekiben.spec.sums import check_sums

UNLOCKED = "# not locked: "  # mark in a .lock file: a requirement that no index had
_PIN = re.compile(r"([A-Za-z0-9][\w.-]*)==([^\s;]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_INTERPRETER = re.compile(r"(/[\w.+-]+)+")  # a path that needs no quotes in a script
_LIBC = re.compile(r"glibc \d{1,3}\.\d{1,3}|musl")
_SNAPSHOT = re.compile(r"\d{8}T\d{6}Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFile:
    """The content of a stack.yaml. ``cuda`` and ``torch`` are "" where the images have none."""

    name: str
    description: str
    suite: str
    python: str
    cuda: str
    torch: str
    driver: str
    compute_capabilities: tuple[str, ...]
    epoch: int
    architectures: tuple[str, ...] = ("amd64",)
    arguments: dict[str, str] = field(default_factory=dict)
    interpreter: str = ""
    libc: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.epoch < 2**32:
            raise ValueError(f"epoch: should be seconds since 1970, from 1 to 2**32 - 1 (found: {self.epoch})")
        known = sorted(ARCHITECTURES.values())
        if not self.architectures or not set(self.architectures) <= set(known):
            raise ValueError(
                f"architectures: should be some of {', '.join(known)} (found:"
                f" {', '.join(self.architectures) or 'none'})"
            )
        versions = {
            "python": [self.python],
            "cuda": [self.cuda] if self.cuda else [],
            "torch": [self.torch] if self.torch else [],
            "compute_capabilities": self.compute_capabilities,
        }
        for name, values in versions.items():
            for value in values:
                try:
                    Version(value)
                except InvalidVersion as error:
                    raise ValueError(f"{name}: should be a version (found: {value})") from error
        if self.interpreter and not _INTERPRETER.fullmatch(self.interpreter):
            raise ValueError(f"interpreter: should be a path such as /usr/bin/python3 (found: {self.interpreter})")
        if self.libc and not _LIBC.fullmatch(self.libc):
            raise ValueError(f"libc: should be 'glibc VERSION' or musl (found: {self.libc})")


@dataclass(frozen=True, slots=True)
class AptLock:
    """Debian packages as locked: layer → package → version; ``snapshot`` is the moment as the snapshot archive writes
    it, "" when there is none. A list without [layer] lines belongs to the lowest layer: it has the name ""."""

    snapshot: str = ""
    layers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def packages(self) -> dict[str, str]:
        """Return every package of every layer, name → version."""
        return {name: version for packages in self.layers.values() for name, version in packages.items()}

    def of(self, layer: str, *, lowest: bool) -> dict[str, str]:
        """Return the locked packages of one layer."""
        return {**(self.layers.get("", {}) if lowest else {}), **self.layers.get(layer, {})}


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack's folder and its stack.yaml; ``arch``: the architecture to build for, ``amd64`` or ``arm64``."""

    folder: Path
    file: StackFile
    arch: str = field(default_factory=host_arch)

    @property
    def name(self) -> str:
        """Return the stack's name."""
        return self.file.name

    @property
    def platform(self) -> str:
        """Return the OCI platform that is built for, as ``linux/amd64``."""
        return f"linux/{self.arch}"

    def apt_lock(self) -> AptLock:
        """Read apt.lock.

        Raises DefinitionError for a line that is none of: snapshot: TIME, [layer], package=version, # remark.
        """
        path = lock_for(self.folder / "apt.lock", self.arch)
        return read_apt_lock(path, read_source(path, default=""))

    def check_locks(self) -> None:
        """Raise DefinitionError when an .in or lock file is not as `ekiben lock` left it."""
        check_sums(
            self.folder,
            hint=(
                "require versions in the .in files; then: "
                f"{command_name()} lock {self.name} --keep (without --keep every version is updated)"
            ),
        )

    def unlocked(self, lock: Path) -> list[str]:
        """Return the requirements that ``lock``, a .lock file, could not pin."""
        return [
            line.removeprefix(UNLOCKED)
            for line in read_source(lock, errors="replace").splitlines()
            if line.startswith(UNLOCKED)
        ]


def read_apt_lock(path: Path, text: str) -> AptLock:
    """Read the text of ``path``, an apt.lock.

    Raises DefinitionError for a line that is none of: snapshot: TIME, [layer], package=version, # remark.
    """
    snapshot, layers = "", dict[str, dict[str, str]]()
    layer = ""
    for number, line in enumerate(text.splitlines(), 1):
        name, equals, version = line.partition("=")
        if not line or line.startswith("#"):
            continue
        if line.startswith("[") and line.endswith("]"):
            layer = line[1:-1]
        elif line.startswith("snapshot: ") and _SNAPSHOT.fullmatch(line[10:]):
            snapshot = line[10:]
        elif equals:
            layers.setdefault(layer, {})[name] = version
        else:
            raise DefinitionError(f"{path}:{number}: expected package=version, found: {line}")
    return AptLock(snapshot, layers)


def lock_for(lock: Path, arch: str) -> Path:
    """Return the lock file of ``arch``: NAME.arm64.lock where it exists, else ``lock``, which is for all of them."""
    path = arch_lock(lock, arch)
    return path if path.is_file() else lock


def arch_lock(lock: Path, arch: str) -> Path:
    """Return where what differs from ``lock`` on ``arch`` is locked: NAME.arm64.lock. ``lock`` itself is amd64's."""
    return lock if arch == "amd64" else lock.with_suffix(f".{arch}{lock.suffix}")


def shared_lock(lock: Path) -> Path:
    """Return amd64's lock file beside ``lock``, or ``lock`` itself where it is that: the inverse of arch_lock()."""
    name, _, arch = lock.stem.rpartition(".")
    return lock.with_name(f"{name}{lock.suffix}") if name and arch in ARCHITECTURES.values() else lock


def read_pins(lock: str) -> list[tuple[str, str, list[str]]]:
    """Return name, version and hashes of each pin of a Python lock file; one of the hashes is the installed one."""
    blocks = re.split(r"^(?=[A-Za-z0-9])", lock, flags=re.MULTILINE)
    return [(match[1], match[2], sorted(_HASH.findall(block))) for block in blocks if (match := _PIN.match(block))]


def without_packages(lock: str, names: Collection[str]) -> str:
    """Return a Python lock file without the blocks of these packages, whose names are in canonical form."""
    from packaging.utils import canonicalize_name  # imported here: it brings platform's tags

    blocks = re.split(r"^(?=[A-Za-z0-9])", lock, flags=re.MULTILINE)
    return "".join(block for block in blocks if not ((pin := _PIN.match(block)) and canonicalize_name(pin[1]) in names))


def stacks(folders: Sequence[Path], sources: SourceFolders | None = None) -> list[Stack]:
    """Return every stack of ``folders``, by name.

    Raises DefinitionError, also for one whose files are not in ``sources``.
    """
    known = _stack_files(folders)
    return [read_stack(path.parent, sources) for _, path in sorted(known.items())]


def find_stack(
    name: str, folders: Sequence[Path], *, asked_by: str = "", sources: SourceFolders | None = None
) -> Stack:
    """Find ``name`` in the first of ``folders`` (each an images/ folder) that has it.

    Raises DefinitionError when none has, or when one of its files is not in ``sources``.
    """
    known = _stack_files(folders)
    if name not in known:
        raise DefinitionError(f"{asked_by}: no stack '{name}'.".removeprefix(": ") + nearest(name, known))
    return read_stack(known[name].parent, sources)


def read_stack(folder: Path, sources: SourceFolders | None = None) -> Stack:
    """Read the stack in ``folder``. Raises DefinitionError, also when one of its files is not in ``sources``."""
    if sources:
        sources.check(folder)
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            sources.check(path)
    return Stack(folder, read_yaml(folder / "stack.yaml", StackFile))


def _stack_files(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the stack.yaml of each stack by its name. Raises OSError for a folder that cannot be read."""
    parents = [folder / "stacks" for folder in reversed(folders) if (folder / "stacks").is_dir()]
    paths = (path / "stack.yaml" for parent in parents for path in parent.iterdir())
    return {path.parent.name: path for path in paths if path.is_file()}
