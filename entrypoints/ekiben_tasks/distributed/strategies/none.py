"""Train in one process, on a single GPU or on the CPU."""

from __future__ import annotations

from typing import Literal

from ekiben_tasks.distributed.replicated import create

__all__ = ["create", "memory_layout", "unavailable"]

SUMMARY = ""
PROCESSES = "one"
NEEDS_PROCESS_GROUP = False
TAKES_QUANTIZED = True
COMPILES = True


def unavailable(options: None) -> None:
    """Return None: every image can run it."""


def memory_layout(options: None) -> tuple[Literal["none"], Literal["none"]]:
    """Return the layout ``none``, in which one GPU has everything, without offloading."""
    return "none", "none"
