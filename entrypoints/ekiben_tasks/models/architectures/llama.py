"""Describe Llama."""

from __future__ import annotations

from typing import Any

from ekiben_tasks.models.architecture import Architecture, full_attention

ARCHITECTURE = Architecture(
    name="Llama",
    blocks="model.layers",
    final_norm="model.norm",
    lora=("q_proj", "v_proj"),
    linear=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    kept=((9, 3, 0), (13, 4, 0)),
    kept_compiled=((7, 2, 0), (9, 3, 0)),
)
attention_windows = full_attention


def tiny_config(layers: int, width: int) -> dict[str, Any]:
    """Return a tiny Llama's configuration: 4 heads, 2 of keys and values, 1024 positions; it has no dropout."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 2 * width,
        "max_position_embeddings": 1024,
    }
