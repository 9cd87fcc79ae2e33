"""What blocks are changed into before torch compiles them: the same numbers, fewer trips to the GPU's memory.

Beside its large products, which run as fast as the GPU can, a block's time is what its tensors take to read and write. Four
things keep the compiler from doing that once each: sums over more than 1024 numbers, which it reads once for the sum and
again for its use; queries, keys and values that leave one tensor, are turned one by one and go back into one; an adapter's
factor, which makes a second copy of the widest gradient there is; and GELU's error function, which takes longer than the memory.
"""

from __future__ import annotations

from typing import Any

import peft
import torch
import torch.nn.functional as F
from torch._inductor.choices import InductorChoices
from transformers.activations import GELUActivation
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention

import packing

WHOLE_ROW = 8192  # numbers that fit the registers of the threads that add them up


def prepare(model: Any, body: Any) -> None:
    """Change ``model``, with or without an adapter, in place; ``body``: its part without the head. Evaluation uses it, too.

    Modules get another class, not another forward: blocks that differ in an object of their own are compiled one by one.
    """
    # Dropout by torch's own kernel: the same numbers as uncompiled, and faster than drawn in the middle of a norm's sums.
    torch._inductor.config.fallback_random = True
    # Left open, the adapters' factor of 1 is a product of its own.
    torch._dynamo.config.specialize_float = True
    if hasattr(torch._inductor.config, "inductor_choices_class"):  # torch 2.6 has no such setting
        torch._inductor.config.inductor_choices_class = _Choices
    rotary = getattr(body, "rotary_emb", None)
    if rotary is not None:
        rotary.register_forward_hook(_fix_width)
    if isinstance(model, peft.PeftModel):
        # The first block is one more of the same only where its input wants a gradient as the others' inputs do.
        body.get_input_embeddings().register_forward_hook(_want_gradient)
    for part in list(model.modules()):
        if isinstance(part, peft.tuners.lora.LoraLayer):
            _align_adapter(part)
        elif type(part) is GPTNeoXAttention and body.config._attn_implementation == packing.ATTENTION:
            part.__class__ = _TurnedTogether
        elif type(part) is GELUActivation or (type(part) is torch.nn.GELU and part.approximate == "none"):
            part.__class__ = _ExactGelu


class _Choices(InductorChoices):  # type: ignore[misc]  # torch has no types here
    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        """Also for rows as long as a model is wide: kept in registers they are read once. Inductor's own bound is 1024."""
        rows = features.get_reduction_hint() == torch._inductor.runtime.hints.ReductionHint.INNER
        if rows and torch._inductor.virtualized.V.graph.sizevars.statically_known_leq(
            features.reduction_numel, WHOLE_ROW
        ):
            return True
        return bool(InductorChoices.should_use_persistent_reduction(features, cooperative_reduction))


def _align_adapter(layer: Any) -> None:
    """Let an adapter of an odd rank multiply with zeros beside it: GPUs have fast kernels only for rows of whole 16 bytes.

    And let its factor, alpha / rank, be multiplied where it is narrow.
    """
    for name, narrowing in layer.lora_A.items():
        widening = layer.lora_B[name]
        if type(narrowing) is type(widening) is torch.nn.Linear:
            narrowing.__class__, widening.__class__ = _Narrowing, _Widening
            narrowing.factor, layer.scaling[name] = layer.scaling[name], 1.0


class _Narrowing(torch.nn.Linear):  # type: ignore[misc]
    """To an adapter's rank, and zeros up to a multiple of 8."""

    factor: float

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, F.pad(self.weight, (0, 0, 0, -self.out_features % 8))) * self.factor


class _Widening(torch.nn.Linear):  # type: ignore[misc]
    """From there."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, F.pad(self.weight, (0, -self.in_features % 8)), self.bias)


class _TurnedTogether(GPTNeoXAttention):  # type: ignore[misc]
    """An adapter's share is added to queries, keys and values, they are turned and parted, all in one kernel."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: None, *, position_embeddings: Any, **rest: Any
    ) -> tuple[torch.Tensor, None]:
        cos, sin = position_embeddings
        if not hidden_states.is_cuda or cos.shape[-1] != self.head_size:
            plain: tuple[torch.Tensor, None] = super().forward(
                hidden_states, attention_mask, position_embeddings=position_embeddings, **rest
            )
            return plain
        from turning import turn

        base, change = _parts(self.query_key_value, hidden_states)
        query, key, value = turn(base, change, cos, sin)
        mixed, _ = packing.attend(self, query, key, value, None, scaling=self.scaling, **rest)
        return self.dense(mixed.reshape(hidden_states.shape)), None


def _parts(layer: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a product says, and what its adapter, once aligned, adds to that."""
    if type(layer) is not peft.tuners.lora.Linear:
        return layer(rows), None
    (name,) = layer.active_adapters
    return layer.base_layer(rows), layer.lora_B[name](layer.lora_A[name](layer.lora_dropout[name](rows)))


class _ExactGelu(torch.nn.Module):  # type: ignore[misc]
    """GELU within 5e-7, by a series that shares its one exponential with the slope."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(_Gelu.apply(rows))


class _Gelu(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        wide = rows.float()
        # Copied: traced by torch 2.11, a cast to what it is already gives wrong gradients.
        return (wide * _normal(wide)[0]).to(rows.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> torch.Tensor:
        wide = ctx.saved_tensors[0].float()
        below, density = _normal(wide)
        return (slopes[0].float() * (below + wide * density)).to(slopes[0].dtype, copy=True)


def _normal(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The normal distribution's (cumulative probability, density), within 7.5e-8: Abramowitz and Stegun, 26.2.17."""
    density = torch.exp(-0.5 * x * x) * 0.3989422804  # 1 / sqrt(2 pi)
    t = 1 / (1 + 0.2316419 * x.abs())
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    tail = density * series
    return torch.where(x < 0, tail, 1 - tail), density


def _want_gradient(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_(True)


def _fix_width(_module: Any, _inputs: Any, angles: tuple[torch.Tensor, ...]) -> None:
    """Only the number of tokens varies. Where nothing says so (GPT-NeoX cuts queries at the width of these), the kernels would
    divide by a width that they do not know."""
    for part in angles:
        torch._dynamo.mark_static(part, part.ndim - 1)
