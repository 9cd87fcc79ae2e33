"""pretrain-gpt: a finished or partial run continues with more steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

for package in ("torch", "transformers", "sentencepiece", "megatron.core"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "entrypoints"), str(ROOT / "recipes" / "pretrain-gpt" / "entrypoints")]

from recipes.test_pretrain_gpt import (  # noqa: F401
    background_save,
    data,
    losses,
    pretraining,
    same_environment,
    small,
    tokenizer,
)

# isort: split
import training_data  # Megatron-Core, which is told first that there is no GPU

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours


def test_run_can_be_lengthened(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within the data of the first length: as if the run had been that long from the start. decay_tokens may change,
    too.
    """
    assert pretraining.pretrain(small(data, max_steps=3), tmp_path / "run") == 0
    assert pretraining.pretrain(small(data, max_steps=5), tmp_path / "run") == 0
    printed = capsys.readouterr().out
    assert "(step 3 of 5)" in printed and "5 steps instead of 3: the learning rate follows" in printed
    assert pretraining.pretrain(small(data, max_steps=5), tmp_path / "at-once") == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "at-once") and len(losses(tmp_path / "run")) == 5
    assert losses(tmp_path / "run", "lr") == losses(tmp_path / "at-once", "lr")
    decay = 8 * 8 * 128
    assert pretraining.pretrain(small(data, max_steps=9, decay_tokens=decay), tmp_path / "run") == 0
    schedule = json.loads((tmp_path / "run" / "run.json").read_text())["schedule"]
    assert schedule["lengths"] == [
        {"from_step": 0, "steps": 3, "decay_steps": 60},
        {"from_step": 3, "steps": 5, "decay_steps": 60},
        {"from_step": 5, "steps": 9, "decay_steps": 8},
    ]
    assert losses(tmp_path / "run", "lr")[-1] == 1e-6


def test_lengthened_run_goes_through_its_first_data_and_then_on(data: Path, tmp_path: Path) -> None:
    """The order of the steps so far stays, however often the run is made longer or shorter."""
    request = training_data.Request(data, "9,1,0", tmp_path / "cache", seed=1, positions=128, validation=8)

    def order(sizes: list[int], count: int) -> tuple[list[bytes], list[int]]:
        sequences, valid, sizes = training_data.open_data(request, sizes, count)
        assert len(sequences) >= count and len(valid) >= 8
        return [sequences[index]["tokens"].numpy().tobytes() for index in range(len(sequences))], sizes

    first, sizes = order([], 5)
    epoch = len(first)
    assert sizes == [5] and epoch > 5
    assert order(sizes, epoch) == (first, [5])  # what is left of the epoch comes first
    longer, sizes = order(sizes, 2 * epoch)
    assert sizes == [5, epoch] and longer[:epoch] == first and longer[epoch : 2 * epoch] != first
    assert order(sizes, 5) == (longer, sizes)
    again, sizes = order(sizes, len(longer) + 1)
    assert again[: len(longer)] == longer and sizes == [5, epoch, 1]


def test_checkpoint_of_the_release_before_can_be_lengthened(data: Path, tmp_path: Path) -> None:
    """It has the number of steps in its fingerprint, and no lengths."""
    assert pretraining.pretrain(small(data, max_steps=3), tmp_path) == 0
    file = background_save.list_checkpoints(tmp_path / "checkpoints")[-1] / "about.json"
    text = json.loads(file.read_text())
    del text["lengths"], text["data_sizes"]
    text["fingerprint"] |= {"steps": 3, "max_steps": "3", "train_tokens": "61440.0", "decay_tokens": "61440.0"}
    file.write_text(json.dumps(text))
    assert pretraining.pretrain(small(data, max_steps=4), tmp_path) == 0
    assert len(losses(tmp_path)) == 4
