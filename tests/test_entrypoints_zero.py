"""DeepSpeed's ways beside the plain loop: two processes on the CPU, without a compiled op, as the image finetune has it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers", "deepspeed"):
    pytest.importorskip(package, reason="DeepSpeed, or what it trains with, is not installed here")
ROOT = Path(__file__).resolve().parent.parent
RECIPE = Path(os.environ.get("EKIBEN_RECIPE", ROOT / "recipes" / "lora-opencalm"))
# zero.py is no module of every recipe whose image these tests run in.
sys.path[:0] = [str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"), str(ROOT / "entrypoints")]
os.environ["DS_ACCELERATOR"] = "cpu"

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import loop  # noqa: E402, F401  # imported once here, and not in every fork
import models  # noqa: E402
import report  # noqa: E402, F401
import rows  # noqa: E402
import tiny  # noqa: E402
import together  # noqa: E402
import train  # noqa: E402
import zero  # noqa: E402, F401
from prompt import text_of  # noqa: E402
from settings import TaskError  # noqa: E402
from together import same_environment  # noqa: E402, F401
from world import REQUEUE  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
SAMPLE = RECIPE / "data" / "sample.jsonl"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("bases")
    texts = [text_of(row) for row in rows.read_all([rows.Source(str(SAMPLE), 0.0)], seed=0, skip_bad=False).train]
    for kind in ("gpt2", "llama"):
        tiny.make_model(folder / kind, texts, kind)
    return {kind: folder / kind for kind in ("gpt2", "llama")}


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


@pytest.mark.parametrize(
    ("kind", "method", "stage", "offload"),
    [
        ("gpt2", "full", 2, "none"), ("llama", "lora", 2, "optimizer"), ("gpt2", "full", 3, "optimizer"),
        ("llama", "full", 3, "none"), ("llama", "lora", 3, "all"),
    ],
)  # fmt: skip
def test_two_processes_learn_what_one_does(
    kind: str, method: str, stage: Any, offload: Any, bases: dict[str, Path], tmp_path: Path
) -> None:
    """Several packs a step, the head tied to the table and not, weights and optimizer in the host's memory and not."""
    assert fit(settings_of(bases[kind], method=method), tmp_path / "plain") == 0
    spread = train.DeepSpeed(stage=stage, offload=offload)
    changed = settings_of(bases[kind], method=method, parallel="deepspeed", deepspeed=spread)
    said = together.run(2, tmp_path / "log", fit, changed, tmp_path / "zero")
    assert "ninja" not in said and "JIT" not in said  # nothing is compiled while a job runs
    assert losses(tmp_path / "zero") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
    what = "adapter/adapter_model" if method == "lora" else "model/model"
    ours, theirs = (load_file(str(tmp_path / way / f"{what}.safetensors")) for way in ("zero", "plain"))
    assert ours.keys() == theirs.keys()
    for name, part in ours.items():
        torch.testing.assert_close(part, theirs[name], rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize(("stage", "offload"), [(2, "none"), (3, "all")])
def test_a_run_in_two_halves_has_the_same_losses(
    stage: Any, offload: Any, bases: dict[str, Path], tmp_path: Path
) -> None:
    settings = settings_of(
        bases["llama"], method="full", parallel="deepspeed", max_steps=7, epochs=2,
        deepspeed=train.DeepSpeed(stage=stage, offload=offload),
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
    assert 3 <= stopped_at < 7
    together.run(2, tmp_path / "log", fit, settings, tmp_path / "halves")
    assert losses(tmp_path / "halves") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)


def test_too_little_memory_in_the_host_is_said(bases: dict[str, Path], tmp_path: Path) -> None:
    spread = train.DeepSpeed(stage=3, offload="all")

    def work() -> int:
        models.free_ram = lambda: 100_000
        try:
            return fit(
                settings_of(bases["llama"], method="full", parallel="deepspeed", deepspeed=spread), tmp_path / "out"
            )
        except TaskError as error:
            print(f"error: {error}")
            return 7

    assert together.wait(together.start(1, tmp_path / "log", work)) == [7]
    said = Path(f"{tmp_path / 'log'}-0").read_text()
    assert "of this node's own memory would be needed" in said
    assert "GiB of the host's for each" in said
