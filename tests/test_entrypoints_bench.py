"""lora-bench: a run that is watched and ends at its target."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "recipes" / "lora-opencalm" / "data" / "sample.jsonl"
sys.path.insert(0, str(ROOT / "entrypoints"))

import torch  # noqa: E402

import loop  # noqa: E402
import smoke  # noqa: E402
import train  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("base")
    smoke.make_base(folder, SAMPLE)
    return folder


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    saved = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(saved)


def small(base: Path, **changes: Any) -> train.Settings:
    values: dict[str, Any] = {
        "model": str(base), "data": [str(SAMPLE)], "test_share": 0.1, "max_length": 512, "batch_size": 32,
        "learning_rate": 1e-2, "log_seconds": 0.0, "eval_every": 2, "device": "cpu", "epochs": 2,
    }  # fmt: skip
    return train.Settings(**{**values, **changes})


class Notes(loop.Watch):
    """Writes down what it is told, and is content after the second test."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []

    def starts(self, run: loop.Run) -> None:
        self.said.append(("start", run.first_step))

    def tests(self, run: loop.Run) -> None:
        self.said.append(("tests", run.step))

    def tested(self, run: loop.Run) -> bool:
        assert run.last_test_loss > 0
        self.said.append(("tested", run.step))
        return len(self.said) == 5


def test_a_watched_run_ends_when_its_watch_is_content(base: Path, tmp_path: Path) -> None:
    notes = Notes()
    assert train.train(small(base), ROOT, tmp_path, watch=notes) == 0
    assert notes.said == [("start", 0), ("tests", 2), ("tested", 2), ("tests", 4), ("tested", 4)]
    assert (tmp_path / "checkpoints" / "step-000004").is_dir()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
