"""Write the record of a run of generate beside its output, as training writes run.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from ekiben_tasks.distributed.context import DistributedContext
from ekiben_tasks.models.device import Device
from ekiben_tasks.task import files, run_metadata
from ekiben_tasks.task.adapter_folder import read_base
from ekiben_tasks.task.checksums import ModelChecksum
from ekiben_tasks.task.errors import TaskError


def record_file(output: Path) -> Path:
    """Return the record of an output file: ``answers.jsonl.run.json``."""
    return output.with_name(f"{output.name}.run.json")


class ModelSettings(Protocol):
    """Name the settings that a record reads, of every task that loads a model without training it."""

    @property
    def model(self) -> str:
        """Return the model's hub id or folder."""

    @property
    def adapter(self) -> str:
        """Return the folder of an adapter, or an empty string."""

    @property
    def output(self) -> str:
        """Return the file, or the folder, that the task writes."""

    @property
    def model_checksum(self) -> bool:
        """Return whether the checksums of a local model are recorded."""


class RunRecord:
    """Collect a run's record, from the loading of its model on; the main process writes it.

    began: seconds since the epoch. file: where the record is written; None: beside the settings' output.
    """

    def __init__(
        self,
        settings: ModelSettings,
        device: Device,
        world: DistributedContext,
        began: float,
        file: Path | None = None,
    ) -> None:
        self.settings, self.device, self.world, self.began = settings, device, world, began
        self.file = file or record_file(Path(settings.output))
        adapter = Path(settings.adapter) / "adapter_config.json"
        names = {"model": read_base(adapter) if settings.adapter else settings.model}
        if settings.adapter:
            names["adapter"] = settings.adapter
        starts = world.is_main_process and settings.model_checksum
        self.models = {
            key: (name, run_metadata.start_checksum(name, self.file, key) if starts else ModelChecksum(None))
            for key, name in names.items()
        }
        self.data: dict[str, Any] = {}
        self.counts: dict[str, Any] = {}

    def add_up(self, answers: int, tokens: int, seconds: float, resumed: int) -> None:
        """Add up the counts of all processes, each of which calls this after its last answer.

        resumed: answers that were there before.
        """
        total = torch.tensor([answers, tokens], dtype=torch.int64, device=self.device.torch_device)
        self.world.all_reduce(total)
        answers, tokens = total.tolist()
        self.counts = {
            "answers": resumed + answers,
            "resumed": resumed,
            "tokens": tokens,
            "seconds": round(seconds, 1),
            "tokens_per_s": round(tokens / seconds, 1) if seconds else 0.0,
        }

    def write(self, exit_code: int | None) -> Path:
        """Write the record in the main process, and return its path. exit_code: None for a finished run.

        Raises:
            TaskError: it cannot be written.
        """
        if not self.world.is_main_process:
            return self.file
        finished = exit_code is None
        models = {
            key: run_metadata.model_record(name, checksum, wait=finished)
            for key, (name, checksum) in self.models.items()
        }
        device = {
            "name": self.device.name,
            "count": self.world.size,
            "dtype": str(self.device.dtype).removeprefix("torch."),
        }
        record = run_metadata.run_record(self.settings, exit_code, self.began)
        try:
            files.write_json(self.file, {**record, **models, "data": self.data, "device": device, **self.counts})
        except OSError as error:
            raise TaskError(f"{self.file}: cannot be written: {error.strerror}; the answers are not lost") from None
        return self.file
