"""Run a training job: decide, load, train, record."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ekiben_tasks.data.packing import fill_sequences
from ekiben_tasks.data.sources import Source
from ekiben_tasks.data.tokenize import apply_format, prepare_padding
from ekiben_tasks.distributed import strategy as strategies
from ekiben_tasks.distributed.context import DistributedContext, Stop, init_distributed
from ekiben_tasks.distributed.heartbeat import Heartbeat, Phase
from ekiben_tasks.distributed.options import DeepSpeed
from ekiben_tasks.models import flops, load, memory
from ekiben_tasks.models.attention_choice import choose_kernels, kernels_in_use
from ekiben_tasks.models.classifier import Classes, describes_classifier, list_labels
from ekiben_tasks.models.device import GIB, Device, choose_device, dry_run_device, free_ram, named_device
from ekiben_tasks.models.proof import verify
from ekiben_tasks.models.tuning import apply_tuning_method, describe
from ekiben_tasks.task import plot, run_metadata
from ekiben_tasks.task.checksums import ModelChecksum
from ekiben_tasks.task.command import DryRun
from ekiben_tasks.task.errors import DoesNotFitError, TaskError
from ekiben_tasks.task.files import write_json
from ekiben_tasks.training import checkpoint, run_summary, token_cache
from ekiben_tasks.training.batches import Batches
from ekiben_tasks.training.loop import Run, TrainerCallback
from ekiben_tasks.training.plan import make_plan, memory_choices
from ekiben_tasks.training.prepare import Prepared, check_tokens, prepare_data
from ekiben_tasks.training.progress import Progress, peak_memory
from ekiben_tasks.training.run_summary import Outcome, RunSummary
from ekiben_tasks.training.samples import Samples
from ekiben_tasks.training.settings import Settings, TrainOptions, fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Describe a requested run. path: of the model, as locate_model() returned it."""

    settings: Settings
    parallel: str
    processes: int
    sources: list[Source]
    path: str
    output: Path
    options: TrainOptions
    prepare: Callable[[Settings, list[Source], Any, int, bool], Prepared] | None
    callback: TrainerCallback | None

    @property
    def dry(self) -> DryRun | None:
        """Return the GPUs that the run is only planned for; None: it is run."""
        return self.options.dry

    @property
    def product(self) -> str:
        """Return the name of the folder in ``output`` that holds the trained weights."""
        return "adapter" if self.settings.method == "lora" else "model"


def run(job: Job) -> int:
    """Run ``job`` and return the exit code: 0, or 75 or 130 after a signal.

    Raises:
        DoesNotFitError: it needs more memory than there is.
        TaskError: the device, the data, the model or the output cannot be used.
    """
    module = strategies.find(job.parallel)
    heartbeat = Heartbeat(job.settings.hang_minutes)
    heartbeat.beat(Phase.LOAD, long=True)
    world = _join(job, module)
    stop = Stop()
    if not job.dry:
        stop.listen()
    tokenizer = load.load_tokenizer(job.path)
    if job.settings.form.kind == "classification":
        job = _take_labels(job)
    summary, profile, costs = _decide(job, tokenizer, world)
    if world.is_main_process:
        print("\n".join(run_summary.format_header(summary)), flush=True)
    _refuse_what_cannot_fit(summary, profile, is_here=not (job.dry and (summary.no_device or job.dry.gpu)))
    if job.dry:
        return 0

    if job.options.fresh and world.is_main_process:
        shutil.rmtree(job.output / "checkpoints", ignore_errors=True)
    world.barrier()
    started = time.time()
    strategy = module.create(_request(job, summary), summary.plan.optimizer, world, _options(job))
    # Once the weights are loaded, their files are in the page cache; one process reads them.
    checksums = world.is_main_process and job.settings.model_checksum
    checksum = run_metadata.start_checksum(job.path, job.output / "run.json") if checksums else ModelChecksum(None)
    progress = Progress(summary.plan, world, summary.device, costs, job.output, summary.data.count)
    training = _prepare_training(job, summary, strategy, progress, stop)
    training.samples = Samples(summary.data, tokenizer, job.settings.sample_answers)
    in_use = kernels_in_use(summary.kernels.setting, summary.device.torch_device)
    with peak_memory(summary.device) as peak, in_use:
        exit_code = training.fit(job.callback, heartbeat)
    heartbeat.beat(Phase.SAVE, training.step, long=True)
    _record(job, summary, training, tokenizer, Outcome(exit_code, peak["bytes"], started, checksum))
    world.destroy()
    return exit_code or 0


def _join(job: Job, module: strategies.StrategyModule) -> DistributedContext:
    """Join the processes of the run, which may take long: the process must stay killable."""
    if job.dry:  # a dry run needs no other process: one plans for all
        return DistributedContext(rank=int(os.environ.get("RANK", "0")), size=job.processes)
    settings = job.settings
    return init_distributed(settings.device, alone=not module.NEEDS_PROCESS_GROUP, hang_minutes=settings.hang_minutes)


def _prepare_training(
    job: Job, summary: RunSummary, strategy: strategies.ParallelStrategy, progress: Progress, stop: Stop
) -> Run:
    """Return the loop, ready for its first step."""
    data, device, world = summary.data, summary.device, progress.world
    batches = Batches(
        data,
        summary.plan,
        world,
        layout=strategy.loss_module.layout,
        collective=strategy.collective,
        device=device.torch_device,
    )
    checkpoints = checkpoint.Checkpoints(
        job.output, fingerprint(job.settings, data), job.settings.model, world, keep=job.settings.save_total_limit
    )
    return Run(strategy, batches, progress, checkpoints, device, stop)


def _decide(
    job: Job, tokenizer: Any, world: DistributedContext
) -> tuple[RunSummary, memory.MemoryProfile, flops.Costs]:
    """Prepare everything that does not need weights."""
    settings = job.settings
    device, no_device = _device(settings, world.local_rank, job.dry)
    is_here = not (job.dry and job.dry.gpu)
    # Micro-batches that fit the fullest GPU: processes with different plans would deadlock.
    device = dataclasses.replace(device, memory=world.minimum(device.memory, device.torch_device))
    form = apply_format(tokenizer, settings.form)  # before anything is rendered: it is saved with the tokenizer
    config = load.read_config(job.path)
    proof, context = verify(config), load.longest_context(config)
    classes = None
    if settings.form.kind == "classification":
        # The labels of the data, which a head is made for, are not known yet.
        classes = Classes(("0", "1"), prepare_padding(tokenizer, config), settings.seed)
    meta = apply_tuning_method(load.load_meta_model(job.path, classes=classes), settings)
    data = _prepare_data(job, tokenizer, context, len(meta.get_input_embeddings().weight), world, device)
    if classes:
        classes = dataclasses.replace(classes, labels=data.labels)
        meta = apply_tuning_method(load.load_meta_model(job.path, classes=classes), settings)
    needing = ("early_stopping_patience", "load_best_model_at_end", "sample_answers")
    if not data.test and (named := [name for name in needing if getattr(settings, name)]):
        raise TaskError(f"setting {', '.join(named)}: there are no rows for evaluation; set validation_split")
    if settings.packing:
        data = dataclasses.replace(
            data, sequences=fill_sequences([len(example.ids) for example in data.train], data.limit)
        )
    module = strategies.find(job.parallel)
    choices = memory_choices(module, settings, device, world.size, data.tokens, _options(job))
    profile = memory.profile_model(meta, longest=data.longest, **choices)
    expected = memory.expect_memory(profile)
    parameters, trainable = load.count_parameters(meta)
    kernels = choose_kernels(
        settings.attention, meta.config, device, is_here=is_here and no_device is None, longest=data.longest
    )
    summary = RunSummary(
        settings=settings,
        parallel=job.parallel,
        processes=world.size,
        spread=module.SUMMARY,
        device=device,
        no_device=no_device,
        plan=make_plan(settings, device, expected, profile, data),
        attention=run_summary.name_attention(proof, kernels.mixed),
        proof=proof,
        classes=classes,
        kernels=kernels,
        data=data,
        memory=expected,
        layers=profile.layers,
        parameters=parameters - trainable * (settings.method == "lora"),
        form=form,
        trainable=trainable,
        trained=describe(meta, settings),
        output="removed afterwards" if job.options.temporary else str(job.output.absolute()),
    )
    return summary, profile, flops.training_costs(meta)


def _take_labels(job: Job) -> Job:
    """Return the job with the labels of a base model that is a classifier already, unless the settings have labels.

    Raises:
        TaskError: the numbers of labels differ.
    """
    config, form = load.read_config(job.path), job.settings.form
    if not describes_classifier(config):
        return job
    labels = form.labels or list_labels(config)
    if labels and len(labels) != config.num_labels:
        raise TaskError(
            f"setting form.labels: has {len(labels)} labels, and the model {job.settings.model} {config.num_labels}"
        )
    return dataclasses.replace(
        job, settings=dataclasses.replace(job.settings, form=dataclasses.replace(form, labels=labels))
    )


def _prepare_data(
    job: Job, tokenizer: Any, context: int, embeddings: int, world: DistributedContext, device: Device
) -> Prepared:
    """Read and tokenise the examples, or have another process of the node do it."""
    arguments = (job.settings, job.sources, tokenizer, context, job.options.skip_bad)

    def prepare() -> Prepared:
        data = (job.prepare or prepare_data)(*arguments)
        check_tokens(data, job.settings, job.sources, tokenizer, embeddings)
        return data

    if job.prepare or job.dry or not token_cache.is_on():
        return prepare()
    limits = (context, embeddings, job.options.skip_bad)
    key = token_cache.make_key(job.settings, job.sources, tokenizer, limits, world)
    return token_cache.share_tokens(key, prepare, world, device.torch_device)


def _request(job: Job, summary: RunSummary) -> strategies.ModelRequest:
    return strategies.ModelRequest(
        path=job.path,
        name=job.settings.model,
        device=summary.device,
        tuning=job.settings,
        bits=job.settings.bits,
        checkpointed_blocks=summary.plan.checkpointed,
        compile=summary.plan.compile,
        attention_kernel=summary.kernels.setting,
        classes=summary.classes,
    )


def _options(job: Job) -> Any:
    """The settings of the strategy alone: the group that has its name."""
    return getattr(job.settings, job.parallel, None)


def _record(
    job: Job,
    summary: RunSummary,
    training: Run,
    tokenizer: Any,
    outcome: Outcome,
) -> None:
    """Write the model, the run's record and its plot, and print a summary."""
    strategy, folder = training.strategy, job.output / job.product
    if outcome.exit_code is None and job.product == "model":
        weights = strategy.weights()
        if training.world.is_main_process:
            checkpoint.save_model(strategy.loss_module.causal, folder, weights)
    metrics = training.progress.metrics
    if metrics is None:  # only the main process writes the record
        return
    metrics.close(finished=outcome.exit_code is None)
    result = run_summary.result(summary, training, outcome)
    write_json(job.output / "run.json", result)
    series = {"train": metrics.series("loss"), "eval": metrics.series("eval_loss")}
    plot.draw(job.output / "loss.png", f"{Path(job.settings.model).name}: loss", series)
    if outcome.exit_code is None:
        tokenizer.save_pretrained(str(folder))
        lines = run_summary.format_footer(result, job.product, job.output)
        print("\n".join(lines[:1] if job.options.temporary else lines), flush=True)


def _refuse_what_cannot_fit(summary: RunSummary, profile: memory.MemoryProfile, *, is_here: bool) -> None:
    """Raise DoesNotFitError with settings that would fit. is_here: it would run on this machine."""
    # DeepSpeed's states in the host's memory, for all GPUs of this node.
    host = summary.memory.host * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if is_here and host > (free := free_ram()):
        raise DoesNotFitError(
            f"{summary.settings.model}: about {host / GIB:.0f} GiB of this node's own memory would be needed, and "
            f"{free / GIB:.0f} GiB are free; use more nodes, or keep less there (--set deepspeed.offload=none)"
        )
    budget_bytes = summary.device.memory
    expected = summary.needed_bytes
    if expected <= budget_bytes:
        return
    has_deepspeed = strategies.find("deepspeed").unavailable(DeepSpeed()) is None
    ways = memory.suggest(
        profile,
        int(0.9 * budget_bytes),
        quantises=summary.device.is_gpu,
        offloads=has_deepspeed and summary.device.is_gpu,
    )
    smaller = "; what would: " + ", or ".join(ways) if ways else "; use a smaller model"
    raise DoesNotFitError(
        f"{summary.settings.model}: about {expected / GIB:.0f} GiB would be needed, and {summary.device.name} "
        f"has {budget_bytes / GIB:.0f} GiB free, so it will not fit{smaller}"
    )


def _device(settings: Settings, index: int, dry: DryRun | None) -> tuple[Device, str | None]:
    """Return the device; for a dry run without one, the CPU and the reason."""
    if dry and dry.gpu:
        return named_device(dry.gpu), None
    try:
        device = choose_device(settings.device, index)
        if settings.weights == "fp32":
            return device, None
        if device.is_gpu and not device.has_bf16:
            raise TaskError(f"setting weights=bf16: {device.name} does not compute in bf16; use weights=fp32")
        return dataclasses.replace(device, dtype=torch.bfloat16), None
    except TaskError as error:
        if not dry:
            raise
        return dry_run_device(), str(error)
