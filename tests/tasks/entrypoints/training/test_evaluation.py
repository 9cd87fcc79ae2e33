"""Evaluations stop a run early, choose its result, and show answers; noise on embeddings is transformers' own."""

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
from transformers import AutoModelForCausalLM
from transformers.integrations import neftune

from ekiben_tasks.data.sources import parse_sources
from ekiben_tasks.models.adapter import load_adapter
from ekiben_tasks.models.device import choose_device
from ekiben_tasks.models.lora import Lora
from ekiben_tasks.task.errors import SettingError, TaskError
from ekiben_tasks.training.prepare import prepare_data
from ekiben_tasks.training.samples import MAX_NEW_TOKENS
from ekiben_tasks.training.settings import check
from support import multiprocess
from support.multiprocess import same_environment  # noqa: F401
from support.tiny_runs import base, fit, metrics, small, tokenizer  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
# A few rows that are learnt by heart: the loss of the others rises soon.
OVERFITTING: dict[str, Any] = {
    "validation_split": 0.9,
    "max_length": 100,
    "batch_size": 16,
    "epochs": 30,
    "schedule": "constant",
    "warmup_steps": 0,
    "learning_rate": 1e-2,
    "eval_every": 1,
    "save_total_limit": 1,
}


def eval_losses(output: Path) -> list[float]:
    return [line["eval_loss"] for line in metrics(output) if "eval_loss" in line]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_run_stops_early_and_returns_its_best(method: str, base: Path, tmp_path: Path, capsys: Any) -> None:
    settings = {**OVERFITTING, "method": method, "early_stopping_patience": 2, "load_best_model_at_end": True}
    settings["learning_rate"] = 1e-2 if method == "full" else 5e-2
    settings["lora"] = Lora(r=16, dropout=0.0, target_modules="all-linear")
    assert fit(small(base, **settings), tmp_path / "run") == 0
    losses = eval_losses(tmp_path / "run")
    best = losses.index(min(losses)) + 1
    # As transformers' EarlyStoppingCallback counts: two evaluations in a row without a new minimum.
    waits = [step - losses.index(min(losses[:step])) - 1 for step in range(1, len(losses) + 1)]
    assert 1 < best == len(losses) - 2 and max(waits[:-1]) < 2 == waits[-1]
    assert f"2 evaluations have had no lower loss since step {best}" in capsys.readouterr().out
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["best_step"], record["best_eval_loss"], record["steps"]) == (best, min(losses), len(losses))
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == [f"step-{best:06d}", f"step-{len(losses):06d}"]
    product = (
        {"adapter": str(tmp_path / "run" / "adapter")}
        if method == "lora"
        else {"model": str(tmp_path / "run" / "model")}
    )
    again = {**OVERFITTING, "method": method, "learning_rate": 1e-12, "max_steps": 1}
    assert fit(small(base, **{**again, **product}), tmp_path / "again") == 0
    assert eval_losses(tmp_path / "again")[-1] == pytest.approx(min(losses), rel=1e-6)


def test_resumed_run_remembers_its_best(base: Path, tmp_path: Path) -> None:
    settings = {**OVERFITTING, "method": "full", "early_stopping_patience": 2, "load_best_model_at_end": True}
    assert fit(small(base, **settings), tmp_path / "straight") == 0
    steps = len(eval_losses(tmp_path / "straight"))
    assert fit(small(base, **settings, max_steps=steps - 1), tmp_path / "stopped") == 0
    assert fit(small(base, **settings), tmp_path / "stopped") == 0
    records = [json.loads((tmp_path / name / "run.json").read_text()) for name in ("straight", "stopped")]
    assert records[0]["best_step"] == records[1]["best_step"] == steps - 2
    assert records[0]["steps"] == records[1]["steps"] == steps
    straight, stopped = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "model").state_dict() for name in ("straight", "stopped")
    )
    assert all(torch.equal(straight[name], stopped[name]) for name in straight)


@pytest.mark.parametrize("way", ["none", "ddp", "fsdp"])
def test_answers_are_those_of_generate(way: str, base: Path, tokenizer: Any, tmp_path: Path) -> None:
    settings = small(base, max_steps=3, eval_every=2, sample_answers=3, lora=Lora(dropout=0.0), parallel=way)
    if way == "none":
        assert fit(settings, tmp_path / "run") == 0
    else:
        assert multiprocess.wait(multiprocess.start(2, tmp_path / "log", fit, settings, tmp_path / "run")) == [0, 0]
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 2, 2, 3, 3, 3]
    data = prepare_data(settings, parse_sources(settings.data, 0.1), tokenizer, 10_000, False)
    model, _ = load_adapter(tmp_path / "run" / "adapter", choose_device("cpu"))
    for line, example in zip(lines[3:], data.test, strict=False):
        ids = torch.tensor(example.ids[None, : example.targets[0][0]], dtype=torch.int64)
        theirs = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_NEW_TOKENS, pad_token_id=0
        )
        assert line["answer"] == tokenizer.decode(theirs[0, len(ids[0]) :], skip_special_tokens=True)
        assert line["expected"] == tokenizer.decode(example.ids[len(ids[0]) :], skip_special_tokens=True)


def test_noise_on_embeddings_is_that_of_transformers(base: Path, tokenizer: Any, tmp_path: Path) -> None:
    example_item = {"instruction": "日本の首都はどこですか。", "output": "東京です。"}
    (tmp_path / "one.jsonl").write_text(json.dumps(example_item) + "\n")
    settings = small(
        base,
        data=[str(tmp_path / "one.jsonl")],
        validation_split=0.0,
        method="full",
        batch_size=1,
        epochs=3,
        learning_rate=1e-3,
        schedule="constant",
        warmup_steps=0,
        max_grad_norm=0.0,
        neftune_noise_alpha=5.0,
    )
    assert fit(settings, tmp_path / "run") == 0
    ours = [line["loss"] for line in metrics(tmp_path / "run") if "loss" in line]
    (example,) = prepare_data(settings, parse_sources(settings.data, 0.0), tokenizer, 10_000, False).train
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).train()
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    model.get_input_embeddings().register_forward_hook(neftune.neftune_post_forward_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    ids = torch.tensor(example.ids[None], dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    labels[0, example.target_positions] = ids[0, example.target_positions]
    theirs = []
    for step in range(3):
        torch.manual_seed((settings.seed * 1_000_003 + step) * 1021)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(loss.item())
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert fit(small(base, max_steps=1), tmp_path / "quiet") == fit(
        small(base, max_steps=1, neftune_noise_alpha=5.0), tmp_path / "noisy"
    )
    first, second = (metrics(tmp_path / name)[0]["loss"] for name in ("quiet", "noisy"))
    assert first != second


@pytest.mark.parametrize("name", ["early_stopping_patience", "load_best_model_at_end", "sample_answers"])
def test_evaluations_that_cannot_be_are_refused(name: str, base: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=f"setting {name}: there are no rows for evaluation"):
        fit(small(base, validation_split=0.0, eval_every=1, **{name: 1}), tmp_path)
    if name != "sample_answers":
        with pytest.raises(SettingError, match="setting eval_every=0"):
            check(small(base, eval_every=0, **{name: 1}))
