"""Load the models, adapters and rewards of an alignment."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

import align_settings
from ekiben_tasks.models import adapter, load
from ekiben_tasks.models.architecture import lora_targets
from ekiben_tasks.models.device import Device
from ekiben_tasks.task import input_files
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.hub import format_hub_error, locate_model


def load_model(settings: align_settings.Settings, path: str, device: Device) -> Any:
    """Return the model to train, or the one that it is compared with. Every weight that is trained is in fp32.

    Raises:
        TaskError: it cannot be loaded.
    """
    is_full = settings.method == "full"
    device = dataclasses.replace(device, dtype=torch.float32) if is_full else device
    if settings.NAME != "reward":
        return load.load_base(path, device, bits=settings.bits).requires_grad_(is_full)
    transformers.set_seed(settings.seed)  # the head's weights are random, and the same in every process
    return _load_classifier(path, device, is_reward=False).requires_grad_(is_full)


def load_reward(name: str, device: Device) -> Any:
    """Return a reward model that ``reward`` wrote, or one of the hub; an adapter is merged into its base in memory.

    Raises:
        TaskError: it cannot be loaded, or has no trained head.
    """
    folder = Path(name)
    if not (folder / "adapter_config.json").is_file():
        return _load_classifier(locate_model(name), device, is_reward=True)
    try:
        loaded = peft.AutoPeftModelForSequenceClassification.from_pretrained(name, num_labels=1, dtype=device.dtype)
    except Exception as error:
        raise TaskError(format_hub_error(error, name, "reward model")) from error
    return loaded.merge_and_unload().to(device.torch_device).eval()


def _load_classifier(path: str, device: Device, *, is_reward: bool) -> Any:
    try:
        model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
            **load.pretrained(path),
            num_labels=1,
            dtype=device.dtype,
            device_map={"": device.torch_device},
            output_loading_info=True,
        )
    except Exception as error:
        raise TaskError(format_hub_error(error, path, "reward model" if is_reward else "model")) from error
    missing = [name for name in report["missing_keys"] if is_reward or not name.startswith(("score", "classifier"))]
    if missing:
        kind = "is not a reward model" if is_reward else "cannot be used"
        raise TaskError(f"model {path}: {kind}: its files lack the weights {', '.join(sorted(missing)[:3])}")
    return model


def lora_config(settings: align_settings.Settings, path: str) -> Any:
    """Return PEFT's configuration of the adapter. path: of the model. A reward model's head is trained, too.

    Raises:
        TaskError: the model has no layer, module or token of such a name.
    """
    model, targets = load.load_meta_model(path), settings.lora.target_modules
    if targets == "auto":
        targets = lora_targets(model)
    config = adapter.lora_config(model, settings.lora, ("all-linear",) if targets == "all-linear" else targets)
    if settings.NAME == "reward":
        config.task_type = peft.TaskType.SEQ_CLS
        config.modules_to_save = [*settings.lora.modules_to_save, "score"]
    return config


def load_functions(rewards: Sequence[str]) -> list[Callable[..., Any]]:
    """Return the functions of the rewards that are FILE.py:FUNCTION.

    Raises:
        TaskError: a file cannot be run, or has no such function.
    """
    functions: list[Callable[..., Any]] = []
    for reward in rewards:
        if not align_settings.is_function(reward):
            continue
        name, _, function = reward.partition(":")
        file = Path(name).expanduser()
        names: dict[str, Any] = {"__name__": file.stem, "__file__": str(file)}
        text = input_files.read_text(file, "setting rewards takes a Python file")
        sys.path.insert(0, str(file.absolute().parent))
        try:
            exec(compile(text, str(file), "exec"), names)
        except Exception as error:
            raise TaskError(f"{file}: cannot be run: {type(error).__name__}: {error}") from error
        finally:
            sys.path.pop(0)
        if not callable(names.get(function)):
            known = [key for key, value in names.items() if callable(value) and not key.startswith("_")]
            raise TaskError(f"{file}: has no function {function}; it has {', '.join(known) or 'none'}")
        functions.append(names[function])
    return functions
