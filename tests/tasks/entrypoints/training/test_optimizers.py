"""Each optimizer trains as its library's does in a plain loop over transformers' own model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "bitsandbytes"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

import bitsandbytes
import torch
from transformers import AutoModelForCausalLM
from transformers.optimization import Adafactor

from ekiben_tasks.task.errors import SettingError
from ekiben_tasks.training.settings import Settings, check
from support.multiprocess import same_environment  # noqa: F401
from support.plain_training import SMALL_RUN, STEPS, train_plainly
from support.tiny_runs import base, fit, metrics, small, tokenizer  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
RUN: dict[str, Any] = {**SMALL_RUN, "method": "full", "weight_decay": 0.1}


def parts(model: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the matrices in blocks, the embeddings and the head, and vectors."""
    named = list(model.named_parameters())
    ends = [each for name, each in named if "embed" in name or "lm_head" in name]
    matrices = [each for _, each in named if each.ndim == 2 and not any(each is end for end in ends)]
    return matrices, ends, [each for _, each in named if each.ndim == 1]


def adamw(matrices: list[Any], ends: list[Any], vectors: list[Any]) -> list[Any]:
    groups = [{"params": matrices + ends, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, betas=(0.8, 0.9))]


def adamw_8bit(matrices: list[Any], ends: list[Any], vectors: list[Any]) -> list[Any]:
    groups = [{"params": matrices + ends, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return [bitsandbytes.optim.AdamW8bit(groups, betas=(0.8, 0.9))]


def adafactor(matrices: list[Any], ends: list[Any], vectors: list[Any]) -> list[Any]:
    groups = [{"params": matrices + ends, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return [Adafactor(groups, lr=1e-3, scale_parameter=False, relative_step=False)]


def muon(matrices: list[Any], ends: list[Any], vectors: list[Any]) -> list[Any]:
    groups = [{"params": ends, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, betas=(0.8, 0.9)),
    ]


@pytest.mark.parametrize(("make", "tolerance"), [(adamw, 2e-5), (adamw_8bit, 3e-4), (adafactor, 2e-5), (muon, 2e-4)])
def test_optimizers_train_as_in_a_plain_loop(
    make: Callable[..., Any], tolerance: float, base: Path, tokenizer: Any, tmp_path: Path
) -> None:
    betas = {} if make is adafactor else {"adam_beta1": 0.8, "adam_beta2": 0.9}
    settings = small(base, **RUN, optimizer=make.__name__, **betas)
    assert fit(settings, tmp_path / "run") == 0
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32).state_dict()
    start, model = (AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32) for _ in range(2))
    train_plainly(settings, tokenizer, model, make(*parts(model)))
    theirs, start = model.state_dict(), start.state_dict()
    change = max((theirs[name] - start[name]).abs().max().item() for name in theirs)
    assert change > 1e-3
    assert max((ours[name] - theirs[name]).abs().max().item() for name in theirs) < tolerance


@pytest.mark.parametrize("name", ["adamw_8bit", "adafactor", "muon"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_resumed_run_is_as_if_it_had_not_stopped(name: str, method: str, base: Path, tmp_path: Path) -> None:
    settings = {**RUN, "optimizer": name, "method": method, "schedule": "constant", "warmup_steps": 0}
    assert fit(small(base, **{**settings, "epochs": 2}), tmp_path / "stopped") == 0
    for folder in ("stopped", "straight"):
        assert fit(small(base, **settings), tmp_path / folder) == 0
    stopped, straight = (
        [line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("stopped", "straight")
    )
    assert stopped == straight and len(straight) == STEPS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": "deepspeed"}, "optimizer=muon: its state cannot be sharded by parallel=deepspeed"),
        ({"parallel": "fsdp", "method": "full"}, "optimizer=muon: its state cannot be sharded by parallel=fsdp"),
        ({"adam_beta2": 1.0}, "adam_beta2: must be at least 0 and below 1, not 1.0"),
        ({"min_learning_rate": 1.0}, "min_learning_rate: must be from 0 to learning_rate, not 1.0"),
    ],
)
def test_what_an_optimizer_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=f"setting {message}"):
        check(Settings(**{"optimizer": "muon", **changes}))
    check(Settings(optimizer="muon", parallel="fsdp"))  # an adapter is complete in every process
