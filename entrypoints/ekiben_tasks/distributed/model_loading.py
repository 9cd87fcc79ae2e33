"""Load the base model of a run with its tuning method applied, in every process or in the first one alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ekiben_tasks.distributed.context import DistributedContext
from ekiben_tasks.distributed.strategy import ModelRequest
from ekiben_tasks.models import load
from ekiben_tasks.models.proof import attach_masks, verify
from ekiben_tasks.models.tuning import LossModule, apply_tuning_method, check_head, check_weights


def load_loss_module(request: ModelRequest, shards_in: DistributedContext | None = None) -> LossModule:
    """Load the model, apply its tuning method, and return its loss module.

    shards_in: the processes it will be sharded among: real weights in the first one's memory, meta in the others.

    Raises:
        TaskError: the model cannot be loaded, holds NaN or infinite values, or computes its logits in another way.
    """
    model = apply_tuning_method(_load_causal(request, shards_in), request.tuning)
    loss_module = LossModule(model, request.device.dtype, request.attention_kernel)
    if shards_in is None or shards_in.is_main_process:
        check_weights(loss_module.model, request.name)
        check_head(loss_module)
    prepare(loss_module, request)
    return loss_module


def prepare(loss_module: LossModule, request: ModelRequest) -> None:
    """Add noise to the embeddings of ``loss_module``, checkpoint and compile its blocks as ``request`` says."""
    loss_module.add_noise(request.tuning.neftune_noise_alpha)
    if request.checkpointed_blocks:
        loss_module.checkpoint_activations(request.checkpointed_blocks)
    if request.compile:
        loss_module.compile_blocks()


def _load_causal(request: ModelRequest, shards_in: DistributedContext | None) -> Any:
    proof = verify(load.read_config(request.path))
    if shards_in is None:
        causal = load.load_base(request.path, request.device, proof.implementation, request.bits, request.classes)
    elif shards_in.is_main_process:
        on_host = dataclasses.replace(request.device, torch_device=torch.device("cpu"))
        causal = load.load_base(request.path, on_host, proof.implementation, classes=request.classes)
    else:
        causal = load.load_meta_model(request.path, request.device.dtype, proof.implementation, request.classes)
    attach_masks(causal, proof)
    return causal
