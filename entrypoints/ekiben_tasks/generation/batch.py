"""Answer many prompts: one line of JSON per example, in batches, on every GPU there is."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ekiben_tasks.data.schema import RawExample
from ekiben_tasks.data.sources import Source, read_prompts
from ekiben_tasks.data.tokenize import apply_format, describe_unknown, encode_prompts
from ekiben_tasks.distributed.context import REQUEUE, DistributedContext, Stop, init_distributed
from ekiben_tasks.distributed.heartbeat import Heartbeat, Phase
from ekiben_tasks.generation.record import RunRecord
from ekiben_tasks.generation.resumable_jsonl import ResumableJsonlWriter
from ekiben_tasks.generation.sampling import Sampling, sample
from ekiben_tasks.generation.settings import GenerateSettings
from ekiben_tasks.models import load
from ekiben_tasks.models.adapter import load_ready
from ekiben_tasks.models.device import Device, choose_device, named_device
from ekiben_tasks.models.placement import free_memory, spread_layers
from ekiben_tasks.task.adapter_folder import find_model
from ekiben_tasks.task.command import DryRun, print_once
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.output_lock import lock_output

# Settings that may differ between a run and its continuation.
_FREE = {"device", "devices", "batch_size", "output", "model_checksum", "hang_minutes"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """Hold the tokens of one prompt of the data."""

    index: int  # of the example in the data
    ids: list[int]
    max_new_tokens: int


def generate(settings: GenerateSettings, source: Source, *, skip_bad: bool = False, fresh: bool = False) -> int:
    """Answer the examples of ``source`` and return the exit code: 0, or 75 or 130 after a signal.

    skip_bad: leave invalid examples out. fresh: overwrite the output.

    Raises:
        TaskError: the data, the model or the output cannot be used.
    """
    heartbeat = Heartbeat(settings.hang_minutes, step="batch", lockstep=False)
    heartbeat.beat(Phase.LOAD, long=True)
    with lock_output(Path(settings.output)):
        return _generate(settings, source, heartbeat, skip_bad=skip_bad, fresh=fresh)


def _generate(settings: GenerateSettings, source: Source, heartbeat: Heartbeat, *, skip_bad: bool, fresh: bool) -> int:
    world = init_distributed(settings.device, hang_minutes=settings.hang_minutes)
    stop = Stop()
    stop.listen()
    stop.saves = True  # every line written stays
    device = choose_device(settings.device, world.local_rank)
    began = time.time()
    examples, bad, versions = read_prompts(source, settings.form, skip_bad=skip_bad)
    chosen = choose_examples(len(examples), settings.examples, settings.seed)
    print_once(f"loading     {settings.adapter or settings.model} on {device.name}")
    device_map = place_model(settings, device)
    model, tokenizer = load_ready(settings.model, settings.adapter, device, bits=settings.bits, device_map=device_map)
    record = RunRecord(settings, device, world, began)
    form = apply_format(tokenizer, settings.form)
    prompts, too_long = prepare_prompts(model, tokenizer, examples, chosen, settings)
    if too_long and not skip_bad:
        limit = load.longest_context(model.config)
        raise TaskError(f"{source.location}: {_describe_too_long(too_long, len(chosen), limit)}")
    print_once(
        f"data        {source.location}: {len(examples):,} examples, {len(bad)} invalid and {len(too_long)} too long"
        f" left out, as {form}",
        f"answers     {len(prompts):,}, {_describe_sampling(settings)}, at most {settings.max_new_tokens} tokens",
    )
    writer = ResumableJsonlWriter(
        Path(settings.output), _fingerprint(settings, examples, chosen), world.rank, fresh=fresh
    )
    heartbeat.beat(Phase.WAIT)
    world.barrier()  # no process writes before all have read the existing answers
    if writer.done:
        print_once(f"resumed     {len(writer.done):,} answers were there")
    record.data = {
        "source": source.location,
        "versions": versions,
        "examples": len(examples),
        "chosen": len(chosen),
        "bad": len(bad),
        "too_long": len(too_long),
    }
    resumed, started = len(writer.done), time.monotonic()
    batches = _share_batches(make_batches(prompts, settings.batch_size), writer, world)
    generator = _BatchGenerator(model, tokenizer, settings, writer, heartbeat)
    finished, answers, tokens = generator.answer(batches, stop)
    heartbeat.beat(Phase.WAIT, len(batches))
    record.add_up(answers, tokens, time.monotonic() - started, resumed)
    # Decided together: a signal may stop one process while another has finished and waits here.
    if not world.minimum(int(finished), device.torch_device):
        record.write(stop.exit_code or REQUEUE)
        print_once("stopped     the same command continues from here")
        world.destroy()
        return stop.exit_code or REQUEUE
    if world.is_main_process:
        heartbeat.beat(Phase.SAVE, len(batches), long=True)
        count = writer.finish()
        file = record.write(None)
        took = f"{time.monotonic() - started:,.0f} s"
        print(f"done        {settings.output}: {count:,} answers in {took}   record {file}", flush=True)
    world.barrier()
    world.destroy()
    return 0


def place_model(settings: GenerateSettings, device: Device) -> dict[str, int | str] | None:
    """Return the devices of the model's modules, and print them; None: all are on ``device``.

    Raises:
        TaskError: the GPUs have not enough memory together.
    """
    if settings.devices == "one":
        return None
    path = find_model(settings.model, settings.adapter)
    placement = spread_layers(path, device, free_memory(), settings.bits)
    print_once(*placement.format_lines(device.name))
    return placement.device_map


def plan(settings: GenerateSettings, dry: DryRun) -> int:
    """Print where the model's layers would be, without loading it, and return 0.

    Raises:
        TaskError: the GPUs have not enough memory together, or the model's configuration cannot be read.
    """
    device = named_device(dry.gpu) if dry.gpu else choose_device(settings.device)
    memory: dict[int | str, int] = (
        dict.fromkeys(range(dry.gpus or 1), device.memory) if dry.gpu else dict(list(free_memory().items())[: dry.gpus])
    )
    memory = memory if settings.devices == "auto" else dict(list(memory.items())[:1]) or {"cpu": device.memory}
    placement = spread_layers(find_model(settings.model, settings.adapter), device, memory, settings.bits)
    print_once(f"model       {settings.adapter or settings.model}", *placement.format_lines(device.name))
    print_once("dry run     nothing was loaded or written")
    return 0


def _describe_too_long(too_long: Sequence[int], count: int, limit: int) -> str:
    return (
        f"example {too_long[0] + 1} leaves no tokens for an answer ({len(too_long)} of {count} do not: the model takes"
        f" {limit:,} tokens); leave such examples out with --skip-invalid"
    )


def _describe_sampling(settings: GenerateSettings) -> str:
    if not settings.temperature:
        return "greedy"
    return f"temperature {settings.temperature}, top-p {settings.top_p}, seed {settings.seed}"


def _share_batches(
    batches: Sequence[Sequence[Prompt]], writer: ResumableJsonlWriter, world: DistributedContext
) -> list[Sequence[Prompt]]:
    """Return this process's share of the remaining batches: one that hung then has left more than
    the others.
    """
    # From the main process: a shared file system may show fewer answers to the others.
    done = set(world.broadcast(sorted(writer.done)))
    remaining = [batch for batch in batches if not done.issuperset(prompt.index for prompt in batch)]
    return remaining[world.rank :: world.size]


@dataclass(frozen=True, slots=True)
class _BatchGenerator:
    """Answer batches with a model, and write the answers."""

    model: Any
    tokenizer: Any
    settings: GenerateSettings
    writer: ResumableJsonlWriter
    heartbeat: Heartbeat

    def answer(self, batches: Sequence[Sequence[Prompt]], stop: Stop) -> tuple[bool, int, int]:
        """Write the answers batch by batch, and print the progress.

        Returns:
            (False when a signal came before the last one, number of answers written, of their tokens)
        """
        started, written, tokens = time.monotonic(), 0, 0
        for number, batch in enumerate(batches, 1):
            if stop.exit_code is not None:
                return False, written, tokens
            lines = list(self._answer_lines(number, batch))
            self.heartbeat.beat(Phase.WRITE, number)
            self.writer.add(lines)
            written, tokens = written + len(lines), tokens + sum(line["tokens"] for line in lines)
            seconds = time.monotonic() - started
            print_once(
                f"batch {number}/{len(batches)}  {written:,} answers  {tokens / seconds:,.0f} tokens/s  "
                f"{seconds / number * (len(batches) - number):,.0f} s left"
            )
        return True, written, tokens

    def _answer_lines(self, number: int, batch: Sequence[Prompt]) -> Iterator[dict[str, Any]]:
        """Yield the lines of a batch that no earlier start has written. number: of the batch, from 1."""

        def beat(token: int) -> None:
            self.heartbeat.beat(Phase.ANSWER, number, micro_batch=token)

        beat(0)
        answers = answer_batch(self.model, self.tokenizer, batch, self.settings, beat)
        for prompt, (ids, ended) in zip(batch, answers, strict=True):
            if prompt.index not in self.writer.done:
                yield {
                    "index": prompt.index,
                    "prompt": self.tokenizer.decode(prompt.ids, skip_special_tokens=True),
                    "complete": self.tokenizer.decode(ids, skip_special_tokens=True),
                    "tokens": len(ids),
                    "ended": ended,
                }


def choose_examples(count: int, wanted: int, seed: int) -> list[int]:
    """Return the sorted indices of ``wanted`` random examples of ``count``; all if it is 0 or not below ``count``."""
    if not 0 < wanted < count:
        return list(range(count))
    return sorted(random.Random(seed).sample(range(count), wanted))


def prepare_prompts(
    model: Any, tokenizer: Any, examples: Sequence[RawExample], chosen: Sequence[int], settings: GenerateSettings
) -> tuple[list[Prompt], list[int]]:
    """Return (prompts of the ``chosen`` examples, indices of those that leave no tokens for an answer).

    Raises:
        TaskError: the model has no embedding of a token.
    """
    limit, embeddings = load.longest_context(model.config), len(model.get_input_embeddings().weight)
    encoded = encode_prompts(tokenizer, [examples[index] for index in chosen])
    for index, ids in zip(chosen, encoded, strict=True):
        if problem := describe_unknown(tokenizer, ids, embeddings):
            raise TaskError(f"example {index + 1} of the data: {problem}")
    prompts = [
        Prompt(index, ids, min(settings.max_new_tokens, limit - len(ids)))
        for index, ids in zip(chosen, encoded, strict=True)
    ]
    fits = [prompt for prompt in prompts if prompt.max_new_tokens > 0]
    return fits, [prompt.index for prompt in prompts if prompt.max_new_tokens <= 0]


def make_batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Group prompts with the same ``max_new_tokens`` into batches of at most ``size``, the longest prompts first.

    A batch has one limit, so prompts with different limits cannot share one.
    """
    batches: list[list[Prompt]] = []
    for prompt in sorted(prompts, key=lambda each: (each.max_new_tokens, -len(each.ids), each.index)):
        if not batches or len(batches[-1]) == size or batches[-1][0].max_new_tokens != prompt.max_new_tokens:
            batches.append([])
        batches[-1].append(prompt)
    return batches


def answer_batch(
    model: Any,
    tokenizer: Any,
    batch: Sequence[Prompt],
    settings: GenerateSettings,
    on_token: Callable[[int], None] | None = None,
) -> list[tuple[list[int], bool]]:
    """Return (token ids, whether it ended by itself) of each answer. After out of memory, the batch is halved.

    on_token: is called before each token with the number of those before it.

    Raises:
        TaskError: a single prompt does not fit the memory.
    """
    params = Sampling(
        settings.temperature, settings.top_p, settings.repetition_penalty, settings.seed, on_token=on_token
    )
    ids, indices = [prompt.ids for prompt in batch], [prompt.index for prompt in batch]
    try:
        return sample(model, tokenizer, ids, indices, batch[0].max_new_tokens, params)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    if len(batch) == 1:
        raise TaskError(
            f"out of GPU memory with one prompt of {len(ids[0])} tokens; try --set bits=4, or a smaller model"
        )
    half = len(batch) // 2
    print_once(f"out of GPU memory: continuing with {half} prompts at a time")
    parts = (batch[:half], batch[half:])
    return [answer for part in parts for answer in answer_batch(model, tokenizer, part, settings, on_token)]


def _fingerprint(settings: GenerateSettings, examples: Sequence[RawExample], chosen: Sequence[int]) -> str:
    """Return the settings that must be equal to resume a partial output."""
    fixed = {name: value for name, value in asdict(settings).items() if name not in _FREE}
    content = [fixed, [asdict(examples[index]) for index in chosen], list(chosen)]
    return hashlib.sha256(json.dumps(content, ensure_ascii=False, sort_keys=True).encode()).hexdigest()
