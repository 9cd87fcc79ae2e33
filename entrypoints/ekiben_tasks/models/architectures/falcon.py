"""Describe Falcon."""

from __future__ import annotations

from typing import Any

from ekiben_tasks.models.architecture import Architecture, full_attention

ARCHITECTURE = Architecture(
    name="Falcon",
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    lora=("query_key_value",),
    linear=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
)
attention_windows = full_attention


def tiny_config(layers: int, width: int) -> dict[str, Any]:
    """Return a tiny Falcon's configuration: 4 heads, 1024 positions; its dropout is 0 by default."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
    }
