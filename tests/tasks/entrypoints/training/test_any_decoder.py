"""`train` on families that have no file of their own: packed, filled up, and what the plan and the record say of it."""

from __future__ import annotations

import json
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
import transformers

from ekiben_tasks.data.schema import INSTRUCTION
from ekiben_tasks.models import tiny
from ekiben_tasks.models.adapter import load_adapter
from ekiben_tasks.models.device import choose_device
from ekiben_tasks.task.command import DryRun
from ekiben_tasks.training.settings import TrainOptions
from support.multiprocess import same_environment  # noqa: F401
from support.tiny_runs import SAMPLE, fit, small

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128},
    "gemma2": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
    },
    "mamba": {"intermediate_size": 128, "state_size": 8, "time_step_rank": 4},
}


def make(kind: str, folder: Path) -> Path:
    """Save a random model of ``kind``, and a tokenizer."""
    tokenizer = tiny.learn_tokenizer(tiny.sample_texts(SAMPLE, INSTRUCTION), 500)
    tokenizer.save_pretrained(folder)
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        **SIZES[kind],
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "method", "layout"),
    [
        ("qwen3", "lora", "packed"),
        ("gemma2", "last-layer", "packed"),
        ("gemma2", "full", "packed"),
        ("mamba", "lora", "padded"),
    ],
)
def test_a_family_without_a_file_is_trained(
    kind: str, method: Any, layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = small(make(kind, tmp_path / "base"), method=method, max_steps=6, epochs=3, warmup_steps=1)
    assert fit(settings, tmp_path / "plan", options=TrainOptions(dry=DryRun())) == 0
    plan = capsys.readouterr().out
    assert "on a small model the gradient is within" in plan
    assert ("not packed (ekiben_packed): " in plan) == (layout != "packed")
    assert fit(settings, tmp_path / "result") == 0
    record = json.loads((tmp_path / "result" / "run.json").read_text())
    assert record["device"]["layout"]["name"] == layout
    assert record["device"]["layout"]["gradient_difference"] < 1e-4
    lines = [json.loads(line) for line in (tmp_path / "result" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    if method == "lora":
        load_adapter(tmp_path / "result" / "adapter", choose_device("cpu"))
    else:
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "result" / "model")
