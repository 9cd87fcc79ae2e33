"""Define the settings of single parallel strategies: a group for each, with the strategy's name. Imports no torch."""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ekiben_tasks.task.settings import option

OptimizerName = Literal["adamw", "adamw_8bit", "adafactor", "muon"]


@dataclass(frozen=True)
class DeepSpeed:
    """Define the settings ``deepspeed``, which ``parallel: deepspeed`` uses."""

    stage: Literal[2, 3] = option(3, "ZeRO stage: 2 shares gradients and optimizer, 3 the weights, too")
    offload: Literal["none", "optimizer", "all"] = option(
        "none", "states offloaded to the host's memory; all: optimizer and weights (stage 3)"
    )
    optimizer: Literal["auto", "torch", "deepspeed"] = option(
        "auto",
        "implementation of AdamW; deepspeed: FusedAdam, or CPUAdam with offload, where the image has them compiled; "
        "auto: that CPUAdam where there is one, else torch's",
    )

    @property
    def adam_op(self) -> str:
        """Return the name of DeepSpeed's op that would be the optimizer."""
        return "fused_adam" if self.offload == "none" else "cpu_adam"

    def takes_adam_op(self) -> bool:
        """Return whether the optimizer is DeepSpeed's own in this image."""
        if self.optimizer == "torch" or (self.optimizer == "auto" and self.offload == "none"):
            return False
        return self.adam_op in compiled_ops()


def compiled_ops() -> frozenset[str]:
    """Return the names of DeepSpeed's ops that are compiled into this image.

    DeepSpeed, which takes seconds, is not imported.
    """
    spec = importlib.util.find_spec("deepspeed")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        file = Path(folder, "git_version_info_installed.py")
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if match := re.search(r"^installed_ops\s*=\s*(\{.*?\})", text, re.MULTILINE | re.DOTALL):
            return frozenset(name for name, is_compiled in ast.literal_eval(match[1]).items() if is_compiled)
    return frozenset()
