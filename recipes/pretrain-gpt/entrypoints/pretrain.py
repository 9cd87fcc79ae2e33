"""Pretrain a GPT on Megatron-Core: one GPU, or many with tensor, pipeline and data parallelism.

pretrain --data prepared --output pretrained
pretrain --set size=1.3B --dry-run                 whether it fits, how many tokens, how long a warm-up
pretrain --smoke                                   tokenizer to converted model in a minute, offline
pretrain --gpus 4 --set tensor_parallel=2 --set pipeline_parallel=2      on several nodes, build.py submit starts it
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import places
import settings as options
import shapes
from settings import SettingError, TaskError, nearest, option

if TYPE_CHECKING:
    import torch

    import steps
    from world import World

GIB = 1 << 30
# What may differ between a run and its continuation: Megatron's checkpoints are the same however the model is split.
_FREE = {
    "tensor_parallel", "pipeline_parallel", "sequence_parallel", "distributed_optimizer", "micro_batch", "recompute",
    "eval_every", "save_every", "log_seconds", "device", "data",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    size: str = option("0.125B", f"shape and learning rate: {', '.join(shapes.LADDER)}")
    layers: int = option(0, "blocks; 0: as the size says")
    width: int = option(0, "numbers a token is; 0: as the size says")
    heads: int = option(0, "of attention; 0: as the size says")
    data: str = option("prepared", "folder that prepare-data wrote; --data")
    split: str = option("949,50,1", "parts of the documents to learn from, to test on, and to leave")
    sequence: int = option(2048, "tokens of a sequence")
    batch_size: int = option(256, "sequences of one step of the optimizer, over all GPUs")
    micro_batch: int | Literal["auto"] = option("auto", "sequences at a time on one GPU; auto: what fits")
    tensor_parallel: int = option(1, "GPUs that share each layer")
    pipeline_parallel: int = option(1, "GPUs that each hold some of the layers")
    sequence_parallel: bool = option(False, "share norms and dropout too, with tensor_parallel above 1: less memory")
    distributed_optimizer: bool = option(True, "share the optimizer's numbers among the copies of the model")
    recompute: bool | Literal["auto"] = option("auto", "compute activations twice to save memory; auto: when needed")
    train_tokens: float = option(300e9, "tokens to learn from, some of them again and again if there are fewer")
    warmup_tokens: float = option(3e9, "tokens until the highest learning rate")
    decay_tokens: float = option(300e9, "tokens until the lowest")
    max_steps: int = option(-1, "stop after so many steps; -1: when train_tokens are through")
    learning_rate: float | Literal["auto"] = option("auto", "the highest; auto: as the size says")
    min_learning_rate: float = option(1e-6, "the lowest, at the end of a half cosine")
    weight_decay: float = option(0.1, "AdamW's, on weights, not on biases and norms")
    adam_beta1: float = option(0.9, "AdamW's")
    adam_beta2: float = option(0.95, "AdamW's")
    max_grad_norm: float = option(1.0, "longer gradients are shortened to this")
    init_std: float = option(0.02, "of the first weights; narrower by sqrt(2 * layers) where blocks add to the stream")
    dropout: float = option(0.0, "share of the numbers left out while learning")
    eval_every: int = option(100, "steps between tests; there is always one at the end")
    eval_batches: int = option(10, "batches of a test")
    save_every: int = option(1000, "steps between checkpoints; there is one at the end and on SIGTERM")
    log_seconds: float = option(5, "seconds between lines of progress")
    seed: int = option(1234, "of the first weights, the order and the dropout")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = option("auto", "auto: bf16 where the GPU has it, else fp16")
    device: Literal["auto", "cpu"] = option("auto", "cpu: for proofs; Megatron-Core is made for GPUs")


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    if args.dry_run and args.gpus is not None:
        options.check_gpus(args.gpus)  # one process reckons for all
    else:
        options.start_processes(__file__, args.gpus, arguments)
    settings = options.load(Settings, args.config, args.set)
    if args.data:
        settings = dataclasses.replace(settings, data=args.data)
    if os.environ.get("RANK", "0") == "0":
        print("".join(f"{line}\n" for line in places.prepare_caches(os.environ)), end="", flush=True)
    if args.smoke:
        import prove

        os.environ["HF_HUB_OFFLINE"] = "1"
        return prove.prove(options.recipe_folder(args.config, __file__))
    return pretrain(settings, args.output, dry=args.dry_run, fresh=args.fresh, gpus=args.gpus)


def pretrain(
    settings: Settings, output: Path, *, dry: bool = False, fresh: bool = False, gpus: int | None = None
) -> int:
    """Train as ``settings`` say into ``output``; the exit code. Errors: TaskError.

    gpus: a dry run's; else there are as many as there are processes.
    """
    # ---- what can be wrong is found before seconds of imports
    _check(settings)
    data = _read_record(Path(settings.data))
    if not dry:
        places.claim_folder(output)

    cpu = settings.device == "cpu"
    quieten()

    if cpu:
        import without_gpu

        without_gpu.pretend()
    device, name, memory = _device(cpu, dry)
    with _together(cpu, dry, gpus) as world:
        return _pretrain(settings, output, data, world, device, name, memory, dry=dry, fresh=fresh)


def _pretrain(
    settings: Settings, output: Path, data: dict[str, Any], world: World, device: torch.device, name: str, memory: int, *,
    dry: bool, fresh: bool,
) -> int:  # fmt: skip
    import torch

    import record
    from world import Stop

    stop = Stop()
    if not dry:
        stop.listen()
    say = print if world.leads else (lambda *_, **__: None)

    # ---- what will be done
    if world.size > 1 and not dry:
        # What fits the fullest GPU: processes that took different micro-batches would wait for each other for ever.
        least = torch.tensor(memory, device=device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        memory = int(least)
    plan = make_plan(settings, data, world.size, memory, _dtype(settings))
    for line in _announce(settings, plan, data, world.size, name, memory, output):
        say(line, flush=True)
    if dry:
        return 0

    # ---- do it
    from megatron.core import parallel_state

    import flops
    import steps

    parallel_state.initialize_model_parallel(settings.tensor_parallel, settings.pipeline_parallel)
    if fresh and world.leads:
        shutil.rmtree(output / steps.CHECKPOINTS, ignore_errors=True)
    torch.distributed.barrier()
    started = time.time()
    peak = flops.peak_flops(name)
    run = steps.Run(
        plan, Path(settings.data), settings.split, output, _fingerprint(settings, plan, data), world, stop, device, peak
    )
    exit_code = run.fit()

    # ---- say what came of it
    if world.leads:
        import pieces
        import plot

        shutil.copyfile(Path(settings.data) / pieces.MODEL, output / pieces.MODEL)
        result = _result(settings, run, data, name, exit_code, started)
        record.write_json(output / "run.json", result)
        series = {"train": run.metrics.series("loss"), "test": run.metrics.series("test_loss")}
        plot.draw(output / "loss.png", f"GPT {settings.size}: loss", series)
        if exit_code is None:
            mfu = f", MFU {result['mfu']:.0%}" if result["mfu"] else ""
            say(f"done        {run.step:,} steps in {run.wall:,.0f} s, {result['tokens_per_s']:,.0f} tokens/s{mfu}")
            say(f"try         convert --input {output} --output converted", flush=True)
    return exit_code or 0


def quieten() -> None:
    """Megatron's warnings that Transformer Engine and Apex are not here (gpt.py has what is used in their place), and
    torch's about how Megatron calls it: nothing a user could do."""
    for category, module in ((UserWarning, r"megatron\."), (FutureWarning, r"megatron\."), (FutureWarning, r"torch\.")):
        warnings.filterwarnings("ignore", category=category, module=module)
    # The same, where a call passes through ours.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor|Please use DTensor")


def make_plan(settings: Settings, data: dict[str, Any], gpus: int, memory: int, dtype: torch.dtype) -> steps.Plan:
    """Errors: TaskError: what does not divide, what cannot fit."""
    import steps

    shape = shape_of(settings, data["vocab_size"])
    split = settings.tensor_parallel * settings.pipeline_parallel
    if gpus % split:
        raise TaskError(
            f"{gpus} GPUs cannot be groups of tensor_parallel {settings.tensor_parallel} x pipeline_parallel "
            f"{settings.pipeline_parallel} = {split}; start as many processes or a multiple (--gpus {split})"
        )
    copies = gpus // split
    recompute, micro = _fit_memory(settings, shape, copies, memory)
    if settings.batch_size % (micro * copies):
        raise TaskError(
            f"setting batch_size: {settings.batch_size} sequences cannot be shared by {copies} copies of the model, "
            f"{micro} at a time; make it a multiple of {micro * copies}"
        )
    tokens = settings.batch_size * settings.sequence
    whole = math.ceil(settings.train_tokens / tokens)
    rate = shapes.LADDER[settings.size][3] if settings.learning_rate == "auto" else settings.learning_rate
    return steps.Plan(
        shape=shape, dtype=dtype, tensor=settings.tensor_parallel, pipeline=settings.pipeline_parallel,
        sequence_parallel=settings.sequence_parallel, distributed_optimizer=settings.distributed_optimizer,
        recompute=recompute, batch=settings.batch_size, micro_batch=micro,
        steps=min(whole, settings.max_steps) if settings.max_steps > 0 else whole,
        warmup=round(settings.warmup_tokens / tokens), decay=round(settings.decay_tokens / tokens), learning_rate=rate,
        min_learning_rate=min(settings.min_learning_rate, rate), weight_decay=settings.weight_decay,
        betas=(settings.adam_beta1, settings.adam_beta2), max_grad_norm=settings.max_grad_norm,
        init_std=settings.init_std, dropout=settings.dropout, eval_every=settings.eval_every,
        eval_batches=settings.eval_batches, save_every=settings.save_every, log_seconds=settings.log_seconds,
        seed=settings.seed,
    )  # fmt: skip


def shape_of(settings: Settings, vocabulary: int) -> shapes.Shape:
    layers, width, heads, _ = shapes.LADDER[settings.size]
    return shapes.Shape(
        settings.layers or layers, settings.width or width, settings.heads or heads, settings.sequence,
        shapes.pad_vocabulary(vocabulary),
    )  # fmt: skip


def expect_memory(settings: Settings, shape: shapes.Shape, copies: int, micro: int, *, recompute: bool) -> int:
    """Bytes on the fullest GPU, an upper estimate.

    Weights in 2 bytes and gradients in 4; AdamW's two moments and the fp32 weights in 12, shared among the copies by the
    distributed optimizer. A block keeps, per token, 34 widths' bytes less 2 of dropout masks (Korthikanti et al. 2022,
    arXiv:2205.05198, equation 2, without the square of attention, which the flash kernel does not keep); of these 10
    are shared by tensor parallelism only with sequence_parallel. The first pipeline stage holds as many micro-batches
    as there are stages, so it keeps activations of as many blocks as the whole model has. Recomputing keeps the input
    of each block, 2 bytes, and one block whole. Logits: 2 bytes, and 4 twice for their loss.
    """
    split = settings.tensor_parallel * settings.pipeline_parallel
    states = shape.parameters / split * (2 + 4 + 12 / (copies if settings.distributed_optimizer else 1))
    shared = settings.tensor_parallel if settings.sequence_parallel else 1
    tokens = micro * shape.positions
    block = tokens * shape.width * (10 / shared + 22 / settings.tensor_parallel)
    kept = shape.layers * 2 * tokens * shape.width + block if recompute else shape.layers * block
    return int(states + kept + tokens * shape.vocabulary * 10 / settings.tensor_parallel)


def _fit_memory(settings: Settings, shape: shapes.Shape, copies: int, memory: int) -> tuple[bool, int]:
    """(recompute, micro-batch). Errors: TaskError where not even one sequence fits."""
    choices = [False, True] if settings.recompute == "auto" else [settings.recompute]
    share = settings.batch_size // copies
    sizes = (
        [settings.micro_batch]
        if settings.micro_batch != "auto"
        else [n for n in (32, 16, 8, 4, 2, 1) if share % n == 0]
    )
    for recompute in choices:
        for micro in sizes:
            if expect_memory(settings, shape, copies, micro, recompute=recompute) < 0.9 * memory:
                return recompute, micro
    least = expect_memory(settings, shape, copies, sizes[-1], recompute=choices[-1])
    raise TaskError(
        f"{shape.parameters / 1e9:.2f} G parameters need {least / GIB:.1f} GiB on each GPU, and {memory / GIB:.1f} GiB are free; "
        f"try --set tensor_parallel={2 * settings.tensor_parallel} (or pipeline_parallel) on as many GPUs, or a smaller size"
    )


def _check(settings: Settings) -> None:
    problems = [
        f"setting {name}: must be at least 1, not {value}"
        for name, value in [
            ("sequence", settings.sequence), ("batch_size", settings.batch_size), ("micro_batch", settings.micro_batch),
            ("tensor_parallel", settings.tensor_parallel), ("pipeline_parallel", settings.pipeline_parallel),
        ]
        if isinstance(value, int) and value < 1
    ]  # fmt: skip
    if settings.size not in shapes.LADDER:
        raise SettingError(f"setting size: no size '{settings.size}'.{nearest(settings.size, shapes.LADDER)}")
    parts = settings.split.split(",")
    if len(parts) != 3 or not all(part.strip().replace(".", "", 1).isdigit() for part in parts):
        problems.append(f"setting split: three numbers like 949,50,1, not {settings.split}")
    if not 0 <= settings.dropout < 1:
        problems.append(f"setting dropout: must be at least 0 and below 1, not {settings.dropout}")
    if settings.learning_rate != "auto" and not settings.learning_rate > 0:
        problems.append(f"setting learning_rate: must be above 0, not {settings.learning_rate}")
    shape = shape_of(settings, 1)
    if shape.width % shape.heads:
        problems.append(f"setting heads: {shape.width} cannot be divided by {shape.heads}")
    for name, count, whole, what in [
        ("tensor_parallel", settings.tensor_parallel, shape.heads, "heads"),
        ("pipeline_parallel", settings.pipeline_parallel, shape.layers, "layers"),
    ]:
        if count > 0 and whole % count:
            problems.append(f"setting {name}: {whole} {what} cannot be shared by {count}")
    if settings.sequence_parallel and settings.tensor_parallel == 1:
        problems.append("setting sequence_parallel: needs tensor_parallel above 1")
    if problems:
        raise SettingError("\n".join(problems))


def _read_record(folder: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads((folder / "prepared.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TaskError(
            f"data {folder.absolute()}: no prepared.json there; prepare-data writes such a folder"
        ) from None
    except (OSError, ValueError) as error:
        raise TaskError(f"data {folder / 'prepared.json'}: cannot be read: {error}") from None
    return about


@contextlib.contextmanager
def _together(cpu: bool, dry: bool, gpus: int | None) -> Iterator[World]:
    """This process's place among all. Megatron wants a process group even for one."""
    import torch

    from world import World, join

    if dry:
        yield World(size=gpus or int(os.environ.get("WORLD_SIZE", "1")), rank=int(os.environ.get("RANK", "0")))
        return
    world = join("cpu" if cpu else "auto")
    try:
        if not torch.distributed.is_initialized():
            # Not through a file that is removed afterwards: with NCCL the program then hung at its very end.
            torch.distributed.init_process_group(
                "gloo" if cpu else "nccl",
                store=torch.distributed.HashStore(),
                rank=0,
                world_size=1,
                device_id=None if cpu else torch.device("cuda", 0),
            )
        yield world
    finally:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _device(cpu: bool, dry: bool) -> tuple[torch.device, str, int]:
    """(device, its name, its free bytes). Errors: TaskError without a GPU; a dry run then reckons with no limit."""
    import torch

    import models

    index = int(os.environ.get("LOCAL_RANK", "0"))
    try:
        found = models.choose_device("cpu" if cpu else "auto", index)
    except TaskError:
        if not dry:
            raise
        return torch.device("cpu"), "none", 1 << 50
    return found.place, found.name, found.memory


def _dtype(settings: Settings) -> torch.dtype:
    import torch

    named = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if settings.precision != "auto":
        return named[settings.precision]
    if settings.device == "cpu":
        return torch.float32
    has_bf16 = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= 8
    return torch.bfloat16 if has_bf16 else torch.float16


def _fingerprint(settings: Settings, plan: steps.Plan, data: dict[str, Any]) -> dict[str, Any]:
    """What has to be the same for a checkpoint to be continued."""
    flat = {name: value for name, value, _ in options.describe(settings) if name not in _FREE}
    return {**flat, "steps": plan.steps, "dtype": str(plan.dtype), "data": data["data"], "tokenizer": data["tokenizer"]}


def _announce(
    settings: Settings, plan: steps.Plan, data: dict[str, Any], gpus: int, name: str, memory: int, output: Path
) -> list[str]:
    shape, copies = plan.shape, gpus // (plan.tensor * plan.pipeline)
    expected = expect_memory(settings, shape, copies, plan.micro_batch, recompute=plan.recompute)
    tokens = plan.steps * plan.batch * shape.positions
    free = f" of {memory / GIB:.1f} GiB free" if name != "none" else ""
    return [
        f"model       GPT {settings.size}: {shape.parameters:,} parameters, all trainable; {shape.layers} layers of "
        f"{shape.width}, {shape.heads} heads, a table of {shape.vocabulary:,}",
        f"data        {settings.data}: {data['documents']:,} documents, {data['tokens']:,} tokens, split {settings.split}",
        f"steps       {plan.steps:,} of {plan.batch} x {shape.positions:,} tokens: {tokens:,}, "
        f"{tokens / max(data['tokens'], 1):.1f} times the data; warm-up {plan.warmup:,}",
        f"parallel    {gpus} GPU{'s' * (gpus > 1)}: tensor {plan.tensor} x pipeline {plan.pipeline} x data {copies}, "
        f"{plan.micro_batch} sequences at a time{', activations computed twice' if plan.recompute else ''}",
        f"device      {name}, {str(plan.dtype).removeprefix('torch.')}, attention by torch's flash kernel",
        f"memory      {expected / GIB:.1f} GiB expected{free} on each",
        f"output      {output.absolute()}",
    ]


def _result(
    settings: Settings, run: steps.Run, data: dict[str, Any], name: str, exit_code: int | None, started: float
) -> dict[str, Any]:
    import record

    speed, mfu = run.speed()
    plan = run.plan
    return {
        "status": "finished" if exit_code is None else "interrupted",
        "settings": dataclasses.asdict(settings),
        "model": {"parameters": plan.shape.parameters, **dataclasses.asdict(plan.shape)},
        "data": data,
        "device": {
            "name": name, "count": run.world.size, "dtype": str(plan.dtype).removeprefix("torch."),
            "micro_batch": plan.micro_batch, "recompute": plan.recompute,
        },
        "site": record.site(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "steps": run.step,
        "time_to_train_s": round(run.wall, 1),
        "tokens_per_s": round(speed, 1),
        "mfu": None if mfu is None else round(mfu, 4),
        "peak_memory_bytes": _peak_memory(run.on_gpu),
        "final_loss": _number(run.last_loss),
        "final_test_loss": _number(run.last_test_loss),
        "final_test_perplexity": _number(math.exp(min(run.last_test_loss, 100))),
        "seed": settings.seed,
        "versions": record.versions(),
        "image": record.image(),
    }  # fmt: skip


def _peak_memory(on_gpu: bool) -> int:
    import resource

    import torch

    return int(
        torch.cuda.max_memory_reserved() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = options.command("pretrain", __doc__, Settings, arguments)
    parser.add_argument("--data", metavar="DIR", help="what prepare-data wrote")
    parser.add_argument("--gpus", type=int, metavar="N", help="one process for each of N GPUs of this node")
    parser.add_argument("--output", type=Path, metavar="DIR", default=Path("pretrained"), help="default: pretrained")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and stop")
    parser.add_argument("--smoke", action="store_true", help="a tiny model through every task, offline, and check it")
    parser.add_argument("--fresh", action="store_true", help="start again, though --output holds a checkpoint")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options.run(main)
