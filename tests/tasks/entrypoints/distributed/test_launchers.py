"""Whoever starts the processes of a task, it does the same: torchrun, accelerate, the project's own launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("torch", "transformers", "peft", "accelerate"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
RECIPE = Path(os.environ.get("EKIBEN_RECIPE", ROOT / "recipes" / "lora-opencalm"))
ENTRYPOINTS = Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"
sys.path[:0] = [str(ENTRYPOINTS)]

from ekiben_tasks.training import smoke
from support import forkserver
from support.ports import free_port

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
SAMPLE = RECIPE / "data" / "sample.jsonl"
STEPS = 4


def launcher(name: str) -> list[str]:
    """The words before the task's script: two processes on the CPU."""
    if name == "torchrun":
        return ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    if name == "accelerate":
        return [
            "-m",
            "accelerate.commands.launch",
            "--multi_gpu",
            "--num_processes",
            "2",
            "--num_machines",
            "1",
            "--num_cpu_threads_per_process",
            "1",
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
            "--main_process_port",
            str(free_port()),
        ]
    return [str(ENTRYPOINTS / "launch_node.py"), "--processes", "2", "--", forkserver.python()]


def train_by(argv: list[str], base: Path, output: Path) -> dict[str, list[float]]:
    """Losses by kind."""
    settings = {
        "model": base,
        "max_steps": STEPS,
        "batch_size": 8,
        "max_length": 512,
        "eval_every": 0,
        "device": "cpu",
        "learning_rate": 0.01,
        "lora.dropout": 0,
        "validation_split": 0.1,
    }
    task = [str(ENTRYPOINTS / "train.py"), "--data", str(SAMPLE), "--output", str(output)]
    task += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    keep = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in keep}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(output.parent / "hub"),
    }
    command = [forkserver.python(), "-W", "ignore", *argv, *task]
    done = subprocess.run(command, cwd=output.parent, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {kind: [line[kind] for line in lines if kind in line] for kind in ("loss", "eval_loss")}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    smoke.make_base(folder, SAMPLE)
    return folder


@pytest.fixture(scope="module")
def alone(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    return train_by([], base, tmp_path_factory.mktemp("alone") / "out")


@pytest.mark.parametrize("name", ["torchrun", "accelerate", "launch_node"])
def test_two_processes_of_any_launcher_train_like_one(
    name: str, base: Path, alone: dict[str, list[float]], tmp_path: Path
) -> None:
    found = train_by(launcher(name), base, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "run.json").read_text())["device"]["count"] == 2
    assert len(found["loss"]) == STEPS
    for kind, losses in alone.items():
        assert found[kind] == pytest.approx(losses, rel=1e-5), kind
