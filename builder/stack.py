"""A stack: versions that work together, with their lock files, in images/stacks/<name>/."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from builder.errors import DefinitionError, nearest
from builder.files import Strict, read_yaml


class StackFile(Strict):
    name: str
    description: str
    suite: str
    python: str
    cuda: str
    torch: str
    driver: str
    compute_capabilities: tuple[str, ...]
    epoch: int = Field(gt=0, lt=2**32)
    arguments: dict[str, str] = {}


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
        return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def find_stack(name: str, folders: Sequence[Path]) -> Stack:
    """``name`` in the first of ``folders`` (each an images/ folder) that has it. Errors: DefinitionError."""
    known = {path.parent.name: path for folder in reversed(folders) for path in folder.glob("stacks/*/stack.yaml")}
    if name not in known:
        raise DefinitionError(f"no stack '{name}'." + nearest(name, known))
    return Stack(known[name].parent, read_yaml(known[name], StackFile))
