"""Write and read a pretraining run's weights and optimizer in pieces: each process its own, without gathering any.

Megatron's distributed optimizer cuts its buffers without regard to where weights begin. A range of a weight is a few
rectangles of the complete one, and torch.distributed.checkpoint reads any rectangles of what it wrote as others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ekiben_tasks.models.sharded_checkpoint import read_metadata, read_shards

MOMENTS = ("exp_avg", "exp_avg_sq")
Rectangle = tuple[tuple[int, ...], tuple[int, ...]]  # (offsets, sizes)


class Pieces(torch.Tensor):  # type: ignore[misc]  # torch has no types here
    """Hold the rectangles of a tensor that this process has, in the form that torch.distributed.checkpoint takes.

    size: of the complete tensor. tensors: by the offsets of each rectangle.
    """

    def __new__(cls, size: Sequence[int], tensors: Mapping[tuple[int, ...], torch.Tensor]) -> Pieces:
        pieces: Pieces = torch.Tensor._make_wrapper_subclass(cls, torch.Size(size))
        return pieces

    def __init__(self, size: Sequence[int], tensors: Mapping[tuple[int, ...], torch.Tensor]) -> None:
        self.tensors = dict(tensors)  # by offsets

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, size=self.size(), properties=TensorProperties.create_from_tensor(tensor)
                ),
            )
            for chunk, tensor in zip(self.__create_chunk_list__(), self.tensors.values(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), tensor.size()) for offsets, tensor in self.tensors.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.tensors[tuple(index.offset)]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} needs the whole tensor, of which this process has only pieces")

    def __repr__(self) -> str:
        return f"Pieces({tuple(self.size())}, {list(self.tensors)})"


@dataclass(frozen=True, slots=True)
class OptimizerShard:
    """Describe a weight in this process, and the range of its elements whose optimizer state this process has."""

    sharded: ShardedTensor  # Megatron's description: where the weight is in the complete one
    start: int
    stop: int
    main: torch.Tensor  # the optimizer's exact copy of the range
    state: Mapping[str, torch.Tensor]  # AdamW's, of the range; empty before the first step
    in_all_copies: bool  # of the model, without the distributed optimizer


def rectangles(size: Sequence[int], start: int, stop: int) -> Iterator[Rectangle]:
    """Cut the elements from ``start`` to ``stop`` of an array, counted in its memory's order, into rectangles.

    size: of the array. They come in the order of the memory.
    """
    if start >= stop:
        return
    if len(size) == 1:
        yield (start,), (stop - start,)
        return
    stride = math.prod(size[1:])
    first, last = -(-start // stride), stop // stride  # complete ones
    if first > last:  # all in one row
        yield from _in_first(size, last, start % stride, stop - last * stride)
        return
    if start % stride:
        yield from _in_first(size, first - 1, start % stride, stride)
    if first < last:
        yield (first, *(0 for _ in size[1:])), (last - first, *size[1:])
    if stop % stride:
        yield from _in_first(size, last, 0, stop % stride)


def _in_first(size: Sequence[int], index: int, start: int, stop: int) -> Iterator[Rectangle]:
    for offsets, sizes in rectangles(size[1:], start, stop):
        yield (index, *offsets), (1, *sizes)


def cut(sharded: ShardedTensor, numbers: torch.Tensor, start: int) -> Pieces:
    """Return the pieces of the complete weight that ``numbers``, its elements from ``start`` on, consist of.

    sharded: Megatron's description of the weight in this process. The pieces share the memory of ``numbers``.
    """
    prefix, inner = sharded.global_offset[: sharded.prepend_axis_num], sharded.global_offset[sharded.prepend_axis_num :]
    tensors, done = {}, 0
    for offsets, sizes in rectangles(sharded.local_shape or (1,), start, start + numbers.numel()):
        count = math.prod(sizes)
        at = (*prefix, *(inside + start_of for inside, start_of in zip(offsets, inner, strict=True)))
        tensors[at] = numbers[done : done + count].view(*(1 for _ in prefix), *sizes)
        done += count
    return Pieces(sharded.global_shape, tensors)


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers that one of Megatron's is made of."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def optimizer_shards(model: Any, optimizer: Any) -> Iterator[OptimizerShard]:
    """Yield every weight of whose optimizer state this process has a part, in the model's order."""
    held = {
        sharded.data: sharded
        for sharded in nested_values(model.sharded_state_dict())
        if isinstance(sharded, ShardedTensor)
    }
    for inner in inner_optimizers(optimizer):
        if hasattr(inner, "model_param_group_index_map"):  # the distributed optimizer
            for weight, (group, index) in inner.model_param_group_index_map.items():
                span = inner._get_model_param_range_map(weight)["param"]
                main = inner.optimizer.param_groups[group]["params"][index]
                yield OptimizerShard(
                    held[weight], span.start, span.end, main, inner.optimizer.state.get(main, {}), False
                )
            continue
        mains = {id(main) for group in inner.optimizer.param_groups for main in group["params"]}
        for weight, sharded in held.items():
            main = getattr(weight, "main_param", weight)
            if id(main) in mains:
                yield OptimizerShard(sharded, 0, weight.numel(), main, inner.optimizer.state.get(main, {}), True)


def to_write(model: Any, optimizer: Any, copy: int, copies: int) -> dict[str, Pieces]:
    """Return name → pieces that this process writes. Nothing is copied.

    Where several copies of the model have the same state, each writes an equal part. copy: the number, from 0, of the
    copy that this process belongs to, of ``copies``.
    """
    entries: dict[str, Pieces] = {}
    for shard in optimizer_shards(model, optimizer):
        # (pipeline stage, tensor rank, copy): the first one saves weights shared by stages or tensor ranks.
        if any(shard.sharded.replica_id[:2]):
            continue
        first, last = 0, shard.stop - shard.start
        if shard.in_all_copies:
            first, last = last * copy // copies, last * (copy + 1) // copies
        empty = torch.zeros(shard.stop - shard.start) if not shard.state else None
        for name in ("weight", *MOMENTS):
            source = shard.main.detach() if name == "weight" else shard.state.get(name, empty)
            entries[f"{name}.{shard.sharded.key}@{shard.sharded.global_offset}"] = cut(
                shard.sharded, source.flatten()[first:last], shard.start + first
            )
    return _join(entries)


def _join(entries: Mapping[str, Pieces]) -> dict[str, Pieces]:
    """Put together the pieces of one tensor: layers that are alike are one tensor of Megatron's."""
    joined: dict[str, Pieces] = {}
    for at, pieces in entries.items():
        name = at.rpartition("@")[0]
        before = joined[name].tensors if name in joined else {}
        if before or pieces.tensors:
            joined[name] = Pieces(pieces.size(), {**before, **pieces.tensors})
    return joined


def read(model: Any, optimizer: Any, folder: Path, step: int) -> None:
    """Restore the weights and, where ``optimizer`` is given, its state, from shards of any number of processes.

    step: how many steps AdamW has made.

    Raises:
        TaskError: the description of the shards cannot be read.
        ValueError: a weight is missing in them.
        Exception: what torch raises for shards that do not fit the model or are damaged.
    """
    known = read_metadata(folder)
    held = [sharded for sharded in nested_values(model.sharded_state_dict()) if isinstance(sharded, ShardedTensor)]
    wholes = {id(sharded.data): torch.empty(sharded.data.numel()) for sharded in held}
    entries = {
        f"weight.{sharded.key}@{sharded.global_offset}": cut(sharded, wholes[id(sharded.data)], 0) for sharded in held
    }
    shards = list(optimizer_shards(model, optimizer)) if optimizer is not None else []
    moments = []
    for shard in shards:
        for name in MOMENTS:
            numbers = torch.empty(shard.stop - shard.start)
            moments.append((shard.state[name], numbers))
            entries[f"{name}.{shard.sharded.key}@{shard.sharded.global_offset}"] = cut(
                shard.sharded, numbers, shard.start
            )
    pieces = _join(entries)
    if missing := next((name for name in pieces if name not in known), None):
        raise ValueError(f"it has no {missing}")
    read_shards(pieces, folder, alone=True)
    with torch.no_grad():
        for sharded in held:
            sharded.data.copy_(wholes[id(sharded.data)].view(sharded.data.size()))
        for shard in shards:
            shard.main.copy_(wholes[id(shard.sharded.data)][shard.start : shard.stop].view(shard.main.size()))
            shard.state["step"].fill_(step)
        for target, numbers in moments:
            target.copy_(numbers.view(target.size()))


def optimizer_steps(optimizer: Any) -> int:
    """Return how many steps AdamW has made: fewer than the run, where fp16 overflowed."""
    for inner in inner_optimizers(optimizer):
        for state in inner.optimizer.state.values():
            return int(state["step"])
    return 0
