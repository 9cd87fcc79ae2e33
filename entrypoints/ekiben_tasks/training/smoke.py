"""Test that an image trains: a tiny random model passes all phases of a run."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any, Literal

import peft
import torch
import transformers

from ekiben_tasks.data.schema import INSTRUCTION, DatasetFormat
from ekiben_tasks.distributed.context import init_distributed, shared_scratch
from ekiben_tasks.generation import chat
from ekiben_tasks.generation.settings import ChatSettings
from ekiben_tasks.models import adapter, load, merge, tiny
from ekiben_tasks.models.device import choose_device
from ekiben_tasks.models.lora import Lora
from ekiben_tasks.task.command import check_smoke
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.files import ensure_output_dir
from ekiben_tasks.training.settings import Settings, TrainOptions
from ekiben_tasks.training.train import train

LABELLED, COLOURS = "labelled.jsonl", ("red", "blue")


def smoke_test(settings: Settings, sample: Path, output: Path | None) -> int:
    """Train on the sample rows, check the results, and return 0.

    Raises:
        TaskError: a check failed; the message names it.
    """
    started = time.monotonic()
    load.silence_warnings()
    device: Literal["auto", "cpu"] = settings.device if torch.cuda.is_available() else "cpu"
    world = init_distributed(device)
    if output:
        ensure_output_dir(output)
    with shared_scratch(world, output) as scratch:
        folder = output or scratch / "result"
        classifies = settings.form.kind == "classification"
        # Next to the adapter, whose config names this path.
        base = (output or scratch) / "smoke-base"
        if world.is_main_process:
            if classifies:
                make_classifier_base(base)
            else:
                make_base(base, sample, form=settings.form)
        world.barrier()  # the other processes read it
        sharded = settings.parallel == "deepspeed" or (settings.parallel == "fsdp" and world.size > 1)
        quick = dataclasses.replace(
            Settings(),
            model=str(base),
            data=[str(base / LABELLED if classifies else sample)],
            validation_split=0.1,
            mask_prompt=settings.mask_prompt,
            form=DatasetFormat(kind="classification") if classifies else settings.form,
            method=settings.method,
            max_length=1024,
            lora=Lora(r=8, target_modules=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")),
            epochs=6,
            max_steps=72,
            batch_size=16,
            learning_rate=2e-2,
            warmup_steps=4,
            eval_every=0,
            log_seconds=2,
            compile=False,
            device=device,
            deepspeed=settings.deepspeed,
            parallel=settings.parallel if sharded else "auto",
        )
        if train(quick, sample.parent.parent, folder, TrainOptions(fresh=True, temporary=output is None)) != 0:
            raise TaskError("smoke: interrupted")
        if not world.is_main_process:  # the files of the run are checked once
            return 0
        check_loss_fell(folder)
        if classifies:
            check_classifier(folder, base)
        elif settings.method == "lora":
            check_adapter(folder / "adapter", base, device, scratch / "merged")
        else:
            check_model(folder / "model", base, device)
    print(f"smoke       all passed in {time.monotonic() - started:.0f} s on {device_name(device)}", flush=True)
    return 0


def make_base(folder: Path, sample: Path, *, form: DatasetFormat = INSTRUCTION, **sizes: Any) -> None:
    """Save a random GPT-NeoX and a tokenizer trained on ``sample`` into ``folder``, as a model of the hub is saved.

    Raises:
        TaskError: ``sample`` cannot be read, or an example is invalid.
    """
    tiny.make_model(folder, tiny.sample_texts(sample, form), **sizes)


def make_classifier_base(folder: Path) -> None:
    """Save a random GPT-NeoX into ``folder``, and rows with labels beside it, as LABELLED."""
    examples = [{"text": f"{number:04} {COLOURS[number % 2]}", "label": COLOURS[number % 2]} for number in range(200)]
    tiny.make_model(folder, [example["text"] for example in examples])
    (folder / LABELLED).write_text("".join(json.dumps(example) + "\n" for example in examples), encoding="utf-8")


def check_classifier(folder: Path, base: Path) -> None:
    """Check a trained classifier of make_classifier_base(): transformers or PEFT loads it, and it finds the labels.

    Raises:
        TaskError: a check failed.
    """
    examples = [json.loads(line) for line in (base / LABELLED).read_text(encoding="utf-8").splitlines()]
    weights = folder / ("adapter" if (folder / "adapter").is_dir() else "model")
    if weights.name == "adapter":
        model = peft.AutoPeftModelForSequenceClassification.from_pretrained(weights, num_labels=2)
    else:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(weights)
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    model.config.pad_token_id = tokenizer.pad_token_id
    with torch.inference_mode():
        batch = tokenizer([example["text"] for example in examples], return_tensors="pt", padding=True)
        logits = model.eval().float()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    correct = sum(
        sorted(COLOURS)[index] == example["label"] for index, example in zip(logits.argmax(-1), examples, strict=True)
    )
    check_smoke("the classifier finds the labels", correct > 0.9 * len(examples), f"{correct} of {len(examples)}")


def check_loss_fell(folder: Path) -> None:
    """Check that the mean of the last five losses is below 0.95 of the first five's.

    Raises:
        TaskError: it is not.
    """
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    check_smoke("the loss falls", last < 0.95 * first, f"{first:.3f} to {last:.3f} in {len(losses)} steps")


def check_adapter(folder: Path, base: Path, device: str, merged: Path) -> None:
    """Check a trained adapter: it changes the model, reloads unchanged, answers, and merges into ``merged``.

    Raises:
        TaskError: a check failed.
    """
    check_smoke("the adapter is saved", (folder / "adapter_model.safetensors").is_file(), "adapter_model.safetensors")
    chosen = choose_device(device)
    model, _ = adapter.load_adapter(folder, chosen)
    tokenizer = load.load_tokenizer(str(folder))
    ids = torch.tensor([tokenizer("富士山の高さは?")["input_ids"]], device=chosen.torch_device)
    ours = merge.logits(model, ids)
    with model.disable_adapter():
        check_smoke(
            "the adapter changes the model",
            not torch.equal(ours, merge.logits(model, ids)),
            "logits differ from the base's",
        )
    again, _ = adapter.load_adapter(folder, chosen)
    check_smoke(
        "a reloaded adapter is the same", torch.equal(ours, merge.logits(again, ids)), "logits equal to the last bit"
    )
    answer = chat.answer(model, tokenizer, "日本の首都はどこですか。", "", ChatSettings(max_new_tokens=16))
    check_smoke("chat answers", isinstance(answer, str), f"{len(answer)} characters")
    difference = merge.merge(folder, merged, chosen, base=str(base))
    check_smoke(
        "a merged model is the same", difference < merge.TOLERANCE["float32"], f"logits differ by {difference:.1e}"
    )


def check_model(folder: Path, base: Path, device: str) -> None:
    """Check a completely saved model: it differs from its base, and reloads unchanged.

    Raises:
        TaskError: a check failed.
    """
    chosen = choose_device(device)
    tokenizer = load.load_tokenizer(str(folder))
    ids = torch.tensor([tokenizer("富士山の高さは?")["input_ids"]], device=chosen.torch_device)
    before, after = (load.load_base(str(path), chosen) for path in (base, folder))
    ours = merge.logits(after, ids)
    check_smoke(
        "the model is changed", not torch.equal(ours, merge.logits(before, ids)), "logits differ from the base's"
    )
    again = load.load_base(str(folder), chosen)
    check_smoke(
        "a reloaded model is the same", torch.equal(ours, merge.logits(again, ids)), "logits equal to the last bit"
    )


def device_name(device: str) -> str:
    """Return the name of the device for messages."""
    return "CPU" if device == "cpu" else choose_device(device).name
