"""Make one ordinary model of a sharded checkpoint: what a run on many GPUs left behind, for programs that know no shards.

merge-weights result --output merged                    the last checkpoint of a run that was never finished
merge-weights result/checkpoints/step-000250 --output merged --base meta-llama/Llama-2-7b-hf
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import places
import settings as options
from hub import check_model_place
from settings import TaskError, nearest, option

if TYPE_CHECKING:
    import torch

SHARDS = "shards"  # of a checkpoint: the folder that torch.distributed.checkpoint writes


@dataclass(frozen=True)
class Settings:
    output: str = option("merged", "an empty or new folder; --output")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = option(
        "auto", "type to store; auto: as the base is stored"
    )
    file_gb: float = option(4.0, "size of one file of weights, and about the memory this takes")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options.command("merge-weights", __doc__, Settings, arguments)
    parser.add_argument("--smoke", action="store_true", help="a tiny model in shards, offline, made whole and compared")
    parser.add_argument(
        "place",
        nargs="?",
        default="result",
        help="the folder a run wrote to, or one of its checkpoints (default: result)",
    )
    parser.add_argument("--base", metavar="PLACE", help="the model it was trained from, if the checkpoint does not say")
    parser.add_argument("--output", metavar="DIR", help="where the model goes (default: merged)")
    args = parser.parse_args(arguments)
    settings = options.load(Settings, args.config, args.set)
    if args.smoke:
        os.environ["HF_HUB_OFFLINE"] = "1"
        places.prepare_caches(os.environ)
        return prove(settings)
    checkpoint = find_checkpoint(Path(args.place))
    output = places.claim_folder(Path(args.output or settings.output), empty=True)
    for line in places.prepare_caches(os.environ):
        print(line, flush=True)
    base = args.base or base_of(checkpoint)
    if check_model_place(base):
        for line in places.prefer_cache(os.environ):
            print(line, flush=True)
    print(f"merging     {checkpoint}, trained from {base}", flush=True)
    files, numbers = merge(checkpoint, base, output, settings)
    print(f"done        {output}: {numbers:,} weights in {files} files", flush=True)
    return 0


def find_checkpoint(place: Path) -> Path:
    """The folder of shards. Errors: TaskError."""
    steps = sorted((place / "checkpoints").glob(f"step-*/{SHARDS}/.metadata"))
    for candidate in (place, place / SHARDS, *(file.parent for file in reversed(steps))):
        if (candidate / ".metadata").is_file():
            return candidate
    if (place / "model" / "config.json").is_file() or (place / "config.json").is_file():
        raise TaskError(f"{place}: holds a whole model already; nothing has to be merged")
    if (place / "adapter").is_dir() or (place / "adapter_config.json").is_file():
        raise TaskError(f"{place}: holds an adapter; `merge` writes it into its base")
    raise TaskError(f"{place.absolute()}: holds no sharded checkpoint (a folder {SHARDS} with a file .metadata)")


def base_of(checkpoint: Path) -> str:
    """The model a checkpoint says it was trained from. Errors: TaskError."""
    import torch

    state = checkpoint.parent / "state.pt"
    if state.is_file():
        model = torch.load(state, map_location="cpu", weights_only=True).get("fingerprint", {}).get("model")
        if model:
            return str(model)
    raise TaskError(f"{checkpoint}: does not say which model it was trained from; name it with --base")


def merge(checkpoint: Path, base: str, output: Path, settings: Settings) -> tuple[int, int]:
    """Write the model; (files, weights). A file at a time, so it takes little memory. Errors: TaskError: nothing is left."""
    from safetensors import SafetensorError

    import models

    names = match_names(checkpoint, base)
    dtype = str(models.stored_dtype(base)).removeprefix("torch.") if settings.dtype == "auto" else settings.dtype
    staged = output.absolute().with_name(f".{output.name}.staged-{os.getpid()}")
    staged.mkdir()
    try:
        groups = _cut(checkpoint, names, int(settings.file_gb * 1e9))
        table: dict[str, str] = {}
        for number, group in enumerate(groups, 1):
            file = f"model-{number:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else "model.safetensors"
            _write_group(checkpoint, group, dtype, staged / file)
            table |= dict.fromkeys(group, file)
        if len(groups) > 1:
            index = {"metadata": {}, "weight_map": table}
            (staged / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
        config = models.read_config(base)
        config.dtype = dtype
        config.save_pretrained(staged)
        models.load_tokenizer(base).save_pretrained(staged)
        models.replace_folder(staged, output)
    except (OSError, SafetensorError) as error:  # the second is what safetensors makes of a full disk
        raise TaskError(f"{output}: cannot be written ({error}); make room, or give another --output") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return len(groups), len(names)


def prove(settings: Settings) -> int:
    """Make a tiny random model whole again. Errors: TaskError, naming what failed."""
    import torch
    import torch.distributed.checkpoint as dcp

    import models
    import tiny

    models.quieten()
    with tempfile.TemporaryDirectory(prefix="ekiben-smoke-") as scratch:
        folder = Path(scratch)
        tiny.make_model(folder / "base", ["smoke"], "llama")
        trained = tiny.random_model("llama", len(models.load_tokenizer(str(folder / "base"))), seed=1)
        _expect_one_process()
        weights = {f"model.{name}": tensor for name, tensor in trained.state_dict().items()}
        dcp.save({"model": weights}, checkpoint_id=str(folder / "shards"), no_dist=True)
        files, _ = merge(folder / "shards", str(folder / "base"), folder / "merged", replace(settings, file_gb=1e-4))
        merged = models.load_base(str(folder / "merged"), models.choose_device("cpu")).state_dict()
        same = all(torch.equal(tensor, merged[name]) for name, tensor in trained.state_dict().items())
    if not same:
        raise TaskError("smoke: failed: the merged weights are those of the shards")
    print(f"smoke       the merged weights are those of the shards, in {files} files", flush=True)
    return 0


def match_names(checkpoint: Path, base: str) -> dict[str, str]:
    """Name in the model → key in the checkpoint. Errors: TaskError for an adapter's, or another model's, checkpoint."""
    import models

    found = {key: tuple(entry.size) for key, entry in _metadata(checkpoint).items() if hasattr(entry, "size")}
    if any(".lora_" in key for key in found):
        raise TaskError(
            f"{checkpoint}: is an adapter's, which `train` writes to adapter/ as well; `merge` puts it into its base"
        )
    wanted = {name: tuple(parameter.shape) for name, parameter in models.load_shape(base).named_parameters()}
    anchor = next(iter(wanted))
    heads = [key.removesuffix(anchor) for key in found if key.endswith(f".{anchor}") or key == anchor]
    prefix = min(heads, key=len, default="")
    for name, shape in wanted.items():
        if prefix + name not in found:
            close = nearest(name, [key.removeprefix(prefix) for key in found]) if len(found) < 10_000 else ""
            hint = close if "Did you mean" in close else ""
            raise TaskError(f"{checkpoint}: is of another model than {base}: it has no {name}.{hint}")
        if found[prefix + name] != shape:
            raise TaskError(
                f"{checkpoint}: is of another model than {base}: {name} is {list(found[prefix + name])} there and {list(shape)} here"
            )
    return {name: prefix + name for name in wanted}


def _metadata(checkpoint: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint import FileSystemReader

    try:
        found: dict[str, Any] = FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    except Exception as error:
        raise TaskError(f"{checkpoint}: cannot be read: {error}") from error
    return found


def _cut(checkpoint: Path, names: dict[str, str], size: int) -> list[dict[str, str]]:
    """``names`` in groups of at most ``size`` bytes in the checkpoint, or of one weight."""
    metadata, groups, room = _metadata(checkpoint), list[dict[str, str]](), 0
    for name, key in names.items():
        entry = metadata[key]
        need = entry.size.numel() * entry.properties.dtype.itemsize
        if not groups or room < need:
            groups.append({})
            room = size
        groups[-1][name] = key
        room -= need
    return groups


def _expect_one_process() -> None:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def _write_group(checkpoint: Path, group: dict[str, str], dtype: str, file: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    metadata = _metadata(checkpoint)
    parts: dict[str, torch.Tensor] = {
        key: torch.empty(metadata[key].size, dtype=metadata[key].properties.dtype) for key in group.values()
    }
    _expect_one_process()
    try:
        dcp.load(parts, storage_reader=dcp.FileSystemReader(str(checkpoint)), no_dist=True)
    except OSError:
        raise
    except Exception as error:
        raise TaskError(f"{checkpoint}: cannot be read: {' '.join(str(error).split())[:300]}") from error
    for name, key in group.items():
        if not parts[key].isfinite().all():
            raise TaskError(
                f"{checkpoint}: {name} holds numbers that are none (NaN or infinite); take an earlier checkpoint"
            )
    kind = getattr(torch, dtype)
    save_file({name: parts[key].to(kind).contiguous() for name, key in group.items()}, file, metadata={"format": "pt"})


if __name__ == "__main__":
    options.run(main)
