"""Define the settings of a training run, and check them before anything is loaded."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
from dataclasses import dataclass
from typing import Any, Literal

from ekiben_tasks.data.schema import DatasetFormat, check_format
from ekiben_tasks.data.sources import Mixture
from ekiben_tasks.distributed import strategy
from ekiben_tasks.distributed.options import DeepSpeed, OptimizerName
from ekiben_tasks.models.attention_kernel import AttentionKernel, missing_package
from ekiben_tasks.models.lora import Lora, check_lora
from ekiben_tasks.task import errors, trackers
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.command import DryRun
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.settings import option

SAMPLE = "sample"
# Settings that may differ between a run and its continuation: they affect neither data nor results, or only speed.
_FREE = {
    "device",
    "compile",
    "attention",
    "micro_batch",
    "gradient_checkpointing",
    "eval_every",
    "early_stopping_patience",
    "load_best_model_at_end",
    "sample_answers",
    "save_minutes",
    "save_steps",
    "save_total_limit",
    "epochs",  # a run can be lengthened
    "max_steps",
    "log_seconds",
    "tracker",
    "hang_minutes",
    "model_checksum",
    "data",
    "parallel",
    "deepspeed",
}


@dataclass(frozen=True)
class Settings:
    """Define the settings of `train`."""

    model: str = option("cyberagent/open-calm-3b", "base model: a hub id or a local folder")
    method: Literal["lora", "full", "last-layer"] = option("lora", "trained weights: an adapter, all, the last layer")
    bits: Literal[16, 8, 4] = option(
        16, "bits of a frozen weight under an adapter; 8 and 4, by bitsandbytes, need a GPU"
    )
    data: object = option(
        SAMPLE,
        "hub data sets, folders, or files (JSON, JSON lines, CSV, TSV, Parquet, Arrow, text); or groups {source,"
        " validation_split, subset, split, eval_split, revision, take, weight}",
    )
    mixture: Mixture = option(  # noqa: RUF009  it makes a field
        "first_exhausted", "when an epoch of sources with weights ends: at the end of the first one, or of the last one"
    )
    validation_split: float = option(
        0.02, "share of the examples for evaluation, unless a source sets it", old="test_share"
    )
    form: DatasetFormat = dataclasses.field(default_factory=DatasetFormat)
    mask_prompt: bool = option(True, "compute the loss of responses only; false: of prompts, too")
    max_length: int = option(2048, "tokens of the longest row")
    long_examples: Literal["drop", "cut", "chunk"] = option(
        "drop", "longer rows are skipped, truncated, or split into several; the plan counts them"
    )
    packing: bool = option(
        False,
        "rows fill sequences of max_length tokens, which batch_size and micro_batch then count; none attends to"
        " another",
    )
    lora: Lora = dataclasses.field(default_factory=Lora)
    adapter: str = option("", "folder of a LoRA adapter to train further; its configuration replaces lora")
    last_layer: Literal["auto"] | tuple[str, ...] = option(
        "auto", "modules or weights that method last-layer trains; auto: the last norm, and the head unless it is tied"
    )
    epochs: float = option(1, "times through the data; 0.5: half of it")
    max_steps: int = option(-1, "stop after this number of steps; -1: at the end of the epochs")
    batch_size: int = option(32, "rows of one step of the optimizer, over all GPUs")
    micro_batch: int | Literal["auto"] = option(
        "auto", "rows at a time; auto: as many as fit. The gradient is the same"
    )
    learning_rate: float = option(3e-4, "highest learning rate")
    schedule: Literal["linear", "cosine", "constant", "wsd"] = option(
        "linear", "decay after the warm-up: linear, cosine, constant: none, or wsd: a cosine in decay_steps at the end"
    )
    min_learning_rate: float = option(0.0, "lowest learning rate, which a decay reaches after the last step")
    decay_steps: int | float = option(0.1, "steps of wsd's decay; below 1: this share of all steps, rounded up")
    warmup_steps: int | float = option(
        0.1, "steps until the highest learning rate; below 1: this share of all steps, rounded up", old="warmup_ratio"
    )
    optimizer: OptimizerName = option(  # noqa: RUF009  it makes a field
        "adamw", "adamw_8bit: bitsandbytes'; adafactor: transformers'; muon: torch's for matrices in blocks, else adamw"
    )
    weights: Literal["fp32", "bf16"] = option(
        "fp32", "trained weights; bf16: no exact copy is kept, and AdamW rounds stochastically (arXiv:2010.06192)"
    )
    adam_beta1: float = option(0.9, "AdamW's decay of the mean of gradients")
    adam_beta2: float = option(0.999, "AdamW's decay of the mean of their squares")
    weight_decay: float = option(0.0, "the optimizer's weight decay; norms and biases have none")
    neftune_noise_alpha: float = option(
        0.0, "noise of alpha / sqrt(tokens x width) on each row's embeddings (NEFTune, arXiv:2310.05914); 0: none"
    )
    max_grad_norm: float = option(1.0, "gradients of a larger norm are clipped to this; 0: no clipping")
    eval_every: int = option(500, "steps between evaluations; the last step has one")
    early_stopping_patience: int = option(
        0, "stop after this number of evaluations without a new lowest loss; 0: never"
    )
    load_best_model_at_end: bool = option(
        False, "return the weights of the evaluation with the lowest loss; its checkpoint is kept"
    )
    sample_answers: int = option(
        0, "number of evaluation rows to answer greedily after each evaluation; printed, and written to samples.jsonl"
    )
    save_minutes: float = option(15, "minutes between checkpoints; there is one after every epoch and on SIGTERM")
    save_steps: int = option(0, "steps between further checkpoints; 0: none")
    save_total_limit: int = option(2, "number of newest checkpoints to keep")
    log_seconds: float = option(5, "seconds between lines of progress")
    tracker: str | tuple[str, ...] = option("none", trackers.HELP)
    hang_minutes: float = option(
        10,
        "minutes that one of several processes may go without progress before all end; loading, compiling and "
        "saving may take an hour, or as long as this; 0: an hour everywhere",
    )
    model_checksum: bool = option(
        True, "record the SHA-256 of a local model's files; they are read in the background, once the model is loaded"
    )
    seed: int = option(42, "seed of the split, the order of the rows, new weights and dropout")
    gradient_checkpointing: bool | Literal["auto"] = option(
        "auto", "compute activations twice to save memory; auto: those of as many blocks as needed"
    )
    compile: bool | Literal["auto"] = option("auto", "torch.compile the blocks; auto: on a GPU, for runs long enough")
    attention: AttentionKernel = option(  # noqa: RUF009  it makes a field
        "auto",
        "attention kernel; auto: the fastest here, for examples of 4,096 tokens and more flash_attn_4 where the image"
        " and a Hopper GPU have it; sdpa: torch's choice; flash, cudnn, efficient, math: that one of torch's alone;"
        " varlen: torch's for mixed lengths; flash_attn_2 and flash_attn_4: of the layers flash-attn and flash-attn-4",
    )
    parallel: str = option(
        "auto",
        "ddp: each GPU has a copy of the model; fsdp, deepspeed: weights are sharded; auto: ddp with several GPUs",
    )
    deepspeed: DeepSpeed = dataclasses.field(default_factory=DeepSpeed)
    device: Literal["auto", "cpu"] = option("auto", "auto: the GPU, bf16 where it has it, else fp16; cpu: fp32")


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Hold the options of a run that are not settings.

    dry: print the plan for these GPUs, and stop. skip_bad: leave invalid examples out. fresh: start again, though the
    output holds a checkpoint. temporary: the output is removed afterwards, so no message names it.
    """

    dry: DryRun | None = None
    skip_bad: bool = False
    fresh: bool = False
    temporary: bool = False


_FROM_ONE = ("max_length", "save_total_limit", "batch_size", "micro_batch")
_FROM_ZERO = (
    "warmup_steps",
    "decay_steps",
    "weight_decay",
    "eval_every",
    "early_stopping_patience",
    "sample_answers",
    "neftune_noise_alpha",
    "save_minutes",
    "log_seconds",
)
_SHARES = ("validation_split", "adam_beta1", "adam_beta2")


def check(settings: Settings) -> None:
    """Check the settings.

    Raises:
        SettingError: some are wrong; the message has all problems.
    """
    check_format(settings.form)
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    tests = [
        *((name, "at least 1", not isinstance(values[name], int) or values[name] >= 1) for name in _FROM_ONE),
        *((name, "at least 0", 0 <= values[name] < math.inf) for name in _FROM_ZERO),
        *((name, "at least 0 and below 1", 0 <= values[name] < 1) for name in _SHARES),
        ("learning_rate", "above 0", 0 < settings.learning_rate < math.inf),
        (
            "min_learning_rate",
            "from 0 to learning_rate",
            0 <= settings.min_learning_rate <= settings.learning_rate,
        ),
        ("max_grad_norm", "at least 0 (0: no clipping)", 0 <= settings.max_grad_norm < math.inf),
        ("epochs", "above 0", 0 < settings.epochs < math.inf),
        ("hang_minutes", "at least 0 (0: an hour)", 0 <= settings.hang_minutes < math.inf),
        ("save_steps", "at least 0 (0: none)", settings.save_steps >= 0),
        (
            "max_steps",
            "at least 1, or -1 (to the end of the epochs)",
            settings.max_steps == -1 or settings.max_steps >= 1,
        ),
    ]
    problems = [f"setting {name}: must be {rule}, not {values[name]}" for name, rule, is_right in tests if not is_right]
    problems += [
        *trackers.tracker_problems(settings.tracker),
        *check_lora(settings.lora),
        *_optimizer_problems(settings),
        *_strategy_problems(settings),
    ]
    if (settings.early_stopping_patience or settings.load_best_model_at_end) and not settings.eval_every:
        problems.append("setting eval_every=0: early_stopping_patience and load_best_model_at_end need evaluations")
    problems += _classifier_problems(settings)
    if settings.bits < 16 and settings.method != "lora":
        problems.append(f"setting bits={settings.bits}: such weights cannot be trained; use method=lora")
    if reason := missing_package(settings.attention):
        problems.append(reason)
    if problems:
        raise errors.SettingError("\n".join(problems))


def _classifier_problems(settings: Settings) -> list[str]:
    """Return what a run with a classification head cannot have."""
    if settings.form.kind != "classification":
        return []
    tests = [
        (settings.bits < 16, f"bits={settings.bits}", "the head would be among the frozen weights; use bits=16"),
        (settings.parallel == "deepspeed", "parallel=deepspeed", "the head is new; use parallel=ddp or fsdp"),
        (settings.sample_answers > 0, f"sample_answers={settings.sample_answers}", "a label is not an answer; use 0"),
        (
            settings.long_examples == "chunk",
            "long_examples=chunk",
            "a part of a text may not have its label; use cut or drop",
        ),
    ]
    return [
        f"setting {name}: not together with form.kind=classification: {reason}"
        for is_wrong, name, reason in tests
        if is_wrong
    ]


def _strategy_problems(settings: Settings) -> list[str]:
    if settings.parallel not in ("auto", *strategy.names()):
        known = ", ".join(["auto", *strategy.names()])
        return [f"setting parallel: must be one of {known}, not {json.dumps(settings.parallel)}"]
    if settings.bits < 16 and settings.parallel != "auto" and not strategy.find(settings.parallel).TAKES_QUANTIZED:
        return [
            f"setting bits={settings.bits}: not together with parallel={settings.parallel}; "
            "use parallel=ddp, where each GPU holds the small weights whole, or bits=16"
        ]
    if settings.deepspeed.offload == "all" and settings.deepspeed.stage == 2:
        return ["setting deepspeed.offload=all: weights are shared only with --set deepspeed.stage=3"]
    return []


def _optimizer_problems(settings: Settings) -> list[str]:
    """Return why the optimizer cannot be had with the other settings, or in this image."""
    if settings.weights == "bf16":
        wrong = [f"optimizer={settings.optimizer}"] if settings.optimizer != "adamw" else []
        wrong += [f"parallel={settings.parallel}"] if settings.parallel in ("fsdp", "deepspeed") else []
        if wrong:
            advice = "use optimizer=adamw with parallel=ddp or none, or weights=fp32"
            return [f"setting weights=bf16: not together with {', '.join(wrong)}; {advice}"]
    way = f"setting optimizer={settings.optimizer}"
    if settings.optimizer == "adamw":
        return []
    if settings.parallel == "deepspeed" or (settings.parallel == "fsdp" and settings.method == "full"):
        return [
            f"{way}: its state cannot be sharded by parallel={settings.parallel}; use parallel=ddp, or optimizer=adamw"
        ]
    if settings.optimizer == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        return [f"{way}: this image has no bitsandbytes; use one with the layer huggingface, or optimizer=adamw"]
    return []


def list_unused(settings: Settings, parallel: str) -> list[str]:
    """Return a sentence for each group of changed settings that the run does not use. parallel: its strategy."""
    is_split = isinstance(settings.data, list) and all(
        isinstance(item, dict) and {"validation_split", "test_share"} & item.keys() for item in settings.data
    )
    is_mixture = isinstance(settings.data, list) and any(
        isinstance(item, dict) and "weight" in item for item in settings.data
    )
    groups = [
        (settings.method != "lora", ("lora", "adapter"), f"with method={settings.method}"),
        (settings.method == "lora" and bool(settings.adapter), ("lora",), f"with adapter={settings.adapter}"),
        (settings.method != "last-layer", ("last_layer",), f"with method={settings.method}"),
        (parallel != "deepspeed", ("deepspeed",), f"with parallel={parallel}"),
        (settings.form.kind != "template", ("form.prompt", "form.response"), f"with form.kind={settings.form.kind}"),
        (settings.form.kind != "chat", ("form.chat",), f"with form.kind={settings.form.kind}"),
        (
            settings.form.kind not in ("text", "classification"),
            ("form.column",),
            f"with form.kind={settings.form.kind}",
        ),
        (settings.form.kind == "text", ("mask_prompt", "long_examples"), "with form.kind=text"),
        (settings.form.kind == "classification", ("mask_prompt",), "with form.kind=classification"),
        (
            settings.form.kind != "classification",
            ("form.label", "form.labels"),
            f"with form.kind={settings.form.kind}",
        ),
        (settings.schedule != "wsd", ("decay_steps",), f"with schedule={settings.schedule}"),
        (settings.schedule == "constant", ("min_learning_rate",), "with schedule=constant"),
        (settings.optimizer == "adafactor", ("adam_beta1", "adam_beta2"), "with optimizer=adafactor"),
        (not is_mixture, ("mixture",), "where no source of the data has a weight"),
        (is_split, ("validation_split",), "where each source of the data has its own"),
    ]
    defaults = {name: value for name, value, _ in options.describe(Settings())}
    changed = [name for name, value, _ in options.describe(settings) if value != defaults[name]]
    sentences = []
    for is_unused, prefixes, reason in groups:
        names = [name for name in changed if name in prefixes or name.split(".")[0] in prefixes]
        if is_unused and names:
            sentences.append(f"{', '.join(names)}: not used {reason}")
    return sentences


def count_processes(settings: Settings, dry: DryRun | None) -> int:
    """Return how many processes the run has, or would have.

    A dry run of a strategy that takes several processes has at least two.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if dry is None or started > 1:
        return started
    takes_several = settings.parallel != "auto" and strategy.find(settings.parallel).PROCESSES == "several"
    return dry.gpus or (2 if takes_several else 1)


def resolve_parallel(settings: Settings, processes: int) -> str:
    """Return the strategy for this number of processes. The setting ``auto`` is ddp for several, none for one.

    Raises:
        TaskError: the strategy does not support this number of processes.
    """
    several = processes > 1
    if settings.parallel == "auto":
        return "ddp" if several else "none"
    takes = strategy.find(settings.parallel).PROCESSES
    if takes == "one" and several:
        raise TaskError(
            f"setting parallel={settings.parallel}: this is one of several processes, each would train the same;"
            " take ddp"
        )
    if takes == "several" and not several:
        raise TaskError(
            f"setting parallel={settings.parallel}: needs several processes, and this is one; start them with "
            "train --gpus N (build.py submit on several nodes), or use --set parallel=none"
        )
    return settings.parallel


def fingerprint(settings: Settings, data: Any) -> dict[str, Any]:
    """Return the values that have to be equal for a checkpoint to be resumed."""
    flat = {name: value for name, value, _ in options.describe(settings) if name.split(".")[0] not in _FREE}
    return {
        **flat,
        "data": data.rows.sha256,
        "rows": len(data.train),
    }
