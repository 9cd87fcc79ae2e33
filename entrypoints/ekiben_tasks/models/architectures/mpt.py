"""Describe MPT."""

from __future__ import annotations

from typing import Any

from ekiben_tasks.models.architecture import Architecture, full_attention

ARCHITECTURE = Architecture(
    name="MPT",
    blocks="transformer.blocks",
    final_norm="transformer.norm_f",
    lora=("Wqkv",),
    linear=("Wqkv", "out_proj", "up_proj", "down_proj"),
)
attention_windows = full_attention


def tiny_config(layers: int, width: int) -> dict[str, Any]:
    """Return a tiny MPT's configuration: 4 heads, 1024 positions; its dropout is 0 by default."""
    return {"n_layers": layers, "d_model": width, "n_heads": 4, "max_seq_len": 1024}
