"""Open prepared data as Megatron's data sets, in an order that a lengthened run keeps."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

import prepare_data
from ekiben_tasks.task.errors import TaskError


@dataclass(frozen=True, slots=True)
class _Ends:
    """The interface of a tokenizer for Megatron's data sets."""

    unique_identifiers: dict[str, str]
    vocab_size: int
    eod: int
    pad: int = -1  # no token: every sequence is full


class Sequences:
    """All training sequences: one of Megatron's data sets after the other.

    Megatron shuffles by the seed and by how many sequences are asked for, so a data set of another length has another
    order. A run that is made longer goes through the data set that it began with, to its last epoch's end, and then
    through a further one.
    """

    def __init__(self, datasets: list[Any]) -> None:
        self.datasets = datasets
        self.ends = list(itertools.accumulate(map(len, datasets)))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Any:
        number = next(number for number, end in enumerate(self.ends) if index < end)
        return self.datasets[number][index - (self.ends[number - 1] if number else 0)]


@dataclass(frozen=True, slots=True)
class Request:
    """Describe the data of a run. validation: sequences for evaluation."""

    folder: Path  # that prepare-data wrote
    split: str
    cache: Path
    seed: int
    positions: int
    validation: int


def open_data(request: Request, sizes: list[int], count: int) -> tuple[Sequences, Any, list[int]]:
    """Return (training sequences, evaluation sequences or None, sizes).

    sizes: how many sequences each data set was asked for, in the order of the starts that made the run longer; empty at
    the first start. count: of the run from its first step to its last. The sizes returned are those to keep in
    checkpoints.

    Raises:
        TaskError: the split leaves no document for training.
    """
    sizes = list(sizes) or [count]
    datasets: list[Any] = []
    valid = None
    for number in itertools.count():
        have = sum(len(dataset) for dataset in datasets)
        if number == len(sizes):
            if have >= count:
                return Sequences(datasets), valid, sizes
            sizes.append(count - have)
        train, test = _build(request, sizes[number], request.seed + number)
        datasets.append(train)
        valid = test if number == 0 else valid
    raise AssertionError


def _build(request: Request, size: int, seed: int) -> tuple[Any, Any]:
    """Megatron's data sets for learning and for testing: shuffled sequences over all documents, by the seed."""
    prepared = prepare_data.read_record(request.folder)
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=request.positions,
        blend=([str(request.folder / "text_document")], None),
        split=request.split,
        path_to_cache=str(request.cache),
        create_attention_mask=False,
        tokenizer=_Ends({"sha256": prepared["tokenizer"]}, prepared["vocab_size"], prepared["end_of_document"]),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        allow_ambiguous_pad_tokens=True,
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [size, request.validation, None], lambda: True, config)
    train, valid, _ = builder.build()
    if train is None or not len(train):
        raise TaskError(f"data {request.folder}: split {request.split} leaves no document for training")
    return train, valid
