"""The weights shared among the processes by DeepSpeed: ZeRO-2 and ZeRO-3, with what does not fit in the host's memory.

Nothing is compiled while a job runs, and nothing has to be: PyTorch's fused AdamW steps on the GPU and, for what is kept in
the host's memory, on the CPU. DeepSpeed's own for the CPU is taken where it was compiled into the image.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.git_version_info import installed_ops
from transformers.integrations import HfDeepSpeedConfig

import models
import packing
from learner import Learner, dress
from replicated import decay_groups
from settings import TaskError
from train_settings import Settings
from world import World

if TYPE_CHECKING:
    from loop import Plan

STATE = "deepspeed"


def make_config(settings: Settings, plan: Plan, device: models.Device) -> dict[str, Any]:
    """DeepSpeed's configuration. No value is "auto": those are filled in by a Trainer, and this is none."""
    zero: dict[str, Any] = {
        "stage": settings.deepspeed.stage,
        "overlap_comm": device.is_gpu,
        "contiguous_gradients": True,
    }
    host = {"device": "cpu", "pin_memory": device.is_gpu}
    if settings.deepspeed.offload != "none":
        zero["offload_optimizer"] = host
    if settings.deepspeed.offload == "all":
        zero["offload_param"] = host
    return {
        "train_micro_batch_size_per_gpu": 1,  # ours are packs of rows, and how many a step takes varies
        "gradient_accumulation_steps": 1,
        "gradient_clipping": plan.max_grad_norm,
        "bf16": {"enabled": device.dtype == torch.bfloat16},
        "fp16": {"enabled": device.dtype == torch.float16},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 30,
    }


class Partitioned:
    collective = True

    def __init__(self, place: str, settings: Settings, plan: Plan, device: models.Device, world: World) -> None:
        # On the CPU DeepSpeed would begin with a compiler; gloo does without that op.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = installed_ops.get("deepspeed_shm_comm", False)
        deepspeed.init_distributed()  # takes up torch's group
        config = make_config(settings, plan, device)
        # While this lives, from_pretrained() gives every weight away as soon as it is read.
        self.shares_while_loading = HfDeepSpeedConfig(config) if settings.deepspeed.stage == 3 else None
        attention = packing.choose_attention(models.read_config(place))
        self.learner = Learner(dress(models.load_base(place, device, attention), settings), device.dtype)
        if plan.checkpointed:
            self.learner.checkpoint_activations(plan.checkpointed)
        self.world = world
        trained = [part for part in self.learner.parameters() if part.requires_grad]
        self.engine, *_ = deepspeed.initialize(
            model=self.learner,
            model_parameters=trained,
            optimizer=_make_optimizer(trained, plan, offloads=settings.deepspeed.offload != "none"),
            config=config,
            dist_init_required=False,
        )

    def loss(self, pack: packing.Pack) -> torch.Tensor:
        return torch.as_tensor(self.engine(pack))

    def backward(self, loss: torch.Tensor, factor: float, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed takes the mean over the processes where the sum is wanted.
        self.engine.backward(loss * (factor * self.world.size))
        if not last:
            self.engine.step()

    def forget(self) -> None:
        self.engine.zero_grad()

    def step(self, rate: float) -> torch.Tensor:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        self.engine.step()
        return torch.tensor(float(self.engine.get_global_grad_norm() or 0.0), device=self.engine.device)

    def save(self, folder: Path) -> dict[str, Any]:
        self.engine.save_checkpoint(str(folder), tag=STATE, exclude_frozen_parameters=True)
        return {}

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        path, _ = self.engine.load_checkpoint(str(folder), tag=STATE, load_module_strict=False)
        if path is None:
            raise TaskError(f"{folder}: cannot be read by DeepSpeed; remove it, or start again with --fresh")

    def weights(self) -> dict[str, torch.Tensor]:
        """One after the other: the whole model never has to fit one GPU."""
        adapter = hasattr(self.learner.model, "peft_config")
        found = {}
        for name, part in self.learner.model.named_parameters():
            if part.requires_grad or not adapter:
                with deepspeed.zero.GatheredParameters([part]):
                    if self.world.leads:
                        found[name] = part.detach().cpu().clone()
        return found


def _make_optimizer(parameters: list[torch.Tensor], plan: Plan, *, offloads: bool) -> Any:
    groups = decay_groups(parameters, plan)
    if offloads and installed_ops.get("cpu_adam"):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, lr=plan.learning_rate, adamw_mode=True)
    return torch.optim.AdamW(groups, lr=plan.learning_rate, fused=True)
