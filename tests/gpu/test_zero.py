"""DeepSpeed's ways beside the plain loop. Where the package is, GPU or not:

    DS_ACCELERATOR=cpu python3 -m pytest -q tests/gpu/test_zero.py      two processes on the CPU

(DeepSpeed compiles a small library for CPUs at its first start. Its source package installs with DS_BUILD_OPS=0.)
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers", "deepspeed"):
    pytest.importorskip(package, reason="DeepSpeed, or what it trains with, is not installed here")
ROOT = Path(__file__).resolve().parent.parent.parent
RECIPE = Path(os.environ.get("EKIBEN_RECIPE", ROOT / "recipes" / "lora-opencalm"))
sys.path[:0] = [str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"), str(ROOT / "tests")]

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import loop  # noqa: E402, F401  # imported once here, and not in every fork
import report  # noqa: E402, F401
import rows  # noqa: E402
import tiny  # noqa: E402
import together  # noqa: E402
import train  # noqa: E402
import zero  # noqa: E402, F401
from prompt import text_of  # noqa: E402
from world import REQUEUE  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
SAMPLE = RECIPE / "data" / "sample.jsonl"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("bases")
    texts = [text_of(row) for row in rows.read_all([rows.Source(str(SAMPLE), 0.0)], seed=0, skip_bad=False).train]
    for kind in ("gpt2", "llama"):
        tiny.make_model(folder / kind, texts, kind)
    return {kind: folder / kind for kind in ("gpt2", "llama")}


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    saved = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(saved)


def settings_of(base: Path, **changes: Any) -> train.Settings:
    values: dict[str, Any] = {
        "model": str(base), "data": [str(SAMPLE)], "test_share": 0.1, "max_length": 512, "batch_size": 31,
        "learning_rate": 1e-2, "log_seconds": 0.0, "eval_every": 0, "device": "cpu", "max_steps": 3,
        "lora": train.Lora(dropout=0.0), "micro_batch": 4,
    }  # fmt: skip
    return train.Settings(**{**values, **changes})


def fit(settings: train.Settings, output: Path) -> int:
    return train.train(settings, RECIPE, output)


def losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line.get("loss", line.get("test_loss")) for line in lines]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("stage", [2, 3])
def test_two_processes_learn_what_one_does(
    kind: str, method: str, stage: int, bases: dict[str, Path], tmp_path: Path
) -> None:
    """Several packs a step, the head tied to the table and not."""
    assert fit(settings_of(bases[kind], method=method), tmp_path / "plain") == 0
    changed = settings_of(
        bases[kind],
        method=method,
        parallel="deepspeed",
        deepspeed=train.DeepSpeed(stage=stage),  # type: ignore[arg-type]
    )
    together.run(2, tmp_path / "log", fit, changed, tmp_path / "zero")
    assert losses(tmp_path / "zero") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
    what = "adapter/adapter_model" if method == "lora" else "model/model"
    ours, theirs = (load_file(str(tmp_path / way / f"{what}.safetensors")) for way in ("zero", "plain"))
    assert ours.keys() == theirs.keys()
    for name, part in ours.items():
        torch.testing.assert_close(part, theirs[name], rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_in_two_halves_has_the_same_losses(stage: int, bases: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_of(
        bases["llama"], method="full", parallel="deepspeed", max_steps=9, epochs=2,
        deepspeed=train.DeepSpeed(stage=stage),  # type: ignore[arg-type]
    )  # fmt: skip
    together.run(2, tmp_path / "log", fit, settings, tmp_path / "whole")
    processes = together.start(2, tmp_path / "half", fit, settings, tmp_path / "halves")
    said, deadline = Path(f"{tmp_path / 'half'}-0"), time.monotonic() + 100
    while time.monotonic() < deadline and all(process.is_alive() for process in processes):
        if said.is_file() and "step 3/" in said.read_text():
            os.kill(processes[1].pid, signal.SIGUSR1)
            break
        time.sleep(0.01)
    assert together.wait(processes) == [REQUEUE] * 2, said.read_text()
    stopped_at = len(losses(tmp_path / "halves"))
    assert 3 <= stopped_at < 9
    together.run(2, tmp_path / "log", fit, settings, tmp_path / "halves")
    assert losses(tmp_path / "halves") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)
