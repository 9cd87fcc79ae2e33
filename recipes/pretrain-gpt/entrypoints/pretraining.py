"""Pretrain a GPT on Megatron-Core: settings, plan, run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import model_configs
import prepare_data
from ekiben_tasks.task import files, output_lock, trackers
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.command import DryRun
from ekiben_tasks.task.errors import DoesNotFitError, SettingError, TaskError, nearest
from ekiben_tasks.task.settings import option
from megatron_warnings import silence_warnings

if TYPE_CHECKING:
    import torch

    import steps
    from ekiben_tasks.distributed.context import DistributedContext, Stop
    from ekiben_tasks.models.device import Device

GIB = 1 << 30
# Settings that may differ between a run and its continuation: Megatron's checkpoints do not depend on the sharding.
_FREE = {
    "tensor_parallel",
    "pipeline_parallel",
    "sequence_parallel",
    "distributed_optimizer",
    "micro_batch",
    "recompute",
    "eval_every",
    "save_every",
    "log_seconds",
    "tracker",
    "hang_minutes",
    "device",
    "data",
    "train_tokens",
    "max_steps",
    "decay_tokens",  # a run can be lengthened
}


@dataclass(frozen=True)
class Settings:
    """Define the settings of `pretrain`."""

    size: str = option("0.125B", f"shape and learning rate: {', '.join(model_configs.LADDER)}")
    layers: int = option(0, "blocks; 0: that of ``size``")
    width: int = option(0, "hidden size; 0: that of ``size``")
    heads: int = option(0, "attention heads; 0: that of ``size``")
    data: str = option("prepared", "folder that prepare-data wrote; --data")
    split: str = option("949,50,1", "shares of the documents for training, evaluation, and neither")
    sequence: int = option(2048, "tokens of a sequence")
    batch_size: int = option(256, "sequences of one step of the optimizer, over all GPUs")
    micro_batch: int | Literal["auto"] = option("auto", "sequences at a time on one GPU; auto: as many as fit")
    tensor_parallel: int = option(1, "GPUs over which each layer is sharded")
    pipeline_parallel: int = option(1, "GPUs that each hold some of the layers")
    sequence_parallel: bool = option(False, "shard norms and dropout, too, with tensor_parallel above 1: less memory")
    distributed_optimizer: bool = option(True, "shard the optimizer state over the data-parallel group")
    recompute: bool | Literal["auto"] = option("auto", "compute activations twice to save memory; auto: when needed")
    train_tokens: float = option(300e9, "training tokens; fewer in the data are repeated")
    warmup_tokens: float = option(3e9, "tokens until the highest learning rate")
    decay_tokens: float = option(300e9, "tokens until the lowest")
    max_steps: int = option(-1, "stop after this number of steps; -1: after train_tokens")
    learning_rate: float | Literal["auto"] = option("auto", "highest learning rate; auto: that of ``size``")
    min_learning_rate: float = option(1e-6, "the lowest, at the end of a half cosine")
    weight_decay: float = option(0.1, "AdamW's, on weights, not on biases and norms")
    adam_beta1: float = option(0.9, "AdamW's")
    adam_beta2: float = option(0.95, "AdamW's")
    max_grad_norm: float = option(1.0, "gradients of a larger norm are clipped to this; 0: no clipping")
    init_std: float = option(0.02, "of the first weights; narrower by sqrt(2 * layers) where blocks add to the stream")
    dropout: float = option(0.0, "dropout probability while training")
    eval_every: int = option(100, "steps between evaluations; the last step has one")
    eval_batches: int = option(10, "batches of an evaluation")
    save_every: int = option(1000, "steps between checkpoints; there is one at the end and on SIGTERM")
    log_seconds: float = option(5, "seconds between lines of progress")
    tracker: str | tuple[str, ...] = option("none", trackers.HELP)
    hang_minutes: float = option(
        10,
        "minutes that one of several processes may go without progress before all end; loading, compiling and "
        "saving may take an hour, or as long as this; 0: an hour everywhere",
    )
    seed: int = option(1234, "of the first weights, the order and the dropout")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = option("auto", "auto: bf16 where the GPU has it, else fp16")
    device: Literal["auto", "cpu"] = option("auto", "cpu: for proofs; Megatron-Core is made for GPUs")


def pretrain(settings: Settings, output: Path, *, dry: DryRun | None = None, fresh: bool = False) -> int:
    """Train as ``settings`` say into ``output`` and return the exit code: 0, or 75 or 130 after a signal.

    dry: print the plan for these GPUs, and stop. fresh: start again, though ``output`` holds a checkpoint.

    Raises:
        SettingError: settings are wrong.
        DoesNotFitError: no micro-batch fits the memory.
        TaskError: the data, the device or the output cannot be used, or a loss is not finite.
    """
    # ---- checks before seconds of imports
    _check(settings)
    data = prepare_data.read_record(Path(settings.data))
    if not dry:
        files.ensure_output_dir(output)

    silence_warnings()
    if settings.device == "cpu":
        import without_gpu

        without_gpu.pretend()
    from ekiben_tasks.distributed.context import Stop

    device = _device(settings, dry)
    lock = contextlib.nullcontext() if dry else output_lock.lock_output(output)
    with lock, _process_group(settings, dry) as world:
        # The size that fits the fullest GPU: processes with different micro-batches would deadlock.
        device = dataclasses.replace(device, memory=world.minimum(device.memory, device.torch_device))
        stop = Stop()
        if not dry:
            stop.listen()
        plan = make_plan(settings, data, world.size, device.memory, device.dtype)
        run = _Run(plan, data, output, world, device)
        if world.is_main_process:
            print("\n".join(_format_header(run)), flush=True)
        return 0 if dry else _train(run, stop, fresh=fresh)


@dataclass(frozen=True, slots=True)
class _Run:
    """Hold everything that is decided before the model is built. data: the record of prepare-data."""

    plan: steps.Plan
    data: dict[str, Any]
    output: Path
    world: DistributedContext
    device: Device


def _train(run: _Run, stop: Stop, *, fresh: bool) -> int:
    """Train, write the record, and return the exit code."""
    import torch
    from megatron.core import parallel_state

    import steps
    from background_save import CHECKPOINTS
    from ekiben_tasks.distributed.context import process_group_timeout
    from ekiben_tasks.distributed.heartbeat import Heartbeat
    from ekiben_tasks.training.progress import peak_memory

    settings, output = run.plan.settings, run.output
    minutes = process_group_timeout(settings.hang_minutes).total_seconds() / 60
    parallel_state.initialize_model_parallel(
        settings.tensor_parallel, settings.pipeline_parallel, distributed_timeout_minutes=math.ceil(minutes)
    )
    if fresh and run.world.is_main_process:
        shutil.rmtree(output / CHECKPOINTS, ignore_errors=True)
    torch.distributed.barrier()
    started = time.time()
    job = steps.Job(Path(settings.data), settings.split, output, _fingerprint(run.plan, run.data))
    with peak_memory(run.device) as peak:
        training = steps.Run(run.plan, job, run.world, run.device, stop, Heartbeat(settings.hang_minutes))
        exit_code = training.fit()
    if run.world.is_main_process:
        _record(run, training, _result(run, training, peak["bytes"], exit_code, started))
    return exit_code or 0


def _record(run: _Run, training: steps.Run, result: dict[str, Any]) -> None:
    """Write the run's record and its plot beside the tokenizer, and print a summary."""
    import pieces
    from ekiben_tasks.task import plot

    output = run.output
    training.metrics.close(finished=result["status"] == "finished")
    shutil.copyfile(Path(run.plan.settings.data) / pieces.MODEL, output / pieces.MODEL)
    files.write_json(output / "run.json", result)
    series = {"train": training.metrics.series("loss"), "eval": training.metrics.series("eval_loss")}
    plot.draw(output / "loss.png", f"GPT {run.plan.settings.size}: loss", series)
    if result["status"] == "finished":
        mfu = f", MFU {result['mfu']:.0%}" if result["mfu"] else ""
        speed = f"{result['tokens_per_s']:,.0f} tokens/s{mfu}"
        print(f"done        {training.step:,} steps in {training.wall:,.0f} s, {speed}", flush=True)


def make_plan(settings: Settings, data: dict[str, Any], gpus: int, memory: int, dtype: torch.dtype) -> steps.Plan:
    """Return the plan of a run. data: the record of prepare-data. memory: bytes of one GPU that are free.

    Raises:
        DoesNotFitError: no micro-batch fits the memory.
        TaskError: the GPUs or the batch cannot be divided as the settings say.
    """
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
    total_steps = math.ceil(settings.train_tokens / tokens)
    rate = model_configs.LADDER[settings.size][3] if settings.learning_rate == "auto" else settings.learning_rate
    return steps.Plan(
        settings,
        shape,
        dtype,
        recompute=recompute,
        micro_batch=micro,
        steps=min(total_steps, settings.max_steps) if settings.max_steps > 0 else total_steps,
        warmup=round(settings.warmup_tokens / tokens),
        decay=round(settings.decay_tokens / tokens),
        learning_rate=rate,
        min_learning_rate=min(settings.min_learning_rate, rate),
    )


def shape_of(settings: Settings, vocabulary: int) -> model_configs.Shape:
    """Return the model's sizes: those of ``settings.size``, where no other is set. vocabulary: before padding."""
    layers, width, heads, _ = model_configs.LADDER[settings.size]
    return model_configs.Shape(
        settings.layers or layers,
        settings.width or width,
        settings.heads or heads,
        settings.sequence,
        model_configs.pad_vocabulary(vocabulary),
    )


def expect_memory(settings: Settings, shape: model_configs.Shape, copies: int, micro: int, *, recompute: bool) -> int:
    """Return an upper estimate of the bytes in use on the fullest GPU. micro: sequences of a micro-batch.

    Weights in 2 bytes and gradients in 4; AdamW's two moments and the fp32 weights in 12, shared among the copies by
    the distributed optimizer. A block keeps, per token, 34 widths' bytes less 2 of dropout masks (Korthikanti et al.
    2022, arXiv:2205.05198, equation 2, without the square of attention, which the flash kernel does not keep); of these
    10 are shared by tensor parallelism only with sequence_parallel. The first pipeline stage holds as many
    micro-batches as there are stages, so it keeps activations of as many blocks as the whole model has. Recomputing
    keeps the input of each block, 2 bytes, and one block whole. Logits: 2 bytes, and 4 twice for their loss.
    """
    split = settings.tensor_parallel * settings.pipeline_parallel
    states = shape.parameters / split * (2 + 4 + 12 / (copies if settings.distributed_optimizer else 1))
    shared = settings.tensor_parallel if settings.sequence_parallel else 1
    tokens = micro * shape.positions
    block = tokens * shape.width * (10 / shared + 22 / settings.tensor_parallel)
    kept = shape.layers * 2 * tokens * shape.width + block if recompute else shape.layers * block
    return int(states + kept + tokens * shape.vocabulary * 10 / settings.tensor_parallel)


def _fit_memory(settings: Settings, shape: model_configs.Shape, copies: int, memory: int) -> tuple[bool, int]:
    """(recompute, micro-batch). Raises TaskError where not even one sequence fits."""
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
    raise DoesNotFitError(
        f"{shape.parameters / 1e9:.2f} G parameters need {least / GIB:.1f} GiB on each GPU, and {memory / GIB:.1f} GiB"
        f" are free; try --set tensor_parallel={2 * settings.tensor_parallel} (or pipeline_parallel) on as many GPUs,"
        " or a smaller size"
    )


def _check(settings: Settings) -> None:
    problems = [
        f"setting {name}: must be at least 1, not {value}"
        for name, value in [
            ("sequence", settings.sequence),
            ("batch_size", settings.batch_size),
            ("micro_batch", settings.micro_batch),
            ("tensor_parallel", settings.tensor_parallel),
            ("pipeline_parallel", settings.pipeline_parallel),
        ]
        if isinstance(value, int) and value < 1
    ]
    problems += trackers.tracker_problems(settings.tracker)
    if settings.size not in model_configs.LADDER:
        raise SettingError(f"setting size: no size '{settings.size}'.{nearest(settings.size, model_configs.LADDER)}")
    shares = settings.split.split(",")
    if len(shares) != 3 or not all(share.strip().replace(".", "", 1).isdigit() for share in shares):
        problems.append(f"setting split: three numbers like 949,50,1, not {settings.split}")
    if not 0 <= settings.dropout < 1:
        problems.append(f"setting dropout: must be at least 0 and below 1, not {settings.dropout}")
    if not 0 <= settings.max_grad_norm < math.inf:
        problems.append(f"setting max_grad_norm: must be at least 0 (0: no clipping), not {settings.max_grad_norm}")
    if not 0 <= settings.hang_minutes < math.inf:
        problems.append(f"setting hang_minutes: must be at least 0 (0: an hour), not {settings.hang_minutes}")
    if settings.learning_rate != "auto" and not settings.learning_rate > 0:
        problems.append(f"setting learning_rate: must be above 0, not {settings.learning_rate}")
    shape = shape_of(settings, 1)
    if shape.width % shape.heads:
        problems.append(f"setting heads: {shape.width} cannot be divided by {shape.heads}")
    for name, count, total, what in [
        ("tensor_parallel", settings.tensor_parallel, shape.heads, "heads"),
        ("pipeline_parallel", settings.pipeline_parallel, shape.layers, "layers"),
    ]:
        if count > 0 and total % count:
            problems.append(f"setting {name}: {total} {what} cannot be shared by {count}")
    if settings.sequence_parallel and settings.tensor_parallel == 1:
        problems.append("setting sequence_parallel: needs tensor_parallel above 1")
    if problems:
        raise SettingError("\n".join(problems))


@contextlib.contextmanager
def _process_group(settings: Settings, dry: DryRun | None) -> Iterator[DistributedContext]:
    """Initialise the process group, which Megatron needs even for one process."""
    import torch

    from ekiben_tasks.distributed.context import DistributedContext, init_distributed
    from ekiben_tasks.distributed.heartbeat import Heartbeat, Phase

    if dry:
        yield DistributedContext(
            size=dry.gpus or int(os.environ.get("WORLD_SIZE", "1")), rank=int(os.environ.get("RANK", "0"))
        )
        return
    cpu = settings.device == "cpu"
    Heartbeat(settings.hang_minutes).beat(Phase.LOAD, long=True)
    world = init_distributed("cpu" if cpu else "auto", hang_minutes=settings.hang_minutes)
    if not torch.distributed.is_initialized():
        # Not through a temporary file: with NCCL the program then hung at exit.
        torch.distributed.init_process_group(
            "gloo" if cpu else "nccl",
            store=torch.distributed.HashStore(),
            rank=0,
            world_size=1,
            device_id=None if cpu else torch.device("cuda", 0),
        )
    try:
        yield world
    except BaseException:
        # Destroying a group waits for the others, which wait for this process: report its error first.
        if world.size == 1:
            _destroy()
        raise
    _destroy()


def _destroy() -> None:
    from megatron.core import parallel_state

    from ekiben_tasks.distributed.context import leave_group, wait_for_peers

    wait_for_peers()
    parallel_state.destroy_model_parallel()
    leave_group()


def _device(settings: Settings, dry: DryRun | None) -> Device:
    """Return the device with the dtype to compute in; a dry run without a GPU has no memory limit.

    Raises:
        TaskError: there is no GPU, or --on names an unknown one.
    """
    import torch

    from ekiben_tasks.models.device import choose_device, dry_run_device, named_device

    try:
        if dry and dry.gpu:
            device = named_device(dry.gpu)
        else:
            device = choose_device(settings.device, int(os.environ.get("LOCAL_RANK", "0")))
    except SettingError:
        raise
    except TaskError:
        if not dry:
            raise
        device = dry_run_device()
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "auto": device.dtype}
    return dataclasses.replace(device, dtype=dtypes[settings.precision])


def _fingerprint(plan: steps.Plan, data: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that must be equal to resume a checkpoint."""
    flat = {name: value for name, value, _ in options.describe(plan.settings) if name not in _FREE}
    return {**flat, "dtype": str(plan.dtype), "data": data["data"], "tokenizer": data["tokenizer"]}


def _format_header(run: _Run) -> list[str]:
    """Return the lines printed before a run."""
    settings, plan, data, gpus, device = run.plan.settings, run.plan, run.data, run.world.size, run.device
    shape, copies = plan.shape, gpus // (settings.tensor_parallel * settings.pipeline_parallel)
    expected = expect_memory(settings, shape, copies, plan.micro_batch, recompute=plan.recompute)
    tokens = plan.steps * settings.batch_size * shape.positions
    free = f" of {device.memory / GIB:.1f} GiB free" if device.name != "none" else ""
    return [
        (
            f"model       GPT {settings.size}: {shape.parameters:,} parameters, all trainable; {shape.layers} layers of"
            f" {shape.width}, {shape.heads} heads, a table of {shape.vocabulary:,}"
        ),
        (
            f"data        {settings.data}: {data['documents']:,} documents, {data['tokens']:,} tokens, split"
            f" {settings.split}"
        ),
        (
            f"steps       {plan.steps:,} of {settings.batch_size} x {shape.positions:,} tokens: {tokens:,}, "
            f"{tokens / max(data['tokens'], 1):.1f} times the data; warm-up {plan.warmup:,}"
        ),
        (
            f"parallel    {gpus} GPU{'s' * (gpus > 1)}: tensor {settings.tensor_parallel} x pipeline"
            f" {settings.pipeline_parallel} x data {copies}, {plan.micro_batch} sequences at a"
            f" time{', activations computed twice' if plan.recompute else ''}"
        ),
        f"device      {device.name}, {str(plan.dtype).removeprefix('torch.')}, attention by torch's flash kernel",
        f"memory      {expected / GIB:.1f} GiB expected{free} on each",
        f"output      {run.output.absolute()}",
    ]


def _result(run: _Run, training: steps.Run, peak: int, exit_code: int | None, started: float) -> dict[str, Any]:
    """Return the content of run.json. peak: bytes. started: seconds since the epoch."""
    from ekiben_tasks.distributed.optimizer import name_optimizer
    from ekiben_tasks.task import run_metadata
    from sharded_state import inner_optimizers

    plan = run.plan
    return {
        **run_metadata.run_record(plan.settings, exit_code, started),
        "model": {"parameters": plan.shape.parameters, **dataclasses.asdict(plan.shape)},
        "data": run.data,
        "device": {
            "name": run.device.name,
            "count": run.world.size,
            "dtype": str(plan.dtype).removeprefix("torch."),
            "micro_batch": plan.micro_batch,
            "recompute": plan.recompute,
        },
        "optimizer": name_optimizer(inner_optimizers(training.optimizer)[0].optimizer),
        "steps": training.step,
        "schedule": {"name": "cosine", "warmup_steps": plan.warmup, "lengths": training.lengths},
        **training.measurements(),
        "peak_memory_bytes": peak,
    }
