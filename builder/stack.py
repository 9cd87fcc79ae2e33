"""A stack: versions that work together, with their lock files, in images/stacks/<name>/."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from builder.errors import DefinitionError, nearest
from builder.files import read_yaml


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
class Stack:
    folder: Path
    file: StackFile

    @property
    def name(self) -> str:
        return self.file.name

    def apt_lock(self) -> dict[str, str]:
        """Debian package → version, as locked; empty when the stack has no apt.lock."""
        path = self.folder / "apt.lock"
        lines = path.read_text().splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            if line and not line.startswith("#") and "=" not in line:
                raise DefinitionError(f"{path}:{number}: expected package=version, found: {line}")
        return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def find_stack(name: str, folders: Sequence[Path], *, asked_by: str = "") -> Stack:
    """``name`` in the first of ``folders`` (each an images/ folder) that has it. Errors: DefinitionError."""
    known = {path.parent.name: path for folder in reversed(folders) for path in folder.glob("stacks/*/stack.yaml")}
    if name not in known:
        raise DefinitionError(f"{asked_by}: no stack '{name}'.".removeprefix(": ") + nearest(name, known))
    return Stack(known[name].parent, read_yaml(known[name], StackFile))
