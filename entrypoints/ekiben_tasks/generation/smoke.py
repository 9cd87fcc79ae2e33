"""Test chat and generate: a tiny random model answers, offline."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from ekiben_tasks.data.sources import Source
from ekiben_tasks.data.tokenize import apply_format
from ekiben_tasks.distributed.context import continue_alone, init_distributed, shared_scratch
from ekiben_tasks.generation.batch import choose_examples, generate
from ekiben_tasks.generation.chat import answer
from ekiben_tasks.generation.settings import ChatSettings, GenerateSettings
from ekiben_tasks.models import load, tiny
from ekiben_tasks.models.adapter import load_ready
from ekiben_tasks.models.device import choose_device
from ekiben_tasks.task import input_files
from ekiben_tasks.task.command import check_smoke
from ekiben_tasks.task.errors import TaskError


def smoke_chat(settings: ChatSettings, sample: Path) -> int:
    """Ask a tiny random model, check its answers, and return 0.

    sample: the JSONL file whose lines its tokenizer is trained on, whatever their columns are.

    Raises:
        TaskError: a check failed.
    """
    load.silence_warnings()
    lines = [input_files.decode(line) for _, line in input_files.read_lines(sample, "build the image again")]
    with tempfile.TemporaryDirectory(prefix="ekiben-smoke-") as scratch:
        tiny.make_model(Path(scratch), lines, "llama")
        model, tokenizer = load_ready(scratch, "", choose_device(_device()))
    form = apply_format(tokenizer, settings.form)
    greedy = replace(settings, temperature=0.0, max_new_tokens=16)
    sampled = replace(greedy, temperature=1.0)

    def ask(question: str, settings: ChatSettings = greedy) -> str:
        return answer(model, tokenizer, question, "", settings)

    first = ask("日本で一番高い山は?")
    check_smoke(f"it answers ({form})", bool(first))
    check_smoke("greedy answers repeat", ask("日本で一番高い山は?") == first)
    check_smoke("another question has another answer", ask("名物は何ですか。") != first)
    check_smoke("sampling is on", len({ask("山は?", sampled) for _ in range(4)}) > 1)
    return 0


def smoke_generate(settings: GenerateSettings, sample: Path) -> int:
    """Answer ``sample`` with a tiny random model, check the output, and return 0.

    Raises:
        TaskError: a check failed.
    """
    load.silence_warnings()
    texts = tiny.sample_texts(sample, settings.form)
    world = init_distributed(_device())
    with shared_scratch(world, None) as folder:
        if world.is_main_process:
            tiny.make_model(folder / "model", texts)
        world.barrier()  # the other processes read it
        quick = replace(
            settings,
            model=str(folder / "model"),
            adapter="",
            examples=12,
            max_new_tokens=12,
            batch_size=8,
            temperature=0.7,
            bits=16,
            device=_device(),
        )

        def answers(name: str, **changes: Any) -> list[dict[str, Any]]:
            file = folder / f"{name}.jsonl"
            if generate(replace(quick, output=str(file), **changes), Source(str(sample))) != 0:
                raise TaskError("smoke: interrupted")
            lines = file.read_text(encoding="utf-8").splitlines() if world.is_main_process else []
            return [json.loads(line) for line in lines]

        first = answers("first")
        if not world.is_main_process:  # the answers of several processes are checked once
            return 0
        continue_alone()
        greedy, single = (
            [line["complete"] for line in answers(f"greedy-{size}", temperature=0.0, batch_size=size)]
            for size in (8, 1)
        )
        chosen = choose_examples(len(texts), 12, quick.seed)
        check_smoke("every example is answered", [line["index"] for line in first] == chosen)
        check_smoke("the same seed gives the same answers", answers("again") == first)
        check_smoke("another seed gives others", answers("other", seed=quick.seed + 1) != first)
        check_smoke("sampling is on", greedy != [line["complete"] for line in first])
        check_smoke("a batch gives what single prompts give", greedy == single)
    return 0


def _device() -> Literal["auto", "cpu"]:
    return "auto" if torch.cuda.is_available() else "cpu"
