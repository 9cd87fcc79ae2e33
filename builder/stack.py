"""A stack: versions that work together, with their lock files, in images/stacks/<name>/."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from builder.errors import DefinitionError, nearest
from builder.files import read_yaml

SUMS = "SHA256SUMS"  # of a stack's .in and lock files as `build.py lock` left them; `sha256sum -c` reads it, too
UNLOCKED = "# not locked: "  # in a .lock file: a requirement that no index had where it was made
_PIN = re.compile(r"([A-Za-z0-9][\w.-]*)==([^\s;]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_SNAPSHOT = re.compile(r"\d{8}T\d{6}Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFile:
    name: str
    description: str
    suite: str
    python: str
    cuda: str
    torch: str
    driver: str
    compute_capabilities: tuple[str, ...]
    epoch: int
    arguments: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.epoch < 2**32:
            raise ValueError(f"epoch: should be seconds since 1970, from 1 to 2**32 - 1 (found: {self.epoch})")


@dataclass(frozen=True, slots=True)
class AptLock:
    """Debian packages as locked: layer → package → version; ``snapshot`` is the moment as the snapshot archive writes
    it, "" when there is none. A list without [layer] lines belongs to the lowest layer: it has the name ""."""

    snapshot: str = ""
    layers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def packages(self) -> dict[str, str]:
        return {name: version for packages in self.layers.values() for name, version in packages.items()}

    def of(self, layer: str, *, lowest: bool) -> dict[str, str]:
        """What is locked for one layer."""
        return {**(self.layers.get("", {}) if lowest else {}), **self.layers.get(layer, {})}


@dataclass(frozen=True, slots=True)
class Stack:
    folder: Path
    file: StackFile

    @property
    def name(self) -> str:
        return self.file.name

    def apt_lock(self) -> AptLock:
        """Errors: DefinitionError for a line that is none of: snapshot: TIME, [layer], package=version, # remark."""
        path = self.folder / "apt.lock"
        snapshot, layers = "", dict[str, dict[str, str]]()
        layer = ""
        for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
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

    def check_locks(self) -> None:
        """Whether the .in and lock files are as `build.py lock` left them. Errors: DefinitionError."""
        sums = self.folder / SUMS
        problems = []
        for line in sums.read_text().splitlines() if sums.exists() else []:
            wanted, _, name = line.partition("  ")
            path = self.folder / name
            if not path.is_file():
                problems.append(f"{path}: was locked, and is gone")
            elif hashlib.sha256(path.read_bytes()).hexdigest() != wanted:
                said = "was changed and not locked again" if path.suffix == ".in" else "was edited by hand"
                problems.append(f"{path}: {said}")
        if problems:
            raise DefinitionError("\n".join(problems), hint="versions are asked for in the .in files; then: "
                                  f"build.py lock {self.name} --keep (without --keep every version is today's)")  # fmt: skip

    def unlocked(self, lock: Path) -> list[str]:
        """The requirements that ``lock``, a .lock file, could not pin."""
        return [line.removeprefix(UNLOCKED) for line in lock.read_text().splitlines() if line.startswith(UNLOCKED)]


def read_pins(lock: str) -> list[tuple[str, str, list[str]]]:
    """What a lock file of Python packages pins: name, version and sha256 of each; any of the hashes may be the one installed."""
    blocks = re.split(r"^(?=[A-Za-z0-9])", lock, flags=re.MULTILINE)
    return [(match[1], match[2], sorted(_HASH.findall(block))) for block in blocks if (match := _PIN.match(block))]


def stacks(folders: Sequence[Path]) -> list[Stack]:
    """Every stack of ``folders``, by name."""
    known = {path.parent.name: path for folder in reversed(folders) for path in folder.glob("stacks/*/stack.yaml")}
    return [Stack(path.parent, read_yaml(path, StackFile)) for _, path in sorted(known.items())]


def find_stack(name: str, folders: Sequence[Path], *, asked_by: str = "") -> Stack:
    """``name`` in the first of ``folders`` (each an images/ folder) that has it. Errors: DefinitionError."""
    known = {path.parent.name: path for folder in reversed(folders) for path in folder.glob("stacks/*/stack.yaml")}
    if name not in known:
        raise DefinitionError(f"{asked_by}: no stack '{name}'.".removeprefix(": ") + nearest(name, known))
    return Stack(known[name].parent, read_yaml(known[name], StackFile))
