"""Choose an attention kernel for packed examples, each attending only to itself, and call a model with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from ekiben_tasks.data.packing import Layout, PackedBatch
from ekiben_tasks.models.architecture import find_architecture, plain_attention

ATTENTION = "ekiben_packed"


def choose_layout(config: Any) -> Layout:
    """Return the layout of batches for this model: packed where its attention takes lengths, else padded.

    Raises:
        TaskError: the ``model_type`` is not supported.
    """
    return "packed" if find_architecture(config).attention == "interface" else "padded"


def choose_attention(config: Any) -> str:
    """Return ``attn_implementation`` for training: ATTENTION for packed examples, else that of plain_attention().

    Raises:
        TaskError: the ``model_type`` is not supported.
    """
    return ATTENTION if choose_layout(config) == "packed" else str(plain_attention(config))


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int = 0,
    row_lengths: tuple[int, ...] = (),
    uniform_rows: int = 0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention inside each example. query, key, value: ``[1, heads, tokens, size]``.

    The result is ``[1, tokens, heads, size]``, with None for the weights (Vaswani et al. 2017, arXiv:1706.03762,
    equation 1). ``uniform_rows``: as a batch of so many examples; ``row_lengths``: one by one; ``cu_seq_lens_q`` alone:
    by the variable-length flash kernel; none of them: as one example. No attention dropout: the kernels for packed
    examples have none.
    """
    # A branch: where sharded blocks are compiled, a comparison is no plain bool, which would break their graph.
    grouped = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    if uniform_rows:
        q, k, v = (tensor.squeeze(0).unflatten(1, (uniform_rows, -1)).transpose(0, 1) for tensor in (query, key, value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, **grouped)
        return mixed.transpose(1, 2).flatten(0, 1)[None], None
    if cu_seq_lens_q is not None and not row_lengths:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        mixed = varlen_attn(
            q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling, window_size=(-1, 0)
        )
        return torch.as_tensor(mixed)[None], None
    rows = row_lengths or (query.shape[2],)
    parts = zip(query.split(rows, 2), key.split(rows, 2), value.split(rows, 2), strict=True)
    outputs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, **grouped) for q, k, v in parts]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def register() -> None:
    """Register ``attn_implementation=ATTENTION``. It has no mask function, so transformers builds no mask at all."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)


def forward(body: Any, pack: PackedBatch, dtype: torch.dtype) -> torch.Tensor:
    """Return the hidden states after the last norm, ``[positions, width]``, positions counted over all of ``pack.ids``.

    body: a model without its head, computing in ``dtype``.
    """
    if pack.layout == "padded":
        return torch.as_tensor(body(input_ids=pack.ids, use_cache=False).last_hidden_state).flatten(0, 1)
    # A power of two: the longest example only sizes the kernel's grid, and each new value may cost a compilation.
    longest = 1 << (max(pack.seq_lens) - 1).bit_length()
    even = len(pack.seq_lens) if pack.is_uniform else 0
    output = body(
        input_ids=pack.ids,
        position_ids=pack.position_ids,
        use_cache=False,
        cu_seq_lens_q=pack.cu_seqlens,
        max_length_q=longest,
        row_lengths=() if even or has_varlen(pack.ids.device, dtype) else pack.seq_lens,
        uniform_rows=even,
    )
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the variable-length flash kernel runs: for bf16 and fp16 on Ampere or later."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return bool(torch.cuda.get_device_capability(device)[0] >= 8)


def prefer_kernels(device: torch.device, dtype: torch.dtype) -> str:
    """Choose the flash kernels for this process, and return the name of the one for examples of mixed lengths."""
    if not has_varlen(device, dtype):
        return "sdpa"
    if torch.cuda.get_device_capability(device) == (9, 0):
        with contextlib.suppress(Exception):  # an interface without kernels, or kernels of another torch: then ours
            torch.nn.attention.activate_flash_attention_impl("FA3")
            return "flash-attn 3"
    return "flash 2"


@contextlib.contextmanager
def uniform_kernels(device: torch.device) -> Iterator[None]:
    """Prefer cuDNN's attention in this context, on Hopper and later: it is the fastest for examples of one length."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(order, set_priority=True):
        yield
