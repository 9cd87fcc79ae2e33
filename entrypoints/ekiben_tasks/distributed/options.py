"""Define the settings of single parallel strategies: a group for each, with the strategy's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ekiben_tasks.task.settings import option


@dataclass(frozen=True)
class DeepSpeed:
    """Define the settings ``deepspeed``, which ``parallel: deepspeed`` uses."""

    stage: Literal[2, 3] = option(3, "ZeRO stage: 2 shares gradients and optimizer, 3 the weights, too")
    offload: Literal["none", "optimizer", "all"] = option(
        "none", "what is kept in the host's memory; all: optimizer and weights (stage 3)"
    )
