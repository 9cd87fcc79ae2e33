"""Keep the complete model in every process, and sum the gradients once a step."""

from __future__ import annotations

from typing import Literal

from ekiben_tasks.distributed.replicated import create

__all__ = ["create", "memory_layout", "unavailable"]

SUMMARY = "each with the whole model"
PROCESSES = "several"
NEEDS_PROCESS_GROUP = False
TAKES_QUANTIZED = True
COMPILES = True


def unavailable(options: None) -> None:
    """Return None: every image can run it."""


def memory_layout(options: None) -> tuple[Literal["ddp"], Literal["none"]]:
    """Return the layout ``ddp``, in which every GPU has all weights and optimizer state, without offloading."""
    return "ddp", "none"
