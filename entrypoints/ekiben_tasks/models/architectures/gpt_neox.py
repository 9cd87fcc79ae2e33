"""Describe GPT-NeoX."""

from __future__ import annotations

from typing import Any

from ekiben_tasks.models.architecture import Architecture, full_attention

ARCHITECTURE = Architecture(
    name="GPT-NeoX",
    blocks="gpt_neox.layers",
    final_norm="gpt_neox.final_layer_norm",
    lora=("query_key_value",),
    linear=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
)
attention_windows = full_attention


def tiny_config(layers: int, width: int) -> dict[str, Any]:
    """Return a tiny GPT-NeoX's configuration: 4 heads, 1024 positions, rotary over complete heads, no dropout."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": 4,
        "intermediate_size": 4 * width,
        "max_position_embeddings": 1024,
        "hidden_act": "gelu",
        "rotary_pct": 1.0,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
