"""The shapes of the models: a ladder of sizes, and the same model as Hugging Face's libraries describe it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# layers, width, heads, highest learning rate: Brown et al. 2020 (arXiv:2005.14165), table 2.1; heads of 1.3B as table
# 2.1's width divided by 128.
LADDER = {
    "0.125B": (12, 768, 12, 6.0e-4),
    "0.35B": (24, 1024, 16, 3.0e-4),
    "0.76B": (24, 1536, 16, 2.5e-4),
    "1.3B": (24, 2048, 16, 2.0e-4),
    "2.7B": (32, 2560, 32, 1.6e-4),
    "6.7B": (32, 4096, 32, 1.2e-4),
    "13B": (40, 5120, 40, 1.0e-4),
}
# Tables of whole tiles are faster to multiply, and divide among any usual number of GPUs; the same whatever that
# number, so that losses are.
_TABLE_ROWS = 128


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    width: int
    heads: int
    positions: int
    vocabulary: int  # rows of the table, padded

    @property
    def parameters(self) -> int:
        """Of the whole model; head and table are one."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + 2 * self.width + (self.vocabulary + self.positions) * self.width


def pad_vocabulary(size: int) -> int:
    return -(-size // _TABLE_ROWS) * _TABLE_ROWS


def hugging_face_config(shape: Shape, *, end: int, begin: int, dropout: float = 0.0) -> Any:
    """GPT-2 as transformers has it: learned positions, pre-norm, GELU by tanh, head and table tied."""
    import transformers

    return transformers.GPT2Config(
        vocab_size=shape.vocabulary, n_positions=shape.positions, n_embd=shape.width, n_layer=shape.layers,
        n_head=shape.heads, activation_function="gelu_new", resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        layer_norm_epsilon=1e-5, bos_token_id=begin, eos_token_id=end, tie_word_embeddings=True,
    )  # fmt: skip


def training_flops(shape: Shape, sequences: float) -> float:
    """FLOPs of training on ``sequences`` of full length, counted on the transformers model of the same shape."""
    import torch
    import transformers

    import flops

    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(hugging_face_config(shape, end=0, begin=0))
    costs = flops.training_costs(model)
    return sequences * costs.of_rows([shape.positions], shape.positions)
