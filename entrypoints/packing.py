"""Rows laid end to end in one long sequence, each attending only to itself: no padding, so no work is thrown away.

A step of the optimizer takes ``batch_size`` rows; they are cut into packs that fit the memory. The loss is divided by
the number of learnt tokens of the whole step, so how the step is cut does not change its gradient.

Architectures whose attention is not transformers' exchangeable one (Falcon, MPT, GPT-Neo) get the rows of a pack side by
side instead, filled up at the right: there nothing that is real can see the filling, because attention is causal.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from architectures import find_architecture
from prompt import Example

ATTENTION = "ekiben_packed"
Layout = Literal["packed", "padded"]


@dataclass(frozen=True, slots=True)
class Pack:
    """ids, positions: [1, tokens], or [rows, longest] when padded. sources, targets: [learnt]: the hidden state at
    sources[i], all positions counted through, predicts targets[i]."""

    ids: torch.Tensor
    positions: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor
    boundaries: torch.Tensor  # [rows + 1], int32: 0, then where each row ends
    lengths: tuple[int, ...]
    layout: Layout = "packed"

    def to(self, device: torch.device) -> Pack:
        return dataclasses.replace(
            self,
            ids=_send(self.ids, device),
            positions=_send(self.positions, device),
            sources=_send(self.sources, device),
            targets=_send(self.targets, device),
            boundaries=_send(self.boundaries, device),
        )

    @property
    def is_even(self) -> bool:
        """Rows alike in length, as blocks of running text are: these need no variable-length kernel."""
        return len(self.lengths) > 1 and len(set(self.lengths)) == 1 and self.lengths[0] % 128 == 0


def choose_layout(config: Any) -> Layout:
    return "packed" if find_architecture(config).attention == "interface" else "padded"


def choose_attention(config: Any) -> str:
    """``attn_implementation`` for training: ours over packed rows, else the best of the architecture's own in torch."""
    if choose_layout(config) == "packed":
        return ATTENTION
    return "sdpa" if "sdpa" in find_architecture(config).implementations else "eager"


def cut(examples: Sequence[Example], max_rows: int, max_tokens: int, layout: Layout = "packed") -> list[list[Example]]:
    """Packs of at most ``max_rows`` rows and ``max_tokens`` tokens, filling included (a longer row gets a pack to itself)."""
    packs: list[list[Example]] = []
    room = 0
    for example in sorted(examples, key=lambda example: len(example.ids), reverse=True):
        size = len(packs[-1][0].ids) if packs and layout == "padded" else len(example.ids)
        if not packs or len(packs[-1]) >= max_rows or room < size:
            packs.append([])
            room, size = max_tokens, len(example.ids)
        packs[-1].append(example)
        room -= size
    return packs


def pack(examples: Sequence[Example], layout: Layout = "packed") -> Pack:
    lengths = [len(example.ids) for example in examples]
    ends = np.cumsum(lengths)
    longest = max(lengths)
    starts = np.arange(len(lengths)) * longest if layout == "padded" else ends - lengths
    shape = (len(lengths), longest) if layout == "padded" else (1, int(ends[-1]))
    ids, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    sources, targets = [], []
    for example, start, length in zip(examples, starts, lengths, strict=True):
        ids.reshape(-1)[start : start + length] = example.ids
        positions.reshape(-1)[start : start + length] = np.arange(length)
        places = example.places
        sources.append(start + places - 1)
        targets.append(example.ids[places])
    return Pack(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        sources=_tensor(np.concatenate(sources)),
        targets=_tensor(np.concatenate(targets)),
        boundaries=torch.tensor([0, *ends], dtype=torch.int32),
        lengths=tuple(lengths),
        layout=layout,
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
    even_rows: int = 0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each row. query, key, value: [1, heads, tokens, size]; returns [1, tokens, heads, size].

    With ``even_rows`` as a batch of so many rows, with ``row_lengths`` row by row, without them by the variable-length
    flash kernel; without any, as one row. No attention dropout: the kernels for packed rows have none.
    """
    # A branch, for a comparison is no plain bool where sharded blocks are compiled, and that would break their graph in pieces.
    grouped = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    if even_rows:
        q, k, v = (tensor.squeeze(0).unflatten(1, (even_rows, -1)).transpose(0, 1) for tensor in (query, key, value))
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
    """Make ``attn_implementation=ATTENTION`` known. It has no mask function, so transformers builds no mask at all."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)


def forward(body: Any, pack: Pack, dtype: torch.dtype) -> torch.Tensor:
    """Hidden states after the last norm, [positions, width], of a model without its head; ``dtype``: it computes in."""
    if pack.layout == "padded":
        return torch.as_tensor(body(input_ids=pack.ids, use_cache=False).last_hidden_state).flatten(0, 1)
    # A power of two: the longest row only sizes the kernel's grid, and each new value may cost a compilation.
    longest = 1 << (max(pack.lengths) - 1).bit_length()
    even = len(pack.lengths) if pack.is_even else 0
    output = body(
        input_ids=pack.ids,
        position_ids=pack.positions,
        use_cache=False,
        cu_seq_lens_q=pack.boundaries,
        max_length_q=longest,
        row_lengths=() if even or has_varlen(pack.ids.device, dtype) else pack.lengths,
        even_rows=even,
    )
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """The variable-length flash kernel is for bf16 and fp16 on Ampere or later."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return bool(torch.cuda.get_device_capability(device)[0] >= 8)


def prefer_kernels(device: torch.device, dtype: torch.dtype) -> str:
    """Choose the flash kernels for this process; the name of the one for rows of mixed length."""
    if not has_varlen(device, dtype):
        return "sdpa"
    if torch.cuda.get_device_capability(device) == (9, 0):
        with contextlib.suppress(Exception):  # an interface without kernels, or kernels of another torch: then ours
            torch.nn.attention.activate_flash_attention_impl("FA3")
            return "flash-attn 3"
    return "flash 2"


@contextlib.contextmanager
def even_kernels(device: torch.device) -> Iterator[None]:
    """While it lasts, rows of one length go to cuDNN's attention on Hopper and later, where it is the fastest."""
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


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).long()


def _send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
