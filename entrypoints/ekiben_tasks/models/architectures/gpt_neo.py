"""Describe GPT-Neo, in which every other layer attends to a window of tokens."""

from __future__ import annotations

from typing import Any

from ekiben_tasks.models.architecture import Architecture

ARCHITECTURE = Architecture(
    name="GPT-Neo",
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    lora=("q_proj", "v_proj"),
    linear=("q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"),
)


def attention_windows(config: Any) -> list[int | None]:
    """Return ``window_size`` for each local layer and None for each global one."""
    return [config.window_size if kind == "local" else None for kind in config.attention_layers]


def tiny_config(layers: int, width: int) -> dict[str, Any]:
    """Return a tiny GPT-Neo's configuration: 4 heads, 1024 positions, windows of 16 tokens; ``layers`` must be even."""
    return {
        "num_layers": layers,
        "hidden_size": width,
        "num_heads": 4,
        "max_position_embeddings": 1024,
        "window_size": 16,
        "attention_types": [[["global", "local"], layers // 2]],
    }
