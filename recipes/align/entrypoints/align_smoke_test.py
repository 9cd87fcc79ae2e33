"""Test that an image aligns: a tiny random model learns a preference, offline."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import align_models
import align_run
import align_settings
import preferences
from ekiben_tasks.data.sources import Source
from ekiben_tasks.distributed.context import continue_alone, init_distributed, shared_scratch
from ekiben_tasks.models import tiny
from ekiben_tasks.models.adapter import load_ready
from ekiben_tasks.models.device import choose_device
from ekiben_tasks.models.lora import Lora
from ekiben_tasks.task.command import check_smoke
from ekiben_tasks.task.errors import TaskError

# What has to rise, as TRL names it.
_RISES = {
    "dpo": "rewards/margins",
    "orpo": "rewards/margins",
    "kto": "rewards/chosen",
    "reward": "margin",
    "grpo": "reward",
}


def smoke_test(settings: align_settings.Settings, sample: Path) -> int:
    """Train on the sample, check what a user relies on, and return 0.

    Raises:
        TaskError: a check failed.
    """
    started = time.monotonic()
    device = settings.device if torch.cuda.is_available() else "cpu"
    world = init_distributed(device)
    with shared_scratch(world, None) as folder:
        if world.is_main_process:
            items = preferences.read([Source(str(sample))], settings.DATA, skip=False).items
            texts = [text for item in items for text in item.values() if isinstance(text, str)]
            tiny.make_model(folder / "model", texts)
        world.barrier()  # the others read it
        quick = replace(
            settings,
            model=str(folder / "model"),
            lora=Lora(r=8, target_modules="all-linear"),
            max_steps=12,
            batch_size=8 * world.size,
            micro_batch=8,
            learning_rate=5e-3,
            schedule="constant",
            warmup_steps=0,
            max_length=256,
            log_steps=1,
            bits=16,
            device=device,
        )
        if isinstance(quick, align_settings.GrpoSettings):
            quick = replace(
                quick, num_generations=8, max_new_tokens=16, micro_batch=32, batch_size=32 * world.size, max_steps=20
            )
        output = folder / "result"
        if align_run.run(align_run.Request(quick, [Source(str(sample))], output)) != 0:
            raise TaskError("smoke: interrupted")
        if not world.is_main_process:  # what several processes trained is checked once
            return 0
        continue_alone()
        check_run(quick, output)
    print(f"smoke       all passed in {time.monotonic() - started:.0f} s", flush=True)
    return 0


def check_run(settings: align_settings.Settings, output: Path) -> None:
    """Check that the preference moved in the right direction, and that what was written loads.

    Raises:
        TaskError: a check failed.
    """
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    name = _RISES[settings.NAME]
    values = [line[name] for line in lines if name in line]
    first, last = sum(values[:3]) / 3, sum(values[-3:]) / 3
    check_smoke(f"{name} rises", last > first, f"{first:.3f} to {last:.3f} in {len(lines)} steps")
    device = choose_device(settings.device)
    folder = output / ("adapter" if settings.method == "lora" else "model")
    model: Any
    if settings.NAME == "reward":
        model = align_models.load_reward(str(folder), device)
    elif settings.method == "lora":
        model, _ = load_ready("", str(folder), device)
    else:
        model, _ = load_ready(str(folder), "", device)
    ids = torch.tensor([[5, 6, 7]], device=device.torch_device)
    with torch.no_grad():
        check_smoke("what is written loads", bool(torch.isfinite(model(input_ids=ids).logits).all()))
