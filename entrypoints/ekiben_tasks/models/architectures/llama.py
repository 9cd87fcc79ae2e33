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
