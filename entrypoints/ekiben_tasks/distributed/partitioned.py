"""Shard the weights among the processes with DeepSpeed: ZeRO-2 and ZeRO-3, with offloading to the host's memory.

ZeRO is described by Rajbhandari et al. 2020 (arXiv:1910.02054). Nothing is compiled while a job runs: PyTorch's fused
AdamW steps on the GPU and, for what is kept in the host's memory, on the CPU. DeepSpeed's CPUAdam is used for that
where it was compiled into the image, and its FusedAdam on the GPU where the settings ask for it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ekiben_tasks.data import packing
from ekiben_tasks.distributed import failures
from ekiben_tasks.distributed.context import DistributedContext
from ekiben_tasks.distributed.optimizer import OptimizerConfig, decay_groups, set_learning_rate
from ekiben_tasks.distributed.options import DeepSpeed, compiled_ops
from ekiben_tasks.distributed.saved_state import ZERO, load_zero_file, open_saved, zero_rank
from ekiben_tasks.distributed.strategy import ModelRequest
from ekiben_tasks.models.device import Device
from ekiben_tasks.models.load import load_base, read_config
from ekiben_tasks.models.proof import attach_masks, verify
from ekiben_tasks.models.tuning import LossModule, apply_tuning_method
from ekiben_tasks.task.errors import TaskError


def create(
    request: ModelRequest, optimizer: OptimizerConfig, world: DistributedContext, options: DeepSpeed
) -> PartitionedStrategy:
    """Load the model, sharded by DeepSpeed, and return its strategy.

    Raises:
        TaskError: the model cannot be loaded, or no layer has the name of a target.
    """
    # By default DeepSpeed uses a GPU if there is one, even where the CPU was chosen.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if request.device.is_gpu else "cpu")
    return PartitionedStrategy(request, optimizer, world, options)


def make_config(options: DeepSpeed, max_grad_norm: float, device: Device) -> dict[str, Any]:
    """Return DeepSpeed's configuration. No value is "auto": a Trainer would fill those in, and there is none here."""
    zero: dict[str, Any] = {
        "stage": options.stage,
        "overlap_comm": device.is_gpu,
        "contiguous_gradients": True,
    }
    host = {"device": "cpu", "pin_memory": device.is_gpu}
    if options.offload != "none":
        zero["offload_optimizer"] = host
    if options.offload == "all":
        zero["offload_param"] = host
    return {
        "train_micro_batch_size_per_gpu": 1,  # nominal: packed micro-batches vary in number
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": device.dtype == torch.bfloat16},
        "fp16": {"enabled": device.dtype == torch.float16},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 30,
    }


class PartitionedStrategy:
    """Train a model whose gradients, optimizer state and, in stage 3, weights DeepSpeed shards."""

    collective = True

    def __init__(
        self, request: ModelRequest, optimizer: OptimizerConfig, world: DistributedContext, options: DeepSpeed
    ) -> None:
        import deepspeed  # seconds, and only in some images
        from transformers.integrations import HfDeepSpeedConfig

        # DeepSpeed probes every op where this is not set, and warns of each that would have to be compiled first. An
        # image has no compiler, so other ops are not available.
        deepspeed.ops.__compatible_ops__ = dict.fromkeys(compiled_ops(), True)
        deepspeed.init_distributed()  # reuses torch's process group
        config = make_config(options, optimizer.max_grad_norm, request.device)
        proof = verify(read_config(request.path))  # before models that are made are sharded
        # While this exists, from_pretrained() shards every weight as soon as it is read.
        self.shares_while_loading = HfDeepSpeedConfig(config) if options.stage == 3 else None
        causal = load_base(request.path, request.device, proof.implementation)
        attach_masks(causal, proof)
        model = apply_tuning_method(causal, request.tuning)
        self.loss_module = LossModule(model, request.device.dtype, request.attention_kernel)
        if self.loss_module.tails and options.stage == 3:
            raise TaskError(
                f"{type(causal).__name__}: its head is more than a product, or adapted, which was not tried with"
                " DeepSpeed's stage 3; use parallel=fsdp, or deepspeed.stage=2"
            )
        self.loss_module.add_noise(request.tuning.neftune_noise_alpha)
        if request.checkpointed_blocks:
            self.loss_module.checkpoint_activations(request.checkpointed_blocks)
        self.world = world
        kind = "deepspeed" if options.takes_adam_op() else "torch"  # their states are incompatible
        self.spread = {"stage": options.stage, "offload": options.offload, "size": world.size, "optimizer": kind}
        self.trainable = {
            name: param for name, param in self.loss_module.model.named_parameters() if param.requires_grad
        }
        trained = list(self.trainable.values())
        self.optimizer = _make_optimizer(trained, optimizer, options)
        self.engine, *_ = deepspeed.initialize(
            model=self.loss_module,
            model_parameters=trained,
            optimizer=self.optimizer,
            config=config,
            dist_init_required=False,
        )

    def loss(self, batch: packing.PackedBatch) -> torch.Tensor:
        """Return the summed loss of ``batch``, a scalar in fp32."""
        return torch.as_tensor(self.engine(batch))

    def backward(self, loss: torch.Tensor, factor: float, *, last: bool) -> None:
        """Add the gradient of ``loss``, a scalar, times ``factor``, summed over the processes.

        last: no other micro-batch of this step follows.
        """
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over the processes; we need the sum.
        self.engine.backward(loss * (factor * self.world.size))
        if not last:
            self.engine.step()

    def zero_grad(self) -> None:
        """Drop the gradients of this step."""
        self.engine.zero_grad()

    def step(self, rate: float) -> torch.Tensor:
        """Clip the gradients, and update the weights at learning rate ``rate``.

        Returns:
            The norm before clipping, a scalar in fp32.
        """
        set_learning_rate(self.engine.optimizer, rate)
        self.engine.step()
        return torch.tensor(float(self.engine.get_global_grad_norm() or 0.0), device=self.engine.device)

    def is_finite(self) -> bool:
        """Return whether the trained weights that this process keeps are all finite."""
        shards = (
            getattr(parameter, "ds_tensor", parameter)
            for parameter in self.loss_module.parameters()
            if parameter.requires_grad
        )
        return all(bool(shard.isfinite().all()) for shard in shards)

    def save(self, folder: Path) -> dict[str, Any]:
        """Write DeepSpeed's checkpoint into ``folder``; return its stage, offloading and number of processes.

        Raises:
            OSError: the disk is full, or fails in another way.
        """
        try:
            self.engine.save_checkpoint(str(folder), tag=ZERO, exclude_frozen_parameters=True)
        except RuntimeError as error:  # torch's errors for a full disk: the first one names the cause
            if failures.is_peer_lost(error) or failures.is_out_of_memory(error):
                raise
            cause: BaseException = error
            while cause.__context__ is not None:
                cause = cause.__context__
            raise OSError(" ".join(str(cause).split())[:200]) from error
        return {"zero": self.spread}

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Restore the state that save() of any strategy left in ``folder`` and ``state``.

        Raises:
            TaskError: it cannot be read, contains code, or belongs to another model.
        """
        before = _spread_of(folder, state)
        if before is None or {"optimizer": self.spread["optimizer"], **before} != self.spread:
            self._load_other(folder, state)
            return
        try:
            for file in (folder / ZERO).glob("*.pt"):  # DeepSpeed's own loader executes any pickle
                load_zero_file(file)
        except (OSError, ValueError, RuntimeError) as error:
            raise TaskError(f"{folder}: cannot be read: {error}; remove it, or start again with --overwrite") from error
        path, _ = self.engine.load_checkpoint(str(folder), tag=ZERO, load_module_strict=False)
        if path is None:
            raise TaskError(f"{folder}: cannot be read by DeepSpeed; remove it, or start again with --overwrite")

    def _load_other(self, folder: Path, state: dict[str, Any]) -> None:
        """Restore a checkpoint of another strategy, stage or number of processes."""
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        sizes = {name: torch.Size(getattr(param, "ds_shape", param.size())) for name, param in self.trainable.items()}
        read, step = open_saved(folder, state, sizes), 0.0
        zero = self.engine.optimizer
        counts_in_tensors = self.spread["optimizer"] == "torch"
        # Before its first step the optimizer has no state to load into.
        for partition in getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups:
            empty = {key: torch.zeros_like(partition) for key in ("exp_avg", "exp_avg_sq")}
            zero.optimizer.state[partition] = {
                "step": torch.zeros((), device=partition.device) if counts_in_tensors else 0,
                **empty,
                **zero.optimizer.state[partition],
            }
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):  # stage 2 has its own map from weights to states
            zero._lazy_init_hp_params_optimizer_state()
        for name, param in self.trainable.items():
            saved = read(name)
            step = saved.step
            safe_set_full_fp32_param(param, saved.weight.to(self.engine.device))
            for key in ("exp_avg", "exp_avg_sq"):
                safe_set_full_optimizer_state(param, getattr(saved, key).to(self.engine.device), key)
            with torch.no_grad(), deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                param.copy_(saved.weight)
        for kept in zero.optimizer.state.values():
            kept["step"] = torch.as_tensor(kept["step"]).clone().fill_(step) if counts_in_tensors else int(step)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return parameter name → tensor on the CPU, in the first process: an adapter's weights, else all.

        They are gathered one by one, so the complete model never has to fit one GPU.
        """
        import deepspeed

        adapter = hasattr(self.loss_module.model, "peft_config")
        weights = {}
        for name, parameter in self.loss_module.model.named_parameters():
            if parameter.requires_grad or not adapter:
                with deepspeed.zero.GatheredParameters([parameter]):
                    if self.world.is_main_process:
                        weights[name] = parameter.detach().cpu().clone()
        return weights


def _spread_of(folder: Path, state: dict[str, Any]) -> dict[str, Any] | None:
    """Return the sharding of DeepSpeed's checkpoint in ``folder``; None: it is of another strategy."""
    files = list((folder / ZERO).glob("*zero_pp_rank_*_optim_states.pt"))
    if not files:
        return None
    settings = state["fingerprint"]  # for checkpoints of versions that did not record it
    before = {"stage": int(settings.get("deepspeed.stage", 3)), "offload": settings.get("deepspeed.offload", "none")}
    spread: dict[str, Any] = state.get("zero", {**before, "size": 1 + max(map(zero_rank, files))})
    return spread


def _make_optimizer(
    parameters: list[torch.Tensor], config: OptimizerConfig, options: DeepSpeed
) -> torch.optim.Optimizer:
    groups = decay_groups(parameters, config)
    if options.takes_adam_op():
        from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

        if options.offload == "none":
            return FusedAdam(groups, lr=config.learning_rate, betas=config.betas, adam_w_mode=True)
        return DeepSpeedCPUAdam(groups, lr=config.learning_rate, betas=config.betas, adamw_mode=True)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)
