"""Steps of packed sequences of a fixed length (setting packing)."""

from __future__ import annotations

import math
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

import torch

from ekiben_tasks.data.packing import fill_sequences
from ekiben_tasks.data.sources import parse_sources
from ekiben_tasks.models import load
from ekiben_tasks.models.lora import Lora
from ekiben_tasks.task.command import DryRun
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.training.prepare import prepare_data
from ekiben_tasks.training.settings import Settings, TrainOptions
from support import multiprocess
from support.tiny_runs import base, device, fit, metrics, same_environment, small, tokenizer  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours


def naive_best_fit(lengths: list[int], size: int) -> int:
    """The number of sequences by the definition: longest first, each where the least is left over."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [number for number, tokens in enumerate(free) if tokens >= length]
        if fitting:
            free[min(fitting, key=lambda number: free[number])] -= length
        else:
            free.append(size - length)
    return len(free)


@pytest.mark.parametrize("seed", range(60))
def test_every_example_is_in_one_sequence_that_is_not_too_long(seed: int) -> None:
    drawn = random.Random(seed)
    size = drawn.choice([1, 2, 7, 64, 2048])
    lengths = [drawn.randint(1, drawn.choice([size, max(size // 3, 1)])) for _ in range(drawn.randint(1, 200))]
    sequences = fill_sequences(lengths, size)
    assert sorted(index for sequence in sequences for index in sequence) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in sequence) <= size for sequence in sequences)
    assert len(sequences) == naive_best_fit(lengths, size) and fill_sequences(lengths, size) == sequences


def test_many_examples_are_packed_in_seconds() -> None:
    drawn = random.Random(1)
    lengths = [min(int(drawn.lognormvariate(5, 1)) + 1, 2048) for _ in range(200_000)]
    assert len(fill_sequences(lengths, 2048)) <= 1.01 * math.ceil(sum(lengths) / 2048)


def packed(base: Path, **changes: Any) -> Settings:
    return small(base, **{"packing": True, "batch_size": 2, "max_steps": 3, "lora": Lora(dropout=0.0), **changes})


def test_loss_is_that_of_the_unpacked_examples(base: Path, tokenizer: Any, device: Any, tmp_path: Path) -> None:
    """Each alone, in transformers' own forward pass; an adapter changes nothing before its first step."""
    settings = packed(base, batch_size=3)
    assert fit(settings, tmp_path) == 0
    data = prepare_data(settings, parse_sources(settings.data, settings.validation_split), tokenizer, 1 << 30, False)
    lengths = [len(example.ids) for example in data.train]
    sequences = fill_sequences(lengths, 512)
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(settings.seed)).tolist()
    examples = [data.train[index] for number in order[:3] for index in sequences[number]]
    assert len(examples) > 3 and 3 * 512 >= sum(len(example.ids) for example in examples) > 2 * 512
    model, total, targets = load.load_base(str(base), device).eval(), 0.0, 0
    for example in examples:
        ids = torch.tensor([example.ids.tolist()])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0].float()
        positions = torch.as_tensor(example.target_positions)
        total += float(torch.nn.functional.cross_entropy(logits[positions - 1], ids[0, positions], reduction="sum"))
        targets += len(positions)
    assert metrics(tmp_path)[0]["loss"] == pytest.approx(total / targets, rel=1e-5)
    assert metrics(tmp_path)[0]["num_target_tokens"] == targets


def test_losses_depend_neither_on_micro_batches_nor_on_processes(base: Path, tmp_path: Path) -> None:
    assert fit(packed(base), tmp_path / "auto") == 0
    assert fit(packed(base, micro_batch=1), tmp_path / "one") == 0
    multiprocess.run(2, tmp_path / "log", fit, packed(base), tmp_path / "two")
    for name in ("one", "two"):
        for ours, theirs in zip(metrics(tmp_path / name), metrics(tmp_path / "auto"), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)


def test_plan_counts_sequences(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = small(base, max_length=1024, device="auto", packing=True, batch_size=4)
    fit(settings, tmp_path / "out", options=TrainOptions(DryRun(1, "H100")))
    printed = capsys.readouterr().out
    steps, count, filled = map(
        int,
        re.findall(r"steps +(\d+) of 4 packed sequences of at most 1,024 tokens \((\d+), (\d+)% full\)", printed)[0],
    )
    assert steps == math.ceil(count / 4) and filled > 90


@pytest.mark.parametrize(("before", "after"), [("false", "true"), ("true", "false")])
def test_packing_of_a_run_is_not_changed(before: str, after: str, base: Path, tmp_path: Path) -> None:
    assert fit(small(base, max_steps=1, packing=before == "true"), tmp_path) == 0
    with pytest.raises(TaskError, match=rf"belongs to another run \(packing was '{before}' and is '{after}'\)"):
        fit(small(base, max_steps=2, packing=after == "true"), tmp_path)
