"""Define the settings of the benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

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
    runs: int = option(10, "how many; MLPerf asks for 10 of a benchmark like this")
    organisation: str = option("unofficial", "who runs it, in the log")
    platform: str = option("auto", "what it runs on, in the log; auto: the device's name")
    benchmark: str = option("llama2_70b_lora", "MLPerf's benchmark that this one imitates, in the log: open division")
    train: Training = field(default_factory=Training)
