"""Define the sizes of the models, and describe such a model as Hugging Face's libraries do."""

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
# A multiple of 128 rows is faster to multiply, and divisible by any usual number of GPUs. It does not depend on their
# number, so that losses do not, either.
_TABLE_ROWS = 128


@dataclass(frozen=True, slots=True)
class Shape:
    """Hold the sizes of a model: blocks, width of a hidden state, heads, tokens of a sequence, rows of the table."""

    layers: int
    width: int
    heads: int
    positions: int
    vocabulary: int  # rows of the table, padded

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the complete model; head and embedding table are one.

        Each block has 12 * width**2 weights (Kaplan et al. 2020, arXiv:2001.08361, section 2.1), and 13 * width in
        biases and norms.
        """
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + 2 * self.width + (self.vocabulary + self.positions) * self.width


def pad_vocabulary(size: int) -> int:
    """Return ``size`` rounded up to a multiple of 128 rows."""
    return -(-size // _TABLE_ROWS) * _TABLE_ROWS


def hugging_face_config(shape: Shape, *, end: int, begin: int) -> Any:
    """Return GPT-2's configuration in transformers: learned positions, pre-norm, GELU by tanh, tied head.

    end, begin: ids of the tokens that end and begin a text.
    """
    import transformers

    return transformers.GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.positions,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        activation_function="gelu_new",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        layer_norm_epsilon=1e-5,
        bos_token_id=begin,
        eos_token_id=end,
        tie_word_embeddings=True,
    )


def training_flops(shape: Shape, sequences: float) -> float:
    """Return the FLOPs of training on ``sequences`` of full length, counted on the transformers model (flops.py)."""
    import torch
    import transformers

    from ekiben_tasks.models import flops

    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(hugging_face_config(shape, end=0, begin=0))
    costs = flops.training_costs(model)
    return sequences * costs.of_examples([shape.positions], shape.positions)
