"""The learning rate of each step is that of transformers' scheduler."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

import torch
from transformers import TrainingArguments, get_scheduler

from ekiben_tasks.task import settings as options
from ekiben_tasks.task.errors import SettingError
from ekiben_tasks.training.plan import Plan
from ekiben_tasks.training.settings import Settings
from support.tiny_runs import small

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours


def make_plan(**changes: Any) -> Plan:
    return Plan(small(Path("base"), **changes), 1, 1, checkpointed=0, compile=False)


@pytest.mark.parametrize("warmup", [0, 0.004, 0.03, 0.1, 0.5, 0.999, 1, 1.0, 1.5, 7, 200, 1000])
@pytest.mark.parametrize("steps", [1, 2, 9, 100, 101])
def test_warmup_equals_transformers(warmup: float, steps: int, tmp_path: Path) -> None:
    theirs = TrainingArguments(output_dir=str(tmp_path), warmup_steps=warmup, report_to=[]).get_warmup_steps(steps)
    assert make_plan(warmup_steps=warmup).warmup(steps) == theirs


def test_warmup_ratio_is_the_former_name_of_a_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.yaml").write_text("warmup_steps: 200\n")
    options._WARNED.clear()
    assert options.load(Settings, tmp_path / "own.yaml", ["warmup_ratio=0.004"]).warmup_steps == 0.004
    assert "setting warmup_ratio is now warmup_steps" in capsys.readouterr().err
    (tmp_path / "own.yaml").write_text("warmup_steps: 200\nwarmup_ratio: 0.1\n")
    with pytest.raises(SettingError, match="warmup_steps: is set twice, also by its former name"):
        options.load(Settings, tmp_path / "own.yaml")


@pytest.mark.parametrize(
    ("changes", "name", "options"),
    [
        ({"schedule": "linear"}, "linear", {}),
        ({"schedule": "cosine"}, "cosine", {}),
        ({"schedule": "constant"}, "constant_with_warmup", {}),
        ({"schedule": "linear", "min_learning_rate": 1e-4}, "polynomial", {"lr_end": 1e-4, "power": 1}),
        ({"schedule": "cosine", "min_learning_rate": 1e-4}, "cosine_with_min_lr", {"min_lr": 1e-4}),
        ({"schedule": "wsd", "decay_steps": 5}, "warmup_stable_decay", {"num_decay_steps": 5}),
        (
            {"schedule": "wsd", "decay_steps": 0.2, "min_learning_rate": 1e-4},
            "warmup_stable_decay",
            {"num_decay_steps": 4, "min_lr_ratio": 0.1},
        ),
    ],
)
@pytest.mark.parametrize("warmup", [0, 3, 0.1, 15, 30])
def test_rates_equal_transformers(changes: dict[str, Any], name: str, options: dict[str, Any], warmup: float) -> None:
    """A warm-up begins with the rate of transformers' second step here, whose first one is 0 and trains nothing."""
    steps, plan = 20, make_plan(**changes, warmup_steps=warmup, learning_rate=1e-3)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = get_scheduler(name, optimizer, plan.warmup(steps), steps, scheduler_specific_kwargs=options)
    rates = []
    for _ in range(steps + 1):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    before = min(plan.warmup(steps), steps)
    assert [plan.rate(step, steps) for step in range(steps)] == pytest.approx(rates[1 : before + 1] + rates[before:-1])
