"""Pack examples end to end into one long sequence, each attending only to itself: nothing is computed for padding.

A step of the optimizer takes ``batch_size`` examples; they are split into micro-batches that fit the memory. The loss
is divided by the number of target tokens of the whole step, so how the step is split does not change its gradient.

Models whose attention is not transformers' exchangeable one (Falcon, MPT, GPT-Neo), or that keep a state (Mamba), get
the examples as rows instead, padded at the right: there no real token can see the padding, because attention is
causal. Where the padding would still change results, a batch has only examples of equal length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from ekiben_tasks.data.tokenize import Example

Layout = Literal["packed", "padded", "equal"]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Hold the tensors of one micro-batch, int64 where not noted.

    ids, position_ids: ``[1, tokens]``, or ``[examples, longest]`` when not packed. target_positions, labels:
    ``[targets]``: the hidden state at target_positions[i], counted over all of ``ids``, predicts labels[i].
    """

    ids: torch.Tensor
    position_ids: torch.Tensor
    target_positions: torch.Tensor
    labels: torch.Tensor
    cu_seqlens: torch.Tensor  # [examples + 1], int32: 0, then where each example ends
    seq_lens: tuple[int, ...]
    layout: Layout = "packed"
    asks: bool = False  # for the likeliest tokens, or a classifier's logits, instead of the loss of the labels

    def ask(self) -> PackedBatch:
        """Return the batch as a question for the tokens at its labels' places, or for a classifier's logits."""
        return dataclasses.replace(self, asks=True)

    def to(self, device: torch.device) -> PackedBatch:
        """Return the batch with its tensors on ``device``."""
        names = ("ids", "position_ids", "target_positions", "labels", "cu_seqlens")
        return dataclasses.replace(self, **{name: _send(getattr(self, name), device) for name in names})

    @property
    def is_uniform(self) -> bool:
        """Return whether several examples have one length, a multiple of 128: these need no variable-length kernel.

        Blocks of running text are such examples.
        """
        return len(self.seq_lens) > 1 and len(set(self.seq_lens)) == 1 and self.seq_lens[0] % 128 == 0


def split_micro_batches(
    examples: Sequence[Example], max_examples: int, max_tokens: int, layout: Layout = "packed"
) -> list[list[Example]]:
    """Split ``examples`` into groups of at most ``max_examples`` and ``max_tokens`` tokens, padding included.

    An example of more tokens gets a group to itself.
    """
    groups: list[list[Example]] = []
    remaining = 0
    for example in sorted(examples, key=lambda example: len(example.ids), reverse=True):
        first = len(groups[-1][0].ids) if groups else 0
        size = first if groups and layout == "padded" else len(example.ids)
        is_other = layout == "equal" and first != size
        if not groups or len(groups[-1]) >= max_examples or remaining < size or is_other:
            groups.append([])
            remaining, size = max_tokens, len(example.ids)
        groups[-1].append(example)
        remaining -= size
    return groups


def fill_sequences(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Group the examples of these ``lengths``, by index, into sequences of at most ``size`` tokens: best fit, longest
    first.

    The same lengths give the same sequences. No example may be longer than ``size``.
    """
    sequences: list[list[int]] = []
    by_free: dict[int, list[int]] = {}  # free tokens → sequences
    free_sizes = 0  # bit n is set where a sequence has n free tokens
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True):
        length = lengths[index]
        if fitting := free_sizes >> length:
            free = length + (fitting & -fitting).bit_length() - 1  # the smallest that is enough
            number = by_free[free].pop()
            if not by_free[free]:
                free_sizes ^= 1 << free
        else:
            free, number = size, len(sequences)
            sequences.append([])
        sequences[number].append(index)
        by_free.setdefault(free - length, []).append(number)
        free_sizes |= 1 << (free - length)
    return sequences


def pack(examples: Sequence[Example], layout: Layout = "packed") -> PackedBatch:
    """Return ``examples`` as one batch on the CPU."""
    seq_lens = [len(example.ids) for example in examples]
    ends = np.cumsum(seq_lens)
    longest = max(seq_lens)
    starts = ends - seq_lens if layout == "packed" else np.arange(len(seq_lens)) * longest
    shape = (1, int(ends[-1])) if layout == "packed" else (len(seq_lens), longest)
    ids, position_ids = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for example, start, length in zip(examples, starts, seq_lens, strict=True):
        ids.reshape(-1)[start : start + length] = example.ids
        position_ids.reshape(-1)[start : start + length] = np.arange(length)
    targets = [example.target_positions for example in examples]
    return PackedBatch(
        ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(position_ids),
        target_positions=_tensor([start + positions - 1 for start, positions in zip(starts, targets, strict=True)]),
        labels=_tensor([example.target_labels for example in examples]),
        cu_seqlens=torch.tensor([0, *ends], dtype=torch.int32),
        seq_lens=tuple(seq_lens),
        layout=layout,
    )


def _tensor(arrays: Sequence[Any]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays)).long()


def _send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
