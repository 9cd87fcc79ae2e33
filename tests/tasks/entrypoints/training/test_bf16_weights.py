"""Weights in bf16 alone: each update is rounded up or down, is right on average, and a run learns as with fp32."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

import torch
from transformers import AutoModelForCausalLM

from ekiben_tasks.distributed.bf16_adamw import RoundingAdamW
from ekiben_tasks.distributed.optimizer import OptimizerConfig
from ekiben_tasks.models.memory import MemoryProfile, expect_memory
from ekiben_tasks.task.errors import SettingError
from ekiben_tasks.training.settings import Settings, check
from support import multiprocess
from support.multiprocess import same_environment  # noqa: F401
from support.tiny_runs import base, fit, metrics, small  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
RUN: dict[str, Any] = {"method": "full", "learning_rate": 1e-3, "epochs": 2, "schedule": "constant", "warmup_steps": 0}


def test_a_step_is_that_of_adamw_rounded_to_a_neighbour_and_right_on_average() -> None:
    torch.manual_seed(0)
    config = OptimizerConfig(1e-4, 0.1, 0.0, (0.9, 0.95))
    weight = torch.randn(64, 512).bfloat16()
    exact = weight.float().requires_grad_()
    gradient = torch.randn(64, 512)
    reference = torch.optim.AdamW([exact], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    before, ours = weight.float(), RoundingAdamW([weight], [gradient], config)
    for _ in range(2):
        # From the rounded weights, so that each step is compared by itself.
        exact.data.copy_(weight)
        exact.grad = gradient.clone()
        reference.step()
        ours.step()
        below = (exact.detach().view(torch.int32) & -65536).view(torch.float32)
        above = ((exact.detach().view(torch.int32) & -65536) + 65536).view(torch.float32)
        rounded = weight.float()
        assert bool(((rounded == below) | (rounded == above)).all())
        gradient.copy_(torch.randn(64, 512))
    state = reference.state[exact]
    assert torch.equal(state["exp_avg"], ours.moments[0][0])
    assert torch.equal(state["exp_avg_sq"], ours.moments[0][1])
    bias = (weight.float() - exact.detach()).mean().abs()
    spacing = (above - below).abs().mean()
    assert bias < 0.02 * spacing  # of 32,768 independent roundings
    # To the nearest number, most weights would not have moved at all.
    nearest = (before - 1e-4 * gradient.sign()).bfloat16().float()
    assert (nearest == before).float().mean() > 0.9 and (weight.float() != before).float().mean() > 0.02


def test_a_run_learns_as_with_fp32(base: Path, tmp_path: Path) -> None:
    for name in ("fp32", "bf16"):
        assert fit(small(base, **RUN, weights=name), tmp_path / name) == 0
    fp32, bf16 = ([line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("fp32", "bf16"))
    assert len(fp32) == len(bf16) and fp32[-1] < 0.9 * fp32[0]
    assert max(abs(one / two - 1) for one, two in zip(fp32, bf16, strict=True)) < 0.03
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16" / "model")
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_resumed_run_is_as_if_it_had_not_stopped(method: str, base: Path, tmp_path: Path) -> None:
    settings = {**RUN, "method": method, "weights": "bf16"}
    assert fit(small(base, **{**settings, "epochs": 1}), tmp_path / "stopped") == 0
    for folder in ("stopped", "straight"):
        assert fit(small(base, **settings), tmp_path / folder) == 0
    stopped, straight = (
        [line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("stopped", "straight")
    )
    assert stopped == straight


def test_two_processes_have_the_same_weights_as_one(base: Path, tmp_path: Path) -> None:
    settings = {**RUN, "weights": "bf16", "validation_split": 0.2, "max_steps": 4}
    assert fit(small(base, **settings), tmp_path / "one") == 0
    multiprocess.run(2, tmp_path / "log", fit, small(base, **settings, parallel="ddp"), tmp_path / "two")
    one, two = (metrics(tmp_path / name)[-1]["eval_loss"] for name in ("one", "two"))
    assert one == pytest.approx(two, rel=2e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "muon"}, "weights=bf16: not together with optimizer=muon"),
        ({"parallel": "fsdp"}, "weights=bf16: not together with parallel=fsdp"),
        ({"parallel": "deepspeed"}, "weights=bf16: not together with parallel=deepspeed"),
    ],
)
def test_what_cannot_have_bf16_weights_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=f"setting {message}"):
        check(Settings(**{"weights": "bf16", **changes}))


def test_memory_counts_no_exact_copy() -> None:
    counts: dict[str, Any] = {"frozen": 0, "trainable": 10**9, "products": 0, "unit": 1, "root": 1, "layers": 1}
    sizes = {"width": 1, "vocabulary": 1, "kept": 0.0}
    fp32, bf16 = (expect_memory(MemoryProfile(**counts, **sizes, optimizer_size=size)) for size in (12, 8))
    assert fp32.fixed - bf16.fixed == 4 * 10**9
