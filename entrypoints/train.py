"""Fine-tune a base model on instruction rows: an adapter (LoRA), the last layer, or every weight; on one GPU or many.

train --data my_rows.jsonl --output result
train --set epochs=3 --set lora.r=8
train --dry-run          what would be trained on what, and whether it fits
train --smoke            prove in seconds, offline, that this image trains
train --gpus 4           on several GPUs of this node; on several nodes, build.py submit starts it
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import places
import settings as options
from hub import check_model_place, locate_model
from rows import Rows, Source, check_places, parse_sources, read_all
from settings import TaskError
from train_settings import SAMPLE, DeepSpeed, Lora, Settings, check, fingerprint, resolve_parallel

if TYPE_CHECKING:
    import loop
    import memory as memories
    import models
    import report
    from prompt import Example

__all__ = ["DeepSpeed", "Lora", "Prepared", "Settings", "main", "make_plan", "prepare_data", "train"]


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
    options.start_processes(__file__, args.gpus, arguments)
    settings = options.load(Settings, args.config, _assignments(args))
    recipe = options.recipe_folder(args.config, __file__)
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
    check(settings)
    parallel = resolve_parallel(settings)
    sources = parse_sources(_with_sample(settings.data, recipe), settings.test_share)
    if check_places(sources) | check_model_place(settings.model):
        _tell(places.prefer_cache(os.environ))
    if not dry:
        places.claim_folder(output)
    place = locate_model(settings.model)

    import checkpoint
    import flops
    import learner as learners
    import loop
    import memory as memories
    import models
    import packing
    import parallel as ways
    import plot
    import record
    import report
    from prompt import set_form
    from world import Stop, join

    ways.check(parallel, settings)
    world = join(settings.device, alone=parallel != "deepspeed")  # may wait for others for long, and must stay killable
    stop = Stop()
    if not dry:
        stop.listen()
    say = print if world.leads else (lambda *_, **__: None)

    # ---- what will be done
    device, no_device = _device(settings, world.local_rank, dry)
    tokenizer = models.load_tokenizer(place)
    form = set_form(tokenizer, settings.form)  # before anything is rendered: it is saved with the tokenizer
    shape = learners.dress(models.load_shape(place), settings)
    data = (prepare or prepare_data)(settings, sources, tokenizer, models.longest_context(shape.config), skip_bad)
    choices = ways.memory_choices(parallel, settings, device, world, data.tokens)
    needs = memories.count_needs(shape, longest=data.longest, **choices)
    memory = memories.expect_memory(needs)
    plan = make_plan(settings, device, memory, needs, data)
    parameters, trainable = models.count_parameters(shape)
    layout, implementation = packing.choose_layout(shape.config), packing.choose_attention(shape.config)
    intent = report.Intent(
        settings=settings, parallel=parallel, processes=world.size, device=device, no_device=no_device, plan=plan,
        attention=report.name_attention(layout, implementation, packing.prefer_kernels(device.place, device.dtype)),
        data=data, memory=memory, layers=needs.layers, parameters=parameters - trainable * (settings.method == "lora"),
        form=form, trainable=trainable, trained=learners.describe(shape, settings), output=output,
    )  # fmt: skip
    for line in report.announce(intent):
        say(line, flush=True)
    _refuse_what_cannot_fit(intent, needs)
    if dry:
        world.leave()
        return 0

    # ---- do it
    if fresh and world.leads:
        shutil.rmtree(output / "checkpoints", ignore_errors=True)
    world.wait()
    started = time.time()
    trained = ways.load(parallel, place, settings, plan, device, world)
    run = loop.Run(
        trained=trained, base=settings.model, device=device, train=data.train, test=data.test, plan=plan, output=output,
        fingerprint=fingerprint(settings, parallel, data), world=world, stop=stop, costs=flops.training_costs(shape),
        watch=watch,
    )  # fmt: skip
    with loop.peak_memory(device) as peak, packing.even_kernels(device.place):
        exit_code = run.fit()

    # ---- say what came of it
    what = "adapter" if settings.method == "lora" else "model"
    if exit_code is None and what == "model":
        weights = trained.weights()
        if world.leads:
            checkpoint.save_model(trained.learner.causal, output / what, weights)
    if world.leads:
        result = report.result(intent, run, peak["bytes"], exit_code, started)
        record.write_json(output / "run.json", result)
        series = {"train": run.metrics.series("loss"), "test": run.metrics.series("test_loss")}
        plot.draw(output / "loss.png", f"{Path(settings.model).name}: loss", series)
        if exit_code is None:
            tokenizer.save_pretrained(str(output / what))
            for line in report.conclude(result, what, output):
                say(line, flush=True)
    world.leave()
    return exit_code or 0


def prepare_data(settings: Settings, sources: list[Source], tokenizer: Any, context: int, skip_bad: bool) -> Prepared:
    """Read, split and tokenise. Errors: TaskError: nothing left to learn, nothing readable."""
    from prompt import encode_rows

    rows = read_all(sources, seed=settings.seed, skip_bad=skip_bad, form=settings.form)
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


def make_plan(
    settings: Settings, device: models.Device, memory: memories.Memory, needs: memories.Needs, data: Prepared
) -> loop.Plan:
    import loop

    checkpointed, max_tokens = _fit_memory(settings, device, memory, needs, data)
    return loop.Plan(
        epochs=settings.epochs,
        max_steps=settings.max_steps,
        batch_size=settings.batch_size,
        max_rows=settings.micro_batch if isinstance(settings.micro_batch, int) else settings.batch_size,
        max_tokens=max_tokens,
        checkpointed=checkpointed,
        compile=needs.compiled,
        learning_rate=settings.learning_rate,
        schedule=settings.schedule,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        eval_every=settings.eval_every,
        save_minutes=settings.save_minutes,
        log_seconds=settings.log_seconds,
        seed=settings.seed,
    )


def _fit_memory(
    settings: Settings, device: models.Device, memory: memories.Memory, needs: memories.Needs, data: Prepared
) -> tuple[int, int]:
    """(blocks to checkpoint, tokens of a pack) within nine tenths of the memory.

    Packs as large as pays; where even packs that are large enough for full speed do not fit, as many blocks as it takes
    are computed twice.
    """
    most, enough = (16_384, 8192) if device.is_gpu else (4096, 1024)
    if device.is_gpu and needs.strategy == "fsdp":
        most = 32_768  # each pack costs gathering every weight
    room = max(int(0.9 * device.memory) - memory.fixed, 0)
    plain, twice = memory.per_token, memory.per_token_checkpointed
    if isinstance(settings.micro_batch, int):
        wanted = most = data.longest * settings.micro_batch
    else:
        wanted = max(data.longest, min(enough, data.longest * settings.batch_size))
    layers = needs.layers
    if settings.gradient_checkpointing == "auto":
        share = (wanted * plain - room) / max(wanted * (plain - twice), 1)
        checkpointed = min(max(-int(-share * layers // 1), 0), layers)
    else:
        checkpointed = layers if settings.gradient_checkpointing else 0
    per_token = plain - (plain - twice) * checkpointed // layers
    return checkpointed, max(min(room // max(per_token, 1), most), data.longest)


def _refuse_what_cannot_fit(intent: report.Intent, needs: memories.Needs) -> None:
    """Errors: TaskError, with what would make it fit. The estimate is an upper one: a little more than there is may pass."""
    import memory as memories
    import models

    # What DeepSpeed keeps in the host's memory, for all GPUs of this node.
    host = intent.memory.host * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if intent.no_device is None and host > (free := models.free_ram()):
        raise TaskError(
            f"{intent.settings.model}: about {host / memories.GIB:.0f} GiB of this node's own memory would be needed, and "
            f"{free / memories.GIB:.0f} GiB are free; take more nodes, or keep less there (--set deepspeed.offload=none)"
        )
    room = intent.device.memory
    expected = intent.expected_bytes
    if expected <= room:
        return
    ways = memories.suggest(needs, int(0.9 * room), quantises=intent.device.is_gpu)
    smaller = "; what would: " + ", or ".join(ways) if ways else "; take a smaller model"
    raise TaskError(
        f"{intent.settings.model}: about {expected / memories.GIB:.0f} GiB would be needed, and {intent.device.name} "
        f"has {room / memories.GIB:.0f} GiB free, so it will not fit{smaller}"
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = options.command("train", __doc__, Settings, arguments)
    parser.add_argument(
        "--data", action="append", default=[], metavar="PLACE",
        help="instead of the setting data; repeatable; 'sample': the recipe's own rows",
    )  # fmt: skip
    parser.add_argument("--gpus", type=int, metavar="N", help="one process for each of N GPUs of this node")
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


def _tell(lines: list[str]) -> None:
    """Before the processes of a run have met: only the first of them speaks."""
    if os.environ.get("RANK", "0") == "0":
        print("".join(f"{line}\n" for line in lines), end="", flush=True)


def _with_sample(data: Any, recipe: Path) -> Any:
    """``data`` with the word 'sample' replaced by the rows that ship with the recipe."""
    items = data if isinstance(data, list) else [data]
    return [str(recipe / "data" / "sample.jsonl") if item == SAMPLE else item for item in items]


def _device(settings: Settings, index: int, dry: bool) -> tuple[models.Device, str | None]:
    """The device; for a dry run without one, the CPU in its place and the reason."""
    import models

    try:
        return models.choose_device(settings.device, index), None
    except TaskError as error:
        if not dry:
            raise
        return models.stand_in(), str(error)


if __name__ == "__main__":
    options.run(main)
