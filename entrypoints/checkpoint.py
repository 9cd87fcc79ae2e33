"""State of a run on disk: whole or not there, and enough of it to go on as if nothing had happened."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

import models
from settings import TaskError
from world import World

KEEP = 2


def save(folder: Path, step: int, state: dict[str, Any], write: Callable[[Path], dict[str, Any]], world: World) -> Path:
    """Write ``folder/step-NNNNNN`` under another name, flush it to disk, rename it; then remove older ones.

    state: plain values, the same in every process. write: called in every process with the folder to fill; what it
    returns in the first one is kept beside ``state``. Errors: TaskError, with the older ones untouched.
    """
    final = folder / f"step-{step:06d}"
    staged = folder / f".staged-{step:06d}"
    try:
        if world.leads:
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)
        world.wait()
        own = write(staged)
        if world.leads:
            _write(staged / "state.pt", {**state, **own})
        world.wait()
    except OSError as error:
        shutil.rmtree(staged, ignore_errors=True)
        raise TaskError(
            f"{final}: cannot be written ({error}); {_free(folder)}; make room and give the same command again: "
            f"it goes on from {_newest(folder)}"
        ) from error
    if world.leads:
        if final.exists():
            shutil.rmtree(final)
        staged.rename(final)
        for old in _all(folder)[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)
    world.wait()
    return final


def save_model(causal: Any, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """The whole model as transformers reads it, whole or not there. weights: of every parameter. Errors: TaskError."""
    staged = folder.with_name(f".{folder.name}.staged-{os.getpid()}")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        causal.save_pretrained(str(staged), state_dict=weights)
        models.make_readable(staged)
        models.replace_folder(staged, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staged, ignore_errors=True)
        raise TaskError(
            f"{folder}: cannot be written ({error}); {_free(folder.parent)}; make room and give the same command again: "
            "nothing has to be trained a second time"
        ) from error


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


def _write(path: Path, state: dict[str, Any]) -> None:
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # what torch makes of a full disk
            raise OSError(str(error.__context__ or error)) from error
        file.flush()
        os.fsync(file.fileno())


def _all(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if (path / "state.pt").is_file())


def _newest(folder: Path) -> str:
    found = latest(folder)
    return f"step {int(found.name.removeprefix('step-'))}" if found else "the start"


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB are free there"
    except OSError:
        return "its file system does not answer"
