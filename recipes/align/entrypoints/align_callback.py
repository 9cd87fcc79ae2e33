"""Write the metrics of a run of TRL's trainers, and stop it at a signal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from ekiben_tasks.distributed.context import DistributedContext, Stop
from ekiben_tasks.distributed.heartbeat import Heartbeat, Phase
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.run_metadata import Metrics

_SHOWN = ("loss", "reward", "rewards/margins", "accuracy", "rewards/accuracies", "kl", "learning_rate")


class RunCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Print and record each log, tell where the process is, and save and stop at a signal.

    first: the step after which the run continues; later lines of an earlier start are removed.
    """

    def __init__(
        self,
        output: Path,
        world: DistributedContext,
        stop: Stop,
        heartbeat: Heartbeat,
        first: int,
    ) -> None:
        self.world, self.stop, self.heartbeat = world, stop, heartbeat
        self.metrics = Metrics(output / "metrics.jsonl", first) if world.is_main_process else None
        if first:
            print_once(f"resumed     after step {first:,}")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell that the next step begins. The first one may take long: its data is prepared."""
        self.heartbeat.beat(Phase.COMPUTE, state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save and stop where any process has received a signal."""
        if not self.world.minimum(int(self.stop.exit_code is None), args.device):
            self.stop.exit_code = self.stop.exit_code or 75
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell that the checkpoint is written."""
        self.heartbeat.beat(Phase.SAVE, state.global_step, long=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Write a line of metrics.jsonl, and print the most important ones."""
        values = {key: value for key, value in (logs or {}).items() if isinstance(value, (int, float))}
        if self.metrics is None or "loss" not in values:
            return
        self.metrics.add([{"step": state.global_step, **values}])
        shown = "  ".join(f"{key} {values[key]:.4g}" for key in _SHOWN if key in values)
        print_once(f"step {state.global_step}/{state.max_steps}  {shown}")
