"""List the attention kernels of the setting ``attention``, and those that this image lacks.

Imports no torch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Literal

AttentionKernel = Literal[
    "auto", "sdpa", "flash", "cudnn", "efficient", "math", "varlen", "flash_attn_2", "flash_attn_3", "flash_attn_4"
]
SDPA_KERNELS = ("sdpa", "flash", "cudnn", "efficient", "math")  # of torch's scaled_dot_product_attention
AMPERE_KERNELS = ("flash", "cudnn", "varlen", "flash_attn_2", "flash_attn_3")  # on a GPU: for Ampere and later
FLASH_ATTN_KERNELS = ("flash_attn_2", "flash_attn_4")  # of the packages' own functions
# Packages, not modules: both contain flash_attn, and a search for flash_attn.cute imports its parents.
_PACKAGES = {"flash_attn_2": "flash-attn", "flash_attn_4": "flash-attn-4"}


def missing_package(kernel: AttentionKernel) -> str | None:
    """Return a hint if the image lacks the package of ``kernel``, else None."""
    if _has_package(kernel):
        return None
    ways = {
        "flash_attn_2": "this image has no flash-attn; build it with --layer flash-attn, or use attention=auto",
        "flash_attn_3": "this image has no flash_attn_interface, which no layer brings yet; use attention=auto",
        "flash_attn_4": "this image has no flash-attn-4; build it with --layer flash-attn-4, or use attention=auto",
    }
    return f"setting attention={kernel}: {ways[kernel]}"


def _has_package(kernel: AttentionKernel) -> bool:
    if kernel == "flash_attn_3":
        return importlib.util.find_spec("flash_attn_interface") is not None
    return kernel not in _PACKAGES or any(importlib.metadata.distributions(name=_PACKAGES[kernel]))
