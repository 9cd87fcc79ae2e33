"""What can be set about a training run, and what is wrong with a setting before anything is loaded."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any, Literal

import settings as options
from forms import Form, check_form
from settings import TaskError, option

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
    "parallel",
}


@dataclass(frozen=True)
class Lora:
    r: int = option(4, "rank of the two small matrices beside each target")
    alpha: int = option(16, "their product is scaled by alpha / r")
    dropout: float = option(0.05, "share of the adapter's inputs left out while learning")
    target_modules: Literal["auto"] | tuple[str, ...] = option(
        "auto", "names of the layers that get an adapter; auto: the attention's, by architecture"
    )


@dataclass(frozen=True)
class DeepSpeed:
    stage: Literal[2, 3] = option(3, "ZeRO stage: 2 shares gradients and optimizer, 3 the weights, too")
    offload: Literal["none", "optimizer", "all"] = option(
        "none", "what is kept in the host's memory; all: optimizer and weights (stage 3)"
    )


@dataclass(frozen=True)
class Settings:
    model: str = option("cyberagent/open-calm-3b", "base model: a hub id or a local folder")
    method: Literal["lora", "full", "last-layer"] = option("lora", "what is trained: an adapter, every weight, the end")
    bits: Literal[16, 8, 4] = option(16, "of the frozen weights under an adapter; 8 and 4 by bitsandbytes, on a GPU")
    data: object = option(
        SAMPLE, "hub data sets, folders, .json, .jsonl or .parquet files; or {source, test_share} groups"
    )
    test_share: float = option(0.02, "share of the rows kept for testing, where a source does not say")
    form: Form = dataclasses.field(default_factory=Form)
    mask_prompt: bool = option(True, "learn the response only; false: learn the prompt's text too")
    max_length: int = option(2048, "rows of more tokens are left out, and counted")
    lora: Lora = dataclasses.field(default_factory=Lora)
    last_layer: Literal["auto"] | tuple[str, ...] = option(
        "auto", "modules or weights that method last-layer trains; auto: the last norm, and the head unless it is tied"
    )
    epochs: int = option(1, "times through the data")
    max_steps: int = option(-1, "stop after so many steps; -1: at the end of the epochs")
    batch_size: int = option(32, "rows of one step of the optimizer, over all GPUs")
    micro_batch: int | Literal["auto"] = option("auto", "rows at a time; auto: what fits. The gradient is the same")
    learning_rate: float = option(3e-4, "highest learning rate")
    schedule: Literal["linear", "cosine", "constant"] = option("linear", "how it falls to 0 from there, or not")
    warmup_steps: int = option(200, "steps until the highest learning rate, at most a tenth of all")
    weight_decay: float = option(0.0, "AdamW's weight decay; norms and biases have none")
    max_grad_norm: float = option(1.0, "longer gradients are shortened to this")
    eval_every: int = option(500, "steps between tests; there is always one at the end")
    save_minutes: float = option(15, "minutes between checkpoints; there is one after every epoch and on SIGTERM")
    log_seconds: float = option(5, "seconds between lines of progress")
    seed: int = option(42, "of the split, the order, the adapter's start and the dropout")
    gradient_checkpointing: bool | Literal["auto"] = option(
        "auto", "compute activations twice to save memory; auto: those of as many blocks as needed"
    )
    compile: bool | Literal["auto"] = option("auto", "torch.compile the blocks; auto: on a GPU, for runs long enough")
    parallel: Literal["auto", "none", "ddp", "fsdp", "deepspeed"] = option(
        "auto", "several GPUs: ddp: each the whole model; fsdp, deepspeed: shared. auto: ddp where there are several"
    )
    deepspeed: DeepSpeed = dataclasses.field(default_factory=DeepSpeed)
    device: Literal["auto", "cpu"] = option("auto", "auto: the GPU, bf16 where it has it, else fp16; cpu: fp32")


def check(settings: Settings) -> None:
    """Errors: SettingError, all in one."""
    check_form(settings.form)
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
    if settings.bits < 16 and settings.method != "lora":
        problems.append(f"setting bits={settings.bits}: such weights cannot learn; take it with method=lora")
    if settings.bits < 16 and settings.parallel in ("fsdp", "deepspeed"):
        problems.append(
            f"setting bits={settings.bits}: not together with parallel={settings.parallel}; "
            "take parallel=ddp, where each GPU holds the small weights whole, or bits=16"
        )
    if settings.deepspeed.offload == "all" and settings.deepspeed.stage == 2:
        problems.append("setting deepspeed.offload=all: weights are shared only with --set deepspeed.stage=3")
    if problems:
        raise options.SettingError("\n".join(problems))


def resolve_parallel(settings: Settings) -> Literal["none", "ddp", "fsdp", "deepspeed"]:
    """What ``parallel`` means under this launcher. Errors: TaskError."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if settings.parallel == "auto":
        return "ddp" if several else "none"
    if settings.parallel == "none" and several:
        raise TaskError("setting parallel=none: this is one of several processes, each would train the same; take ddp")
    if settings.parallel in ("ddp", "fsdp") and not several:
        raise TaskError(
            f"setting parallel={settings.parallel}: needs several processes, and this is one; start them with "
            "train --gpus N (build.py submit on several nodes), or take --set parallel=none"
        )
    return settings.parallel


def fingerprint(settings: Settings, parallel: str, data: Any) -> dict[str, Any]:
    """What has to be the same for a checkpoint to be continued."""
    flat = {name: value for name, value, _ in options.describe(settings) if name.split(".")[0] not in _FREE}
    # Replicated weights are the same in one process and in many; shards and DeepSpeed have forms of their own.
    kind = {"none": "replicated", "ddp": "replicated"}.get(parallel, parallel)
    return {**flat, "parallel": kind, "data": data.rows.sha256, "rows": len(data.train)}
