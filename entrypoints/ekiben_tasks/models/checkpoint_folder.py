"""Find the shards of a run's checkpoint. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from ekiben_tasks.task.errors import TaskError

SHARDS = "shards"  # of a checkpoint: such a folder
METADATA = ".metadata"


def find_checkpoint(path: Path) -> Path:
    """Return the folder of shards: ``path`` itself, that of a checkpoint, or that of a run's newest checkpoint.

    Raises:
        TaskError: there is none.
    """
    # Sorted by number: from a million steps on, names are longer.
    steps = sorted((path / "checkpoints").glob(f"step-*/{SHARDS}/{METADATA}"), key=lambda file: int(file.parts[-3][5:]))
    for candidate in (path, path / SHARDS, *(file.parent for file in reversed(steps))):
        if (candidate / METADATA).is_file():
            return candidate
    if (path / "model" / "config.json").is_file() or (path / "config.json").is_file():
        raise TaskError(f"{path}: holds a complete model already; there is nothing to merge")
    if (path / "adapter").is_dir() or (path / "adapter_config.json").is_file():
        raise TaskError(f"{path}: holds an adapter; `merge` writes it into its base")
    raise TaskError(f"{path.absolute()}: holds no sharded checkpoint (a folder {SHARDS} with a file {METADATA})")
