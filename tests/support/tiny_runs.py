"""Training runs of a tiny random model on the CPU: the model, its settings, a finished run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[2]
RECIPE = Path(os.environ.get("EKIBEN_RECIPE", ROOT / "recipes" / "lora-opencalm"))
ENTRYPOINTS = Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"
sys.path.insert(0, str(ENTRYPOINTS))

import torch

from ekiben_tasks.models import device as device_module
from ekiben_tasks.models import (
    load,
)
from ekiben_tasks.training import (
    loop,
    smoke,
    train,
)
from ekiben_tasks.training.settings import Settings
from support.multiprocess import same_environment  # noqa: F401

SAMPLE = RECIPE / "data" / "sample.jsonl"
CPU = "cpu"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("base")
    smoke.make_base(folder, SAMPLE)
    return folder


@pytest.fixture(scope="session")
def tokenizer(base: Path) -> Any:
    return load.load_tokenizer(str(base))


@pytest.fixture(scope="session")
def device() -> device_module.Device:
    return device_module.choose_device(CPU)


def small(base: Path, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "model": str(base),
        "data": [str(SAMPLE)],
        "validation_split": 0.1,
        "max_length": 512,
        "batch_size": 32,
        "learning_rate": 1e-2,
        "log_seconds": 0.0,
        "eval_every": 0,
        "device": CPU,
    }
    return Settings(**{**values, **changes})


def fit(settings: Settings, output: Path, **options_: Any) -> int:
    return train.train(settings, RECIPE, output, **options_)


def metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trained")
    assert fit(small(base, epochs=2), output) == 0
    return output


def signalled(step: int, number: int, work: Callable[..., int], *, rank: int = 0) -> Callable[..., int]:
    """``work`` in processes of which one gets the signal after ``step`` steps, however fast they are."""

    def run(*args: Any, **kwargs: Any) -> int:
        gradients = loop.Run._gradients

        def get_signal(run: loop.Run, *batch: Any) -> Any:
            if run.step == step and os.environ["RANK"] == str(rank):
                os.kill(os.getpid(), number)
            return gradients(run, *batch)

        loop.Run._gradients = get_signal  # type: ignore[assignment, method-assign]
        return work(*args, **kwargs)

    return run
