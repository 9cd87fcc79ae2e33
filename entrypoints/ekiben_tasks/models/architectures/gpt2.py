"""Describe GPT-2."""

from __future__ import annotations

from typing import Any

from ekiben_tasks.models.architecture import Architecture, full_attention

ARCHITECTURE = Architecture(
    name="GPT-2",
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    lora=("c_attn",),
    linear=("c_attn", "c_proj", "c_fc"),
    transposed=True,
)
attention_windows = full_attention


def tiny_config(layers: int, width: int) -> dict[str, Any]:
    """Return a tiny GPT-2's configuration: 4 heads, 1024 positions, no dropout."""
    return {
        "n_layer": layers,
        "n_embd": width,
        "n_head": 4,
        "n_positions": 1024,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
