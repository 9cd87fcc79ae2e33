"""Load base models and their tokenizers from the hub or a folder."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from transformers.integrations import is_deepspeed_zero3_enabled

from ekiben_tasks.models import attention as attention_module
from ekiben_tasks.models.classifier import (
    HEAD,
    Classes,
    add_classes,
    check_classifier,
    choose_class,
    finish_classifier,
    refuse_classifier,
)
from ekiben_tasks.models.device import Device
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.hub import format_hub_error, locate_model, split_revision


def silence_warnings() -> None:
    """Silence progress bars outside a terminal, where each update is a line, and warnings of PEFT and TRL.

    They are of names that a later version of transformers drops: nobody who runs a task can act on them.
    """
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)


def pretrained(name: str) -> dict[str, Any]:
    """Return the arguments of from_pretrained() for ``name@revision``.

    A model's own code is not run, and nobody is asked to.
    """
    repository, revision = split_revision(name)
    arguments = {"pretrained_model_name_or_path": repository, "trust_remote_code": False}
    return arguments | ({"revision": revision} if revision else {})


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of model ``name``.

    Raises:
        TaskError: it cannot be loaded, or has no end-of-text token.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**pretrained(name))
    except Exception as error:
        raise TaskError(format_hub_error(error, name, "tokenizer of model")) from error
    if tokenizer.eos_token_id is None:
        raise TaskError(f"model {name}: its tokenizer has no end-of-text token, so answers would never end")
    return tokenizer


def load_base(
    name: str,
    device: Device,
    attention: str | None = None,
    bits: int = 16,
    classes: Classes | None = None,
    device_map: Mapping[str, int | str] | None = None,
) -> Any:
    """Return the frozen base model on ``device``, its GEMM weights in ``bits`` bits.

    attention: transformers' ``attn_implementation``; None, for generation: transformers' choice. classes: of a
    classification head in place of the output layer, new where the files have none. device_map: devices of modules;
    None: all on ``device``.

    Raises:
        TaskError: it cannot be loaded or quantised, does not fit the memory, or is a classifier without ``classes``.
    """
    path = locate_model(name)
    config = _read_config(path, name, classes)
    attention_module.register()
    silence_warnings()
    try:
        model, report = choose_class(classes).from_pretrained(
            **pretrained(path),
            config=config,
            dtype=device.dtype,
            attn_implementation=attention,
            # DeepSpeed shards the weights as they are read.
            device_map=None if is_deepspeed_zero3_enabled() else dict(device_map or {"": device.torch_device}),
            quantization_config=_quantization_config(device, bits),
            output_loading_info=True,
        )
    except torch.OutOfMemoryError as error:
        raise TaskError(f"model {name}: does not fit the memory of {device.name}; choose a smaller one") from error
    except Exception as error:
        raise TaskError(name_damaged(path) or format_hub_error(error, name, "model")) from error
    if classes:
        finish_classifier(model, classes, is_new=f"{HEAD}.weight" in report["missing_keys"])
    new_keys = {f"{HEAD}.weight"} if classes else set()
    if missing := sorted(set(report["missing_keys"]) - new_keys):  # transformers fills them with random numbers
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise TaskError(f"model {name}: its files lack the weights {shown}; copy or download it again")
    return model.requires_grad_(False)


def name_damaged(path: str) -> str | None:
    """Return a sentence that names the first file of weights in the folder ``path`` that cannot be opened, or None."""
    for file in sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []:
        try:
            with safetensors.safe_open(file, "pt"):
                pass
        except (safetensors.SafetensorError, OSError) as error:
            return f"{file}: is cut or damaged ({error}); copy or download it again"
    return None


def load_meta_model(
    path: str, dtype: torch.dtype = torch.float32, attention: str | None = None, classes: Classes | None = None
) -> Any:
    """Return the frozen model on the meta device: enough to count with, or to receive another process's weights.

    Raises:
        TaskError: its configuration cannot be read, or describes no causal model.
    """
    attention_module.register()
    config = _read_config(path, path, classes)
    try:
        with torch.device("meta"):
            model = choose_class(classes).from_config(config, dtype=dtype, attn_implementation=attention)
    except Exception as error:
        raise TaskError(format_hub_error(error, path, "model")) from error
    if classes:
        check_classifier(model, path)
        finish_classifier(model, classes, is_new=False)
    return model.requires_grad_(False)


def read_config(path: str) -> Any:
    """Return the model's configuration.

    Raises:
        TaskError: it cannot be read.
    """
    silence_warnings()
    try:
        return transformers.AutoConfig.from_pretrained(**pretrained(path))
    except Exception as error:
        raise TaskError(format_hub_error(error, path, "model")) from error


def _read_config(path: str, name: str, classes: Classes | None) -> Any:
    """Return the configuration of the model ``name``, with ``classes``.

    Raises:
        TaskError: it cannot be read, or is of a classifier, and ``classes`` is None.
    """
    config = read_config(path)
    if classes:
        return add_classes(config, classes)
    refuse_classifier(config, name)
    return config


def longest_context(config: Any) -> int:
    """Return the longest context in tokens, 2**30 where the config names none."""
    names = ("max_position_embeddings", "max_seq_len")  # the second is MPT's
    return next((int(length) for name in names if (length := getattr(config, name, None))), 1 << 30)


def stored_dtype(name: str) -> torch.dtype:
    """Return the dtype that a model's configuration names, else fp32.

    Raises:
        TaskError: the configuration cannot be read.
    """
    dtype = getattr(read_config(name), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def count_parameters(model: Any) -> tuple[int, int]:
    """Return the numbers of (all, trainable) parameters."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def quantization_problem(device: Device, bits: int) -> str | None:
    """Return why weights cannot be quantised to 8 or 4 bits on this machine, or None."""
    if not device.is_gpu:
        return "needs a GPU"
    # LLM.int8() needs Turing or later; on a V100 its gradients are 0.
    if bits == 8 and torch.cuda.get_device_capability(device.torch_device) < (7, 5):
        return f"needs a GPU of Turing or later, and this is a {device.name}; 4 bits work there"
    if importlib.util.find_spec("bitsandbytes") is None:
        return "needs the package bitsandbytes, which this image does not have"
    return None


def _quantization_config(device: Device, bits: int) -> Any:
    if bits == 16:
        return None
    reason = quantization_problem(device, bits)
    if reason:
        raise TaskError(f"setting bits={bits}: {reason}; use --set bits=16")
    if bits == 8:
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=device.dtype,
        bnb_4bit_use_double_quant=True,
    )
