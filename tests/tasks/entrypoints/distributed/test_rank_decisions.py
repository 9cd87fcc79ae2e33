"""Decisions that lead to a collective are the main process's, shared with all ranks: clocks, signals and free memory
differ between them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

from ekiben_tasks.distributed.context import REQUEUE
from ekiben_tasks.models.lora import Lora
from ekiben_tasks.training import checkpoint, loop, run
from support import multiprocess
from support.multiprocess import same_environment  # noqa: F401
from support.tiny_runs import base, fit, metrics, small  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
WAYS = [("ddp", "lora"), ("ddp", "full"), ("fsdp", "lora"), ("fsdp", "full")]


def is_main() -> bool:
    return os.environ["RANK"] == "0"


def skew(factor: float) -> None:
    """Let the training loop's clock of this process run ``factor`` times as fast."""
    loop.time = types.SimpleNamespace(monotonic=lambda: factor * time.monotonic())  # type: ignore[attr-defined]


def settings_of(base: Path, way: str, method: str, **changes: Any) -> Any:
    values = {"parallel": way, "method": method, "batch_size": 8, "max_steps": 6, "lora": Lora(dropout=0.0)}
    return small(base, **{**values, **changes})


@pytest.mark.parametrize(("way", "method"), WAYS)
@pytest.mark.parametrize("fast", [0, 1])
def test_time_based_saves_and_logs_with_skewed_clocks(
    way: str, method: str, fast: int, base: Path, tmp_path: Path
) -> None:
    check_skewed_clocks(way, method, fast, base, tmp_path)


@pytest.mark.parametrize("fast", [0, 1])
def test_deepspeed_saves_and_logs_with_skewed_clocks(
    fast: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed here")
    check_skewed_clocks("deepspeed", "full", fast, base, tmp_path)


def check_skewed_clocks(way: str, method: str, fast: int, base: Path, tmp_path: Path) -> None:
    """One rank's clock says that it is time to save and log after every step, the other's never."""
    settings = settings_of(base, way, method, save_minutes=1.0, log_seconds=60.0)

    def work() -> int:
        skew(1e6 if int(os.environ["RANK"]) == fast else 1e-3)
        return fit(settings, tmp_path / "run")

    processes = multiprocess.start(2, tmp_path / "log", work)
    codes = multiprocess.wait(processes)
    printed = Path(f"{tmp_path / 'log'}-0").read_text()
    assert codes == [0, 0], printed + Path(f"{tmp_path / 'log'}-1").read_text()
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == (["step-000005", "step-000006"] if fast == 0 else ["step-000006"])
    assert printed.count("tokens/s") >= (4 if fast == 0 else 1)
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("way", "method"), [("ddp", "lora"), ("fsdp", "full")])
def test_sigterm_is_answered_with_skewed_clocks(way: str, method: str, base: Path, tmp_path: Path) -> None:
    settings = settings_of(base, way, method, save_minutes=1.0, log_seconds=60.0, max_steps=100_000, epochs=10_000)

    def work() -> int:
        skew(1e6 if not is_main() else 1e-3)
        return fit(settings, tmp_path / "run")

    processes = multiprocess.start(2, tmp_path / "log", work)
    printed, deadline = Path(f"{tmp_path / 'log'}-0"), time.monotonic() + 60
    while time.monotonic() < deadline and not (printed.is_file() and "step 1/" in printed.read_text()):
        time.sleep(0.05)
    os.kill(processes[0].pid, signal.SIGTERM)
    assert multiprocess.wait(processes) == [REQUEUE] * 2, multiprocess.read_logs(tmp_path / "log")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "interrupted"


def test_main_process_chooses_the_checkpoint_to_resume(base: Path, tmp_path: Path) -> None:
    """The second rank's file system does not show the checkpoint yet."""
    settings = settings_of(base, "ddp", "lora", max_steps=2)
    multiprocess.run(2, tmp_path / "log", fit, settings, tmp_path / "run")

    def work() -> int:
        if not is_main():
            checkpoint.latest = lambda _: None
        return fit(settings_of(base, "ddp", "lora", max_steps=2), tmp_path / "run")

    processes = multiprocess.start(2, tmp_path / "log", work)
    assert multiprocess.wait(processes) == [0, 0], multiprocess.read_logs(tmp_path / "log")


def test_main_process_decides_whether_the_target_is_reached(base: Path, tmp_path: Path) -> None:
    settings = settings_of(base, "ddp", "lora", eval_every=2)

    class Target(loop.TrainerCallback):
        def on_evaluate(self, run: loop.Run) -> bool:
            return is_main()

    def work() -> int:
        return fit(settings, tmp_path / "run", callback=Target())

    processes = multiprocess.start(2, tmp_path / "log", work)
    assert multiprocess.wait(processes) == [0, 0], multiprocess.read_logs(tmp_path / "log")
    assert max(line["step"] for line in metrics(tmp_path / "run")) == 2


@pytest.mark.parametrize("method", ["full", "lora"])
def test_micro_batches_of_all_ranks_shrink_when_one_is_short_of_memory(method: str, base: Path, tmp_path: Path) -> None:
    settings = settings_of(base, "fsdp", method, batch_size=32, max_steps=3)
    multiprocess.run(2, tmp_path / "log", fit, settings, tmp_path / "alike")

    def work() -> int:
        counts = iter([0, 1] + [1] * 100)  # the allocator of rank 1 finds its GPU full in the first step
        if not is_main():
            loop.count_alloc_retries = lambda _: next(counts)
        return fit(settings, tmp_path / "run")

    processes = multiprocess.start(2, tmp_path / "log", work)
    printed = Path(f"{tmp_path / 'log'}-0")
    assert multiprocess.wait(processes) == [0, 0], multiprocess.read_logs(tmp_path / "log")
    assert printed.read_text().count("little GPU memory left: continuing with packs of at most") == 1
    losses, sizes = (
        [[line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("run", "alike")],
        [
            json.loads((tmp_path / name / "run.json").read_text())["device"]["tokens_at_a_time"]
            for name in ("run", "alike")
        ],
    )
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert sizes[0] <= sizes[1] // 2


@pytest.mark.parametrize("method", ["full", "lora"])
def test_packs_are_planned_from_the_least_free_memory(method: str, base: Path, tmp_path: Path) -> None:
    """The second rank has less than packs of full size need; both cut their rows alike."""
    settings = settings_of(base, "fsdp", method, batch_size=32, max_steps=2)
    multiprocess.run(2, tmp_path / "log", fit, settings, tmp_path / "alike")

    expected = json.loads((tmp_path / "alike" / "run.json").read_text())["expected_memory_bytes"]

    def work() -> int:
        if not is_main():
            choose = run.choose_device
            run.choose_device = lambda *args: dataclasses.replace(choose(*args), memory=int(0.8 * expected))
        return fit(settings, tmp_path / "run")

    processes = multiprocess.start(2, tmp_path / "log", work)
    assert multiprocess.wait(processes) == [0, 0], multiprocess.read_logs(tmp_path / "log")
    assert [line["loss"] for line in metrics(tmp_path / "run") if "loss" in line] == pytest.approx(
        [line["loss"] for line in metrics(tmp_path / "alike") if "loss" in line], rel=1e-4
    )
    sizes = [
        json.loads((tmp_path / name / "run.json").read_text())["device"]["tokens_at_a_time"]
        for name in ("run", "alike")
    ]
    assert sizes[0] < sizes[1]
