"""State of a run on disk: whole or not there, and enough of it to go on as if nothing had happened."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from settings import TaskError

KEEP = 2


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write ``folder/step-NNNNNN`` under another name, flush it to disk, rename it; then remove older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:06d}"
    staged = folder / f".staged-{os.getpid()}"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    with (staged / "state.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    if final.exists():
        shutil.rmtree(final)
    staged.rename(final)
    for old in _all(folder)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def latest(folder: Path) -> Path | None:
    found = _all(folder)
    return found[-1] if found else None


def load(path: Path) -> dict[str, Any]:
    """Errors: TaskError. Only tensors and plain values are read, never code."""
    try:
        state: dict[str, Any] = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    except Exception as error:
        raise TaskError(f"{path}: cannot be read ({error}); remove it, or start again with --fresh") from error
    return state


def _all(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if (path / "state.pt").is_file())
