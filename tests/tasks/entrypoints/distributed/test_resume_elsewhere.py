"""A checkpoint continues with any number of processes and any strategy, and learns what one process learns at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

import torch

from ekiben_tasks.distributed.options import DeepSpeed
from ekiben_tasks.distributed.saved_state import load_zero_file, open_saved
from ekiben_tasks.models.lora import Lora
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.training import loop, run  # noqa: F401  # imported once here, and not in every fork
from support import multiprocess
from support.multiprocess import same_environment  # noqa: F401
from support.tiny_runs import base, fit, metrics, small  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
Stage = tuple[str, int, dict[str, Any]]
NONE, DDP_2, FSDP_2, FSDP_4 = ("none", 1, {}), ("ddp", 2, {}), ("fsdp", 2, {}), ("fsdp", 4, {})
ZERO_2, ZERO_3, ZERO_3_ALONE = (
    ("deepspeed", size, {"deepspeed": DeepSpeed(stage=stage)})  # type: ignore[arg-type]
    for size, stage in ((2, 2), (2, 3), (1, 3))
)


def check_losses(stages: list[Stage], method: str, base: Path, tmp_path: Path) -> None:
    """Train one step more with each stage, and compare all losses with those of one process that was never stopped."""
    common: dict[str, Any] = {
        "method": method,
        "schedule": "constant",
        "warmup_steps": 0,
        "batch_size": 8,
        "lora": Lora(dropout=0.0),
        "learning_rate": 1e-2,
    }
    assert fit(small(base, **common, max_steps=len(stages)), tmp_path / "at-once") == 0
    for step, (way, size, more) in enumerate(stages, 1):
        settings = small(base, **common, **more, parallel=way, max_steps=step)
        env = {"WORLD_SIZE": "1"} if size == 1 else None
        printed = multiprocess.run(size, tmp_path / "log", fit, settings, tmp_path / "resumed", env=env)
        assert step == 1 or f"step {step - 1} of {step}" in printed
    ours, theirs = (
        [line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("resumed", "at-once")
    )
    assert len(ours) == len(stages)
    assert ours == pytest.approx(theirs, rel=2e-5)


@pytest.mark.parametrize(
    ("stages", "method"),
    [
        ([NONE, FSDP_2, FSDP_4, DDP_2, FSDP_2, NONE], "full"),
        ([NONE, FSDP_2, DDP_2], "lora"),
    ],
    ids=["full", "lora"],
)
def test_run_goes_on_with_another_strategy(stages: list[Stage], method: str, base: Path, tmp_path: Path) -> None:
    check_losses(stages, method, base, tmp_path)


@pytest.mark.parametrize(
    ("stages", "method"),
    [
        ([DDP_2, ZERO_3, ZERO_3_ALONE, ZERO_2, FSDP_2, ZERO_2, NONE], "full"),
        ([ZERO_2, DDP_2, ZERO_3], "lora"),
    ],
    ids=["full", "lora"],
)
def test_run_goes_on_from_and_with_deepspeed(
    stages: list[Stage], method: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed here")
    check_losses(stages, method, base, tmp_path)


def test_checkpoint_of_another_model_is_refused_with_a_sentence(tmp_path: Path) -> None:
    state = {"weights": torch.zeros(3), "optimizer": {"state": {}}}
    with pytest.raises(TaskError, match=r"cannot be read with these settings .*--overwrite"):
        open_saved(tmp_path, state, {"a": torch.Size([4])})


class _Hostile:
    """Makes a file when its pickle is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


class _Attribute:
    """An enum as Python 3.11.0 to 3.11.3 pickles it, or what a hostile file makes of that."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (self.owner, self.name))


def test_deepspeed_files_of_every_python_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    enums = pytest.importorskip("deepspeed.runtime.zero.config", reason="DeepSpeed is not installed here")
    file = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    for stage in (enums.ZeroStageEnum.weights, _Attribute(enums.ZeroStageEnum, "weights")):
        torch.save({"zero_stage": stage}, file)
        assert load_zero_file(file)["zero_stage"] == 3
    torch.save({"zero_stage": _Attribute(torch.Size, "numel")}, file)
    with pytest.raises(ValueError, match="is damaged, or holds code"):
        load_zero_file(file)


@pytest.mark.parametrize("spread", ["equal", "another"])
def test_code_in_a_deepspeed_checkpoint_is_not_run(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spread: str
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed here")
    way, size, more = ZERO_3_ALONE
    settings = small(base, method="lora", **more, parallel=way, max_steps=1)
    multiprocess.run(size, tmp_path / "log", fit, settings, tmp_path / "out", env={"WORLD_SIZE": "1"})
    for file in (tmp_path / "out").rglob("*_optim_states.pt"):
        torch.save({"optimizer_state_dict": _Hostile(tmp_path / "ran")}, file)
    if spread == "another":
        settings, env = small(base, method="lora", max_steps=2), None
    else:
        settings, env = small(base, method="lora", **more, parallel=way, max_steps=2), {"WORLD_SIZE": "1"}
    printed = multiprocess.run(size, tmp_path / "log", _fit_and_print_error, settings, tmp_path / "out", env=env)
    assert " is damaged, or holds code, which DeepSpeed's files do not" in printed
    assert "--overwrite" in printed
    assert not (tmp_path / "ran").exists()


def _fit_and_print_error(*args: Any) -> int:
    try:
        fit(*args)
    except TaskError as error:
        print(error)
        return 0
    return 1
