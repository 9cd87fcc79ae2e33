"""Fine-tune a base model with LoRA on instruction rows.

train --data my_rows.jsonl --output result
train --set epochs=3 --set lora.r=8
train --dry-run          what would be trained on what, and whether it fits
train --smoke            prove in seconds, offline, that this image trains
torchrun --nproc-per-node 4 $EKIBEN_RECIPE/entrypoints/train.py --config $EKIBEN_RECIPE/configs/train.yaml
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import places
import settings as options
from hub import check_model_place, locate_model
from rows import Rows, Source, check_places, parse_sources, read_all
from settings import TaskError, option

if TYPE_CHECKING:
    import loop
    import models
    from prompt import Example

SAMPLE = "sample"
# What may differ between a run and its continuation: it changes neither data nor arithmetic, or only how fast it goes.
_FREE = {
    "device",
    "compile",
    "micro_batch",
    "gradient_checkpointing",
    "eval_every",
    "save_minutes",
    "log_seconds",
    "data",
}


@dataclass(frozen=True)
class Lora:
    r: int = option(4, "rank of the two small matrices beside each target")
    alpha: int = option(16, "their product is scaled by alpha / r")
    dropout: float = option(0.05, "share of the adapter's inputs left out while learning")
    target_modules: tuple[str, ...] = option(("query_key_value",), "names of the layers that get an adapter")


@dataclass(frozen=True)
class Settings:
    model: str = option("cyberagent/open-calm-3b", "base model: a hub id or a local folder")
    data: object = option(
        SAMPLE, "hub data sets, folders, .json, .jsonl or .parquet files; or {source, test_share} groups"
    )
    test_share: float = option(0.02, "share of the rows kept for testing, where a source does not say")
    mask_prompt: bool = option(True, "learn the response only; false: learn the prompt's text too")
    max_length: int = option(2048, "rows of more tokens are left out, and counted")
    lora: Lora = dataclasses.field(default_factory=Lora)
    epochs: int = option(1, "times through the data")
    max_steps: int = option(-1, "stop after so many steps; -1: at the end of the epochs")
    batch_size: int = option(32, "rows of one step of the optimizer, over all GPUs")
    micro_batch: int | Literal["auto"] = option("auto", "rows at a time; auto: what fits. The gradient is the same")
    learning_rate: float = option(3e-4, "highest learning rate; it falls linearly to 0 from there")
    warmup_steps: int = option(200, "steps until the highest learning rate, at most a tenth of all")
    weight_decay: float = option(0.0, "AdamW's weight decay")
    max_grad_norm: float = option(1.0, "longer gradients are shortened to this")
    eval_every: int = option(500, "steps between tests; there is always one at the end")
    save_minutes: float = option(15, "minutes between checkpoints; there is one after every epoch and on SIGTERM")
    log_seconds: float = option(5, "seconds between lines of progress")
    seed: int = option(42, "of the split, the order, the adapter's start and the dropout")
    gradient_checkpointing: bool | Literal["auto"] = option(
        "auto", "compute activations twice to save memory; auto: when needed"
    )
    compile: bool | Literal["auto"] = option("auto", "torch.compile the blocks; auto: on a GPU, for runs long enough")
    device: Literal["auto", "cpu"] = option("auto", "auto: the GPU, bf16 where it has it, else fp16; cpu: fp32")


@dataclass(frozen=True)
class Prepared:
    """Rows as tokens, and what was left out on the way."""

    train: list[Example]
    test: list[Example]
    rows: Rows
    too_long: int

    @property
    def tokens(self) -> int:
        return sum(len(example.ids) for example in self.train)

    @property
    def learnt(self) -> int:
        return sum(example.learnt for example in self.train)

    @property
    def longest(self) -> int:
        return max(len(example.ids) for example in [*self.train, *self.test])


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    settings = options.load(Settings, args.config, _assignments(args))
    recipe = _recipe_folder(args.config)
    _tell(places.prepare_caches(os.environ))
    if args.smoke:
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # a model this small only waits for a second thread
        import smoke

        return smoke.prove(settings, recipe / "data" / "sample.jsonl", args.output)
    return train(
        settings, recipe, args.output or Path("result"), dry=args.dry_run, skip_bad=args.skip_bad, fresh=args.fresh
    )


def train(
    settings: Settings, recipe: Path, output: Path, *, dry: bool = False, skip_bad: bool = False, fresh: bool = False,
    prepare: Callable[[Settings, list[Source], Any, int, bool], Prepared] | None = None,
    watch: loop.Watch | None = None,
) -> int:  # fmt: skip
    """Train as ``settings`` say into ``output``; the exit code. Errors: TaskError.

    prepare: in the place of prepare_data(), for rows that are tokens already. watch: told of the run's start and tests.
    """
    # ---- what can be wrong is found before seconds of imports and minutes of downloads
    _check(settings)
    sources = parse_sources(_with_sample(settings.data, recipe), settings.test_share)
    if check_places(sources) | check_model_place(settings.model):
        _tell(places.prefer_cache(os.environ))
    if not dry:
        places.claim_folder(output)

    import loop
    import models
    import record
    from world import Stop, join

    world = join(settings.device)  # may wait for others for long, and must stay killable: before the handlers
    stop = Stop()
    if not dry:
        stop.listen()
    say = print if world.leads else (lambda *_, **__: None)

    # ---- what will be done
    device, no_device = _device(settings, world.local_rank, dry)
    place = locate_model(settings.model)
    tokenizer = models.load_tokenizer(place)
    skeleton = models.skeleton(place, **dataclasses.asdict(settings.lora), seed=settings.seed)
    data = (prepare or prepare_data)(settings, sources, tokenizer, models.longest_context(skeleton.config), skip_bad)
    parameters, trainable = models.count_parameters(skeleton)
    memory = models.expect_memory(skeleton.config, parameters, device.dtype)
    plan = make_plan(settings, device, memory, data)
    for line in _announce(settings, device, no_device, plan, data, memory, parameters, trainable, output):
        say(line, flush=True)
    if dry:
        return 0

    # ---- do it
    fingerprint = _fingerprint(settings, data)
    if fresh and world.leads:
        shutil.rmtree(output / "checkpoints", ignore_errors=True)
    world.wait()
    started = time.time()
    base = models.load_base(place, device, attention=models.PACKED)
    model = models.add_adapter(base, **dataclasses.asdict(settings.lora), seed=settings.seed)
    run = loop.Run(
        model=model, base=settings.model, device=device, train=data.train, test=data.test, plan=plan, output=output,
        fingerprint=fingerprint, world=world, stop=stop, watch=watch,
    )  # fmt: skip
    with loop.peak_memory(device) as peak:
        exit_code = run.fit()

    # ---- say what came of it
    if world.leads:
        result = _result(settings, run, data, peak["bytes"], exit_code, started, parameters, trainable)
        record.write_json(output / "run.json", result)
        series = {"train": run.metrics.series("loss"), "test": run.metrics.series("test_loss")}
        record.plot(output / "loss.svg", f"{settings.model}: loss", series)
        if exit_code is None:
            tokenizer.save_pretrained(str(output / "adapter"))
            for line in _conclude(result, output):
                say(line, flush=True)
    world.leave()
    return exit_code or 0


def prepare_data(settings: Settings, sources: list[Source], tokenizer: Any, context: int, skip_bad: bool) -> Prepared:
    """Read, split and tokenise. Errors: TaskError: nothing left to learn, nothing readable."""
    from prompt import encode_rows

    rows = read_all(sources, seed=settings.seed, skip_bad=skip_bad)
    limit = min(settings.max_length, context)
    kept = []
    too_long = 0
    for part in (rows.train, rows.test):
        encoded = encode_rows(tokenizer, part, mask_prompt=settings.mask_prompt)
        kept.append([example for example in encoded if len(example.ids) <= limit])
        too_long += len(encoded) - len(kept[-1])
    if not kept[0]:
        raise TaskError(f"setting max_length: none of the {len(rows.train)} rows fits {limit} tokens")
    return Prepared(kept[0], kept[1], rows, too_long)


def make_plan(settings: Settings, device: models.Device, memory: models.Memory, data: Prepared) -> loop.Plan:
    import loop
    import models

    checkpointing, max_tokens = _fit_memory(settings, device, memory, data)
    wants_compile = device.is_gpu and device.has_bf16 and models.compiler_missing() is None
    worth_it = data.tokens * settings.epochs > 1_000_000  # it takes about half a minute to compile
    return loop.Plan(
        epochs=settings.epochs,
        max_steps=settings.max_steps,
        batch_size=settings.batch_size,
        max_rows=settings.micro_batch if isinstance(settings.micro_batch, int) else settings.batch_size,
        max_tokens=max_tokens,
        checkpointing=checkpointing,
        compile=wants_compile and worth_it if settings.compile == "auto" else settings.compile,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        eval_every=settings.eval_every,
        save_minutes=settings.save_minutes,
        log_seconds=settings.log_seconds,
        seed=settings.seed,
    )


def _fit_memory(settings: Settings, device: models.Device, memory: models.Memory, data: Prepared) -> tuple[bool, int]:
    """(checkpointing, tokens of a pack): as large as fits nine tenths of the memory, but no larger than pays."""
    enough = 16_384 if device.is_gpu else 4096
    room = int(0.9 * device.memory) - memory.weights - memory.loss
    plain = max(room, 0) // memory.per_token
    wanted = data.longest * (settings.micro_batch if isinstance(settings.micro_batch, int) else 1)
    checkpointing = plain < wanted if settings.gradient_checkpointing == "auto" else settings.gradient_checkpointing
    fits = max(room, 0) // memory.per_token_checkpointed if checkpointing else plain
    if isinstance(settings.micro_batch, int):
        return checkpointing, wanted
    return checkpointing, max(min(fits, enough), data.longest)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    config = first.parse_known_args(arguments)[0].config
    parser = argparse.ArgumentParser(
        prog="train", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(__doc__ or "").strip(), epilog=options.help_table(options.load(Settings, config)),
    )  # fmt: skip
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change one setting")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="PLACE",
        help="instead of the setting data; repeatable; 'sample': the recipe's own rows",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="where results go (default: result)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and stop")
    parser.add_argument(
        "--smoke", action="store_true", help="train a tiny model on the sample rows, offline, and check everything"
    )
    parser.add_argument("--skip-bad", action="store_true", help="leave bad rows out instead of stopping at them")
    parser.add_argument("--fresh", action="store_true", help="start again, though --output holds a checkpoint")
    return parser.parse_args(arguments)


def _assignments(args: argparse.Namespace) -> list[str]:
    import json

    data = [f"data={json.dumps(args.data, ensure_ascii=False)}"] if args.data else []
    return [*args.set, *data]


def _recipe_folder(config: Path | None) -> Path:
    given = os.environ.get("EKIBEN_RECIPE")
    if given:
        return Path(given)
    return config.resolve().parent.parent if config else Path(__file__).resolve().parent.parent


def _tell(lines: list[str]) -> None:
    """Before the processes of a run have met: only the first of them speaks."""
    if os.environ.get("RANK", "0") == "0":
        print("".join(f"{line}\n" for line in lines), end="", flush=True)


def _with_sample(data: Any, recipe: Path) -> Any:
    """``data`` with the word 'sample' replaced by the rows that ship with the recipe."""
    items = data if isinstance(data, list) else [data]
    return [str(recipe / "data" / "sample.jsonl") if item == SAMPLE else item for item in items]


def _check(settings: Settings) -> None:
    problems = [
        f"setting {name}: must be at least 1, not {value}"
        for name, value in [
            ("max_length", settings.max_length), ("epochs", settings.epochs), ("batch_size", settings.batch_size),
            ("lora.r", settings.lora.r), ("micro_batch", settings.micro_batch),
        ]
        if isinstance(value, int) and value < 1
    ]  # fmt: skip
    if not settings.learning_rate > 0 or not math.isfinite(settings.learning_rate):
        problems.append(f"setting learning_rate: must be above 0, not {settings.learning_rate}")
    if not 0 <= settings.test_share < 1:
        problems.append(f"setting test_share: must be at least 0 and below 1, not {settings.test_share}")
    if not 0 <= settings.lora.dropout < 1:
        problems.append(f"setting lora.dropout: must be at least 0 and below 1, not {settings.lora.dropout}")
    if problems:
        raise options.SettingError("\n".join(problems))


def _device(settings: Settings, index: int, dry: bool) -> tuple[models.Device, str | None]:
    """The device; for a dry run without one, the CPU in its place and the reason."""
    import models

    try:
        return models.choose_device(settings.device, index), None
    except TaskError as error:
        if not dry:
            raise
        return models.stand_in(), str(error)


def _fingerprint(settings: Settings, data: Prepared) -> dict[str, Any]:
    """What has to be the same for a checkpoint to be continued."""
    flat = {name: value for name, value, _ in options.describe(settings) if name not in _FREE}
    return {**flat, "data": data.rows.sha256, "rows": len(data.train)}


def _announce(
    settings: Settings, device: models.Device, no_device: str | None, plan: loop.Plan, data: Prepared,
    memory: models.Memory, parameters: int, trainable: int, output: Path,
) -> list[str]:  # fmt: skip
    import models

    per_token = memory.per_token_checkpointed if plan.checkpointing else memory.per_token
    tokens = min(plan.max_tokens, data.longest * min(plan.batch_size, plan.max_rows), data.tokens)
    expected = memory.weights + memory.loss + per_token * tokens
    left_out = f"{data.too_long} longer than {settings.max_length} tokens and {len(data.rows.bad)} bad left out"
    steps = plan.steps(len(data.train))
    compiling = "compiled" if plan.compile else "not compiled"
    if not plan.compile and device.is_gpu and models.compiler_missing():
        compiling += f" ({models.compiler_missing()} in this image)"
    sources = ", ".join(f"{name} ({count:,})" for name, count in data.rows.counts.items())
    lines = [
        f"model       {settings.model}: {parameters - trainable:,} parameters, frozen",
        f"adapter     LoRA r {settings.lora.r} on {', '.join(settings.lora.target_modules)}: {trainable:,} trainable",
        f"data        {sources}",
        f"            {len(data.train):,} rows to learn, {len(data.test):,} to test on; {left_out}",
        f"            {data.tokens:,} tokens, {data.learnt:,} of them learnt; the longest row has {data.longest:,}",
        f"steps       {steps:,} of {plan.batch_size} rows, {plan.epochs} epoch{'s' * (plan.epochs > 1)}",
        f"device      {device.name}, {str(device.dtype).removeprefix('torch.')}, attention "
        f"{'flash over packed rows' if device.has_bf16 else 'sdpa row by row'}, {compiling}",
        f"memory      {expected / models.GIB:.1f} GiB expected of {device.memory / models.GIB:.1f} GiB free"
        f"{', with gradient checkpointing' if plan.checkpointing else ''}",
        f"output      {output.absolute()}",
    ]
    if no_device:
        lines[6:8] = [f"device      none: {no_device}", f"memory      {expected / models.GIB:.1f} GiB expected"]
    if settings.warmup_steps > steps // 10:
        lines.append(f"note        warm-up is {steps // 10} steps, a tenth of all, not {settings.warmup_steps}")
    return lines


def _result(
    settings: Settings, run: loop.Run, data: Prepared, peak: int, exit_code: int | None, started: float,
    parameters: int, trainable: int,
) -> dict[str, Any]:  # fmt: skip
    import record

    speed, mfu = run.speed()
    return {
        "status": "finished" if exit_code is None else "interrupted",
        "settings": dataclasses.asdict(settings),
        "model": {"name": settings.model, "parameters": parameters - trainable, "trainable": trainable},
        "data": {
            "sha256": data.rows.sha256,
            "sources": data.rows.counts,
            "rows": len(data.train),
            "test_rows": len(data.test),
            "tokens": data.tokens,
            "learnt_tokens": data.learnt,
            "too_long": data.too_long,
            "bad": len(data.rows.bad),
        },
        "device": {
            "name": run.device.name,
            "count": run.world.size,
            "dtype": str(run.device.dtype).removeprefix("torch."),
            "compiled": run.plan.compile,
            "gradient_checkpointing": run.checkpointing,
            "tokens_at_a_time": run.max_tokens,
        },
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "steps": run.step,
        "time_to_train_s": round(run.wall, 1),
        "tokens_per_s": round(speed, 1),
        "mfu": None if mfu is None else round(mfu, 4),
        "peak_memory_bytes": peak,
        "final_loss": _number(run.last_loss),
        "final_test_loss": _number(run.last_test_loss),
        "final_test_perplexity": _number(math.exp(min(run.last_test_loss, 100))),
        "seed": settings.seed,
        "versions": record.versions(),
        "image": record.image(),
    }


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _conclude(result: dict[str, Any], output: Path) -> list[str]:
    mfu = f", MFU {result['mfu']:.0%}" if result["mfu"] else ""
    return [
        f"done        {result['steps']:,} steps in {result['time_to_train_s']:,.0f} s, {result['tokens_per_s']:,.0f} tokens/s"
        f"{mfu}, at most {result['peak_memory_bytes'] / 2**30:.1f} GiB",
        f"adapter     {output / 'adapter'}   loss {output / 'loss.svg'}   record {output / 'run.json'}",
        f'try         chat --adapter {output / "adapter"} "質問"',
    ]


if __name__ == "__main__":
    options.run(main)
