"""Test jsquad and perplexity: a tiny random model, offline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from ekiben_tasks.data.schema import DatasetFormat
from ekiben_tasks.data.sources import Source
from ekiben_tasks.distributed.context import DistributedContext, continue_alone, init_distributed, shared_scratch
from ekiben_tasks.evaluation import frame, perplexity, squad
from ekiben_tasks.evaluation.settings import PerplexitySettings, SquadSettings
from ekiben_tasks.models import load, tiny
from ekiben_tasks.task import input_files
from ekiben_tasks.task.command import check_smoke

_ADVICE = "build the image again"


def smoke_squad(settings: SquadSettings, sample: Path) -> int:
    """Answer the questions of ``sample`` with a tiny random model, check what a user relies on, and return 0.

    Raises:
        TaskError: a check failed.
    """
    questions = squad.read_questions(sample)
    perfect = squad.score(questions, [question.answers[-1] for question in questions])
    check_smoke("right answers score 100", perfect["exact_match"] == perfect["f1"] == 100)
    template = DatasetFormat("template", "{context}\n{question}\n", "{answers[0]}")
    with _tiny_model([question.question for question in questions]) as (folder, world):
        quick = SquadSettings(
            model=str(folder / "model"),
            form=settings.form if settings.form.kind == "template" else template,
            examples=6,
            max_new_tokens=8,
            device=_device(),
        )
        squad.evaluate(replace(quick, output=str(folder / "first")), sample)
        if not world.is_main_process:  # what several processes answered is checked once
            return 0
        continue_alone()
        squad.evaluate(replace(quick, output=str(folder / "single"), batch_size=1), sample)
        first, single = (_scores(folder / name)["jsquad"] for name in ("first", "single"))
        check_smoke("every question is scored", first["questions"] == 6)
        check_smoke("a batch gives what single questions give", first == single, f"F1 {first['f1']:.1f}")
    return 0


def smoke_perplexity(settings: PerplexitySettings, sample: Path) -> int:
    """Measure the texts of ``sample`` with a tiny random model, check what a user relies on, and return 0.

    Raises:
        TaskError: a check failed.
    """
    lines = [line for _, line in input_files.read_lines(sample, _ADVICE)]
    with _tiny_model([json.loads(line)["text"] for line in lines]) as (folder, world):
        quick = PerplexitySettings(model=str(folder / "model"), device=_device(), max_length=32)
        sources = [Source(str(sample))]
        perplexity.evaluate(replace(quick, output=str(folder / "first")), sources)
        if not world.is_main_process:  # what several processes measured is checked once
            return 0
        continue_alone()
        perplexity.evaluate(replace(quick, output=str(folder / "single"), batch_size=1), sources)
        first, single = (_scores(folder / name)["texts"] for name in ("first", "single"))
        check_smoke("every token is counted once", first["tokens"] == single["tokens"], f"{first['tokens']} tokens")
        loss = first["loss"]
        check_smoke("a batch gives what single texts give", abs(loss - single["loss"]) < 1e-2 * loss, f"{loss:.4f}")
    return 0


@contextmanager
def _tiny_model(texts: list[str]) -> Iterator[tuple[Path, DistributedContext]]:
    """Yield (a folder that all processes see, with a tiny random model in it, the processes)."""
    load.silence_warnings()
    world = init_distributed(_device())
    with shared_scratch(world, None) as folder:
        if world.is_main_process:
            tiny.make_model(folder / "model", texts, vocabulary=400)
        world.barrier()  # the others read it
        yield folder, world


def _scores(output: Path) -> dict[str, Any]:
    scores: dict[str, Any] = input_files.read_object(output / frame.RECORD, _ADVICE)["scores"]
    return scores


def _device() -> Literal["auto", "cpu"]:
    return "auto" if torch.cuda.is_available() else "cpu"
