"""Layered container images for LLM training. From Python: ``plan``, ``build`` and ``open``, of ``ekiben.api``.

import ekiben

ekiben.build("hello", output="hello.sif")
with ekiben.open("hello.sif") as image:
    print(image.execute(["hello", "--json"]).stdout)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ekiben.api import Image, PlannedLayer, Result, build, open, plan

__version__ = "0.2.0"
__all__ = ["Image", "PlannedLayer", "Result", "__version__", "build", "open", "plan"]


def __getattr__(name: str) -> Any:
    """Import the interface when it is first used: ``import ekiben`` is part of every command's start."""
    if name in __all__:
        from importlib import import_module

        return getattr(import_module("ekiben.api"), name)
    raise AttributeError(f"module 'ekiben' has no attribute '{name}'")
