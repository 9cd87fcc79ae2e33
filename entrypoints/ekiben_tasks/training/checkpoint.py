"""Save and restore the state of a run atomically, complete enough to continue it as if it had not stopped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ekiben_tasks.distributed.context import DistributedContext
from ekiben_tasks.distributed.strategy import ParallelStrategy
from ekiben_tasks.models.adapter import save_adapter
from ekiben_tasks.task import files
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.settings import describe
from ekiben_tasks.training.settings import Settings

KEEP = 2
# Checkpoints of earlier releases can be resumed; they have other names, and not all settings.
_FORMER_NAMES = {"last_test_loss": "last_eval_loss", "test_share": "validation_split"}


class Checkpoints:
    """Save and load the checkpoints of one run in ``output``, and the adapter beside them.

    fingerprint: values that have to be equal for a checkpoint to be resumed. base: the name an adapter gives its base
    model. keep: how many checkpoints stay.
    """

    def __init__(
        self, output: Path, fingerprint: dict[str, Any], base: str, world: DistributedContext, *, keep: int = KEEP
    ) -> None:
        self.output, self.fingerprint, self.base, self.world = output, fingerprint, base, world
        self.keep = keep
        self.folder = output / "checkpoints"

    def load(self, restore: Callable[[Path, dict[str, Any]], None]) -> dict[str, Any] | None:
        """Restore the newest checkpoint and return its state, None where there is none.

        restore: called with the checkpoint's folder and its state.

        Raises:
            TaskError: it belongs to another run, or cannot be read.
        """
        # A shared file system shows a new or removed folder to some nodes earlier than to others.
        newest = self.world.broadcast(None if (path := latest(self.folder)) is None else str(path))
        if newest is None:
            return None
        path = Path(newest)
        state = load(path)
        check_fingerprint(path, state["fingerprint"], self.fingerprint)
        restore(path, state)
        return state

    def say_resumed(self, step: int, steps: int) -> None:
        """Print, in the main process, which checkpoint the run resumes from."""
        if self.world.is_main_process:
            print(f"resumed     {latest(self.folder)} (step {step} of {steps})", flush=True)

    def save(self, step: int, state: dict[str, Any], strategy: ParallelStrategy) -> None:
        """Write the checkpoint of this step and, where there is one, the adapter.

        Raises:
            TaskError: it cannot be written; earlier checkpoints stay.
        """
        save(self.folder, step, {**state, "fingerprint": self.fingerprint}, strategy.save, self.world, keep=self.keep)
        self._save_adapter(strategy)

    def load_best(self, step: int, strategy: ParallelStrategy) -> None:
        """Restore the weights of the checkpoint of this step, and write the adapter, where there is one, with them.

        Raises:
            TaskError: it cannot be read, or the adapter cannot be written.
        """
        path = self.folder / f"step-{step:06d}"
        strategy.load(path, load(path))
        self._save_adapter(strategy)

    def _save_adapter(self, strategy: ParallelStrategy) -> None:
        if hasattr(strategy.loss_module.model, "peft_config"):
            weights = strategy.weights()
            if self.world.is_main_process:
                save_adapter(strategy.loss_module.model, self.output / "adapter", weights, self.base)


def check_fingerprint(checkpoint: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Check that a checkpoint is of the run with the ``current`` fingerprint.

    Raises:
        TaskError: a value differs.
    """
    changed = [
        f"{name} was {saved.get(name)!r} and is {value!r}"
        for name, value in current.items()
        if saved.get(name) != value
    ]
    if changed:
        raise TaskError(
            f"{checkpoint.parent}: belongs to another run ({'; '.join(changed)}); give another --output, "
            "or start again in this one with --overwrite"
        )


def advise_restart(rate: float, newest: Path | None) -> str:
    """Return a hint for a value that is not finite. newest: the remaining checkpoint."""
    left = f"{newest} is the newest checkpoint, from before it" if newest else "no checkpoint was saved before it"
    retry = f"start again with --overwrite --set learning_rate={rate / 3:.2g}"
    return f"look at the data for rows of noise, or {retry}; {left}"


def save(
    folder: Path,
    step: int,
    state: dict[str, Any],
    write: Callable[[Path], dict[str, Any]],
    world: DistributedContext,
    *,
    keep: int = KEEP,
) -> Path:
    """Write the checkpoint ``folder/step-NNNNNN``, remove older ones, and return its path.

    It is written under another name, flushed to disk, and renamed. state: plain values, the same in every process.
    write: called in every process with the folder to fill; what it returns in the first one is kept beside ``state``.

    Raises:
        TaskError: it cannot be written; the older ones stay.
    """
    final = folder / f"step-{step:06d}"
    staged = folder / f".staged-{step:06d}"
    try:
        if world.is_main_process:
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)
        world.barrier()
        strategy_state = write(staged)
        if world.is_main_process:
            _write(staged / "state.pt", {**state, **strategy_state})
        world.barrier()
    except OSError as error:
        shutil.rmtree(staged, ignore_errors=True)
        raise TaskError(
            f"{final}: cannot be written ({error}); {_free(folder)}; make room and give the same command again: "
            f"it continues from {_newest(folder)}"
        ) from error
    if world.is_main_process:
        if final.exists():
            shutil.rmtree(final)
        staged.rename(final)
        for old in _all(folder)[:-keep]:
            if old.name == f"step-{state.get('kept_step', 0):06d}":
                continue  # the best one so far
            shutil.rmtree(old, ignore_errors=True)
    world.barrier()
    return final


def save_model(causal: Any, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write the complete model as transformers reads it, atomically. weights: of every parameter, by name.

    Raises:
        TaskError: it cannot be written.
    """
    staged = folder.with_name(f".{folder.name}.staged-{os.getpid()}")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        causal.save_pretrained(str(staged), state_dict=weights)
        files.make_readable(staged)
        files.replace_folder(staged, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staged, ignore_errors=True)
        raise TaskError(
            f"{folder}: cannot be written ({error}); {_free(folder.parent)}; make room and give the same command again:"
            " nothing has to be trained a second time"
        ) from error


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in ``folder``, or None."""
    checkpoints = _all(folder)
    return checkpoints[-1] if checkpoints else None


def load(path: Path) -> dict[str, Any]:
    """Load the state of the checkpoint ``path``. Only tensors and plain values are read, never code.

    Raises:
        TaskError: it cannot be read.
    """
    try:
        state: dict[str, Any] = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    except Exception as error:
        raise TaskError(f"{path}: cannot be read ({error}); remove it, or start again with --overwrite") from error
    defaults = {name: value for name, value, _ in describe(Settings())}  # also of settings that it does not have yet
    state["fingerprint"] = defaults | current_names(state.get("fingerprint", {}))
    return current_names(state)


def current_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return the state or fingerprint of an earlier release under today's names."""
    return {_FORMER_NAMES.get(name, name): value for name, value in values.items()}


def _write(path: Path, state: dict[str, Any]) -> None:
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch's error for a full disk
            raise OSError(str(error.__context__ or error)) from error
        file.flush()
        os.fsync(file.fileno())


def _all(folder: Path) -> list[Path]:
    complete = (path for path in folder.glob("step-*") if (path / "state.pt").is_file())
    return sorted(complete, key=lambda path: int(path.name.removeprefix("step-")))  # by number: names grow at a million


def _newest(folder: Path) -> str:
    newest = latest(folder)
    return f"step {int(newest.name.removeprefix('step-'))}" if newest else "the start"


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB are free there"
    except OSError:
        return "its file system does not answer"
