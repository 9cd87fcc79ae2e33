"""Define the settings of the benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ekiben_tasks.data.schema import DatasetFormat
from ekiben_tasks.task.errors import SettingError
from ekiben_tasks.task.settings import option
from ekiben_tasks.training.settings import Settings as Training

REFERENCE = 0  # the number of the run that sets the target: its seed is the one before the first run's


@dataclass(frozen=True)
class Settings:
    """Define the settings of the benchmark's command `train`; the group ``train`` has those of the training."""

    target_loss: float | Literal["auto"] | None = option(
        "auto",
        "cross-entropy of the test rows to reach; auto: what a reference run has half way through; null: none, runs go "
        "to their end and prove no time",
    )
    runs: int = option(10, "number of runs; MLPerf requires 10 for such a benchmark")
    organisation: str = option("unofficial", "submitter in the log")
    platform: str = option("auto", "platform in the log; auto: the device's name")
    benchmark: str = option("llama2_70b_lora", "MLPerf's benchmark that this one imitates, in the log: open division")
    train: Training = field(default_factory=Training)


# Settings fixed by the benchmark: setting → its value and the reason.
_FIXED = {
    "form": (DatasetFormat(), "preprocess has made tokens of the rows already"),
    "mask_prompt": (True, "preprocess has made targets of the responses alone"),
    "validation_split": (Training().validation_split, "preprocess splits the rows; set its validation_split"),
    "long_examples": (Training().long_examples, "preprocess cuts them at its max_length"),
    "adapter": ("", "a run starts from the base model"),
    "save_minutes": (Training().save_minutes, "a run that is interrupted starts again, so none saves by the clock"),
}


def check_settings(settings: Settings) -> None:
    """Check the settings of the benchmark.

    Raises:
        SettingError: one has a value that no run would use; the message has all problems.
    """
    problems = [
        f"setting train.{name}: {reason}"
        for name, (value, reason) in _FIXED.items()
        if getattr(settings.train, name) != value
    ]
    if not isinstance(settings.train.data, str):
        problems.append("setting train.data: must be the one folder that preprocess wrote")
    if problems:
        raise SettingError("\n".join(problems))
