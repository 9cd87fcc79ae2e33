"""Merge an adapter into its base, and compare the result with the two before it is kept."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils import cached_file

from ekiben_tasks.models import load
from ekiben_tasks.models.adapter import load_adapter
from ekiben_tasks.models.device import Device
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.files import replace_folder
from ekiben_tasks.task.hub import split_revision

# Tolerance of the logits, relative to the largest: merged weights are rounded to the stored dtype.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


def merge(folder: Path, output: Path, device: Device, *, base: str | None = None, dtype: str = "auto") -> float:
    """Merge the adapter of ``folder`` into its base, write the model to ``output`` and read it back.

    dtype: of the stored weights; auto: the base's. The merge is computed in fp32.

    Returns:
        The largest difference in logits, as a share of the largest logit.

    Raises:
        TaskError: the weights are broken, the logits differ, or the disk is full; ``output`` stays empty.
    """
    exact = replace(device, dtype=torch.float32)
    torch.set_float32_matmul_precision("highest")  # TF32 would round the merge and the comparison to three digits
    adapted, name = load_adapter(folder, exact, base=base)
    stored = load.stored_dtype(name) if dtype == "auto" else getattr(torch, dtype)
    ids = torch.arange(100, 116, device=exact.torch_device)[None] % adapted.config.vocab_size
    before = logits(adapted, ids)
    if not before.isfinite().all():
        raise TaskError(f"{folder} on {name} gives logits that are NaN or infinite: one of them is broken")
    method = adapted.peft_config["default"].peft_type.value
    if not hasattr(adapted.base_model, "merge_and_unload"):
        raise TaskError(f"{folder}: is an adapter of the method {method}, which cannot be merged into a base model")
    # merge_and_unload works on a copy of the structure: only the model it returns is the merged one.
    merged = adapted.merge_and_unload()
    staged = output.absolute().with_name(f".{output.name}.staged-{os.getpid()}")
    try:
        merged.to(stored).save_pretrained(staged)
        tokenizer = folder if (folder / "tokenizer_config.json").is_file() else name
        load.load_tokenizer(str(tokenizer)).save_pretrained(staged)
        _keep_sentencepiece(name, staged)
        del adapted, merged
        after = logits(load.load_base(str(staged), exact), ids)
        difference = float((after - before).abs().max() / before.abs().max())
        allowed = TOLERANCE[str(stored).removeprefix("torch.")]
        if not difference <= allowed:
            raise TaskError(
                f"merged logits differ by {difference:.1e} of the largest, more than {allowed}: nothing written"
            )
        replace_folder(staged, output)
    except (OSError, SafetensorError) as error:  # the second is safetensors' error for a full disk
        raise TaskError(f"{output}: cannot be written ({error}); free disk space, or give another --output") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return difference


def _keep_sentencepiece(name: str, folder: Path) -> None:
    """Copy tokenizer.model of model ``name`` into ``folder``: transformers does not write it; llama.cpp reads it."""
    repository, revision = split_revision(name)
    source = cached_file(
        repository,
        "tokenizer.model",
        revision=revision,
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if source and not (folder / "tokenizer.model").exists():
        shutil.copyfile(source, folder / "tokenizer.model")


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of ``ids``, ``[1, tokens]``, in fp32, ``[tokens, vocabulary]``."""
    model.eval()
    with torch.inference_mode():
        output: torch.Tensor = model(input_ids=ids).logits[0].float()
    return output
