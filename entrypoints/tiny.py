"""Tiny random models of every architecture, with a tokenizer learnt on the spot: what proofs and tests run on, offline."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

END = "<|endoftext|>"


def make_model(
    folder: Path,
    texts: Iterable[str],
    kind: str = "gpt_neox",
    *,
    layers: int = 2,
    width: int = 64,
    vocabulary: int = 800,
) -> None:
    """A random model of ``kind`` (a key of architectures.ARCHITECTURES) saved as the hub's are, its tokenizer beside it."""
    tokenizer = learn_tokenizer(texts, vocabulary)
    tokenizer.save_pretrained(folder)
    random_model(kind, len(tokenizer), layers=layers, width=width).save_pretrained(folder)


def learn_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Byte-level BPE: it encodes any text, Japanese too, however small the vocabulary."""
    bytes_ = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = bytes_(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], show_progress=False, initial_alphabet=bytes_.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END)


def random_model(kind: str, vocabulary: int, *, layers: int = 2, width: int = 64, seed: int = 0) -> Any:
    """A causal model of ``kind`` with 4 heads and 1024 positions, without dropout."""
    sizes: dict[str, Any] = {
        "gpt2": {"n_layer": layers, "n_embd": width, "n_head": 4, "n_positions": 1024, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "gpt_neo": {"num_layers": layers, "hidden_size": width, "num_heads": 4, "max_position_embeddings": 1024, "window_size": 16, "attention_types": [[["global", "local"], layers // 2]]},
        "gpt_neox": {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": 4, "intermediate_size": 4 * width, "max_position_embeddings": 1024, "hidden_act": "gelu", "rotary_pct": 1.0, "attention_dropout": 0.0, "hidden_dropout": 0.0},
        "falcon": {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": 4, "max_position_embeddings": 1024},
        "mpt": {"n_layers": layers, "d_model": width, "n_heads": 4, "max_seq_len": 1024},
        "llama": {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 2 * width, "max_position_embeddings": 1024},
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=vocabulary, bos_token_id=0, eos_token_id=0, initializer_range=0.1, **sizes[kind]
    )
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config)
