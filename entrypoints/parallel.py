"""What learns, and how its gradients become a step: one Protocol, one module for each way of spreading it over GPUs.

replicated.py   every process has all that is trained: one GPU, several (ddp), or an adapter on sharded weights (fsdp)
sharded.py      every process has a part of every weight (fsdp): PyTorch's fully_shard
zero.py         the same by DeepSpeed: ZeRO-2 and ZeRO-3, optimizer and weights in the host's memory if asked
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

import models
import packing
from learner import Learner, check_head, check_weights, dress
from settings import TaskError
from train_settings import Settings
from world import World

if TYPE_CHECKING:
    from loop import Plan


class Trained(Protocol):
    """The loop's view. Every process calls every method in the same order."""

    learner: Learner
    collective: bool  # running the model talks to the other processes: all must run it equally often

    def loss(self, pack: packing.Pack) -> torch.Tensor:
        """Summed loss of a pack."""

    def backward(self, loss: torch.Tensor, factor: float, *, last: bool) -> None:
        """Add the gradient of ``loss`` * ``factor`` to what this step has so far; ``last``: of this step."""

    def forget(self) -> None:
        """Drop the gradients of this step."""

    def step(self, rate: float) -> torch.Tensor:
        """Sum the gradients over the processes, shorten them, change the weights; the norm before shortening."""

    def save(self, folder: Path) -> dict[str, Any]:
        """Write what is large into ``folder``, return what is small: together the state after the last step."""

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Go back to what save() left."""

    def weights(self) -> dict[str, torch.Tensor]:
        """In the first process: parameter name → tensor on the CPU, the trained ones of an adapter, else all."""


def check(parallel: str, settings: Settings) -> None:
    """Errors: TaskError where this image lacks what ``parallel`` needs."""
    if parallel == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise TaskError(
            "setting parallel=deepspeed: this image has no DeepSpeed; use the recipe finetune, build this one on a layer that "
            "has it (layer: deepspeed-plain in recipe.yaml), or take parallel=fsdp, which shares the weights in the same way"
        )


def will_compile(parallel: str, settings: Settings, device: models.Device, tokens: int) -> bool:
    """tokens: of one epoch."""
    if parallel == "deepspeed":  # its hooks break a compiled block into pieces
        return False
    if settings.compile != "auto":
        return settings.compile
    worth_it = tokens * settings.epochs > 1_000_000  # it takes about half a minute to compile
    return worth_it and device.has_bf16 and models.compiler_missing() is None


def memory_choices(
    parallel: str, settings: Settings, device: models.Device, world: World, tokens: int
) -> dict[str, Any]:
    """What memory.Needs has to know of how the work is done; ``tokens``: of one epoch."""
    stage = f"zero{settings.deepspeed.stage}"
    return {
        "strategy": stage if parallel == "deepspeed" else parallel,
        "gpus": world.size,
        "offload": settings.deepspeed.offload if parallel == "deepspeed" else "none",
        "bits": settings.bits,
        "size": device.dtype.itemsize,
        "compiled": will_compile(parallel, settings, device, tokens),
    }


def load(parallel: str, place: str, settings: Settings, plan: Plan, device: models.Device, world: World) -> Trained:
    """The model, spread over the processes and ready to learn. Errors: TaskError."""
    from replicated import Replicated

    if parallel == "deepspeed":
        # Left alone, DeepSpeed takes a GPU that is there, also where the CPU was asked for.
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if device.is_gpu else "cpu")
        from zero import Partitioned

        return Partitioned(place, settings, plan, device, world)
    shards = parallel == "fsdp"
    learner = Learner(dress(_load_causal(place, settings, device, world, shards), settings), device.dtype)
    if world.leads or not shards:
        check_weights(learner.model, settings.model)
        check_head(learner)
    prepare(learner, plan)
    if not shards:
        return Replicated(learner, plan, world)
    import sharded

    trained = settings.method == "full"
    sharded.shard(learner, device.place, world, trained=trained)
    if trained:
        return sharded.Sharded(learner, plan, world, device.place)
    return Replicated(learner, plan, world, collective=True)


def prepare(learner: Learner, plan: Plan) -> None:
    if plan.checkpointed:
        learner.checkpoint_activations(plan.checkpointed)
    if plan.compile:
        learner.compile_blocks()


def _load_causal(place: str, settings: Settings, device: models.Device, world: World, shards: bool) -> Any:
    """The base model: on the GPU, or where it is to be shared in the first process's memory, and nowhere else."""
    attention = packing.choose_attention(models.read_config(place))
    if not shards:
        return models.load_base(place, device, attention, settings.bits)
    if world.leads:
        return models.load_base(place, dataclasses.replace(device, place=torch.device("cpu")), attention)
    return models.load_shape(place, device.dtype, attention)
