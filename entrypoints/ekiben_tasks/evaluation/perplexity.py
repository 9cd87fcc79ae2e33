"""Measure how likely texts, or the responses of examples, are to a model: loss, perplexity and bits per byte."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ekiben_tasks.data.schema import DatasetFormat
from ekiben_tasks.data.sources import Source, read_all
from ekiben_tasks.data.tokenize import apply_format, encode_examples, full_text
from ekiben_tasks.distributed.context import Stop, init_distributed
from ekiben_tasks.distributed.heartbeat import Heartbeat, Phase
from ekiben_tasks.evaluation import frame
from ekiben_tasks.evaluation.settings import PerplexitySettings
from ekiben_tasks.generation.record import RunRecord
from ekiben_tasks.models import load
from ekiben_tasks.models.adapter import load_ready
from ekiben_tasks.models.device import choose_device
from ekiben_tasks.task import input_files
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.errors import TaskError

_PROGRESS_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Window:
    """Hold tokens that a model reads at once. targets: the positions of ``ids`` that the window counts."""

    ids: list[int]
    targets: tuple[int, ...]


@dataclass(slots=True)
class Texts:
    """Hold the texts of the data. versions: file → its SHA-256, or hub data set → its commit."""

    examples: list[Any] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


def read_texts(settings: PerplexitySettings, sources: Sequence[Source], *, skip: bool = False) -> Texts:
    """Return the texts, or the examples, of ``sources``. skip: leave invalid ones out.

    Raises:
        TaskError: a file cannot be read, or an example is invalid.
    """
    plain = [source for source in sources if source.location.endswith(".txt")]
    if plain and settings.counts == "responses":
        raise TaskError(f"{plain[0].location}: a plain text has no response; use --set counts=texts")
    advice = "save the text in UTF-8"
    texts = Texts(plain=[input_files.read_text(Path(each.location).expanduser(), advice) for each in plain])
    if tables := [source for source in sources if source not in plain]:
        column = DatasetFormat("template", "", f"{{{settings.column}}}")
        form = settings.form if settings.counts == "responses" else column
        read = read_all(tables, seed=settings.seed, skip_bad=skip, form=form)
        texts.examples, texts.versions = read.train, read.versions
        if settings.counts == "texts":
            texts.plain += [full_text(example) for example in read.train]
        for note in read.notes:
            print_once(f"note        {note}")
    limit = settings.examples or None
    texts.plain, texts.examples = texts.plain[:limit], texts.examples[:limit]
    return texts


def evaluate(
    settings: PerplexitySettings,
    sources: Sequence[Source],
    *,
    skip: bool = False,
    overwrite: bool = False,
) -> int:
    """Measure the texts of ``sources``, write the scores, and return 0.

    skip: leave invalid examples out. overwrite: the output of an earlier run.

    Raises:
        TaskError: the data, the model or the output cannot be used.
    """
    began = time.time()
    texts = read_texts(settings, sources, skip=skip)
    world = init_distributed(settings.device, hang_minutes=settings.hang_minutes)
    Stop("stopping; there is nothing to save").listen()
    heartbeat = Heartbeat(settings.hang_minutes, step="batch", lockstep=False)
    heartbeat.beat(Phase.LOAD, long=True)
    with frame.claim(settings, overwrite=overwrite) as output:
        device = choose_device(settings.device, world.local_rank)
        print_once(f"loading     {settings.adapter or settings.model} on {device.name}")
        model, tokenizer = load_ready(settings.model, settings.adapter, device, bits=settings.bits)
        record = RunRecord(settings, device, world, began, output / frame.RECORD)
        longest = min(settings.max_length or 1 << 30, load.longest_context(model.config))
        windows, size = make_windows(tokenizer, texts, settings, longest)
        shares = sorted(windows, key=lambda window: len(window.ids), reverse=True)[world.rank :: world.size]
        started = time.monotonic()
        total, tokens = measure(model, shares, settings.batch_size, heartbeat)
        # On a GPU, NCCL adds up what lies there.
        sums = torch.tensor([total, tokens], dtype=torch.float64, device=device.torch_device)
        heartbeat.beat(Phase.WAIT)
        world.all_reduce(sums)
        if world.is_main_process:
            scores = {str(settings.counts): summarize(float(sums[0]), round(float(sums[1])), size)}
            count = len(texts.plain if settings.counts == "texts" else texts.examples)
            record.data = {"texts": count, "windows": len(windows), "versions": texts.versions}
            record.counts = {"scores": scores, "seconds": round(time.monotonic() - started, 1)}
            file = record.write(None)
            frame.finish(output)
            frame.print_scores(scores)
            print(f"done        record {file}", flush=True)
        world.barrier()
        world.destroy()
    return 0


def make_windows(tokenizer: Any, texts: Texts, settings: PerplexitySettings, longest: int) -> tuple[list[Window], int]:
    """Return (windows of at most ``longest`` tokens to read, bytes of what is counted; 0 for responses).

    Raises:
        TaskError: there is nothing to count.
    """
    windows: list[Window] = []
    size = 0
    if settings.counts == "texts":
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        for text in texts.plain:
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            # The first token is predicted from the start of a text, and each is counted once.
            windows += split_windows([first, *ids], range(1, len(ids) + 1), longest)
            size += len(text.encode())
    else:
        apply_format(tokenizer, settings.form)
        for example in encode_examples(tokenizer, texts.examples):
            windows += split_windows([int(each) for each in example.ids], example.target_positions.tolist(), longest)
    if not windows:
        raise TaskError("setting data: its texts have no tokens")
    return windows, size


def split_windows(ids: Sequence[int], targets: Sequence[int], longest: int) -> Iterator[Window]:
    """Yield windows that count each of ``targets``, positions in ``ids``, once.

    As lm-evaluation-harness does for its rolling likelihood: each window counts the next ``longest`` tokens, and reads
    as many as it may before the last of them.
    """
    for first in range(1, len(ids), longest):
        last = min(first + longest, len(ids))  # counted are those of [first, last), read is all before the last one
        start = max(last - 1 - longest, 0)
        inside = tuple(target - start for target in targets if first <= target < last)
        if inside:
            yield Window(list(ids[start:last]), inside)


def measure(model: Any, windows: Sequence[Window], size: int, heartbeat: Heartbeat) -> tuple[float, int]:
    """Return (sum of the losses of the windows' targets in nats, their number). size: windows at a time."""
    total, tokens, printed = 0.0, 0, time.monotonic()
    for number, at in enumerate(range(0, len(windows), size), 1):
        heartbeat.beat(Phase.ANSWER, number)
        batch = windows[at : at + size]
        longest = max(len(window.ids) for window in batch) - 1
        ids = torch.tensor([window.ids[:-1] + [0] * (longest + 1 - len(window.ids)) for window in batch])
        mask = torch.tensor([[1] * (len(window.ids) - 1) + [0] * (longest + 1 - len(window.ids)) for window in batch])
        with torch.inference_mode():
            logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device)).logits
        for window, scores in zip(batch, logits, strict=True):  # one in fp32 at a time
            positions = torch.tensor(window.targets, device=scores.device)
            labels = torch.tensor([window.ids[target] for target in window.targets], device=scores.device)
            losses = torch.nn.functional.cross_entropy(scores[positions - 1].float(), labels, reduction="none")
            total += float(losses.double().sum())
            tokens += len(window.targets)
        if time.monotonic() - printed > _PROGRESS_SECONDS:
            printed = time.monotonic()
            print_once(f"batch       {number:,} of {math.ceil(len(windows) / size):,}")
    return total, tokens


def summarize(total: float, tokens: int, size: int) -> dict[str, float]:
    """Return loss (nats per token), perplexity, tokens and, of texts, bits per byte and perplexity per byte.

    total: sum of the losses in nats. size: bytes of the texts; 0: not known.
    """
    mean = total / tokens
    scores = {"loss": mean, "perplexity": math.exp(min(mean, 100)), "tokens": tokens}
    if size:
        scores |= {"bits_per_byte": total / size / math.log(2), "byte_perplexity": math.exp(min(total / size, 100))}
    return scores
