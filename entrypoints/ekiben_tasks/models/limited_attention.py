"""Compute attention with limits: windows, chunks, soft caps and sinks, packed and exact.

A window lets a token attend to the last W tokens, itself included (Beltagy et al. 2020, arXiv:2004.05150); a chunk to
those of its own C tokens (Llama 4); a soft cap bounds scores by a tanh (Gemma 2, arXiv:2408.00118); a sink is a learned
score per head that takes its share of the softmax and adds nothing (gpt-oss; Xiao et al. 2023, arXiv:2309.17453).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Mask:
    """Hold which earlier tokens one attends to: the last ``window``, those of its ``chunk``, or all."""

    window: int | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        """Return it in words."""
        if self.window is None and self.chunk is None:
            return "causal"
        return f"windows of {self.window:,}" if self.window is not None else f"chunks of {self.chunk:,}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Hold the limits of one call of attention. sinks: ``[heads]``."""

    mask: Mask  # no default: Dynamo cannot follow an instance that a class made
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def bind(self, longest: int) -> bool:
        """Return whether any has an effect on examples of at most ``longest`` tokens; 0: of any length."""
        return (
            self.softcap is not None
            or self.sinks is not None
            or self.window(longest) is not None
            or self._cuts(longest)
        )

    def window(self, longest: int) -> int | None:
        """Return the window, None where it holds ``longest`` tokens."""
        window = self.mask.window
        return None if window is None or 0 < longest <= window else window

    def _cuts(self, longest: int) -> bool:
        return self.mask.chunk is not None and not 0 < longest <= self.mask.chunk


QueryKeyValue = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attend_examples(
    states: QueryKeyValue, lengths: tuple[int, ...], scaling: float | None, limits: Limits
) -> torch.Tensor:
    """Return attention one example after the other, ``[1, tokens, heads, size]``.

    states: ``[1, heads, tokens, size]``.
    """
    if limits.mask.chunk is not None:  # a chunk is an example of its own
        size = limits.mask.chunk
        lengths = tuple(min(size, length - start) for length in lengths for start in range(0, length, size))
    query, key, value = states
    groups = query.size(1) // key.size(1)
    parts = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    outputs = [
        _attend_example(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), scaling, limits)
        for q, k, v in parts
    ]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous()


def _attend_example(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None, limits: Limits
) -> torch.Tensor:
    window = limits.window(q.size(2))
    sees = None
    if window is not None:
        index = torch.arange(q.size(2), device=q.device)
        back = index[:, None] - index
        sees = (back >= 0) & (back < window)
    if limits.softcap is None and limits.sinks is None:
        if sees is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scaling)
    if sees is None:
        sees = torch.ones(q.size(2), q.size(2), dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.transpose(2, 3)) * (q.size(-1) ** -0.5 if scaling is None else scaling)
    if limits.softcap is not None:
        scores = torch.tanh(scores / limits.softcap) * limits.softcap
    scores = scores.float().masked_fill(~sees, -torch.inf)
    if limits.sinks is not None:
        column = limits.sinks.float().view(1, -1, 1, 1).expand(scores.size(0), -1, scores.size(2), 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1].to(v.dtype) @ v
    return scores.softmax(-1).to(v.dtype) @ v


def attend_varlen(
    states: QueryKeyValue, ends: torch.Tensor, longest: int, scaling: float | None, limits: Limits
) -> torch.Tensor:
    """Return attention by torch's flash kernel for mixed lengths, ``[tokens, heads, size]`` as its arguments.

    It has windows; sinks are added here. It has neither chunks nor soft caps.
    """
    window = limits.window(longest)
    span = (-1, 0) if window is None else (window - 1, 0)  # the kernel counts the tokens before the current one
    from torch.nn.attention.varlen import varlen_attn  # which registers the kernel's operators, too

    if limits.sinks is not None:
        mixed: torch.Tensor = _SinkAttention.apply(*states, limits.sinks, (ends, longest, scaling, span))
        return mixed
    return torch.as_tensor(varlen_attn(*states, ends, ends, longest, longest, scale=scaling, window_size=span))


class _SinkAttention(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    """Add sinks to what the flash kernel returns.

    With the logarithm of the sums lse' = log(exp(lse) + exp(sink)) the result is out * exp(lse - lse'), and the
    kernel's own backward, given these two, is exact: it computes probabilities as exp(score - lse'). Left to autograd,
    the kernel would ignore the gradient of lse.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, options: Any
    ) -> torch.Tensor:
        ends, longest, scaling, span = options
        causal = span == (-1, 0)
        out, lse, rng = torch.ops.torch_attn._varlen_attn(
            query, key, value, ends, ends, longest, longest, causal, scaling, list(span)
        )
        total = torch.logaddexp(lse, sinks.float()[:, None])  # [heads, tokens]
        out = out * (lse - total).exp().transpose(0, 1)[..., None].to(out.dtype)
        ctx.save_for_backward(query, key, value, sinks, ends, out, total, rng)
        ctx.options = longest, causal, scaling, list(span)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value, sinks, ends, out, total, rng = ctx.saved_tensors
        longest, causal, scaling, span = ctx.options
        grad = grads[0].contiguous()
        dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(
            grad, query, key, value, out, total, ends, ends, longest, longest, causal, rng, scaling, span
        )
        share = (sinks.float()[:, None] - total).exp()  # probability of the sink in each softmax
        mixed = (grad.float() * out.float()).sum(-1).transpose(0, 1)
        return dq, dk, dv, -(share * mixed).sum(1).to(sinks.dtype), None
