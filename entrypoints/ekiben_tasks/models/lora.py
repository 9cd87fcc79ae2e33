"""Define the settings of a LoRA adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ekiben_tasks.task.settings import option


@dataclass(frozen=True)
class Lora:
    """Define the settings ``lora`` (Hu et al. 2021, arXiv:2106.09685)."""

    r: int = option(4, "rank of the two small matrices beside each target")
    alpha: int = option(16, "their product is scaled by alpha / r")
    dropout: float = option(0.05, "share of the adapter's inputs left out while learning")
    target_modules: Literal["auto", "all-linear"] | tuple[str, ...] = option(
        "auto",
        "names of the layers that get an adapter; auto: the attention's, by architecture; all-linear: all but the head",
    )
