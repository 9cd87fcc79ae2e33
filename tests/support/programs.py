"""Stand-ins for programs on PATH."""

from __future__ import annotations

from pathlib import Path


def write_program(path: Path, script: str) -> Path:
    """Write an executable file, and its folder where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)
    return path
