"""Let a model answer many questions: rows in, one line of JSON out per row, in batches, on every GPU there is.

generate --model databricks/dolly-v2-12b --data data/jsquad-valid.jsonl
generate --adapter result/adapter --set examples=0            0: every row
generate --greedy --output answers.jsonl                      always the likeliest token
generate --gpus 4                                             each takes its share of the rows
generate --smoke                                              offline, in seconds, with or without a GPU
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import places
import settings as options
from forms import AnyRow, Form, check_form
from hub import check_model_place
from rows import is_hub, read_questions
from settings import SettingError, TaskError, option

# What may differ between a run and its continuation.
_FREE = {"device", "batch_size", "output"}


@dataclass(frozen=True)
class Settings:
    model: str = option(
        "cyberagent/open-calm-3b", "a hub id or a folder; not looked at where an adapter names its base; --model"
    )
    adapter: str = option("", "folder of an adapter that train wrote; empty: the model as it is; --adapter")
    data: str = option("sample", "a hub data set, a folder or a file; sample: the recipe's own rows; --data")
    form: Form = field(default_factory=Form)
    output: str = option("generated.jsonl", "--output")
    examples: int = option(100, "so many rows, chosen by the seed; 0: all")
    max_new_tokens: int = option(256, "an answer ends here at the latest")
    temperature: float = option(0.7, "0: always the likeliest token, as --greedy")
    top_p: float = option(0.9, "sample from the likeliest tokens that together have this probability")
    repetition_penalty: float = option(1.05, "above 1: less of what was already said")
    seed: int = option(42, "of the rows chosen and of the sampling")
    batch_size: int = option(32, "rows at a time; less by itself where the memory is too small")
    bits: Literal[16, 8, 4] = option(16, "of the weights: 8 and 4 need a GPU and save memory")
    device: Literal["auto", "cpu"] = option("auto", "auto: the GPU; cpu: without one, slowly")


@dataclass(frozen=True, slots=True)
class Question:
    index: int  # of the row in the data
    ids: list[int]
    room: int  # tokens the answer may have


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options.command("generate", __doc__, Settings, arguments)
    parser.add_argument("--model", metavar="PLACE", help="instead of the setting model")
    parser.add_argument("--adapter", metavar="DIR", help="instead of the setting adapter")
    parser.add_argument("--data", metavar="PLACE", help="instead of the setting data")
    parser.add_argument("--output", metavar="FILE", help="instead of the setting output")
    parser.add_argument("--greedy", action="store_true", help="no chance: always the likeliest token")
    parser.add_argument("--gpus", type=int, metavar="N", help="one process for each of N GPUs of this node")
    parser.add_argument("--skip-bad", action="store_true", help="leave bad rows out instead of stopping at them")
    parser.add_argument("--fresh", action="store_true", help="start again, though the output is half written")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, offline; checks what a user relies on")
    args = parser.parse_args(arguments)
    options.start_processes(__file__, args.gpus, arguments)
    given = {name: getattr(args, name) for name in ("model", "adapter", "data", "output") if getattr(args, name)}
    settings = replace(options.load(Settings, args.config, args.set), **given)
    settings = replace(settings, temperature=0.0) if args.greedy else settings
    recipe = options.recipe_folder(args.config, __file__)
    for line in places.prepare_caches(os.environ):
        _tell(line)
    if args.smoke:
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # a model this small only waits for a second thread
        return prove(settings, recipe)
    return generate(settings, recipe, skip_bad=args.skip_bad, fresh=args.fresh)


def generate(settings: Settings, recipe: Path, *, skip_bad: bool = False, fresh: bool = False) -> int:
    """Answer as ``settings`` say; the exit code. Errors: TaskError."""
    # ---- what can be wrong is found before seconds of imports and minutes of downloads
    _check(settings)
    data = str(recipe / "data" / "sample.jsonl") if settings.data == "sample" else settings.data
    of_hub = is_hub(data)
    if not settings.adapter:
        of_hub |= check_model_place(settings.model)
    if of_hub:
        for line in places.prefer_cache(os.environ):
            _tell(line)
    output = Path(settings.output)
    places.claim_folder(output.absolute().parent)

    import models
    from journal import Journal
    from prompt import set_form
    from world import Stop, join

    world = join(settings.device)
    stop = Stop()
    stop.listen()
    stop.saves = True  # every line written stays
    say = _tell if world.leads else (lambda _: None)

    # ---- what will be done
    device = models.choose_device(settings.device, world.local_rank)
    rows, bad = read_questions(data, settings.form, skip_bad=skip_bad)
    chosen = choose(len(rows), settings.examples, settings.seed)
    say(f"loading     {settings.adapter or settings.model} on {device.name}")
    model, tokenizer = models.load_ready(settings.model, settings.adapter, device, bits=settings.bits)
    form = set_form(tokenizer, settings.form)
    questions, too_long = encode(model, tokenizer, rows, chosen, settings)
    if too_long and not skip_bad:
        raise TaskError(
            f"{data}: row {too_long[0] + 1} leaves no room for an answer ({len(too_long)} of {len(chosen)} do not: the model "
            f"takes {models.longest_context(model.config):,} tokens); leave such rows out with --skip-bad"
        )
    how = (
        f"temperature {settings.temperature}, top-p {settings.top_p}, seed {settings.seed}"
        if settings.temperature
        else "greedy"
    )
    say(f"data        {data}: {len(rows):,} rows, {len(bad)} bad and {len(too_long)} too long left out, as {form}")
    say(f"answers     {len(questions):,}, {how}, at most {settings.max_new_tokens} tokens")

    # ---- do it
    journal = Journal(output, _fingerprint(settings, rows, chosen), world.rank, fresh=fresh)
    world.wait()  # nobody writes before everybody has read what is there
    if journal.done:
        say(f"resumed     {len(journal.done):,} answers were there")
    started, written, tokens = time.monotonic(), 0, 0
    batches = cut(questions, settings.batch_size)[world.rank :: world.size]
    left = [batch for batch in batches if any(question.index not in journal.done for question in batch)]
    for number, batch in enumerate(left, 1):
        if stop.exit_code is not None:
            say("stopped     the same command goes on from here")
            return stop.exit_code
        answers = answer_batch(model, tokenizer, batch, settings)
        lines = [
            {
                "index": question.index,
                "prompt": tokenizer.decode(question.ids, skip_special_tokens=True),
                "complete": tokenizer.decode(ids, skip_special_tokens=True),
                "tokens": len(ids),
                "ended": ended,
            }
            for question, (ids, ended) in zip(batch, answers, strict=True)
            if question.index not in journal.done
        ]
        journal.add(lines)
        written += len(lines)
        tokens += sum(line["tokens"] for line in lines)
        seconds = time.monotonic() - started
        rest = seconds / number * (len(left) - number)
        say(f"batch {number}/{len(left)}  {written:,} answers  {tokens / seconds:,.0f} tokens/s  {rest:,.0f} s left")
    world.wait()
    if world.leads:
        count = journal.finish()
        say(f"done        {output}: {count:,} answers in {time.monotonic() - started:,.0f} s")
    world.wait()
    world.leave()
    return 0


def choose(rows: int, examples: int, seed: int) -> list[int]:
    """Indices of the rows to answer, in order: ``examples`` of them by chance, all where it is 0 or more than there are."""
    if not 0 < examples < rows:
        return list(range(rows))
    return sorted(random.Random(seed).sample(range(rows), examples))


def encode(
    model: Any, tokenizer: Any, rows: Sequence[AnyRow], chosen: Sequence[int], settings: Settings
) -> tuple[list[Question], list[int]]:
    """(questions, indices of the rows that leave no room for an answer)."""
    import models
    from prompt import encode_questions

    limit = models.longest_context(model.config)
    encoded = encode_questions(tokenizer, [rows[index] for index in chosen])
    made = [
        Question(index, ids, min(settings.max_new_tokens, limit - len(ids)))
        for index, ids in zip(chosen, encoded, strict=True)
    ]
    return [each for each in made if each.room > 0], [each.index for each in made if each.room <= 0]


def cut(questions: Sequence[Question], size: int) -> list[list[Question]]:
    """Batches of alike lengths, the longest first, and of one room: it is the batch that ends, not a row of it."""
    batches: list[list[Question]] = []
    for question in sorted(questions, key=lambda each: (each.room, -len(each.ids), each.index)):
        if not batches or len(batches[-1]) == size or batches[-1][0].room != question.room:
            batches.append([])
        batches[-1].append(question)
    return batches


def answer_batch(
    model: Any, tokenizer: Any, batch: Sequence[Question], settings: Settings
) -> list[tuple[list[int], bool]]:
    """(token ids, whether it came to its end) of each answer. Out of memory: half of the batch at a time. Errors: TaskError."""
    import torch

    from sampling import Sampling, sample

    how = Sampling(settings.temperature, settings.top_p, settings.repetition_penalty, settings.seed)
    try:
        return sample(model, tokenizer, [q.ids for q in batch], [q.index for q in batch], batch[0].room, how)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    if len(batch) == 1:
        raise TaskError(
            f"out of GPU memory with one row of {len(batch[0].ids)} tokens; try --set bits=4, or a smaller model"
        )
    half = len(batch) // 2
    _tell(f"out of GPU memory: going on with {half} rows at a time")
    return [found for part in (batch[:half], batch[half:]) for found in answer_batch(model, tokenizer, part, settings)]


def prove(settings: Settings, recipe: Path) -> int:
    """Answer the sample with a tiny random model, and check what a user relies on. Errors: TaskError, naming the check."""
    import torch

    import models
    import tiny
    from prompt import text_of
    from rows import Source, read_all

    started = time.monotonic()
    models.quieten()
    rows = read_all(
        [Source(str(recipe / "data" / "sample.jsonl"), 0.0)], seed=0, skip_bad=False, form=settings.form
    ).train
    with tempfile.TemporaryDirectory(prefix="ekiben-smoke-") as scratch:
        folder = Path(scratch)
        tiny.make_model(folder / "model", [text_of(row) for row in rows])
        quick = replace(
            settings, model=str(folder / "model"), adapter="", data="sample", examples=12, max_new_tokens=12, batch_size=8,
            temperature=0.7, bits=16, device="auto" if torch.cuda.is_available() else "cpu",
        )  # fmt: skip

        def answers(name: str, **changes: Any) -> list[dict[str, Any]]:
            file = folder / f"{name}.jsonl"
            if generate(replace(quick, output=str(file), **changes), recipe) != 0:
                raise TaskError("smoke: interrupted")
            return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

        first = answers("first")
        _passed("every row is answered", [line["index"] for line in first] == choose(len(rows), 12, quick.seed))
        _passed("the same seed gives the same answers", answers("again") == first)
        _passed("another seed gives others", answers("other", seed=quick.seed + 1) != first)
        greedy = answers("greedy", temperature=0.0)
        _passed("sampling is on", [line["complete"] for line in greedy] != [line["complete"] for line in first])
        one = answers("one-by-one", temperature=0.0, batch_size=1)
        _passed(
            "a batch gives what rows alone give",
            [line["complete"] for line in greedy] == [line["complete"] for line in one],
        )
    print(f"smoke       all passed in {time.monotonic() - started:.0f} s", flush=True)
    return 0


def _passed(what: str, passed: bool) -> None:
    if not passed:
        raise TaskError(f"smoke: failed: {what}")
    print(f"smoke       {what}", flush=True)


def _check(settings: Settings) -> None:
    check_form(settings.form)
    problems = [
        f"setting {name}: must be at least {least}, not {value}"
        for name, value, least in [
            ("examples", settings.examples, 0), ("max_new_tokens", settings.max_new_tokens, 1),
            ("temperature", settings.temperature, 0), ("batch_size", settings.batch_size, 1),
        ]
        if value < least
    ]  # fmt: skip
    if not 0 < settings.top_p <= 1:
        problems.append(f"setting top_p: must be above 0 and at most 1, not {settings.top_p}")
    if not settings.repetition_penalty > 0:
        problems.append(f"setting repetition_penalty: must be above 0, not {settings.repetition_penalty}")
    if problems:
        raise SettingError("\n".join(problems))


def _fingerprint(settings: Settings, rows: Sequence[AnyRow], chosen: Sequence[int]) -> str:
    """What has to be the same for half a file to be continued."""
    fixed = {name: value for name, value in asdict(settings).items() if name not in _FREE}
    content = [fixed, [asdict(rows[index]) for index in chosen], list(chosen)]
    return hashlib.sha256(json.dumps(content, ensure_ascii=False, sort_keys=True).encode()).hexdigest()


def _tell(line: str) -> None:
    """Before the processes of a run have met, too: only the first of them speaks."""
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


if __name__ == "__main__":
    options.run(main)
