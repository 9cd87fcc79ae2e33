"""Pretraining on a GPU, and on four: what the CPU cannot show. Needs the packages of the pretrain-gpt image.

apptainer exec --nv pretrain-gpt.sif python -m pytest -q qa/gpu/test_pretrain_gpu.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "sentencepiece", "megatron.core"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
import torch

if not torch.cuda.is_available():
    assert not Path("/dev/nvidiactl").exists(), "there is an NVIDIA driver, and this torch sees no GPU"
    pytest.skip("no GPU", allow_module_level=True)
ROOT = Path(__file__).resolve().parent.parent.parent
RECIPE = ROOT / "recipes" / "pretrain-gpt"
SCRIPTS = RECIPE / "entrypoints"
PATHS = os.pathsep.join([str(ROOT / "entrypoints"), str(SCRIPTS)])

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


def run(script: str, *args: str, cwd: Path, gpus: int = 1) -> str:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"] if gpus > 1 else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([PATHS, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, *launch, str(SCRIPTS / script), *args]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    run("train_tokenizer.py", "--data", "sample", "--set", "vocab_size=1500", cwd=folder)
    run("prepare_data.py", "--data", "sample", "--set", "workers=2", cwd=folder)
    return folder


def losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def options(**changes: Any) -> list[str]:
    values = {
        "sequence": 512,
        "batch_size": 16,
        "max_steps": 8,
        "eval_batches": 1,
        "split": "9,1,0",
        "save_every": 4,
        "learning_rate": 1e-3,
        "warmup_tokens": 16384,
        "decay_tokens": 65536,
        **changes,
    }
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


def test_smoke_run_passes_on_the_gpu(tmp_path: Path) -> None:
    assert "all passed" in run("pretrain.py", "--smoke", cwd=tmp_path)


def test_bf16_run_trains_and_resumes(prepared: Path) -> None:
    run("pretrain.py", "--output", "whole", *options(), cwd=prepared)
    found = losses(prepared / "whole")
    assert found[-1] < found[0]
    assert json.loads((prepared / "whole" / "run.json").read_text())["device"]["dtype"] == "bfloat16"
    newest = sorted((prepared / "whole" / "checkpoints").glob("step-*"))[-1]
    (newest / "about.json").unlink()
    assert "resumed" in run("pretrain.py", "--output", "whole", *options(), cwd=prepared)
    assert losses(prepared / "whole") == pytest.approx(found, rel=5e-3)
    assert "logits differ by" in run("convert.py", "--input", "whole", "--output", "converted", cwd=prepared)


@pytest.mark.parametrize(
    ("gpus", "split"),
    [
        (2, {"tensor_parallel": 2}),
        (2, {"pipeline_parallel": 2}),
        (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
        (4, {"tensor_parallel": 2}),
        (4, {}),
    ],
    ids=["tp2", "pp2", "tp2 pp2", "tp2 dp2", "dp4"],
)
def test_several_gpus_train_like_one(gpus: int, split: dict[str, int], prepared: Path) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"fewer than {gpus} GPUs")
    name = f"{gpus}-" + ("-".join(f"{key[0]}{value}" for key, value in split.items()) or "copies")
    run("pretrain.py", "--output", name, *options(precision="fp32", **split), cwd=prepared, gpus=gpus)
    run("pretrain.py", "--output", "one-fp32", *options(precision="fp32"), cwd=prepared)
    assert losses(prepared / name) == pytest.approx(losses(prepared / "one-fp32"), rel=1e-3)
