"""Name the kernels of attention that the setting ``attention`` takes, and say which of them this image lacks. Imports no torch."""

from __future__ import annotations

import importlib.util
from typing import Literal

AttentionKernel = Literal[
    "auto", "sdpa", "flash", "cudnn", "efficient", "math", "varlen", "flash_attn_2", "flash_attn_3"
]
SDPA_KERNELS = ("sdpa", "flash", "cudnn", "efficient", "math")  # of torch's scaled_dot_product_attention
AMPERE_KERNELS = ("flash", "cudnn", "varlen", "flash_attn_2", "flash_attn_3")  # on a GPU: for Ampere and later
_MODULES = {"flash_attn_2": "flash_attn", "flash_attn_3": "flash_attn_interface"}


def missing_package(kernel: AttentionKernel) -> str | None:
    """Return what to do in an image without the package of ``kernel``, None in one that has it."""
    module = _MODULES.get(kernel)
    if module is None or importlib.util.find_spec(module) is not None:
        return None
    ways = {
        "flash_attn_2": "this image has no flash-attn; build it with --layer flash-attn, or take attention=auto",
        "flash_attn_3": "this image has no flash_attn_interface, which no layer brings yet; take attention=auto",
    }
    return f"setting attention={kernel}: {ways[kernel]}"
