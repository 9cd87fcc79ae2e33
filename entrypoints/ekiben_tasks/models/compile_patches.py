"""Patch blocks before torch compiles them: the same results with fewer passes over the GPU's memory.

Beside its GEMMs a block's time is memory traffic. Four things make the compiler read or write a tensor more than once:
reductions over more than 1024 elements, read for the sum and again for its use; fused queries, keys and values that are
split, rotated one by one and concatenated again; an adapter's scaling, which copies the widest gradient there is; and
GELU's error function, which is slower than the memory.
"""

from __future__ import annotations

from typing import Any

import peft
import torch
import torch.nn.functional as F
from torch._inductor.choices import InductorChoices
from transformers.activations import GELUActivation
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention

from ekiben_tasks.models import attention

MAX_PERSISTENT_ROW = 8192  # elements that fit into the registers of a reduction


def prepare(model: Any, body: Any) -> None:
    """Patch ``model``, with or without an adapter, in place. Evaluation uses the patched model, too.

    body: the model without its head. Modules get another class, not another forward: blocks that differ in an attribute
    are compiled one by one.
    """
    # Dropout by torch's own kernel: the same mask as uncompiled, and faster than drawn in the middle of a norm's
    # reduction.
    torch._inductor.config.fallback_random = True
    # Left dynamic, the adapters' scaling of 1 costs a multiplication of its own.
    torch._dynamo.config.specialize_float = True
    if hasattr(torch._inductor.config, "inductor_choices_class"):  # torch 2.6 has no such setting
        torch._inductor.config.inductor_choices_class = _Choices
    rotary = getattr(body, "rotary_emb", None)
    if rotary is not None:
        rotary.register_forward_hook(_fix_width)
    if isinstance(model, peft.PeftModel):
        # The first block shares the compiled code only if its input requires a gradient like the others' inputs.
        body.get_input_embeddings().register_forward_hook(_want_gradient)
    for module in list(model.modules()):
        if isinstance(module, peft.tuners.lora.LoraLayer):
            _align_adapter(module)
        elif type(module) is GPTNeoXAttention and body.config._attn_implementation == attention.ATTENTION:
            module.__class__ = FusedRopeAttention
        elif type(module) is GELUActivation or (type(module) is torch.nn.GELU and module.approximate == "none"):
            module.__class__ = _ExactGelu


class _Choices(InductorChoices):  # type: ignore[misc]  # torch has no types here
    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        """Also for rows as long as the hidden size: kept in registers they are read once.

        Inductor's own bound is 1024.
        """
        rows = features.get_reduction_hint() == torch._inductor.runtime.hints.ReductionHint.INNER
        if rows and torch._inductor.virtualized.V.graph.sizevars.statically_known_leq(
            features.reduction_numel, MAX_PERSISTENT_ROW
        ):
            return True
        return bool(InductorChoices.should_use_persistent_reduction(features, cooperative_reduction))


def _align_adapter(layer: Any) -> None:
    """Pad an adapter's rank to a multiple of 8, since GPUs have fast GEMMs only for rows of a multiple of 16 bytes.

    Its scaling, alpha / rank, is multiplied where the tensor is narrow.
    """
    for name, lora_a in layer.lora_A.items():
        lora_b = layer.lora_B[name]
        if type(lora_a) is type(lora_b) is torch.nn.Linear and not layer.lora_variant:
            lora_a.__class__, lora_b.__class__ = PaddedLoraA, PaddedLoraB
            lora_a.factor, layer.scaling[name] = layer.scaling[name], 1.0


class PaddedLoraA(torch.nn.Linear):  # type: ignore[misc]
    """Compute lora_A with its output padded with zeros to a multiple of 8, times the adapter's scaling ``factor``."""

    factor: float

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``[..., rank rounded up to a multiple of 8]`` for ``rows`` of ``[..., in_features]``."""
        return F.linear(rows, F.pad(self.weight, (0, 0, 0, -self.out_features % 8))) * self.factor


class PaddedLoraB(torch.nn.Linear):  # type: ignore[misc]
    """Compute lora_B of an input that PaddedLoraA has padded."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out_features]`` for ``rows`` of ``[..., rank rounded up to a multiple of 8]``."""
        return F.linear(rows, F.pad(self.weight, (0, -self.in_features % 8)), self.bias)


class FusedRopeAttention(GPTNeoXAttention):  # type: ignore[misc]
    """Add the adapter's output to queries, keys and values, and split and rotate them, in one kernel."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: None, *, position_embeddings: Any, **rest: Any
    ) -> tuple[torch.Tensor, None]:
        """Return (output ``[1, tokens, width]``, None) for ``hidden_states`` of the same shape.

        position_embeddings: cos and sin, each ``[1, tokens, size]``. transformers' own forward is used off the GPU, and
        where only a part of each head is rotated.
        """
        cos, sin = position_embeddings
        if not hidden_states.is_cuda or cos.shape[-1] != self.head_size:
            plain: tuple[torch.Tensor, None] = super().forward(
                hidden_states, attention_mask, position_embeddings=position_embeddings, **rest
            )
            return plain
        from ekiben_tasks.models.fused_rope import apply_rotary_pos_emb

        base, change = _parts(self.query_key_value, hidden_states)
        query, key, value = apply_rotary_pos_emb(base, change, cos, sin)
        mixed, _ = attention.attend(self, query, key, value, None, scaling=self.scaling, **rest)
        return self.dense(mixed.reshape(hidden_states.shape)), None


def _parts(layer: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a layer's output, and the contribution of its padded adapter."""
    if type(layer) is not peft.tuners.lora.Linear or layer.lora_variant:
        return layer(rows), None
    (name,) = layer.active_adapters
    return layer.base_layer(rows), layer.lora_B[name](layer.lora_A[name](layer.lora_dropout[name](rows)))


class _ExactGelu(torch.nn.Module):  # type: ignore[misc]
    """GELU within 5e-7, by a series that shares its one exponential with the gradient."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(_Gelu.apply(rows))


class _Gelu(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        wide = rows.float()
        # Copied: with torch 2.11, a traced no-op cast gives wrong gradients.
        return (wide * _normal(wide)[0]).to(rows.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        wide = ctx.saved_tensors[0].float()
        below, density = _normal(wide)
        return (grads[0].float() * (below + wide * density)).to(grads[0].dtype, copy=True)


def _normal(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normal distribution's (cumulative probability, density), within 7.5e-8: Abramowitz and Stegun,
    26.2.17.
    """
    density = torch.exp(-0.5 * x * x) * 0.3989422804  # 1 / sqrt(2 pi)
    t = 1 / (1 + 0.2316419 * x.abs())
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    tail = density * series
    return torch.where(x < 0, tail, 1 - tail), density


def _want_gradient(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_(True)


def _fix_width(_module: Any, _inputs: Any, angles: tuple[torch.Tensor, ...]) -> None:
    """Mark the head size as static.

    GPT-NeoX slices queries by it, and kernels would divide by a size they do not know.
    """
    for angle in angles:
        torch._dynamo.mark_static(angle, angle.ndim - 1)
