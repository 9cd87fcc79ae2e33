"""Spread the layers of one model over several devices, as accelerate does, before its weights are loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ekiben_tasks.models.description import find_blocks, find_blocks_path
from ekiben_tasks.models.device import GIB, Device
from ekiben_tasks.models.load import load_meta_model
from ekiben_tasks.task.errors import DoesNotFitError, TaskError

SHARE = 0.9  # of a device's free memory, which weights may take; the rest is for the cache of keys and values
DeviceName = int | str  # a GPU's number, or cpu or disk


@dataclass(frozen=True, slots=True)
class Placement:
    """Describe which device has which modules. device_map: transformers'. Bytes are by device."""

    device_map: dict[str, DeviceName]
    weights: dict[DeviceName, int]
    memory: dict[DeviceName, int]  # what each has free
    blocks: dict[DeviceName, list[int]]  # numbers of the repeated blocks

    def format_lines(self, name: str) -> list[str]:
        """Return the lines of the plan. name: of a device, as "NVIDIA H200"."""
        head = f"devices     {len(self.weights)} x {name}, layers spread; GiB of weights expected, and free:"
        return [
            head,
            *(
                f"            {gpu}: {_name_range(self.blocks.get(gpu, []))}, {size / GIB:.1f} of"
                f" {self.memory[gpu] / GIB:.1f}"
                for gpu, size in self.weights.items()
            ),
        ]


def _name_range(numbers: Sequence[int]) -> str:
    return f"layers {numbers[0]} to {numbers[-1]}" if numbers else "no layer"


def free_memory() -> dict[DeviceName, int]:
    """Return the bytes that are free on each GPU of this process."""
    return {index: torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())}


def spread_layers(path: str, device: Device, memory: Mapping[DeviceName, int], bits: int = 16) -> Placement:
    """Return where the modules of the model ``path`` go, about the same bytes on each device; a block stays whole.

    memory: free bytes of each device, in order. Nothing is loaded.

    Raises:
        DoesNotFitError: they have not enough memory together.
        TaskError: the configuration cannot be read, or the image has no accelerate.
    """
    try:
        from accelerate.utils import get_balanced_memory, infer_auto_device_map
    except ImportError as error:
        advice = "use one with the layer huggingface"
        raise TaskError(f"setting devices=auto: this image has no accelerate; {advice}") from error
    model = load_meta_model(path, device.dtype)
    model.tie_weights()
    blocks = sorted({type(block).__name__ for block in find_blocks(model)} | set(model._no_split_modules or ()))
    special = _packed_types(model, bits)
    limits = {gpu: int(SHARE * free) for gpu, free in memory.items()}
    nowhere: dict[DeviceName, int] = {"cpu": 0}  # what fits no GPU goes to the disk
    options: dict[str, Any] = {"no_split_module_classes": blocks, "dtype": device.dtype, "special_dtypes": special}
    balanced = get_balanced_memory(model, max_memory={**limits, **nowhere}, **options)
    # The last device of a balanced map gets all that is left.
    even = {gpu: min(size, limits[gpu]) for gpu, size in balanced.items() if gpu in limits} | nowhere
    device_map = infer_auto_device_map(model, max_memory=even, **options)
    if set(device_map.values()) - set(limits):
        device_map = infer_auto_device_map(model, max_memory={**limits, **nowhere}, **options)
    placement = _add_up(model, device_map, special, memory)
    if set(device_map.values()) - set(limits):
        total = sum(_bytes(model, special).values())
        raise DoesNotFitError(
            f"{path}: its weights take {total / GIB:.0f} GiB, and {SHARE:.0%} of the memory of {len(limits)} devices is"
            f" {sum(limits.values()) / GIB:.0f} GiB; use more GPUs, or --set bits=4"
        )
    return placement


def _add_up(
    model: Any, device_map: Mapping[str, DeviceName], special: Mapping[str, Any], memory: Mapping[DeviceName, int]
) -> Placement:
    path = find_blocks_path(model)
    weights: dict[DeviceName, int] = dict.fromkeys(memory, 0)
    blocks: dict[DeviceName, list[int]] = {}
    for name, size in _bytes(model, special).items():
        gpu = _find_device(name, device_map)
        weights[gpu] = weights.get(gpu, 0) + size
        if (match := re.match(rf"{re.escape(path)}\.(\d+)\.", name)) and int(match[1]) not in blocks.get(gpu, []):
            blocks.setdefault(gpu, []).append(int(match[1]))
    used = {gpu: size for gpu, size in weights.items() if size or gpu in blocks}
    return Placement(dict(device_map), used, dict(memory), blocks)


def _find_device(name: str, device_map: Mapping[str, DeviceName]) -> DeviceName:
    """Return the device of a weight: that of the longest name of a module above it."""
    parts = name.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
    return next((device_map[each] for each in names if each in device_map), "cpu")


def _bytes(model: Any, special: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of each weight and buffer, of shared ones once."""
    sizes = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        bits = {"INT4": 4, "int8": 8}.get(str(special.get(name, "")).rpartition(".")[2], 8 * tensor.element_size())
        sizes[name] = tensor.numel() * bits // 8
    return sizes


def _packed_types(model: Any, bits: int) -> dict[str, Any]:
    """Return accelerate's type of each weight that quantisation packs: those of the blocks' products."""
    if bits == 16:
        return {}
    from accelerate.utils import CustomDtype

    path, kind = find_blocks_path(model), torch.int8 if bits == 8 else CustomDtype.INT4
    return {
        name: kind
        for name, parameter in model.named_parameters()
        if name.startswith(f"{path}.") and parameter.ndim == 2
    }
