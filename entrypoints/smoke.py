"""The proof that an image trains: a tiny random model, made on the spot, goes through everything a real one does."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch

import chat
import merge
import models
import tiny
import train
from forms import INSTRUCTION, Form
from prompt import text_of
from rows import Source, read_all
from settings import TaskError
from train import Lora, Settings


def prove(settings: Settings, sample: Path, output: Path | None) -> int:
    """Train on the sample rows, then check what a user relies on. Errors: TaskError, naming the check that failed."""
    started = time.monotonic()
    models.quieten()
    device: Literal["auto", "cpu"] = "auto" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(prefix="ekiben-smoke-") as scratch:
        folder = output or Path(scratch) / "result"
        base = Path(scratch) / "base"
        make_base(base, sample, form=settings.form)
        tiny = dataclasses.replace(
            Settings(), model=str(base), data=[str(sample)], test_share=0.1, mask_prompt=settings.mask_prompt,
            form=settings.form, method=settings.method,
            max_length=1024, lora=Lora(r=8, target_modules=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")),
            epochs=6, max_steps=72, batch_size=16, learning_rate=2e-2, warmup_steps=4,
            eval_every=0, log_seconds=2, compile=False, device=device, deepspeed=settings.deepspeed,
            parallel="deepspeed" if settings.parallel == "deepspeed" else "auto",
        )  # fmt: skip
        if train.train(tiny, sample.parent.parent, folder, fresh=True) != 0:
            raise TaskError("smoke: interrupted")
        check_loss_fell(folder)
        if settings.method == "lora":
            check_adapter(folder / "adapter", base, device, Path(scratch) / "merged")
        else:
            check_model(folder / "model", base, device)
    print(f"smoke       all passed in {time.monotonic() - started:.0f} s on {device_name(device)}", flush=True)
    return 0


def make_base(folder: Path, sample: Path, *, form: Form = INSTRUCTION, **sizes: Any) -> None:
    """A random GPT-NeoX with a tokenizer learnt from the sample, saved as a hub model would be."""
    rows = read_all([Source(str(sample), 0.0)], seed=0, skip_bad=False, form=form).train
    tiny.make_model(folder, [text_of(row) for row in rows], **sizes)


def check_loss_fell(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    _passed("the loss falls", last < 0.95 * first, f"{first:.3f} to {last:.3f} in {len(losses)} steps")


def check_adapter(folder: Path, base: Path, device: str, merged: Path) -> None:
    _passed("the adapter is saved", (folder / "adapter_model.safetensors").is_file(), "adapter_model.safetensors")
    chosen = models.choose_device(device)
    model, _ = models.load_adapter(folder, chosen)
    tokenizer = models.load_tokenizer(str(folder))
    ids = torch.tensor([tokenizer("富士山の高さは?")["input_ids"]], device=chosen.place)
    ours = merge.logits(model, ids)
    with model.disable_adapter():
        _passed(
            "the adapter changes the model",
            not torch.equal(ours, merge.logits(model, ids)),
            "logits differ from the base's",
        )
    again, _ = models.load_adapter(folder, chosen)
    _passed(
        "a reloaded adapter is the same", torch.equal(ours, merge.logits(again, ids)), "logits equal to the last bit"
    )
    answer = chat.answer(model, tokenizer, "日本の首都はどこですか。", "", chat.Settings(max_new_tokens=16))
    _passed("chat answers", isinstance(answer, str), f"{len(answer)} characters")
    difference = merge.merge(folder, merged, chosen, base=str(base))
    _passed("a merged model is the same", difference < merge.TOLERANCE["float32"], f"logits differ by {difference:.1e}")


def check_model(folder: Path, base: Path, device: str) -> None:
    chosen = models.choose_device(device)
    tokenizer = models.load_tokenizer(str(folder))
    ids = torch.tensor([tokenizer("富士山の高さは?")["input_ids"]], device=chosen.place)
    before, after = (models.load_base(str(place), chosen) for place in (base, folder))
    ours = merge.logits(after, ids)
    _passed("the model is changed", not torch.equal(ours, merge.logits(before, ids)), "logits differ from the base's")
    again = models.load_base(str(folder), chosen)
    _passed("a reloaded model is the same", torch.equal(ours, merge.logits(again, ids)), "logits equal to the last bit")


def device_name(device: str) -> str:
    return "CPU" if device == "cpu" else models.choose_device(device).name


def _passed(what: str, passed: bool, detail: str) -> None:
    if not passed:
        raise TaskError(f"smoke: failed: {what} ({detail})")
    print(f"smoke       {what}: {detail}", flush=True)
