"""Train with TRL's trainers: load the model, check the data, resume, train, and record the run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

import align_models
import align_settings
import preferences
from align_callback import RunCallback
from ekiben_tasks.data.sources import Source
from ekiben_tasks.distributed.context import Stop, init_distributed
from ekiben_tasks.distributed.heartbeat import Heartbeat, Phase
from ekiben_tasks.models import load
from ekiben_tasks.models.adapter import save_adapter
from ekiben_tasks.models.device import Device, choose_device
from ekiben_tasks.task import files, input_files, run_metadata
from ekiben_tasks.task.checksums import ModelChecksum
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.hub import locate_model, split_revision
from ekiben_tasks.task.output_lock import claim_output
from ekiben_tasks.training.progress import peak_memory

TRAINERS: dict[str, tuple[Any, Any]] = {
    "dpo": (trl.DPOConfig, trl.DPOTrainer),
    "orpo": (ORPOConfig, ORPOTrainer),
    "kto": (trl.KTOConfig, trl.KTOTrainer),
    "reward": (trl.RewardConfig, trl.RewardTrainer),
    "grpo": (trl.GRPOConfig, trl.GRPOTrainer),
}
# What may differ between a run and its continuation.
_FREE = {
    "data",
    "device",
    "epochs",
    "gradient_checkpointing",
    "hang_minutes",
    "log_steps",
    "max_steps",
    "model_checksum",
    "save_steps",
    "save_total_limit",
    "tracker",
}
_AGAIN = "start again with --overwrite"


@dataclass(frozen=True, slots=True)
class Request:
    """Describe a requested run. skip: leave invalid examples out. overwrite: an earlier run's checkpoints."""

    settings: align_settings.Settings
    sources: Sequence[Source]
    output: Path
    is_dry: bool = False
    skip: bool = False
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Describe how a run ended. began: seconds since the epoch. peak_memory: bytes."""

    exit_code: int | None
    began: float
    checksum: ModelChecksum
    peak_memory: int


def run(request: Request) -> int:
    """Train as ``request`` says, and return the exit code: 0, or 75 or 130 after a signal.

    Raises:
        TaskError: the data, the model or the output cannot be used.
    """
    settings = request.settings
    rewards = align_models.load_functions(getattr(settings, "rewards", ()))
    examples = preferences.read(request.sources, settings.DATA, skip=request.skip)
    _print_data(settings, examples)
    if request.is_dry:
        print_once(f"model       {settings.model}, {settings.method}", "dry run     nothing was loaded or written")
        return 0
    _quiet()
    heartbeat = Heartbeat(settings.hang_minutes)
    heartbeat.beat(Phase.LOAD, long=True)
    world = init_distributed(settings.device, hang_minutes=settings.hang_minutes)
    stop = Stop()
    stop.listen()
    device = choose_device(settings.device, world.local_rank)
    path = locate_model(settings.model)
    with claim_output(request.output):
        checkpoints = request.output / "checkpoints"
        if world.is_main_process:
            _begin(checkpoints, _fingerprint(settings, examples), overwrite=request.overwrite)
        world.barrier()  # nobody looks for checkpoints before the main process has checked them
        last = find_checkpoint(checkpoints)
        began = time.time()
        print_once(f"loading     {settings.model} on {device.name}")
        checksums = world.is_main_process and settings.model_checksum
        checksum = run_metadata.start_checksum(path, request.output / "run.json") if checksums else ModelChecksum(None)
        tokenizer = load.load_tokenizer(path)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # as TRL's other trainers do, for ORPO's
        _check_template(settings, tokenizer, examples)
        callback = RunCallback(request.output, world, stop, heartbeat, _step_of(last))
        if callback.metrics:
            callback.metrics.track(settings.tracker, settings)
        trainer = make_trainer(settings, path, device, checkpoints, (tokenizer, examples, rewards))
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.add_callback(callback)
        stop.saves = True
        with peak_memory(device) as peak:
            trainer.train(resume_from_checkpoint=str(last) if last else None)
        heartbeat.beat(Phase.SAVE, trainer.state.global_step, long=True)
        if world.is_main_process:
            if stop.exit_code is None:
                save(settings, trainer, tokenizer, request.output)
            _record(request, examples, trainer, device, Outcome(stop.exit_code, began, checksum, peak["bytes"]))
            if callback.metrics:
                callback.metrics.close(finished=stop.exit_code is None)
        world.barrier()
        trainer.accelerator.free_memory()
        world.destroy()
    return stop.exit_code or 0


def make_trainer(
    settings: align_settings.Settings,
    path: str,
    device: Device,
    checkpoints: Path,
    inputs: tuple[Any, preferences.Examples, Sequence[Callable[..., Any]]],
) -> Any:
    """Return TRL's trainer of the method. path: of the model. inputs: tokenizer, examples, functions of rewards.

    Raises:
        TaskError: a model cannot be loaded.
    """
    tokenizer, examples, functions = inputs
    configuration, kind = TRAINERS[settings.NAME]
    model = align_models.load_model(settings, path, device)
    options = configuration(**trainer_options(settings, device, checkpoints))
    if options.n_gpu > 1:
        options._n_gpu = 1  # one process, one GPU: Trainer would wrap the model in nn.DataParallel, which TRL refuses
    arguments: dict[str, Any] = {
        "model": model,
        "args": options,
        "train_dataset": datasets.Dataset.from_list(examples.items),
        "processing_class": tokenizer,
    }
    if settings.method == "lora":
        arguments["peft_config"] = align_models.lora_config(settings, path)
    elif settings.NAME in ("dpo", "kto"):
        arguments["ref_model"] = align_models.load_model(settings, path, device)
    if isinstance(settings, align_settings.GrpoSettings):
        if settings.method == "full" and settings.beta and split_revision(path)[1]:
            # TRL loads the second model by the first one's name alone.
            raise TaskError(f"setting beta={settings.beta}: with method=full, the model {path} may have no revision")
        models = [
            align_models.load_reward(each, device) for each in settings.rewards if not align_settings.is_function(each)
        ]
        pending = {False: iter(models), True: iter(functions)}
        arguments["reward_funcs"] = [next(pending[align_settings.is_function(each)]) for each in settings.rewards]
    return kind(**arguments)


def trainer_options(settings: align_settings.Settings, device: Device, checkpoints: Path) -> dict[str, Any]:
    """Return the arguments of the configuration of TRL's trainer."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    options = {
        "output_dir": str(checkpoints),
        "per_device_train_batch_size": settings.micro_batch,
        "gradient_accumulation_steps": settings.batch_size // (settings.micro_batch * processes),
        "num_train_epochs": settings.epochs,
        "max_steps": settings.max_steps or -1,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": settings.schedule,
        "warmup_steps": settings.warmup_steps,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if settings.gradient_checkpointing else None,
        "logging_steps": settings.log_steps,
        "save_steps": settings.save_steps,
        "save_total_limit": settings.save_total_limit,
        "seed": settings.seed,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not device.is_gpu,
        "bf16": device.dtype == torch.bfloat16,
        "fp16": device.dtype == torch.float16,
        "dataloader_pin_memory": device.is_gpu,
        "ddp_find_unused_parameters": False,
        **settings.trl_options(),
    }
    return options if settings.NAME == "grpo" else {**options, "max_length": settings.max_length}


def find_checkpoint(folder: Path) -> Path | None:
    """Return the last complete checkpoint in ``folder``: its trainer_state.json is written last."""
    complete = [file.parent for file in folder.glob("checkpoint-*/trainer_state.json") if _step_of(file.parent)]
    return max(complete, key=_step_of, default=None)


def _step_of(checkpoint: Path | None) -> int:
    number = checkpoint.name.rpartition("-")[2] if checkpoint else "0"
    return int(number) if number.isdecimal() else 0


def _begin(folder: Path, fingerprint: str, *, overwrite: bool) -> None:
    """Check that the checkpoints in ``folder`` are of the same run. Raises TaskError for another one."""
    if overwrite:
        shutil.rmtree(folder, ignore_errors=True)
    files.ensure_output_dir(folder)
    record = folder / "run.json"
    if record.exists() and input_files.read_object(record, _AGAIN).get("run") != fingerprint:
        raise TaskError(f"{folder}: has checkpoints of other settings or data; give another --output, or {_AGAIN}")
    files.write_json(record, {"run": fingerprint})


def _fingerprint(settings: align_settings.Settings, examples: preferences.Examples) -> str:
    values = {name: value for name, value in dataclasses.asdict(settings).items() if name not in _FREE}
    return hashlib.sha256(json.dumps([values, _digest(examples)], sort_keys=True).encode()).hexdigest()


def _digest(examples: preferences.Examples) -> str:
    return hashlib.sha256(json.dumps(examples.items, ensure_ascii=False, default=str).encode()).hexdigest()


def _print_data(settings: align_settings.Settings, examples: preferences.Examples) -> None:
    form = "messages" if examples.is_chat else "text"
    print_once(
        f"data        {len(examples.items):,} {settings.DATA} of {form}, {len(examples.invalid)} invalid left out"
    )
    if examples.unused:
        columns = ", ".join(f"{name} ({count:,})" for name, count in examples.unused.most_common())
        print_once(f"note        nothing uses the columns {columns}")
    per_example = getattr(settings, "num_generations", 1)
    steps = math.ceil(settings.epochs * len(examples.items) * per_example / settings.batch_size)
    print_once(f"steps       {min(steps, settings.max_steps or steps):,} of {settings.batch_size} examples")


def _check_template(settings: align_settings.Settings, tokenizer: Any, examples: preferences.Examples) -> None:
    """Refuse messages without a chat template, and count the examples that TRL will cut."""
    if examples.is_chat and not tokenizer.chat_template:
        raise TaskError(
            f"model {settings.model}: its tokenizer has no chat template for the data's messages; take data with text"
        )
    if settings.DATA == "prompts":
        return
    long = sum(_length(tokenizer, item, is_chat=examples.is_chat) > settings.max_length for item in examples.items)
    if long:
        print_once(f"note        {long:,} examples have more than {settings.max_length:,} tokens, and are cut")


def _length(tokenizer: Any, item: dict[str, Any], *, is_chat: bool) -> int:
    """Return the tokens of prompt and longest answer."""
    answers = [item[name] for name in ("chosen", "rejected", "completion") if name in item]
    if not is_chat:
        return max(len(tokenizer(item.get("prompt", "") + answer, verbose=False)["input_ids"]) for answer in answers)
    texts = [tokenizer.apply_chat_template(item.get("prompt", []) + answer, tokenize=False) for answer in answers]
    return max(len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in texts)


def save(settings: align_settings.Settings, trainer: Any, tokenizer: Any, output: Path) -> None:
    """Write the adapter, or the model, and its tokenizer, in the main process."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    folder = output / ("adapter" if settings.method == "lora" else "model")
    if settings.method == "lora":
        weights = {name: value.detach().cpu() for name, value in model.named_parameters() if value.requires_grad}
        save_adapter(model, folder, weights, settings.model)
    else:
        staged = folder.with_name(f".{folder.name}.staged-{os.getpid()}")
        model.save_pretrained(str(staged))
        files.make_readable(staged)
        files.replace_folder(staged, folder)
    tokenizer.save_pretrained(str(folder))


def _record(
    request: Request,
    examples: preferences.Examples,
    trainer: Any,
    device: Device,
    outcome: Outcome,
) -> None:
    """Write run.json."""
    exit_code, settings = outcome.exit_code, request.settings
    losses = [line for line in trainer.state.log_history if "loss" in line]
    record = {
        "task": settings.NAME,
        **run_metadata.run_record(settings, exit_code, outcome.began),
        "model": run_metadata.model_record(settings.model, outcome.checksum, wait=exit_code is None),
        "data": {
            "sources": [source.location for source in request.sources],
            "rows": len(examples.items),
            "invalid": len(examples.invalid),
            "sha256": _digest(examples),
        },
        "device": {
            "name": device.name,
            "count": trainer.args.world_size,
            "dtype": str(device.dtype).removeprefix("torch."),
        },
        "peak_memory_bytes": outcome.peak_memory,
        "steps": trainer.state.global_step,
        "last": losses[-1] if losses else {},
    }
    files.write_json(request.output / "run.json", record)
    product = "adapter" if settings.method == "lora" else "model"
    where = request.output / product if exit_code is None else "the same command continues from here"
    print(f"{'done' if exit_code is None else 'stopped':<12}{where}   record {request.output / 'run.json'}", flush=True)


def _quiet() -> None:
    """Leave out progress bars, and what the libraries report of their own work."""
    datasets.disable_progress_bars()
    load.silence_warnings()
    transformers.utils.logging.set_verbosity_error()
