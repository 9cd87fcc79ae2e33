"""The proof that an image pretrains: from texts to a converted model that generates and is tuned, in about a minute, offline."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import convert
import prepare_data
import pretrain
import sft
import train
import train_tokenizer
from settings import TaskError


def tiny(data: Path, *, cpu: bool) -> pretrain.Settings:
    """A model of 0.4 M parameters that learns the sample in seconds."""
    tokens = 16 * 128
    return replace(
        pretrain.Settings(), data=str(data), layers=4, width=64, heads=4, sequence=128, batch_size=16, max_steps=30,
        train_tokens=30 * tokens, warmup_tokens=3 * tokens, decay_tokens=30 * tokens, learning_rate=1e-2, split="9,1,0",
        eval_every=0, eval_batches=1, save_every=0, log_seconds=2, device="cpu" if cpu else "auto",
    )  # fmt: skip


def prove(recipe: Path) -> int:
    """Every task in a row, then check what a user relies on. Errors: TaskError, naming the check that failed."""
    import torch

    started = time.monotonic()
    cpu = not torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="ekiben-smoke-") as scratch:
        place = Path(scratch)
        for name in ("tokenizer", "prepared", "pretrained"):
            (place / name).mkdir()
        train_tokenizer.train(train_tokenizer.Settings(vocab_size=1500), ["sample"], recipe, place / "tokenizer")
        prepare_data.prepare(
            prepare_data.Settings(workers=2), ["sample"], recipe, place / "tokenizer", place / "prepared"
        )
        if pretrain.pretrain(tiny(place / "prepared", cpu=cpu), place / "pretrained") != 0:
            raise TaskError("smoke: interrupted")
        lines = [json.loads(line) for line in (place / "pretrained" / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        _passed("the loss falls", losses[-1] < 0.9 * losses[0], f"{losses[0]:.3f} to {losses[-1]:.3f}")
        words = [convert.__file__, "--input", str(place / "pretrained"), "--output", str(place / "converted")]
        _passed("a converted model is the same", subprocess.run([sys.executable, *words]).returncode == 0, "see above")
        _passed("it generates", *generate(place / "converted", "富士山は"))
        _passed("it is tuned on dialogues", *tune(recipe, place / "converted", place / "tuned", cpu=cpu))
    print(f"smoke       all passed in {time.monotonic() - started:.0f} s on {'CPU' if cpu else 'GPU'}", flush=True)
    return 0


def tune(recipe: Path, model: Path, output: Path, *, cpu: bool) -> tuple[bool, str]:
    """(whether the loss fell, how far)."""
    settings = sft.Settings(
        train=replace(
            sft.Settings().train, model=str(model), method="full", max_length=128, test_share=0.1, epochs=4, max_steps=24,
            batch_size=8, learning_rate=5e-3, warmup_steps=2, eval_every=0, log_seconds=2, compile=False,
            device="cpu" if cpu else "auto",
        )
    )  # fmt: skip
    output.mkdir()
    tuned = sft.prepare(settings, [recipe / "data" / "dialogues.jsonl"], output)
    if train.train(tuned, recipe, output) != 0:
        raise TaskError("smoke: interrupted")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    first, last = sum(losses[:4]) / 4, sum(losses[-4:]) / 4
    return last < first and (output / "model" / "model.safetensors").is_file(), f"{first:.3f} to {last:.3f}"


def generate(folder: Path, prompt: str) -> tuple[bool, str]:
    """(whether there is more than the prompt, how much)."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    longer = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return longer.shape[1] > ids.shape[1], f"{longer.shape[1] - ids.shape[1]} tokens after {ids.shape[1]}"


def _passed(what: str, passed: bool, detail: str) -> None:
    if not passed:
        raise TaskError(f"smoke: failed: {what} ({detail})")
    print(f"smoke       {what}: {detail}", flush=True)
