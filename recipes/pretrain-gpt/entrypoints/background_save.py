"""Write checkpoints in the background: training continues as soon as its state is copied to the host's memory."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ekiben_tasks.distributed.context import DistributedContext, check_grace_period
from ekiben_tasks.models.checkpoint_folder import SHARDS
from ekiben_tasks.models.sharded_checkpoint import write_shards
from ekiben_tasks.task import files, input_files
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.training.checkpoint import current_names
from sharded_state import Pieces

KEEP = 2
CHECKPOINTS = "checkpoints"
METADATA_FILE = "about.json"
_METADATA: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "fingerprint": dict,
    "meter": dict,
    "wall": (int, float),
}  # fields of every release, and their types
_STAGED = ".staged-"
_SLAB = 1 << 27  # bytes of pinned memory at a time: CUDA's allocator takes the next power of two


class Saver:
    """Write the checkpoints of one run, one at a time. A checkpoint is complete, or is not there."""

    def __init__(self, folder: Path, world: DistributedContext, device: torch.device) -> None:
        self.folder, self.world, self.on_gpu = folder, world, device.type == "cuda"
        # Not the training group, whose collectives continue meanwhile. And NCCL's would use the GPU.
        self.group = torch.distributed.new_group(backend="gloo") if world.size > 1 else None
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="save")
        self.writing: Future[float] | None = None
        self.step = 0  # step of the current or last save
        self.seconds = 0.0  # seconds of the slowest save until it was on disk
        self.slabs: list[torch.Tensor] = []  # pinned memory, reused by the next save: pinning takes longer than copying

    def save(self, step: int, entries: Mapping[str, Pieces], metadata: Mapping[str, Any]) -> None:
        """Copy ``entries`` of this process, then write them in the background. Waits for the save before.

        Every process calls it, each with its own entries.

        Raises:
            TaskError: this or the save before cannot be written. Complete checkpoints stay.
        """
        self.wait()
        started = time.monotonic()
        final, staged = self.folder / f"step-{step:07d}", self.folder / f"{_STAGED}{step:07d}"
        problem = None
        if self.world.is_main_process and not (final / METADATA_FILE).is_file():
            try:
                for stale in (final, *self.folder.glob(f"{_STAGED}*")):
                    shutil.rmtree(stale, ignore_errors=True)
                staged.mkdir(parents=True)
            except OSError as error:
                problem = self._explain(final, error)
        # A shared file system shows a new folder to some nodes earlier than to others.
        problem, exists = self.world.broadcast((problem, (final / METADATA_FILE).is_file()))
        if problem:
            raise TaskError(problem)
        if exists:
            return
        copied = self._copy(entries)
        self.step = step
        self.writing = self.executor.submit(self._write, staged, final, copied, dict(metadata), started)

    def check(self) -> None:
        """Raise TaskError if the save in the background has failed; never wait."""
        if self.writing is not None and self.writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            TaskError: the save in the background has failed.
        """
        if self.writing is None:
            return
        writing, self.writing = self.writing, None
        final = self.folder / f"step-{self.step:07d}"
        try:
            seconds = writing.result()
        except OSError as error:
            raise TaskError(self._explain(final, error)) from error
        # After a signal, wait for a running save before the last one.
        if self.world.is_main_process and seconds > self.seconds and (note := check_grace_period(2 * seconds)):
            print(note, flush=True)
        self.seconds = max(self.seconds, seconds)

    def _copy(self, entries: Mapping[str, Pieces]) -> dict[str, Pieces]:
        """Return the entries in memory that training does not change."""
        slabs, used, slab = iter(range(1 << 30)), 0, -1
        copied: dict[str, Pieces] = {}
        for name, pieces in entries.items():
            tensors = {}
            for offsets, tensor in pieces.tensors.items():
                left_over = len(self.slabs[slab]) - used if slab >= 0 else 0
                if tensor.numel() > left_over:
                    slab, used = next(slabs), 0
                    self._reserve(slab, tensor.numel())
                tensors[offsets] = self.slabs[slab][used : used + tensor.numel()].view(tensor.size())
                tensors[offsets].copy_(tensor, non_blocking=True)
                used += tensor.numel()
            copied[name] = Pieces(pieces.size(), tensors)
        if self.on_gpu:
            torch.cuda.current_stream().synchronize()
        return copied

    def _reserve(self, index: int, numbers: int) -> None:
        """Return slab ``index`` with space for this number of fp32 values."""
        if index < len(self.slabs) and len(self.slabs[index]) >= numbers:
            return
        slab = torch.empty(max(numbers, _SLAB // 4), pin_memory=self.on_gpu)
        self.slabs[index : index + 1] = [slab]

    def _write(
        self, staged: Path, final: Path, entries: dict[str, Pieces], metadata: dict[str, Any], started: float
    ) -> float:
        """Write the pieces of this process, and in the first one make the checkpoint complete.

        Return the seconds it took.
        """
        write_shards(entries, staged / SHARDS, alone=self.world.size == 1, group=self.group)
        seconds = time.monotonic() - started
        if self.world.is_main_process:
            files.write_json(staged / METADATA_FILE, {**metadata, "save_seconds": round(seconds, 1)})
            for path in (staged / METADATA_FILE, staged / SHARDS, staged):
                _sync(path)
            staged.rename(final)
            _sync(self.folder)
            for old in list_checkpoints(self.folder)[:-KEEP]:
                shutil.rmtree(old, ignore_errors=True)
        return seconds

    def _explain(self, final: Path, error: BaseException) -> str:
        reason = getattr(error, "strerror", None) or error
        checkpoints = list_checkpoints(self.folder)
        left = f"step {int(checkpoints[-1].name.removeprefix('step-'))}" if checkpoints else "the start"
        free = shutil.disk_usage(next(path for path in (self.folder, *self.folder.parents) if path.is_dir())).free
        return (
            f"{final}: cannot be written ({reason}); {free / 2**30:.1f} GiB are free there; make room and give the same"
            f" command again: it continues from {left}"
        )


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in ``folder``, oldest first."""
    complete = (path for path in folder.glob("step-*") if (path / METADATA_FILE).is_file())
    return sorted(complete, key=lambda path: int(path.name.removeprefix("step-")))


def read_metadata(checkpoint: Path) -> dict[str, Any]:
    """Return the metadata of ``checkpoint``, under current names.

    Raises:
        TaskError: the file cannot be read, or lacks what every release wrote.
    """
    file = checkpoint / METADATA_FILE
    advice = f"remove {checkpoint}, and training resumes from the checkpoint before it, or start again with --overwrite"
    metadata = current_names(input_files.read_object(file, advice))
    if damaged := [name for name, kind in _METADATA.items() if not isinstance(metadata.get(name), kind)]:
        raise TaskError(f"{file}: has no valid {', '.join(damaged)}; {advice}")
    return metadata


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
