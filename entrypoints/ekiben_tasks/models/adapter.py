"""Add LoRA adapters to base models, and load and save them as PEFT does."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors import SafetensorError
from transformers.pytorch_utils import Conv1D

from ekiben_tasks.models.classifier import is_classifier
from ekiben_tasks.models.device import Device
from ekiben_tasks.models.load import load_base, load_tokenizer
from ekiben_tasks.models.lora import Lora
from ekiben_tasks.task import input_files
from ekiben_tasks.task.adapter_folder import find_config, read_base
from ekiben_tasks.task.errors import TaskError, nearest
from ekiben_tasks.task.files import make_readable, replace_folder, write_json
from ekiben_tasks.task.hub import split_revision

LABELS = "labels.json"  # in the folder of a classifier's adapter, for which PEFT has no such file


def add_adapter(model: Any, lora: Lora, target_modules: Sequence[str], seed: int) -> Any:
    """Return the model with a new adapter, in the model's dtype. target_modules: last parts of names, or "all-linear".

    The adapter adds ``alpha / r`` times the product of its two matrices (Hu et al. 2021, arXiv:2106.09685, section
    4.1).

    Raises:
        TaskError: no layer has such a name, or one cannot be adapted.
    """
    torch.manual_seed(seed)
    config = lora_config(model, lora, target_modules)
    try:
        # Adapter weights in the model's own dtype: no casts in the forward pass. The optimizer keeps fp32 copies.
        return peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    except (ValueError, NotImplementedError) as error:
        raise TaskError(f"setting lora: {str(error).splitlines()[0]}") from error


def lora_config(model: Any, lora: Lora, target_modules: Sequence[str]) -> Any:
    """Return PEFT's configuration of an adapter of ``model``. target_modules: as of add_adapter().

    Raises:
        TaskError: the model has no layer, module or token of such a name.
    """
    _check_lora(model, lora)
    return peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules="all-linear" if tuple(target_modules) == ("all-linear",) else list(target_modules),
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        rank_pattern=lora.rank_pattern or {},
        alpha_pattern=lora.alpha_pattern or {},
        modules_to_save=list(lora.modules_to_save) or None,
        trainable_token_indices=list(lora.trainable_token_indices) or None,
        task_type=_task_type(model),
    )


def _task_type(model: Any) -> str:
    """Return PEFT's name of what the model does; a classifier's head is saved with its adapter."""
    return "SEQ_CLS" if is_classifier(model) else "CAUSAL_LM"


def _check_lora(model: Any, lora: Lora) -> None:
    """Raise TaskError for names and tokens that the model has not: PEFT leaves them out in silence."""
    names = [name for name, _ in model.named_modules()]
    known = sorted({last for name in names if (last := name.rsplit(".", 1)[-1]).isidentifier()})
    for setting, keys in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for key in keys if isinstance(keys, dict) else ():
            if not any(re.match(rf"(.*\.)?({key})$", name) for name in names):
                raise TaskError(f"setting lora.{setting}: no layer is called {key}.{nearest(key, known)}")
    for key in lora.target_modules if isinstance(lora.target_modules, tuple) else ():
        if not any(name == key or name.endswith(f".{key}") for name in names):
            linear = (name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear | Conv1D))
            has = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in linear}))
            raise TaskError(f"setting lora.target_modules: no layer is called {key}; this model has {has}")
    for key in lora.modules_to_save:
        if not any(name == key or name.endswith(f".{key}") for name in names):
            raise TaskError(f"setting lora.modules_to_save: no module is called {key}.{nearest(key, known)}")
    size = len(model.get_input_embeddings().weight)
    if any(index >= size for index in lora.trainable_token_indices):
        raise TaskError(f"setting lora.trainable_token_indices: the model has embeddings of {size:,} tokens alone")


def resume_adapter(model: Any, folder: Path) -> Any:
    """Return the model with the adapter of ``folder``, ready to be trained further; without its weights on meta.

    Raises:
        TaskError: it is not a LoRA adapter, or does not fit the model.
    """
    input_files.check_model_folder(folder)
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        if not isinstance(config, peft.LoraConfig):
            raise TypeError(f"it is of the method {config.peft_type}, and LoRA alone can be trained further")
        if (config.task_type or "CAUSAL_LM") != _task_type(model):
            raise TypeError(f"it is of the task {config.task_type}, and the run is of {_task_type(model)}")
        config.inference_mode = False
        adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
        if next(model.parameters()).is_meta:
            return adapted
        result = peft.set_peft_model_state_dict(adapted, peft.load_peft_weights(str(folder), device="cpu"))
        trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
        if missing := sorted(trained & set(result.missing_keys)) + sorted(result.unexpected_keys):
            raise TypeError(f"its weights are not the model's: {missing[0]}")
    except (ValueError, TypeError, KeyError, RuntimeError, OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise TaskError(f"setting adapter={folder}: does not fit the model: {reason}") from error
    return adapted


def load_adapter(
    folder: Path,
    device: Device,
    *,
    base: str | None = None,
    bits: int = 16,
    device_map: Mapping[str, int | str] | None = None,
) -> tuple[Any, str]:
    """Return (base with the adapter of ``folder``, name of the base).

    base: the base model, where the adapter's own record of it does not hold. bits: of the base's GEMM weights.
    device_map: devices of the base's modules.

    Raises:
        TaskError: the folder holds no adapter, the base cannot be loaded, or the two do not fit each other.
    """
    file = find_config(folder)
    name = base or read_base(file)
    check_generates(folder)
    return attach_adapter(load_base(name, device, bits=bits, device_map=device_map), folder, name), name


def check_generates(folder: Path) -> None:
    """Check the files of an adapter, and that it is one that writes text.

    Raises:
        TaskError: a file is a pipe, a device or too large, or it is a classifier.
    """
    input_files.check_model_folder(folder)
    if (folder / LABELS).is_file():
        raise TaskError(
            f"adapter {folder}: is of a classifier, which has labels and writes no text; load it with peft's"
            f" AutoPeftModelForSequenceClassification, whose id2label is in {LABELS}"
        )


def attach_adapter(model: Any, folder: Path, base: str) -> Any:
    """Return ``model``, which is changed, with the adapter of ``folder``, for generation. base: the model's name.

    Raises:
        TaskError: the two do not fit each other.
    """
    try:
        adapted = peft.PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise TaskError(f"adapter {folder}: does not fit the base model {base}: {reason}") from error
    return adapted.eval()


def load_ready(
    model: str,
    adapter: str,
    device: Device,
    *,
    base: str | None = None,
    bits: int = 16,
    device_map: Mapping[str, int | str] | None = None,
) -> tuple[Any, Any]:
    """Return (model, tokenizer) for generation: ``adapter`` with its base if one is named, else ``model``.

    device_map: devices of the model's, or the base's, modules.

    Raises:
        TaskError: they cannot be loaded.
    """
    if not adapter:
        return load_base(model, device, bits=bits, device_map=device_map).eval(), load_tokenizer(model)
    folder = Path(adapter)
    adapted, name = load_adapter(folder, device, base=base, bits=bits, device_map=device_map)
    return adapted, load_tokenizer(str(folder) if (folder / "tokenizer_config.json").is_file() else name)


def save_adapter(model: Any, folder: Path, weights: dict[str, torch.Tensor], base: str) -> None:
    """Write the adapter as PEFT does, atomically. weights: parameter name → fp32 tensor.

    base: the base model that the adapter names; a folder is written as an absolute path.

    Raises:
        TaskError: it cannot be written; an earlier one stays.
    """
    staged = folder.with_name(f".{folder.name}.staged-{os.getpid()}")
    shutil.rmtree(staged, ignore_errors=True)
    config = model.peft_config["default"]
    name, config.revision = split_revision(base)
    # As an absolute path, for the adapter may be loaded from another folder than it was trained in.
    config.base_model_name_or_path = (
        str(Path(name).expanduser().resolve()) if Path(name).expanduser().is_dir() else name
    )
    try:
        model.save_pretrained(str(staged), state_dict=weights)
        (staged / "README.md").unlink(
            missing_ok=True
        )  # PEFT's template has empty headings; the run record has this information
        if is_classifier(model.get_base_model()):
            write_json(staged / LABELS, {"id2label": model.config.id2label})
        make_readable(staged)
        replace_folder(staged, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staged, ignore_errors=True)
        raise TaskError(
            f"{folder}: cannot be written ({error}); make room and give the same command again: it continues from the"
            " last checkpoint"
        ) from error
