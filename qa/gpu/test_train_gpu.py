"""What only a GPU can show: its kernels, its number formats, its compiler.

python3 -m pytest -q qa/gpu/test_train_gpu.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
import numpy as np
import torch

if not torch.cuda.is_available():
    assert not Path("/dev/nvidiactl").exists(), "there is an NVIDIA driver, and this torch sees no GPU"
    pytest.skip("no GPU", allow_module_level=True)
ROOT = Path(__file__).resolve().parent.parent.parent
RECIPE = Path(os.environ.get("EKIBEN_RECIPE", ROOT / "recipes" / "lora-opencalm"))
ENTRYPOINTS = Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"
SAMPLE = RECIPE / "data" / "sample.jsonl"
sys.path.insert(0, str(ENTRYPOINTS))
from ekiben_tasks.data import packing, sources
from ekiben_tasks.data.tokenize import Example, encode_examples
from ekiben_tasks.models import attention, load
from ekiben_tasks.models import device as device_module
from ekiben_tasks.models.lora import Lora
from ekiben_tasks.models.tuning import LossModule, apply_tuning_method
from ekiben_tasks.training import run, smoke, train

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 80, as OpenCALM-3B has them: no power of two, which some kernels pad."""
    folder = tmp_path_factory.mktemp("base")
    smoke.make_base(folder, SAMPLE, layers=3, width=320, vocabulary=1000)
    return folder


def losses_of(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def small(base: Path, **changes: Any) -> train.Settings:
    values: dict[str, Any] = {
        "model": str(base),
        "data": [str(SAMPLE)],
        "validation_split": 0.1,
        "max_length": 512,
        "learning_rate": 1e-3,
        "log_seconds": 0.0,
        "eval_every": 3,
        "epochs": 2,
        "lora": Lora(dropout=0.0),
    }
    return train.Settings(**{**values, **changes})


def test_smoke_run_passes_on_the_gpu(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ENTRYPOINTS / "train.py"),
        "--config",
        str(RECIPE / "configs" / "train.yaml"),
        "--smoke",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.cuda.get_device_name() in done.stdout
    assert "all passed" in done.stdout


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("even", [False, True], ids=["mixed", "even"])
def test_packed_bf16_agrees_with_fp32_on_the_cpu(base: Path, method: str, even: bool) -> None:
    """The kernels for packed rows against row by row on the CPU: loss, and the direction of the gradient."""
    settings = small(base, method=method)
    gpu, cpu = device_module.choose_device("auto"), device_module.choose_device("cpu")
    assert gpu.dtype == torch.bfloat16
    found = {}
    for device in (gpu, cpu):
        tokenizer = load.load_tokenizer(str(base))
        read = sources.read_all([sources.Source(str(SAMPLE), 0.0)], seed=0, skip_bad=False)
        examples = encode_examples(tokenizer, read.train[:24])
        if even:
            ids = np.concatenate([example.ids for example in examples])
            examples = [Example(ids[start : start + 256], ((0, 256),)) for start in range(0, 1024, 256)]
        model = apply_tuning_method(load.load_base(str(base), device, attention.ATTENTION), settings)
        pack = packing.pack(examples).to(device.torch_device)
        loss = LossModule(model, device.dtype)(pack)
        (loss / len(pack.labels)).backward()
        gradients = [p.grad.float().cpu().flatten() for p in model.parameters() if p.grad is not None]
        found[device.torch_device.type] = (loss.item() / len(pack.labels), torch.cat(gradients))
    assert found["cuda"][0] == pytest.approx(found["cpu"][0], rel=5e-3)
    assert torch.nn.functional.cosine_similarity(found["cuda"][1], found["cpu"][1], dim=0) > 0.99


def test_compiled_blocks_keep_the_losses(base: Path, tmp_path: Path) -> None:
    assert device_module.compiler_missing() is None
    assert train.train(small(base, compile=False), RECIPE, tmp_path / "eager") == 0
    assert train.train(small(base, compile=True), RECIPE, tmp_path / "compiled") == 0
    assert losses_of(tmp_path / "compiled") == pytest.approx(losses_of(tmp_path / "eager"), rel=5e-3)


def test_resumed_run_has_the_same_losses(base: Path, tmp_path: Path) -> None:
    settings = small(base, lora=Lora(dropout=0.05))
    assert train.train(settings, RECIPE, tmp_path / "whole") == 0
    assert train.train(settings, RECIPE, tmp_path / "halves") == 0
    # Back to the end of the first epoch, as if the machine had died in the second.
    newest = sorted((tmp_path / "halves" / "checkpoints").iterdir())[-1]
    (newest / "state.pt").unlink()
    assert train.train(settings, RECIPE, tmp_path / "halves") == 0
    assert losses_of(tmp_path / "halves") == pytest.approx(losses_of(tmp_path / "whole"), rel=2e-3)


def test_fp16_trains(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a T4 gets: fp16 with a scaled loss."""
    chosen = device_module.choose_device("auto")
    monkeypatch.setattr(run, "choose_device", lambda *_: replace(chosen, dtype=torch.float16))
    assert train.train(small(base, epochs=4, learning_rate=1e-2), RECIPE, tmp_path) == 0
    found = losses_of(tmp_path)
    assert sum(found[-4:]) < sum(found[:4])
    assert json.loads((tmp_path / "run.json").read_text())["device"]["dtype"] == "float16"


def test_out_of_memory_shrinks_micro_batches(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The limit is set between what the whole step and half of it need."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    settings = small(base, max_steps=2, batch_size=187)
    torch.cuda.reset_peak_memory_stats()
    assert train.train(settings, RECIPE, tmp_path / "free") == 0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.75 * peak / total)
    try:
        assert train.train(settings, RECIPE, tmp_path / "tight") == 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "out of GPU memory: continuing with packs" in capsys.readouterr().out
    assert losses_of(tmp_path / "tight") == pytest.approx(losses_of(tmp_path / "free"), rel=5e-3)


def test_chat_and_merge_on_the_gpu(base: Path, tmp_path: Path) -> None:
    import chat
    import merge

    assert train.train(small(base, max_steps=2), RECIPE, tmp_path / "run") == 0
    adapter = str(tmp_path / "run" / "adapter")
    assert chat.main(["--adapter", adapter, "--set", "max_new_tokens=8", "空は?"]) == 0
    assert merge.main(["--adapter", adapter, "--output", str(tmp_path / "merged"), "--set", "device=auto"]) == 0


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo", "gpt_neox", "falcon", "mpt", "llama"])
@pytest.mark.parametrize("method", ["lora", "full", "last-layer"])
def test_every_architecture_trains(kind: str, method: str, tmp_path: Path) -> None:
    smoke.make_base(tmp_path / "base", SAMPLE, kind=kind, width=128)
    lora = Lora(dropout=0.0, target_modules="auto")
    assert (
        train.train(small(tmp_path / "base", method=method, lora=lora, learning_rate=1e-2), RECIPE, tmp_path / "run")
        == 0
    )
    found = losses_of(tmp_path / "run")
    assert sum(found[-4:]) < sum(found[:4])


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_weights_train(bits: int, base: Path, tmp_path: Path) -> None:
    assert train.train(small(base, bits=bits, learning_rate=1e-2, epochs=4), RECIPE, tmp_path) == 0
    found = losses_of(tmp_path)
    assert sum(found[-4:]) < sum(found[:4])


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_several_gpus_train_like_one(way: str, method: str, base: Path, tmp_path: Path) -> None:
    gpus = min(torch.cuda.device_count(), 4)
    if gpus < 2:
        pytest.skip("one GPU")
    values = {
        "model": base,
        "validation_split": 0.1,
        "max_length": 512,
        "learning_rate": 1e-3,
        "log_seconds": 0,
        "epochs": 2,
        "eval_every": 3,
        "lora.dropout": 0,
        "method": method,
    }
    command = [sys.executable, str(ENTRYPOINTS / "train.py"), "--data", str(SAMPLE), "--output", str(tmp_path / "many")]
    command += ["--gpus", str(gpus), *(f"--set={name}={value}" for name, value in {**values, "parallel": way}.items())]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert train.train(small(base, method=method), RECIPE, tmp_path / "one") == 0
    assert losses_of(tmp_path / "many") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-2)


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("way", ["none", "ddp", "fsdp"])
def test_stopped_run_is_resumed(way: str, method: str, base: Path, tmp_path: Path) -> None:
    gpus = 1 if way == "none" else 2
    if torch.cuda.device_count() < gpus:
        pytest.skip("one GPU")
    values = {
        "model": base,
        "validation_split": 0.1,
        "max_length": 512,
        "learning_rate": 1e-3,
        "log_seconds": 0,
        "epochs": 20,
        "lora.dropout": 0,
        "method": method,
    }
    values |= {"parallel": way} if gpus > 1 else {}

    def run(output: str, stop_at: str = "") -> tuple[int, str]:
        command = [
            sys.executable,
            str(ENTRYPOINTS / "train.py"),
            "--data",
            str(SAMPLE),
            "--output",
            output,
            "--gpus",
            str(gpus),
        ]
        command += [f"--set={name}={value}" for name, value in values.items()]
        lines = []
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if stop_at and stop_at in line:
                    process.send_signal(signal.SIGTERM)
        return process.returncode, "".join(lines)

    code, printed = run("whole")
    assert code == 0, printed
    code, printed = run("stopped", stop_at="step 5/")
    assert code == 75, printed
    code, printed = run("stopped")
    assert code == 0, printed
    assert "resumed" in printed
    assert losses_of(tmp_path / "stopped") == pytest.approx(losses_of(tmp_path / "whole"), rel=2e-2)


def test_deepspeed_trains_like_the_plain_loop(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="this image has no DeepSpeed")
    assert train.train(small(base, method="full"), RECIPE, tmp_path / "plain") == 0
    for stage in (2, 3):
        output = tmp_path / f"zero{stage}"
        command = [sys.executable, str(ENTRYPOINTS / "train.py"), "--data", str(SAMPLE), "--output", str(output)]
        values = {
            "model": base,
            "validation_split": 0.1,
            "max_length": 512,
            "learning_rate": 1e-3,
            "log_seconds": 0,
            "epochs": 2,
            "eval_every": 3,
            "method": "full",
            "parallel": "deepspeed",
            "deepspeed.stage": stage,
        }
        command += [f"--set={name}={value}" for name, value in values.items()]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert losses_of(output) == pytest.approx(losses_of(tmp_path / "plain"), rel=1e-2)
