"""`train --dry-run --gpus N --on GPU` plans for GPUs that are not here; its exit code says whether the run fits."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

import torch

import train as train_command
from ekiben_tasks.models import flops, memory, tiny
from ekiben_tasks.models.device import named_device
from ekiben_tasks.task.errors import DoesNotFitError, SettingError
from support.multiprocess import same_environment  # noqa: F401
from support.tiny_runs import SAMPLE

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
# Llama-2-7B, of which a plan reads configuration and tokenizer alone.
SIZES = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "7b"
    tiny.make_model(folder, ["a text to make a tokenizer of"], "llama")
    (folder / "model.safetensors").unlink()
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **SIZES}))
    return folder


def plan(llama: Path, output: Path, *options: str) -> int:
    common = ["--dry-run", "--data", str(SAMPLE), "--output", str(output), "--set", f"model={llama}"]
    return train_command.main([*common, *options])


@pytest.mark.parametrize(("gpus", "way"), [(8, "ddp"), (2, "fsdp"), (8, "fsdp")])
def test_plan_of_many_gpus_comes_from_one_process(
    gpus: int, way: str, llama: Path, tmp_path: Path, capsys: Any
) -> None:
    options = ["--gpus", str(gpus), "--on", "H200", "--set", f"parallel={way}", "--set", "method=full"]
    if way == "ddp":
        options += ["--set", "method=lora"]
    assert plan(llama, tmp_path / "out", *options) == 0
    printed = capsys.readouterr().out
    assert f"device      {gpus} x H200 " in printed and "bfloat16" in printed
    assert "of 139.0 GiB free on each" in printed
    assert not (tmp_path / "out").exists()


def test_memory_of_a_gpu_is_that_of_its_share_of_the_examples(llama: Path, tmp_path: Path, capsys: Any) -> None:
    """On an A100 with 40 GB, where so many examples on one GPU need checkpointing and half of them do not."""

    def memory_line(gpus: int, way: str, *settings: str) -> str:
        flags = [flag for setting in (*settings, f"parallel={way}") for flag in ("--set", setting)]
        assert plan(llama, tmp_path / "out", "--gpus", str(gpus), "--on", "A100", *flags) == 0
        line: str = re.findall(r"^memory +(.*)$", capsys.readouterr().out, re.MULTILINE)[0]
        return line.replace(" on each", "")

    on_one_gpu, half, shared = (
        memory_line(gpus, way, f"batch_size={size}")
        for gpus, way, size in ((1, "none", 12), (1, "none", 6), (2, "ddp", 12))
    )
    assert shared == half != on_one_gpu
    assert "checkpointed" in on_one_gpu and "checkpointed" not in shared


def test_exit_code_tells_what_does_not_fit(llama: Path, tmp_path: Path) -> None:
    for options in (["--on", "H100"], ["--gpus", "8", "--on", "NVIDIA A100-SXM4-40GB", "--set", "parallel=ddp"]):
        with pytest.raises(DoesNotFitError, match=r"will not fit; what would: .*parallel=fsdp") as caught:
            plan(llama, tmp_path / "out", *options, "--set", "method=full")
        assert caught.value.exit_code == 3


def test_strategy_of_several_gpus_is_planned_without_a_number(llama: Path, tmp_path: Path, capsys: Any) -> None:
    """As `submit` tries the arguments of a job before it is queued, where no launcher has started processes."""
    assert plan(llama, tmp_path / "out", "--on", "H200", "--set", "parallel=fsdp", "--set", "method=full") == 0
    assert "device      2 x H200 " in capsys.readouterr().out


def test_plan_for_deepspeed_names_the_faster_strategy(llama: Path, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed here")
    options = ["--gpus", "8", "--on", "H200", "--set", "method=full", "--set"]
    assert plan(llama, tmp_path / "out", *options, "parallel=deepspeed") == 0
    assert "note        parallel=fsdp shards as much and is faster" in capsys.readouterr().out
    assert plan(llama, tmp_path / "out", *options, "parallel=fsdp") == 0
    assert "is faster" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dry-run", "--on", "H10O"], "--on H10O: unknown GPU. Did you mean 'H100'"),
        (["--dry-run", "--gpus", "0", "--on", "H100"], "--gpus 0: at least 1 is needed"),
        (["--on", "H100"], "--on H100: is for --dry-run"),
    ],
)
def test_wrong_options_of_a_plan(options: list[str], message: str, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=message):
        train_command.main(
            ["--data", str(SAMPLE), "--output", str(tmp_path / "out"), "--set", f"model={llama}", *options]
        )


def test_memory_of_a_gpu_by_its_name_or_by_the_drivers() -> None:
    assert memory.gpu_memory("h100") == memory.gpu_memory("NVIDIA H100 80GB HBM3") == 79 * memory.GIB
    assert memory.gpu_memory("NVIDIA A100-SXM4-80GB") == 79 * memory.GIB
    assert memory.gpu_memory("NVIDIA A100-SXM4-40GB") == 39 * memory.GIB
    assert memory.gpu_memory("Tesla V100S-PCIE-32GB") == memory.gpu_memory("Tesla V100-PCIE-32GB") == 31 * memory.GIB
    assert memory.gpu_memory("NVIDIA H20") == memory.gpu_memory("NVIDIA GH200 480GB") == 94 * memory.GIB
    for name in flops.PEAKS:  # whose MFU is known, a run can be planned for
        assert memory.gpu_memory(name) > 10 * memory.GIB
    assert {named_device(name).dtype for name in ("Tesla V100S-PCIE-32GB", "V100", "Tesla T4")} == {torch.float16}
