"""Define the settings of a LoRA adapter."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from ekiben_tasks.task.settings import option


@dataclass(frozen=True)
class Lora:
    """Define the settings ``lora`` (Hu et al. 2021, arXiv:2106.09685)."""

    r: int = option(4, "rank of the two matrices added to each target")
    alpha: int = option(16, "their product is scaled by alpha / r")
    dropout: float = option(0.05, "dropout probability of the adapter's inputs")
    target_modules: Literal["auto", "all-linear"] | tuple[str, ...] = option(
        "auto",
        "names of the layers that get an adapter; auto: the attention's, by architecture; all-linear: all but the head",
    )
    use_rslora: bool = option(False, "scale by alpha / sqrt(r) instead (arXiv:2312.03732)")
    use_dora: bool = option(False, "also train the magnitude of each output's weights (DoRA, arXiv:2402.09353)")
    rank_pattern: object = option(None, "ranks of single layers, {name: r}; a name may be a regular expression")
    alpha_pattern: object = option(None, "alphas of single layers, {name: alpha}, as rank_pattern")
    modules_to_save: tuple[str, ...] = option(
        (), "names of modules that are trained in full and saved with the adapter"
    )
    trainable_token_indices: tuple[int, ...] = option((), "ids of tokens whose embeddings are trained, too")


def check_lora(lora: Lora) -> list[str]:
    """Return what is wrong with the settings."""
    problems = [] if lora.r >= 1 else [f"setting lora.r: must be at least 1, not {lora.r}"]
    if not 0 <= lora.dropout < 1:
        problems.append(f"setting lora.dropout: must be at least 0 and below 1, not {lora.dropout}")
    for name, pattern in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        items = pattern.items() if isinstance(pattern, dict) else [] if pattern is None else [("", 0)]
        if not all(_is_pattern(key) and type(value) is int and value > 0 for key, value in items):
            problems.append(
                f"setting lora.{name}: must be names with whole numbers above 0, as {{q_proj: 8}}, not {pattern}"
            )
    if any(index < 0 for index in lora.trainable_token_indices):
        problems.append("setting lora.trainable_token_indices: must be numbers of tokens, from 0")
    return problems


def _is_pattern(key: Any) -> bool:
    try:
        return bool(isinstance(key, str) and re.compile(key))
    except re.error:
        return False
