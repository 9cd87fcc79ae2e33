"""What the checks of both flash-attn packages share: attention in fp32 to compare with, and the cases.

Each case is computed in fp16 and bf16, forward and backward, with as many heads of keys and values as of queries, and
with fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
import torch.nn.functional as F
from common import assert_near, exact, randn

HALVES = (torch.float16, torch.bfloat16)
SIZES = (64, 80, 128, 256)  # of a head


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """[batch, tokens, heads, size], keys of fewer heads repeated."""
    k, v = (item.repeat_interleave(q.size(2) // item.size(2), 2) for item in (k, v))
    return F.scaled_dot_product_attention(*(item.transpose(1, 2) for item in (q, k, v)), is_causal=causal).transpose(
        1, 2
    )


def compare(
    actual: torch.Tensor,
    expected: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    reference_inputs: list[torch.Tensor],
    name: str,
) -> None:
    """Compare the outputs, and the gradients of q, k and v after a backward pass with one random weight."""
    assert_near(actual, expected, f"{name}, output", actual.dtype)
    weight = torch.randn_like(actual)
    actual.backward(weight)
    expected.backward(weight.double())
    for one, two, which in zip(tensors, reference_inputs, "qkv", strict=True):
        assert_near(one.grad, two.grad, f"{name}, gradient of {which}", one.dtype)


def compare_one_length(attend: Callable[..., torch.Tensor], sizes: Collection[int] = SIZES) -> None:
    """Compare ``attend(q, k, v, causal=)`` of tensors [batch, tokens, heads, size], for those of ``sizes``."""
    cases = ((8, 8, 64, True), (8, 2, 128, True), (4, 4, 80, True), (4, 4, 256, False), (4, 4, 64, False))
    for dtype in HALVES:
        for heads, kept, size, causal in (case for case in cases if case[2] in sizes):
            tensors = tuple(randn(2, 333, count, size, dtype=dtype, grad=True) for count in (heads, kept, kept))
            reference_inputs = [exact(item) for item in tensors]
            actual, expected = attend(*tensors, causal=causal), plain(*reference_inputs, causal=causal)
            name = f"{heads} heads of {size}, {kept} kept"
            compare(actual, expected, tensors, reference_inputs, name)


def compare_several_lengths(attend: Callable[..., torch.Tensor], sizes: Collection[int] = SIZES) -> None:
    """Compare ``attend(q, k, v, cu_seqlens_q=, …, causal=)`` of tensors [tokens, heads, size], for those of
    ``sizes``.
    """
    lengths = (1, 17, 128, 500, 1024)
    ends = torch.tensor((0, *lengths), device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ranges = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    for dtype in HALVES:
        for heads, kept, size in (case for case in ((8, 8, 64), (8, 2, 128), (4, 4, 80)) if case[2] in sizes):
            tensors = tuple(randn(sum(lengths), count, size, dtype=dtype, grad=True) for count in (heads, kept, kept))
            reference_inputs = [exact(item) for item in tensors]
            actual = attend(*tensors, **ranges, causal=True)
            split = zip(*(item.split(lengths) for item in reference_inputs), strict=True)
            expected = torch.cat([plain(*(item[None] for item in qkv), causal=True)[0] for qkv in split])
            name = f"several lengths, {heads} heads of {size}, {kept} kept"
            compare(actual, expected, tensors, reference_inputs, name)
