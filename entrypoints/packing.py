"""Rows laid end to end in one long sequence, each attending only to itself: no padding, so no work is thrown away.

A step of the optimizer takes ``batch_size`` rows; they are cut into packs that fit the memory. The loss is divided by
the number of learnt tokens of the whole step, so how the step is cut does not change its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from prompt import Example

ATTENTION = "ekiben_packed"


@dataclass(frozen=True, slots=True)
class Pack:
    """ids, positions: [1, tokens]. sources, targets: [learnt]: the hidden state at sources[i] predicts targets[i]."""

    ids: torch.Tensor
    positions: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor
    boundaries: torch.Tensor  # [rows + 1], int32: 0, then where each row ends
    lengths: tuple[int, ...]

    def to(self, device: torch.device) -> Pack:
        return Pack(
            ids=_send(self.ids, device),
            positions=_send(self.positions, device),
            sources=_send(self.sources, device),
            targets=_send(self.targets, device),
            boundaries=_send(self.boundaries, device),
            lengths=self.lengths,
        )


def cut(examples: Sequence[Example], max_rows: int, max_tokens: int) -> list[list[Example]]:
    """Packs of at most ``max_rows`` rows and ``max_tokens`` tokens (a longer row gets a pack to itself)."""
    packs: list[list[Example]] = []
    room = 0
    for example in sorted(examples, key=lambda example: len(example.ids), reverse=True):
        if not packs or len(packs[-1]) >= max_rows or room < len(example.ids):
            packs.append([])
            room = max_tokens
        packs[-1].append(example)
        room -= len(example.ids)
    return packs


def pack(examples: Sequence[Example]) -> Pack:
    lengths = [len(example.ids) for example in examples]
    ends = np.cumsum(lengths)
    sources, targets = [], []
    for example, end in zip(examples, ends, strict=True):
        places = example.places
        sources.append(end - len(example.ids) + places - 1)
        targets.append(example.ids[places])
    return Pack(
        ids=_tensor(np.concatenate([example.ids for example in examples]))[None],
        positions=_tensor(np.concatenate([np.arange(length) for length in lengths]))[None],
        sources=_tensor(np.concatenate(sources)),
        targets=_tensor(np.concatenate(targets)),
        boundaries=torch.tensor([0, *ends], dtype=torch.int32),
        lengths=tuple(lengths),
    )


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
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each row. query, key, value: [1, heads, tokens, size]; returns [1, tokens, heads, size].

    With ``row_lengths`` row by row, without them by the variable-length flash kernel; without either, as one row.
    """
    if cu_seq_lens_q is not None and not row_lengths:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        mixed = varlen_attn(
            q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling, window_size=(-1, 0)
        )
        return torch.as_tensor(mixed)[None], None
    rows = row_lengths or (query.shape[2],)
    parts = zip(query.split(rows, 2), key.split(rows, 2), value.split(rows, 2), strict=True)
    outputs = [
        F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=_is_grouped(q, k)
        )
        for q, k, v in parts
    ]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def register() -> None:
    """Make ``attn_implementation=ATTENTION`` known. It has no mask function, so transformers builds no mask at all."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)


def forward(body: Any, pack: Pack) -> torch.Tensor:
    """Hidden states after the last norm, [tokens, width], of a model without its head."""
    # A power of two: the longest row only sizes the kernel's grid, and each new value may cost a compilation.
    longest = 1 << (max(pack.lengths) - 1).bit_length()
    output = body(
        input_ids=pack.ids,
        position_ids=pack.positions,
        use_cache=False,
        cu_seq_lens_q=pack.boundaries,
        max_length_q=longest,
        row_lengths=() if has_varlen(pack.ids.device, body.dtype) else pack.lengths,
    )
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """The variable-length flash kernel is for bf16 and fp16 on Ampere or later."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return bool(torch.cuda.get_device_capability(device)[0] >= 8)


def _is_grouped(query: torch.Tensor, key: torch.Tensor) -> bool:
    return bool(query.shape[1] != key.shape[1])


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).long()


def _send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
