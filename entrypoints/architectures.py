"""What differs between the decoders a task can meet: the names of their parts, and how their attention is asked for.

Names are those of transformers 5; where a checkpoint's own differ (`embed_out`), it renames them while loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from settings import TaskError


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One ``model_type``. Names of modules are counted from the causal model, LoRA targets are last parts of names."""

    name: str  # as people call it
    blocks: str  # the list of repeated blocks
    final_norm: str
    lora: tuple[str, ...]  # where an adapter goes unless told otherwise
    linear: tuple[str, ...]  # every product with a weight inside a block: the widest an adapter can go
    transposed: bool = False  # Conv1D, [in, out]: PEFT's fan_in_fan_out
    # interface: takes any function registered with transformers, so packed rows need no mask at all.
    # mask: the classes of its own file; packed rows need a mask that is one block per row.
    attention: Literal["interface", "mask"] = "interface"
    implementations: tuple[str, ...] = ("flash_attention_3", "flash_attention_2", "sdpa", "eager")  # best first


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(
        name="GPT-2", blocks="transformer.h", final_norm="transformer.ln_f",
        lora=("c_attn",), linear=("c_attn", "c_proj", "c_fc"), transposed=True,
    ),
    "gpt_neo": Architecture(
        name="GPT-Neo", blocks="transformer.h", final_norm="transformer.ln_f",
        lora=("q_proj", "v_proj"), linear=("q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"),
        attention="mask", implementations=("flash_attention_2", "eager"),
    ),
    "gpt_neox": Architecture(
        name="GPT-NeoX", blocks="gpt_neox.layers", final_norm="gpt_neox.final_layer_norm",
        lora=("query_key_value",), linear=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    ),
    "falcon": Architecture(
        name="Falcon", blocks="transformer.h", final_norm="transformer.ln_f",
        lora=("query_key_value",), linear=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
        attention="mask", implementations=("flash_attention_2", "sdpa", "eager"),
    ),
    "mpt": Architecture(
        name="MPT", blocks="transformer.blocks", final_norm="transformer.norm_f",
        lora=("Wqkv",), linear=("Wqkv", "out_proj", "up_proj", "down_proj"),
        attention="mask", implementations=("eager",),
    ),
    "llama": Architecture(
        name="Llama", blocks="model.layers", final_norm="model.norm",
        lora=("q_proj", "v_proj"),
        linear=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ),
}  # fmt: skip


def find_architecture(config: Any) -> Architecture:
    """The architecture of a model's configuration. Errors: TaskError for one that is not in the table."""
    found = ARCHITECTURES.get(config.model_type)
    if found is None:
        raise TaskError(
            f"model_type {config.model_type!r} is not one whose parts are known here ({', '.join(ARCHITECTURES)}); "
            "for LoRA, name the layers yourself (--set lora.target_modules=[...])"
        )
    return found


def last_layer(config: Any) -> tuple[str, ...]:
    """The modules that a last-layer run trains: the final norm, and the head unless it is the embedding table as well.

    A tied head is the same weights as the first layer: training "the last layer" would then change both ends.
    Errors: TaskError.
    """
    norm = find_architecture(config).final_norm
    return (norm,) if config.tie_word_embeddings else (norm, "lm_head")


def strip_adapter(model: Any) -> Any:
    """The causal model itself. Its adapted layers stay adapted: PEFT puts them in their places."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def list_blocks(model: Any) -> Sequence[Any]:
    """The repeated blocks of a causal model, with or without an adapter. Errors: TaskError."""
    causal = strip_adapter(model)
    blocks: Sequence[Any] = causal.get_submodule(find_architecture(causal.config).blocks)
    return blocks


def plain_attention(config: Any) -> str | None:
    """``attn_implementation`` of transformers' and torch's own; None for an unknown architecture: transformers chooses."""
    known = ARCHITECTURES.get(config.model_type)
    return None if known is None else "sdpa" if "sdpa" in known.implementations else "eager"


def attention_windows(config: Any) -> list[int | None]:
    """Per layer how many tokens back attention looks; None: to the start."""
    if config.model_type == "gpt_neo":
        return [config.window_size if kind == "local" else None for kind in config.attention_layers]
    return [None] * int(config.num_hidden_layers)


def attention_width(config: Any) -> int:
    """Heads times the size of a head: the width of queries, which for grouped heads is not that of keys."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_attention_heads * size)
