"""Shrink a model's configuration: few, narrow layers with short windows, of the same classes as the real model's."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers

LIMIT = 8  # tokens of windows, chunks and original contexts: shorter than the proof's rows
VOCABULARY = 128
INNER = 128  # of feed-forwards
POSITIONS = 128  # of learned tables
_DEPTHS = (2, 4, 6, 8, 12, 16, 24)
_LAYERS = re.compile(r"^(num_hidden_layers|num_layers|n_layers?|num_decoder_layers|num_layers_per_stack)$")
_HEADS = re.compile(r"heads$|^n_head$|_heads_per_layer$")
_WIDTHS = re.compile(
    r"^(hidden_size|n_embd|d_model|embedding_size|word_embed_proj_dim|attention_hidden_size|o_lora_rank|dim_model_base)$"
    r"|intermediate|^(n_inner|dff|dim_ff|ffn_dim|d_ff|mamba_d_ssm|dense_ffn_hidden_size|ffn_hidden_size)$"
    r"|^lru_width$|^expert_ffn_hidden_size$|^hc_lowrank$|^ple_embed_dim$"
)
_INNER = re.compile("intermediate|ffn|^(n_inner|dff|dim_ff|d_ff)$")
_WINDOWS = re.compile(
    r"sliding_window(_size)?$|^(attention_)?chunk_size$|^window_size$|mamba_chunk_size|^attention_window_size$"
    r"|^original_max_position_embeddings$|^index_topk$|^floor_scale$|^log_scaling_n_floor$|^n_floor$"
    r"|^keep_window_size$|^rel_extent$|^index_block_size$"
)
_POSITIONS = re.compile(r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length)$")
_EXPERTS = re.compile(r"^(num_local_experts|num_experts|n_routed_experts|moe_num_experts|zero_expert_num)$")
_CHOSEN = re.compile(r"(experts_per_tok(en)?|moe_top_?k|^moe_k|^top_k_experts)$")
_GROUPS = re.compile(r"^(n_groups?|num_expert_group)$")
_CAPS = re.compile(r"(attn_logit_softcap|final_logit_softcap|logits_soft_cap)")
_VOCABULARIES = re.compile(r"^(vocab_size|vocab_size_per_layer_input|unpadded_vocab_size|ngram_vocab_size_base)$")
_RANKS = re.compile(r"^(q_lora_rank|kv_lora_rank|time_step_rank|mamba_dt_rank|gated_norm_rank)$")


def shrink(config: Any, heads: int = 2) -> Any:
    """Return a copy of ``config`` with few, narrow layers and short windows.

    As few layers as have every kind of module that the complete depth has. heads: of keys and values.
    """
    layers = count_layers(config)
    complete = kinds_of_modules(_narrow(config, layers, heads))
    for depth in _DEPTHS:
        if depth >= layers:
            break
        try:
            small = _narrow(config, depth, heads)
            if kinds_of_modules(small) == complete:
                return small
        except Exception:  # a depth that this family cannot have
            continue
    return _narrow(config, layers, heads)


def narrow(config: Any) -> Any:
    """Return a copy of ``config`` with all of its layers, but narrow; windows stay."""
    return _narrow(config, count_layers(config), limits=False)


def count_layers(config: Any) -> int:
    """Return the number of layers that a configuration names, 0 where it names none."""
    known = [value for name, value in vars(config).items() if _LAYERS.match(name) and isinstance(value, int)]
    return int(known[0]) if known else 0


def kinds_of_modules(config: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Return the classes of the modules of a model of ``config``, and the kinds of its layers."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    lists = [kinds for _, kinds in _per_layer(config, count_layers(config))]
    kinds = {str(kind) for kinds in lists if isinstance(kinds[0], str) or set(kinds) <= {0, 1} for kind in kinds}
    return frozenset(type(module).__name__ for module in model.modules()), frozenset(kinds)


def _per_layer(config: Any, layers: int) -> Iterator[tuple[str, list[Any]]]:
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == layers and layers > 0:
            yield name, value


def _narrow(config: Any, depth: int, most: int = 2, *, limits: bool = True) -> Any:
    small = copy.deepcopy(config)
    layers = count_layers(config)
    values = vars(small)
    for name, kinds in list(_per_layer(config, layers)):
        values[name] = kinds[:depth]
    heads = _first(config, "num_attention_heads", "n_head", "num_heads", "n_heads") or 1
    kept = _first(config, "num_key_value_heads", "num_kv_heads") or heads
    fewer = min(kept, most) * min(max(heads // kept, 1), 2)
    share = fewer / heads if heads > 1 else 64 / (_first(config, "hidden_size", "d_model") or 64)
    for name, value in list(values.items()):
        if name.startswith("_") and not name.startswith("_sliding"):
            continue
        if isinstance(value, transformers.PreTrainedConfig):
            values[name] = _narrow(value, min(depth, count_layers(value)), most, limits=limits)
        else:
            values[name] = _shrink_value(name, value, depth, share, limits=limits)
    for name in ("num_key_value_heads", "num_kv_heads"):
        if isinstance(values.get(name), int):
            values[name] = min(kept, most)
    if values.get("moe_layers") is not None:
        values["moe_layers"] = [index for index in values["moe_layers"] if index < depth]
    if isinstance(values.get("num_kv_shared_layers"), int):
        values["num_kv_shared_layers"] = min(values["num_kv_shared_layers"], depth // 2)
    return small


def _shrink_value(name: str, value: Any, depth: int, share: float, *, limits: bool) -> Any:
    """Return the small value of one key."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, dict):
        return {key: _shrink_value(str(key), inner, depth, share, limits=limits) for key, inner in value.items()}
    if isinstance(value, list) and value and (_HEADS.search(name) or _WIDTHS.search(name)):
        return [_shrink_value(name, inner, depth, share, limits=limits) for inner in value]
    if isinstance(value, float) and limits and _CAPS.search(name):
        return 2.0
    if not isinstance(value, int) or value <= 0:
        return value
    if _LAYERS.match(name):
        return depth
    if _HEADS.search(name):
        return max(1, round(value * share))
    if _WIDTHS.search(name):
        exact = float(value * share)
        if _INNER.search(name):
            exact = min(exact, float(INNER))
        is_aligned = exact % 8 == 0 and exact >= 16  # 16 bytes in bf16, as grouped products on a GPU need
        return int(exact) if is_aligned else max(16, 16 * math.ceil(exact / 16))
    for pattern, most in (
        (_EXPERTS, 8),
        (_CHOSEN, 2),
        (_GROUPS, 2),
        (_VOCABULARIES, VOCABULARY),
        (_RANKS, 32),
    ):
        if pattern.search(name):
            return min(value, most)
    if name == "topk_group":
        return 1
    if name == "pad_token_id":
        return min(value, VOCABULARY - 1)
    if limits and _WINDOWS.search(name):
        return min(value, LIMIT)
    if _POSITIONS.match(name):
        return min(value, POSITIONS) if limits else value
    return value


def _first(config: Any, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
