"""Rotate fused queries and keys, as GPT-NeoX has them, by their positions in one pass over memory.

Compiled from torch's own operations it takes a GPU twice as long: each element's index is computed by divisions, and
the backward pass concatenates three tensors by testing for every element which of them it is from.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


def apply_rotary_pos_emb(
    base: torch.Tensor, change: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split ``base`` + ``change`` and rotate queries and keys (Su et al. 2021, arXiv:2104.09864, equation 34).

    base, change: ``[1, tokens, heads * 3 * size]``; cos, sin: ``[1, tokens, size]``. The first half of a head is
    rotated with the second, in fp32.

    Returns:
        Queries, keys and values in the dtype of ``base``, each ``[1, heads, tokens, size]``.
    """
    query, key, value = _rope_forward(base, base if change is None else change, cos, sin, change is not None)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


@torch.library.custom_op("ekiben::fused_rope", mutates_args=())
def _rope_forward(
    base: torch.Tensor, change: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, adds: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = _fake_forward(base, change, cos, sin, adds)
    _launch((base.contiguous(), change.contiguous()), (query, key, value), (cos, sin), adds=adds, back=False)
    return query, key, value


@torch.library.custom_op("ekiben::fused_rope_backward", mutates_args=())
def _rope_backward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of ``base``, which is that of ``change``, too: the transposed rotation."""
    qkv = _fake_backward(query, key, value, cos, sin)
    states = query.contiguous(), key.contiguous(), value.contiguous()
    _launch((qkv, qkv), states, (cos, sin), adds=False, back=True)
    return qkv


@_rope_forward.register_fake
def _fake_forward(
    base: torch.Tensor, change: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, adds: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size = cos.shape[-1]
    shape = (1, base.shape[1], base.shape[-1] // (3 * size), size)
    return base.new_empty(shape), base.new_empty(shape), base.new_empty(shape)


@_rope_backward.register_fake
def _fake_backward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    _, tokens, heads, size = query.shape
    return query.new_empty((1, tokens, heads * 3 * size))


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, cos, sin, ctx.adds = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    grad_base = _rope_backward(query, key, value, *ctx.saved_tensors)
    return grad_base, grad_base if ctx.adds else None, None, None, None


_rope_forward.register_autograd(_backward, setup_context=_keep)


def _launch(
    fused: tuple[torch.Tensor, torch.Tensor],
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    angles: tuple[torch.Tensor, torch.Tensor],
    *,
    adds: bool,
    back: bool,
) -> None:
    """Run the kernel. fused: base and change. states: queries, keys and values. angles: their cosines and sines."""
    _, tokens, heads, size = states[0].shape
    _kernel[(tokens,)](
        *fused,
        *states,
        *(angle.contiguous() for angle in angles),
        HEADS=heads,
        HALF=size // 2,
        BLOCK_HEADS=triton.next_power_of_2(heads),
        BLOCK=triton.next_power_of_2(size // 2),
        ADDS=adds,
        BACK=back,
        num_warps=8,
    )


@triton.jit
def _kernel(
    qkv,
    change,
    query,
    key,
    value,
    cos,
    sin,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    BACK: tl.constexpr,
):
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (head < HEADS) & (column < HALF)
    angle = token * 2 * HALF + column
    c = tl.load(cos + angle, mask=column < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=column < HALF, other=0.0).to(tl.float32)
    if BACK:
        s = -s
    joint = (token * HEADS + head) * 6 * HALF + column
    apart = (token * HEADS + head) * 2 * HALF + column
    _rotate(qkv, change, query, c, s, joint, apart, inside, HALF, ADDS, BACK, True)
    _rotate(qkv, change, key, c, s, joint + 2 * HALF, apart, inside, HALF, ADDS, BACK, True)
    _rotate(qkv, change, value, c, s, joint + 4 * HALF, apart, inside, HALF, ADDS, BACK, False)


@triton.jit
def _rotate(
    qkv,
    change,
    states,
    c,
    s,
    joint,
    apart,
    inside,
    HALF: tl.constexpr,
    ADDS: tl.constexpr,
    BACK: tl.constexpr,
    ROTATES: tl.constexpr,
):
    """Both halves of queries, of keys or of values."""
    if BACK:
        first = tl.load(states + apart, mask=inside).to(tl.float32)
        second = tl.load(states + apart + HALF, mask=inside).to(tl.float32)
    else:
        first = tl.load(qkv + joint, mask=inside).to(tl.float32)
        second = tl.load(qkv + joint + HALF, mask=inside).to(tl.float32)
    if ADDS:
        first += tl.load(change + joint, mask=inside).to(tl.float32)
        second += tl.load(change + joint + HALF, mask=inside).to(tl.float32)
    if ROTATES:
        rotated = first * c - second * s
        second = second * c + first * s
        first = rotated
    if BACK:
        tl.store(qkv + joint, first, mask=inside)
        tl.store(qkv + joint + HALF, second, mask=inside)
    else:
        tl.store(states + apart, first, mask=inside)
        tl.store(states + apart + HALF, second, mask=inside)
