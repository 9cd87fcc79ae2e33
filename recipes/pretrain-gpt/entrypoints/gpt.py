"""Build GPT-2's architecture on Megatron-Core. Tensor and pipeline parallelism do not change its first weights."""

from __future__ import annotations

import hashlib
import math
import re
import types
from contextlib import nullcontext
from dataclasses import dataclass
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

from ekiben_tasks.models import loss as losses
from model_configs import Shape

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


class FlashAttention(MegatronModule):  # type: ignore[misc]
    """Compute causal attention by torch's flash kernel.

    It replaces Megatron's products and softmax, which need Transformer Engine to be fast.
    """

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config=config)
        self.dropout = config.attention_dropout

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any) -> Any:
        """Return ``[tokens, rows, heads * size]``. query, key, value: ``[tokens, rows, heads, size]``."""
        tokens, rows = query.shape[:2]
        query, key, value = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        # Each process has other heads, so each needs its own random numbers for dropout.
        apart = get_cuda_rng_tracker().fork() if dropout and not self.config.sequence_parallel else nullcontext()
        with apart:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        return mixed.permute(2, 0, 1, 3).reshape(tokens, rows, -1)


class Norm(torch.nn.LayerNorm):  # type: ignore[misc]
    """Replace Megatron's wrapper of torch's LayerNorm, which refuses sequence_parallel.

    A norm works token by token: it is enough to sum its weights' gradients over the processes that have other tokens.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for weight in self.parameters():
            weight.sequence_parallel = config.sequence_parallel


class Model(GPTModel):  # type: ignore[misc]
    """Compute the loss in chunks where one process has the complete embedding table.

    Otherwise the logits of tens of thousands of tokens would be written to memory and read again several times.
    """

    chunk_loss: losses.ChunkLoss = staticmethod(losses.softmax_loss)

    def _postprocess(self, hidden_states: Any, labels: Any = None, **named: Any) -> Any:
        """hidden_states: [tokens, rows, width], labels: [rows, tokens] → their losses summed, or one by one, or what
        the next stage gets."""
        if not self.post_process or labels is None or self.config.tensor_model_parallel_size > 1:
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **named)
        table, targets = self.shared_embedding_or_output_weight(), labels.t().flatten()
        return losses.head_loss(hidden_states.flatten(0, 1), table, targets, self.chunk_loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Hold the options for computing a model.

    tensor, pipeline: sizes of the parallel groups. recompute: compute every layer's activations again in the backward
    pass. init_std: standard deviation of the first weights.
    """

    dtype: torch.dtype
    dropout: float = 0.0
    tensor: int = 1
    pipeline: int = 1
    sequence_parallel: bool = False
    recompute: bool = False
    on_gpu: bool = False
    init_std: float = 0.02


def configure(shape: Shape, options: ModelOptions) -> TransformerConfig:
    """Return Megatron's configuration of a model of this ``shape``."""
    dtype = options.dtype
    recomputing: dict[str, Any] = {}
    if options.recompute:
        recomputing = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        activation_func=F.gelu if options.on_gpu else _gelu,
        bias_activation_fusion=options.on_gpu,
        bias_dropout_fusion=options.on_gpu,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        # Its gradients are bf16 for any dtype of the model.
        cross_entropy_loss_fusion=options.on_gpu and dtype == torch.bfloat16,
        cross_entropy_fusion_impl="native",
        hidden_dropout=options.dropout,
        attention_dropout=options.dropout,
        layernorm_epsilon=1e-5,
        init_method_std=options.init_std,
        tensor_model_parallel_size=options.tensor,
        pipeline_model_parallel_size=options.pipeline,
        sequence_parallel=options.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        calculate_per_token_loss=True,
        **recomputing,
    )


def build(shape: Shape, config: TransformerConfig, *, seed: int) -> Any:
    """Return this process's part of the model on its device, with its first weights; compiled on a GPU."""
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = FlashAttention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    blocks = TransformerBlockSubmodules([spec] * get_num_layers_to_build(config), layer_norm=Norm)
    model = Model(
        config,
        blocks,
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
        parallel_output=True,
    )
    device = torch.device(torch.cuda.current_device())  # where without_gpu pretends, the CPU
    model.to(device)
    if device.type == "cuda":
        compile_layers(model)
    fill_weights(model, config, seed)
    return model


def compile_layers(model: Any, backend: Any = "inductor") -> None:
    """Compile the loss and, in place, each layer: equal layers share one compilation.

    Layers that communicate, draw random numbers or are computed twice stay uncompiled: a graph cannot hold that.
    """
    model.chunk_loss = losses.compile_loss(backend)
    config = model.config
    if config.tensor_model_parallel_size > 1 or config.hidden_dropout or config.recompute_granularity:
        return
    # It warns of a group that Megatron itself leaves out, and a warning breaks a layer's graph in pieces.
    megatron.core.utils.warnings = types.SimpleNamespace(warn=lambda *_, **__: None)
    for layer in model.decoder.layers:
        layer.compile(dynamic=False, backend=backend)


def fill_weights(model: Any, config: TransformerConfig, seed: int) -> None:
    """Fill every weight from a random generator of its own name: the same model on one GPU and on many.

    Numbers are normal with standard deviation ``init_method_std``, divided by sqrt(2 * layers) where a block adds to
    the residual stream (Radford et al. 2019, Language Models are Unsupervised Multitask Learners, section 2.3). Biases
    are 0, norms 1.
    """
    narrow = config.init_method_std / math.sqrt(2 * config.num_layers)
    rank, size = parallel_state.get_tensor_model_parallel_rank(), config.tensor_model_parallel_size
    for name, weight in model.named_parameters():
        name = _LAYER.sub(lambda match: f"layers.{_number(model, int(match[1]))}.", name)
        if name.endswith("bias"):
            torch.nn.init.zeros_(weight)
        elif "layernorm" in name:
            torch.nn.init.ones_(weight)
        else:
            if name == "output_layer.weight":  # the last stage's copy of the table
                name = "embedding.word_embeddings.weight"
            std = narrow if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else config.init_method_std
            split = getattr(weight, "partition_dim", -1) if getattr(weight, "tensor_model_parallel", False) else -1
            full_size = [length * (size if axis == split else 1) for axis, length in enumerate(weight.shape)]
            generator = torch.Generator().manual_seed(_seed_of(name, seed))
            numbers = torch.empty(full_size).normal_(std=std, generator=generator)
            with torch.no_grad():
                weight.copy_(numbers if split < 0 else numbers.chunk(size, dim=split)[rank])


def _number(model: Any, local: int) -> int:
    """The layer's number in the whole model: pipeline stages count their own from 0."""
    return int(model.decoder.layers[local].layer_number) - 1


def _seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")


def _gelu(x: Any) -> Any:
    """Compute it as Megatron's fused kernel, which runs on a GPU."""
    return F.gelu(x, approximate="tanh")
