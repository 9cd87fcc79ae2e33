"""Test that an image scores models: a tiny random one answers the recipe's own tasks, offline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import harness_run
from ekiben_tasks.distributed.context import continue_alone, init_distributed, shared_scratch
from ekiben_tasks.evaluation import frame
from ekiben_tasks.models import load, tiny
from ekiben_tasks.task import input_files
from ekiben_tasks.task.command import check_smoke
from harness_settings import Settings

TASKS = ("capitals", "capitals_written", "capitals_text")


def smoke_test(settings: Settings, samples: Path) -> int:
    """Score a tiny random model, check what a user relies on, and return 0. samples: the recipe's own task files.

    Raises:
        TaskError: a check failed.
    """
    load.silence_warnings()
    device = settings.device if torch.cuda.is_available() else "cpu"
    world = init_distributed(device)
    with shared_scratch(world, None) as folder:
        if world.is_main_process:
            lines = (samples / "capitals.jsonl").read_text(encoding="utf-8").splitlines()
            tiny.make_model(folder / "model", [json.loads(line)["question"] for line in lines], vocabulary=300)
        world.barrier()  # the others read it
        quick = replace(
            Settings(),
            model=str(folder / "model"),
            tasks=TASKS,
            batch_size=4,
            device=device,
            examples=8,
        )

        def score(name: str, **changes: Any) -> dict[str, dict[str, float]]:
            output = folder / name
            harness_run.evaluate(replace(quick, output=str(output), **changes), samples)
            if not world.is_main_process:
                return {}
            scores = input_files.read_object(output / frame.RECORD, "")["scores"]
            check_smoke("every task has scores", set(scores) == set(TASKS))
            return dict(scores)

        first = score("first")
        if not world.is_main_process:  # what several processes answered is checked once
            return 0
        continue_alone()
        single = score("single", batch_size=1)
        check_smoke(
            "a batch gives what single examples give", first["capitals"]["acc,none"] == single["capitals"]["acc,none"]
        )
        bits, other = (each["capitals_text"]["bits_per_byte,none"] for each in (first, single))
        check_smoke("texts are as likely in a batch", abs(bits - other) < 1e-2 * bits, f"{bits:.4f} bits per byte")
    return 0
