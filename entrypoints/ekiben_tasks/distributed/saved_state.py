"""Read a checkpoint of any strategy weight by weight, to resume it with another strategy or number of processes.

Every strategy reads its own checkpoints faster. All others are read here, by each process for itself.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ekiben_tasks.models.checkpoint_folder import METADATA, SHARDS
from ekiben_tasks.models.sharded_checkpoint import read_metadata, read_shards
from ekiben_tasks.task.errors import TaskError

ZERO = "deepspeed"  # the folder that DeepSpeed writes
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class SavedWeight:
    """Hold a trained weight and AdamW's state of it, complete, fp32, on the CPU. step: the optimizer's."""

    weight: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: float


Reader = Callable[[str], SavedWeight]
Sizes = Mapping[str, torch.Size]  # of the trained weights, by name, in the model's order


def open_saved(folder: Path, state: Mapping[str, Any], sizes: Sizes) -> Reader:
    """Return a function that reads a weight of the checkpoint in ``folder`` by its name.

    state: what torch.save() wrote beside it. sizes: of all trained weights. The function raises TaskError, too.

    Raises:
        TaskError: the checkpoint cannot be read, or belongs to another model.
    """
    try:
        read = _open(folder, state, sizes)
    except _UNREADABLE as error:
        raise _explain(folder, error) from error

    def read_or_explain(name: str) -> SavedWeight:
        try:
            return read(name)
        except _UNREADABLE as error:
            raise _explain(folder, error) from error

    return read_or_explain


_UNREADABLE = (OSError, KeyError, RuntimeError, ValueError, IndexError)


def _explain(folder: Path, error: Exception) -> TaskError:
    return TaskError(
        f"{folder}: cannot be read with these settings ({type(error).__name__}: {error}); resume it with those it was "
        "written with, or start again with --overwrite"
    )


def _open(folder: Path, state: Mapping[str, Any], sizes: Sizes) -> Reader:
    if (folder / SHARDS / METADATA).is_file():
        return _open_shards(folder / SHARDS, sizes)
    if (folder / ZERO).is_dir():
        return _open_zero(folder / ZERO, sizes)
    return _open_vector(state, sizes)


def _open_vector(state: Mapping[str, Any], sizes: Sizes) -> Reader:
    """Read what ReplicatedStrategy keeps: one vector of all weights, and the optimizer's state by its groups' order."""
    weights = dict(zip(sizes, state["weights"].split([size.numel() for size in sizes.values()]), strict=True))
    # As distributed/optimizer.py groups them.
    order = [name for decays in (True, False) for name, size in sizes.items() if (len(size) > 1) is decays]
    moments = {name: state["optimizer"]["state"][index] for index, name in enumerate(order)}

    def read(name: str) -> SavedWeight:
        first, second = (moments[name][key] for key in _MOMENTS)
        return SavedWeight(weights[name].view(sizes[name]), first, second, float(moments[name]["step"]))

    return read


def _open_shards(folder: Path, sizes: Sizes) -> Reader:
    known = read_metadata(folder)

    def read(name: str) -> SavedWeight:
        # LossModule keeps the model under this name.
        keys = [f"model.model.{name}", *(f"optimizer.state.model.{name}.{key}" for key in _MOMENTS)]
        step = f"optimizer.state.model.{name}.step"
        tensors = {key: torch.empty(sizes[name]) for key in keys}
        tensors[step] = torch.empty((), dtype=known[step].properties.dtype)
        read_shards(tensors, folder, alone=True)
        weight, first, second = (tensors[key] for key in keys)
        return SavedWeight(weight, first, second, float(tensors[step]))

    _check_names([f"model.model.{name}" for name in sizes], known)
    return read


def _open_zero(folder: Path, sizes: Sizes) -> Reader:
    """Read DeepSpeed's files of every rank, as its own ds_to_universal.py does, without writing them again."""
    files = sorted(folder.glob("*zero_pp_rank_*_optim_states.pt"), key=zero_rank)
    ranks = [load_zero_file(file)["optimizer_state_dict"] for file in files]
    fragments = _fragments_of_stage_3(folder, ranks) if ranks[0]["zero_stage"] == 3 else _fragments_of_stage_2(ranks)

    def read(name: str) -> SavedWeight:
        size, (*tensors, steps) = sizes[name], zip(*fragments[f"model.{name}"], strict=True)
        weight, first, second = (torch.cat(each).detach()[: size.numel()].view(size) for each in tensors)
        return SavedWeight(weight, first, second, steps[0])

    _check_names([f"model.{name}" for name in sizes], fragments)
    return read


Fragment = tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]  # of weight, exp_avg, exp_avg_sq; the step


def _fragments_of_stage_2(ranks: list[Any]) -> dict[str, list[Fragment]]:
    """Return the fragments of each weight, in the order of the ranks, each of which has a slice of every group."""
    fragments: dict[str, list[Fragment]] = {}
    for rank in ranks:
        for group, addresses in enumerate(rank["param_slice_mappings"]):
            kept = rank["base_optimizer_state"]["state"][group]
            vectors = [rank["single_partition_of_fp32_groups"][group], *(kept[key] for key in _MOMENTS)]
            for name, address in addresses.items():
                first, second, third = (vector.narrow(0, address.start, address.numel) for vector in vectors)
                fragments.setdefault(name, []).append((first, second, third, float(kept["step"])))
    return fragments


def _fragments_of_stage_3(folder: Path, ranks: list[Any]) -> dict[str, list[Fragment]]:
    """Return the fragments of each weight, in the order of the ranks; the last one is padded to the size of the
    others.
    """
    model, *_ = sorted(folder.glob("*zero_pp_rank_0_*_model_states.pt"))
    groups = load_zero_file(model)["param_shapes"]
    fragments: dict[str, list[Fragment]] = {}
    for rank in ranks:
        for group, sizes in enumerate(groups):
            kept = rank["optimizer_state_dict"]["state"][group]
            vectors = [rank["fp32_flat_groups"][group], *(kept[key] for key in _MOMENTS)]
            start = 0
            for name, size in sizes.items():
                length = -(-size.numel() // len(ranks))
                first, second, third = (vector.narrow(0, start, length) for vector in vectors)
                fragments.setdefault(name, []).append((first, second, third, float(kept["step"])))
                start += length
    return fragments


class _Stage(int):
    """Replace DeepSpeed's enumeration of stages."""


class _Record:
    """Replace DeepSpeed's classes of which only the attributes are read."""


def _stage_of_name(enum: Any, name: str) -> _Stage:
    """Replace getattr: Python 3.11.0 to 3.11.3, as in Debian 12, pickles an enum as a call of it."""
    if enum is not _Stage:
        raise pickle.UnpicklingError(f"it reads an attribute of {enum!r}")
    return _Stage(("disabled", "optimizer_states", "gradients", "weights").index(name))


# DeepSpeed's own classes in its files. A pickle with other names could run arbitrary code.
_ZERO_CLASSES: list[Any] = [
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_stage_of_name, "builtins.getattr"),
    (_Record, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Record, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Record, "deepspeed.utils.tensor_fragment.fragment_address"),
]


def load_zero_file(file: Path) -> Any:
    """Return the content of one of DeepSpeed's files, without running code that it names.

    Raises:
        ValueError: it is no such file, or names other code.
    """
    try:
        with torch.serialization.safe_globals(_ZERO_CLASSES):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{file.name} is damaged, or holds code, which DeepSpeed's files do not") from error


def zero_rank(file: Path) -> int:
    """Return the rank of the process that wrote one of DeepSpeed's files."""
    (rank,) = re.findall(r"zero_pp_rank_(\d+)_", file.name)
    return int(rank)


def _check_names(names: list[str], known: Mapping[str, Any]) -> None:
    """Raise ValueError for the first unknown name."""
    missing = next((name for name in names if name not in known), None)
    if missing:
        raise ValueError(f"it has no {missing}")
