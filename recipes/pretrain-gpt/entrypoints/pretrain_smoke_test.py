"""Test that an image pretrains: from texts to a converted, tuned model that generates, in about a minute, offline."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import dialogues
import prepare_data
import pretraining
import train_tokenizer
from ekiben_tasks.task.command import check_smoke
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.training.settings import TrainOptions
from ekiben_tasks.training.train import train


def tiny(data: Path, *, cpu: bool) -> pretraining.Settings:
    """Return settings of a model with 0.4 M parameters that fits the sample in seconds.

    data: what prepare-data wrote.
    """
    tokens = 16 * 128
    return replace(
        pretraining.Settings(),
        data=str(data),
        layers=4,
        width=64,
        heads=4,
        sequence=128,
        batch_size=16,
        max_steps=30,
        train_tokens=30 * tokens,
        warmup_tokens=3 * tokens,
        decay_tokens=30 * tokens,
        learning_rate=1e-2,
        split="9,1,0",
        eval_every=0,
        eval_batches=1,
        save_every=0,
        log_seconds=2,
        device="cpu" if cpu else "auto",
    )


def smoke_test(recipe: Path) -> int:
    """Run all tasks in sequence, check their results, and return 0.

    Raises:
        TaskError: a check failed; the message names it.
    """
    import torch

    from ekiben_tasks.distributed.context import continue_alone, init_distributed, shared_scratch

    started = time.monotonic()
    cpu = not torch.cuda.is_available()
    world = init_distributed("cpu" if cpu else "auto")
    with shared_scratch(world, None) as scratch:
        if world.is_main_process:
            make_data(recipe, scratch)
        world.barrier()  # the other processes read it
        if pretraining.pretrain(tiny(scratch / "prepared", cpu=cpu), scratch / "pretrained") != 0:
            raise TaskError("smoke: interrupted")
        if not world.is_main_process:  # the files of the run are checked once
            return 0
        continue_alone()
        lines = [json.loads(line) for line in (scratch / "pretrained" / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        check_smoke("the loss falls", losses[-1] < 0.9 * losses[0], f"{losses[0]:.3f} to {losses[-1]:.3f}")
        words = [
            str(Path(__file__).with_name("convert.py")),
            "--input",
            str(scratch / "pretrained"),
            "--output",
            str(scratch / "converted"),
        ]
        converted = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, text=True)
        # Without the hint of next commands: the folder is removed.
        print("".join(line for line in converted.stdout.splitlines(True) if not line.startswith("try ")), end="")
        check_smoke("a converted model is the same", converted.returncode == 0, "see above")
        check_smoke("it generates", *generate(scratch / "converted", "富士山は"))
        check_smoke("it is tuned on dialogues", *tune(recipe, scratch / "converted", scratch / "tuned", cpu=cpu))
    print(f"smoke       all passed in {time.monotonic() - started:.0f} s on {'CPU' if cpu else 'GPU'}", flush=True)
    return 0


def make_data(recipe: Path, folder: Path) -> None:
    """Learn a tokenizer of the sample and prepare it, below ``folder``."""
    for name in ("tokenizer", "prepared", "pretrained"):
        (folder / name).mkdir()
    train_tokenizer.train(train_tokenizer.Settings(vocab_size=1500), ["sample"], recipe, folder / "tokenizer")
    prepare_data.prepare(
        prepare_data.Settings(workers=2), ["sample"], recipe, folder / "tokenizer", folder / "prepared"
    )


def tune(recipe: Path, model: Path, output: Path, *, cpu: bool) -> tuple[bool, str]:
    """Fine-tune ``model`` on the sample dialogues, and return (whether the loss fell, how far).

    Raises:
        TaskError: a signal interrupted it.
    """
    settings = dialogues.Settings(
        train=replace(
            dialogues.Settings().train,
            model=str(model),
            method="full",
            max_length=128,
            validation_split=0.1,
            epochs=4,
            max_steps=24,
            batch_size=8,
            learning_rate=5e-3,
            warmup_steps=2,
            eval_every=0,
            log_seconds=2,
            compile=False,
            device="cpu" if cpu else "auto",
        )
    )
    output.mkdir()
    tuned = dialogues.prepare(settings, [recipe / "data" / "dialogues.jsonl"], output)
    if train(tuned, recipe, output, TrainOptions(temporary=True)) != 0:
        raise TaskError("smoke: interrupted")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    first, last = sum(losses[:4]) / 4, sum(losses[-4:]) / 4
    return last < first and (output / "model" / "model.safetensors").is_file(), f"{first:.3f} to {last:.3f}"


def generate(folder: Path, prompt: str) -> tuple[bool, str]:
    """Generate after ``prompt``, and return (whether there is more than the prompt, how much)."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    longer = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return longer.shape[1] > ids.shape[1], f"{longer.shape[1] - ids.shape[1]} tokens after {ids.shape[1]}"
