"""Write a sharded checkpoint, as a run on many GPUs leaves it, as an ordinary model."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers.utils import cached_file

from ekiben_tasks.data.schema import DatasetFormat
from ekiben_tasks.data.tokenize import apply_format
from ekiben_tasks.models import device, load, tiny
from ekiben_tasks.models.checkpoint_folder import SHARDS
from ekiben_tasks.models.sharded_checkpoint import read_metadata, read_shards, write_shards
from ekiben_tasks.task.command import check_smoke
from ekiben_tasks.task.errors import TaskError, nearest
from ekiben_tasks.task.files import replace_folder
from ekiben_tasks.task.hub import split_revision


def read_fingerprint(checkpoint: Path) -> dict[str, Any]:
    """Return the settings that the run of ``checkpoint`` was started with, {} if the checkpoint does not have them."""
    state = checkpoint.parent / "state.pt"
    if not state.is_file():
        return {}
    return dict(torch.load(state, map_location="cpu", weights_only=True).get("fingerprint", {}))


def merge(
    checkpoint: Path, base: str, output: Path, *, dtype: str = "auto", max_shard_gb: float = 4.0
) -> tuple[int, int]:
    """Write the model into ``output``, one file of weights in memory at a time, and return (files, weights).

    dtype: of the stored weights; auto: the base's. max_shard_gb: GB (1e9 bytes) of one file.

    Raises:
        TaskError: the checkpoint belongs to another model, or is broken, or the disk is full; ``output`` stays empty.
    """
    names = match_names(checkpoint, base)
    entries = read_metadata(checkpoint)
    stored = load.stored_dtype(base) if dtype == "auto" else getattr(torch, dtype)
    empty = {
        name: torch.empty(entries[key].size, dtype=entries[key].properties.dtype, device="meta")
        for name, key in names.items()
    }
    split = huggingface_hub.split_torch_state_dict_into_shards(empty, max_shard_size=int(max_shard_gb * 1e9))
    staged = output.absolute().with_name(f".{output.name}.staged-{os.getpid()}")
    staged.mkdir()
    try:
        for file, group in split.filename_to_tensors.items():
            _write_weights(checkpoint, {name: names[name] for name in group}, stored, staged / file)
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (staged / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
        config = load.read_config(base)
        config.dtype = stored
        config.save_pretrained(staged)
        _tokenizer(checkpoint, base).save_pretrained(staged)
        repository, revision = split_revision(base)
        defaults = cached_file(
            repository, "generation_config.json", revision=revision, _raise_exceptions_for_missing_entries=False
        )
        if defaults:
            shutil.copyfile(defaults, staged / "generation_config.json")
        replace_folder(staged, output)
    except (OSError, SafetensorError) as error:  # the second is safetensors' error for a full disk
        raise TaskError(f"{output}: cannot be written ({error}); free disk space, or give another --output") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return len(split.filename_to_tensors), len(names)


def match_names(checkpoint: Path, base: str) -> dict[str, str]:
    """Return each weight's name in the model ``base`` → its key in the checkpoint.

    Raises:
        TaskError: the checkpoint is an adapter's, or another model's.
    """
    stored = {key: tuple(entry.size) for key, entry in read_metadata(checkpoint).items() if hasattr(entry, "size")}
    if any(".lora_" in key for key in stored):
        raise TaskError(
            f"{checkpoint}: is an adapter's, which `train` writes to adapter/ as well; `merge` puts it into its base"
        )
    expected = {name: tuple(parameter.shape) for name, parameter in load.load_meta_model(base).named_parameters()}
    first = next(iter(expected))
    prefixes = [key.removesuffix(first) for key in stored if key.endswith(f".{first}") or key == first]
    prefix = min(prefixes, key=len, default="")
    for name, shape in expected.items():
        if prefix + name not in stored:
            close = nearest(name, [key.removeprefix(prefix) for key in stored]) if len(stored) < 10_000 else ""
            hint = close if "Did you mean" in close else ""
            raise TaskError(f"{checkpoint}: is of another model than {base}: it has no {name}.{hint}")
        if stored[prefix + name] != shape:
            raise TaskError(
                f"{checkpoint}: is of another model than {base}: {name} is {list(stored[prefix + name])} there and"
                f" {list(shape)} here"
            )
    return {name: prefix + name for name in expected}


def smoke_test(max_shard_gb: float = 1e-4) -> int:
    """Shard a tiny random model, merge it, compare the two, and return 0.

    Raises:
        TaskError: the weights differ.
    """
    load.silence_warnings()
    with tempfile.TemporaryDirectory(prefix="ekiben-smoke-") as scratch:
        folder = Path(scratch)
        tiny.make_model(folder / "base", ["smoke"], "llama")
        trained = tiny.random_model("llama", len(load.load_tokenizer(str(folder / "base"))), seed=1)
        weights = {f"model.{name}": tensor for name, tensor in trained.state_dict().items()}
        write_shards({"model": weights}, folder / SHARDS, alone=True)
        files, _ = merge(folder / SHARDS, str(folder / "base"), folder / "merged", max_shard_gb=max_shard_gb)
        merged = load.load_base(str(folder / "merged"), device.choose_device("cpu")).state_dict()
        same = all(torch.equal(tensor, merged[name]) for name, tensor in trained.state_dict().items())
    check_smoke("the merged weights are those of the shards", same, f"in {files} files")
    return 0


def _tokenizer(checkpoint: Path, base: str) -> Any:
    """Return the base's tokenizer with the chat template that the run trained with."""
    tokenizer = load.load_tokenizer(base)
    settings = read_fingerprint(checkpoint)
    if settings.get("form.kind") == "chat":
        try:
            apply_format(tokenizer, DatasetFormat(kind="chat", chat=settings["form.chat"]))
        except TaskError as error:
            print(f"note        the chat template is the base's: {error}", flush=True)
    return tokenizer


def _write_weights(checkpoint: Path, group: dict[str, str], dtype: torch.dtype, file: Path) -> None:
    entries = read_metadata(checkpoint)
    tensors = {key: torch.empty(entries[key].size, dtype=entries[key].properties.dtype) for key in group.values()}
    try:
        read_shards(tensors, checkpoint, alone=True)
    except OSError:
        raise
    except Exception as error:
        raise TaskError(f"{checkpoint}: cannot be read: {' '.join(str(error).split())[:300]}") from error
    for name, key in group.items():
        if not tensors[key].isfinite().all():
            raise TaskError(f"{checkpoint}: {name} holds NaN or infinite values; use an earlier checkpoint")
    save_file(
        {name: tensors[key].to(dtype).contiguous() for name, key in group.items()}, file, metadata={"format": "pt"}
    )
