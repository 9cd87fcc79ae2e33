"""The model on Megatron-Core: GPT-2's architecture, split by tensor and pipeline parallelism, its weights the same however split."""

from __future__ import annotations

import hashlib
import math
import re
import types
from contextlib import nullcontext
from typing import Any

import megatron.core.utils
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

import loss as losses
from shapes import Shape

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


class FlashAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention by torch's own flash kernel, in the place of Megatron's products and softmax, which need
    Transformer Engine to be fast."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config=config)
        self.dropout = config.attention_dropout

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any) -> Any:
        """query, key, value: [tokens, rows, heads, width of a head] → [tokens, rows, heads * width]."""
        tokens, rows = query.shape[:2]
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        # Each process has other heads, so each drops out with random numbers of its own.
        apart = get_cuda_rng_tracker().fork() if dropout and not self.config.sequence_parallel else nullcontext()
        with apart:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        return mixed.permute(2, 0, 1, 3).reshape(tokens, rows, -1)


class Norm(torch.nn.LayerNorm):  # type: ignore[misc]
    """torch's, in the place of Megatron's wrapper of it, which refuses sequence_parallel: a norm works token by token, and all
    it takes is that the gradients of its weights are summed over the processes that have other tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for weight in self.parameters():
            weight.sequence_parallel = config.sequence_parallel


class Model(GPTModel):  # type: ignore[misc]
    """Megatron's, but where one process has the whole table, the loss is made chunk by chunk beside the products with it:
    whole, the logits of tens of thousands of tokens would be read and written as often as the layers take together."""

    chunk_loss: losses.ChunkLoss = staticmethod(losses.softmax_loss)

    def _postprocess(self, hidden_states: Any, labels: Any = None, **named: Any) -> Any:
        """hidden_states: [tokens, rows, width], labels: [rows, tokens] → their losses summed, or one by one, or what the next
        stage gets."""
        if not self.post_process or labels is None or self.config.tensor_model_parallel_size > 1:
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **named)
        table, targets = self.shared_embedding_or_output_weight(), labels.t().flatten()
        return losses.head_loss(hidden_states.flatten(0, 1), table, targets, self.chunk_loss)


def configure(
    shape: Shape, *, dtype: torch.dtype, dropout: float, tensor: int, pipeline: int, sequence_parallel: bool,
    recompute: bool, on_gpu: bool, init_std: float,
) -> TransformerConfig:  # fmt: skip
    recomputing: dict[str, Any] = {}
    if recompute:
        recomputing = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=shape.layers, hidden_size=shape.width, num_attention_heads=shape.heads,
        activation_func=F.gelu if on_gpu else _gelu, bias_activation_fusion=on_gpu, bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, persist_layer_norm=False,
        # Its gradients are bf16 whatever the model is in.
        cross_entropy_loss_fusion=on_gpu and dtype == torch.bfloat16, cross_entropy_fusion_impl="native",
        hidden_dropout=dropout, attention_dropout=dropout, layernorm_epsilon=1e-5, init_method_std=init_std,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, sequence_parallel=sequence_parallel,
        params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16,
        calculate_per_token_loss=True, **recomputing,
    )  # fmt: skip


def build(shape: Shape, config: TransformerConfig, *, seed: int) -> Any:
    """This process's part of the model, with its weights, on its device."""
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = FlashAttention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    blocks = TransformerBlockSubmodules([spec] * get_num_layers_to_build(config), layer_norm=Norm)
    model = Model(
        config, blocks, vocab_size=shape.vocabulary, max_sequence_length=shape.positions,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True, position_embedding_type="learned_absolute", parallel_output=True,
    )  # fmt: skip
    device = torch.device(torch.cuda.current_device())  # where without_gpu pretends, the CPU
    model.to(device)
    if device.type == "cuda":
        compile_parts(model)
    fill_weights(model, config, seed)
    return model


def compile_parts(model: Any, backend: Any = "inductor") -> None:
    """Compile the loss, and each layer in place: alike layers share one compilation. Not layers that talk to other GPUs, draw
    random numbers or are computed twice: these do what a graph cannot hold."""
    model.chunk_loss = losses.compile_loss(backend)
    config = model.config
    if config.tensor_model_parallel_size > 1 or config.hidden_dropout or config.recompute_granularity:
        return
    # It warns of a group that Megatron itself leaves out, and a warning breaks a layer's graph in pieces.
    megatron.core.utils.warnings = types.SimpleNamespace(warn=lambda *_, **__: None)
    for layer in model.decoder.layers:
        layer.compile(dynamic=False, backend=backend)


def fill_weights(model: Any, config: TransformerConfig, seed: int) -> None:
    """Normal numbers, each weight from a generator of its own name: the same model on one GPU and on many."""
    narrow = config.init_method_std / math.sqrt(2 * config.num_layers)
    rank, size = parallel_state.get_tensor_model_parallel_rank(), config.tensor_model_parallel_size
    for name, weight in model.named_parameters():
        name = _LAYER.sub(lambda found: f"layers.{_number(model, int(found[1]))}.", name)
        if name.endswith("bias"):
            torch.nn.init.zeros_(weight)
        elif "layernorm" in name:
            torch.nn.init.ones_(weight)
        else:
            if name == "output_layer.weight":  # the last stage's copy of the table
                name = "embedding.word_embeddings.weight"
            std = narrow if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else config.init_method_std
            split = getattr(weight, "partition_dim", -1) if getattr(weight, "tensor_model_parallel", False) else -1
            whole = [length * (size if axis == split else 1) for axis, length in enumerate(weight.shape)]
            generator = torch.Generator().manual_seed(_seed_of(name, seed))
            numbers = torch.empty(whole).normal_(std=std, generator=generator)
            with torch.no_grad():
                weight.copy_(numbers if split < 0 else numbers.chunk(size, dim=split)[rank])


def _number(model: Any, local: int) -> int:
    """The layer's number in the whole model: pipeline stages count their own from 0."""
    return int(model.decoder.layers[local].layer_number) - 1


def _seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")


def _gelu(x: Any) -> Any:
    """As Megatron's fused kernel computes it, which is what runs on a GPU."""
    return F.gelu(x, approximate="tanh")
