"""Run the steps of pretraining on Megatron-Core's schedules and optimizer: order, checkpoints, record and signals."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module

import gpt
import sharded_state
import training_data
from background_save import CHECKPOINTS, Saver, list_checkpoints, read_metadata
from ekiben_tasks.distributed.context import REQUEUE, DistributedContext, Stop
from ekiben_tasks.distributed.heartbeat import Heartbeat, Phase
from ekiben_tasks.models import flops
from ekiben_tasks.models.checkpoint_folder import SHARDS
from ekiben_tasks.models.device import Device
from ekiben_tasks.task import run_metadata
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.training.checkpoint import advise_restart, check_fingerprint
from ekiben_tasks.training.progress import RunState, add_length, is_due
from model_configs import Shape, training_flops

if TYPE_CHECKING:
    from pretraining import Settings


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold the plan of a run. Batches are counted in sequences."""

    settings: Settings
    shape: Shape
    dtype: torch.dtype
    recompute: bool
    micro_batch: int
    steps: int
    warmup: int
    decay: int
    learning_rate: float
    min_learning_rate: float

    def rate(self, step: int) -> float:
        """Return the learning rate of ``step``, from 0: a linear warm-up, then half a cosine down to the lowest.

        Half a cosine: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5, without restarts.
        """
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = min((step - self.warmup) / max(self.decay - self.warmup, 1), 1.0)
        return (
            self.min_learning_rate + (self.learning_rate - self.min_learning_rate) * (1 + math.cos(math.pi * done)) / 2
        )


@dataclass(frozen=True, slots=True)
class Job:
    """Describe a requested run: the folder that prepare-data wrote, its split, and where results go.

    fingerprint: values that have to be equal for a checkpoint to be resumed.
    """

    data: Path
    split: str
    output: Path
    fingerprint: dict[str, Any]


def _make_optimizer(plan: Plan, model: DistributedDataParallel) -> Any:
    half = {"bf16": plan.dtype == torch.bfloat16, "fp16": plan.dtype == torch.float16}
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=plan.learning_rate,
            weight_decay=plan.settings.weight_decay,
            adam_beta1=plan.settings.adam_beta1,
            adam_beta2=plan.settings.adam_beta2,
            clip_grad=plan.settings.max_grad_norm,
            params_dtype=plan.dtype,
            **half,
            use_distributed_optimizer=plan.settings.distributed_optimizer,
            initial_loss_scale=2.0**11,
            loss_scale_window=500,
        ),
        [model],
    )


class Run(RunState):
    """Train a model on Megatron-Core, step by step; see fit()."""

    def __init__(
        self,
        plan: Plan,
        job: Job,
        world: DistributedContext,
        device: Device,
        stop: Stop,
        heartbeat: Heartbeat,
    ) -> None:
        super().__init__(plan.steps, world, flops.peak_flops(device.name))
        self.plan, self.settings, self.output, self.stop = plan, plan.settings, job.output, stop
        self.device, self.on_gpu, self.heartbeat = device.torch_device, device.is_gpu, heartbeat
        self.fingerprint = job.fingerprint
        self.copies = parallel_state.get_data_parallel_world_size()
        self._build_model()
        self.schedule = get_forward_backward_func()
        self.saver = Saver(self.output / CHECKPOINTS, world, self.device)
        self.saved = self._find_checkpoint()
        request = training_data.Request(
            folder=job.data,
            split=job.split,
            cache=self.output / "cache",
            seed=self.settings.seed,
            positions=plan.shape.positions,
            validation=self.settings.eval_batches * self.settings.batch_size,
        )
        self.train, self.valid, self.data_sizes = training_data.open_data(
            request, self._saved_sizes(), plan.steps * self.settings.batch_size
        )
        self.lengths = self._add_length([], 0)
        self.flops = training_flops(plan.shape, self.settings.batch_size)
        self.evaluation_due = False  # the process before was stopped between a step and its evaluation
        self.ahead: dict[int, tuple[Any, Any, Any]] = {}  # first row → micro-batch, of the next step

    def _build_model(self) -> None:
        """Build this process's share of the model, with its first weights, and its optimizer."""
        plan, settings = self.plan, self.settings
        model_parallel_cuda_manual_seed(settings.seed)
        options = gpt.ModelOptions(
            dtype=plan.dtype,
            dropout=settings.dropout,
            tensor=settings.tensor_parallel,
            pipeline=settings.pipeline_parallel,
            sequence_parallel=settings.sequence_parallel,
            recompute=plan.recompute,
            on_gpu=self.on_gpu,
            init_std=settings.init_std,
        )
        config = gpt.configure(plan.shape, options)
        config.finalize_model_grads_func = finalize_model_grads
        model_chunk = gpt.build(plan.shape, config, seed=settings.seed)
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=settings.distributed_optimizer,
                overlap_grad_reduce=self.copies > 1,
                bucket_size=40_000_000,
            ),
            Float16Module(config, model_chunk) if config.bf16 or config.fp16 else model_chunk,
        )
        config.no_sync_func = self.model.no_sync
        self.optimizer = _make_optimizer(plan, self.model)
        config.grad_scale_func = self.optimizer.scale_loss

    # ------------------------------------------------------------------ the loop

    def fit(self) -> int | None:
        """Train to the end, or until a signal.

        Returns:
            None at the end, or the exit code after a signal: 75 or 130.

        Raises:
            TaskError: a loss or weight is not finite; a checkpoint cannot be read or written, or is of another run.
        """
        self._resume()
        self.first_step = self.step
        if self.world.is_main_process:
            self.metrics = run_metadata.Metrics(self.output / "metrics.jsonl", self.step)
            self.metrics.track(self.settings.tracker, self.settings)
        self.stop.saves = True
        self.started = reported = time.monotonic()
        if self.evaluation_due:
            self._evaluate()
        self.meter.lap()
        while self.step < self.plan.steps:
            stopped = self._step()
            self.saver.check()
            first, last = self.step == self.first_step + 1, self.step == self.plan.steps
            evaluates = last or is_due(self.step, self.settings.eval_every)
            saves = last or stopped or is_due(self.step, self.settings.save_every)
            if first or evaluates or saves or time.monotonic() - reported > self.settings.log_seconds:
                self.meter.lap() if first else self.meter.keep()
                self.print_line(self.plan.rate(self.step - 1))
                reported = time.monotonic()
            self.evaluation_due = evaluates and stopped  # saving comes first
            if evaluates and not stopped:
                self._evaluate()
            if saves:
                self._save()
            if evaluates or saves:
                self.meter.lap()
            if stopped:
                self.saver.wait()
                if self.world.is_main_process:
                    print(
                        f"saved step {self.step} of {self.plan.steps}; the same command continues from here", flush=True
                    )
                return self.stop.exit_code
        self.saver.wait()
        return None

    # ------------------------------------------------------------------ one step

    def _step(self) -> bool:
        """Run one step of the optimizer. Return True, in all processes, when any got a signal to stop."""
        if self.settings.dropout:
            # Each step seeds itself: a resumed run drops out the same units without keeping a generator's state.
            model_parallel_cuda_manual_seed(self.settings.seed + self.step)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        rate = self.plan.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self._forward(self.train, self.step * self.settings.batch_size, 1, forward_only=False)
        # The optimizer waits for the GPU: until then, the next step's first rows are fetched.
        self._beat(Phase.READ)
        self.ahead = self._fetch_ahead()
        self._beat(Phase.UPDATE)
        applied, norm, _ = self.optimizer.step()
        self.step += 1
        total, tokens, stops = self._add_up(loss, float(self.stop.exit_code or 0))
        self.last_loss = total / tokens
        self.meter.count(int(tokens), self.flops)
        if not math.isfinite(self.last_loss):
            self.saver.wait()
            raise TaskError(f"the loss is {self.last_loss} at step {self.step}: {self._advise()}")
        line = {"step": self.step, "loss": self.last_loss, "lr": rate, "grad_norm": float(norm) if applied else None}
        if self.world.is_main_process:
            self.metrics.add([line])
        if stops:
            self.stop.exit_code = self.stop.exit_code or REQUEUE
        return bool(stops)

    def _beat(self, phase: Phase, micro_batch: int = 0) -> None:
        """Record the position within the current step.

        The first one after a start may compile, and every process waits for the slowest.
        """
        self.heartbeat.beat(phase, self.step + 1, micro_batch=micro_batch, long=self.step == self.first_step)

    def _advise(self) -> str:
        """Return a hint for values that are not finite, with the remaining checkpoint."""
        saved = list_checkpoints(self.output / CHECKPOINTS)
        return advise_restart(self.plan.rate(self.step - 1), saved[-1] if saved else None)

    def _forward(self, data: Any, first: int, batches: int, *, forward_only: bool) -> list[Any]:
        """[(loss summed, tokens) of each micro-batch]: on the last pipeline stage only."""
        count = batches * self.settings.batch_size // (self.plan.micro_batch * self.copies)
        losses: list[Any] = self.schedule(
            forward_step_func=_forward_step,
            data_iterator=self._batches(data, first, count),
            model=[self.model],
            num_microbatches=count,
            seq_length=self.plan.shape.positions,
            micro_batch_size=self.plan.micro_batch,
            forward_only=forward_only,
        )
        return losses

    def _batches(self, data: Any, first: int, count: int) -> Iterator[tuple[Any, Any, Any]]:
        """This process's micro-batches: (tokens, labels, positions), each [micro_batch, positions]."""
        mine = first + parallel_state.get_data_parallel_rank() * self.plan.micro_batch
        for number in range(count):
            start = mine + number * self.plan.micro_batch * self.copies
            training = data is self.train
            self._beat(Phase.READ if training else Phase.EVALUATE, number)
            fetched = self.ahead.pop(start, None) if training else None
            batch = fetched or self._micro_batch(data, start)
            self._beat(Phase.COMPUTE if training else Phase.EVALUATE, number)
            yield batch

    def _fetch_ahead(self) -> dict[int, tuple[Any, Any, Any]]:
        if self.step + 1 >= self.plan.steps:
            return {}
        start = (
            self.step + 1
        ) * self.settings.batch_size + parallel_state.get_data_parallel_rank() * self.plan.micro_batch
        return {start: self._micro_batch(self.train, start)}

    def _micro_batch(self, data: Any, start: int) -> tuple[Any, Any, Any]:
        rows = [data[index % len(data)] for index in range(start, start + self.plan.micro_batch)]
        tokens, labels = (self._move(torch.stack([row[key] for row in rows])) for key in ("tokens", "labels"))
        positions = torch.arange(self.plan.shape.positions, device=self.device)[None]
        return tokens, labels, positions.expand(self.plan.micro_batch, -1)

    def _move(self, tensor: Any) -> Any:
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.on_gpu else tensor

    def _add_up(self, losses: list[Any], vote: float) -> tuple[float, float, float]:
        """(loss, tokens, votes) summed over all processes; those of one tensor-parallel group have the same loss."""
        numbers = torch.zeros(3, dtype=torch.float64, device=self.device)
        if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
            numbers[:2] = torch.stack(losses).sum(0)
        numbers[2] = vote
        self.world.all_reduce(numbers)
        total, tokens, votes = numbers.tolist()
        return total, tokens, votes

    # ------------------------------------------------------------------ around the steps

    def _evaluate(self) -> None:
        if self.valid is None or not self.settings.eval_batches:
            return
        self.model.eval()
        # Compiling for evaluation would take longer than it saves.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            losses = self._forward(self.valid, 0, self.settings.eval_batches, forward_only=True)
        self.model.train()
        total, tokens, _ = self._add_up(losses, 0.0)
        self.last_eval_loss = total / tokens
        if self.world.is_main_process:
            line = {"step": self.step, "eval_loss": self.last_eval_loss}
            if self.metrics.lines[-1:] != [line]:  # already recorded by a process that was killed since
                self.metrics.add([line])
            self.print_evaluation()

    def _save(self) -> None:
        """Begin to write a checkpoint; the next one, and the end of the run, wait for it.

        Raises:
            TaskError: a weight is not a number, or the save before this one failed; complete checkpoints stay.
        """
        self.heartbeat.beat(Phase.SAVE, self.step, long=True)
        shards = list(sharded_state.optimizer_shards(self.model.module, self.optimizer))
        finite = torch.stack([shard.main.isfinite().all() for shard in shards]).all() if shards else True
        if not self.world.minimum(int(finite), self.device):
            self.saver.wait()
            raise TaskError(f"a weight is not finite after step {self.step}: {self._advise()}")
        copy, copies = parallel_state.get_data_parallel_rank(), self.copies
        scaler = next((each.state_dict() for each in self._scalers() if each.state_dict()), None)
        metadata = {
            **self.state(),
            "shape": asdict(self.plan.shape),
            "fingerprint": self.fingerprint,
            "data_sizes": self.data_sizes,
            "evaluation_due": self.evaluation_due,
            "optimizer_steps": sharded_state.optimizer_steps(self.optimizer),
            "grad_scaler": scaler and {**scaler, "scale": float(scaler["scale"])},
        }
        self.saver.save(self.step, sharded_state.to_write(self.model.module, self.optimizer, copy, copies), metadata)

    def _find_checkpoint(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest checkpoint and its metadata, as the main process sees it.

        Raises:
            TaskError: it belongs to another run, or is damaged.
        """
        # A shared file system shows a new or removed folder to some nodes earlier than to others.
        paths = self.world.broadcast(list(map(str, list_checkpoints(self.output / CHECKPOINTS))))
        if not paths:
            return None
        path = Path(paths[-1])
        metadata = read_metadata(path)
        check_fingerprint(path, metadata["fingerprint"], self.fingerprint)
        return path, metadata

    def _saved_sizes(self) -> list[int]:
        """Return the initial lengths for training_data.open_data(); checkpoints of earlier releases have one."""
        if self.saved is None:
            return []
        metadata = self.saved[1]
        return list(metadata.get("data_sizes") or [metadata["fingerprint"]["steps"] * self.settings.batch_size])

    def _add_length(self, lengths: list[dict[str, int]], step: int) -> list[dict[str, int]]:
        return add_length(lengths, step, steps=self.plan.steps, decay_steps=self.plan.decay)

    def _resume(self) -> None:
        if self.saved is None:
            return
        path, metadata = self.saved
        self._start_optimizer()
        try:
            if (path / SHARDS).is_dir():
                sharded_state.read(self.model.module, self.optimizer, path / SHARDS, metadata["optimizer_steps"])
                if scale := metadata["grad_scaler"]:
                    for scaler in self._scalers():
                        scaler.load_state_dict({**scale, "scale": torch.tensor([scale["scale"]])})
            else:
                self._read_former(path)
            self.restore(metadata)
            self.evaluation_due = metadata.get("evaluation_due", False)
            former = metadata.get("lengths") or [{"from_step": 0, "steps": metadata["fingerprint"]["steps"]}]
            self.lengths = self._add_length(former, self.step)
        except TaskError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise TaskError(f"{path}: cannot be read ({reason}); remove it, or start again with --overwrite") from error
        if self.world.is_main_process:
            print(f"resumed     {path} (step {self.step} of {self.plan.steps})", flush=True)
            if self.lengths != former:
                self._print_length(former[-1]["steps"])

    def _print_length(self, before: int) -> None:
        """Print what another number of steps, or of steps to the lowest learning rate, means for a resumed run."""
        plan = self.plan
        print(
            f"note        {plan.steps:,} steps instead of {before:,}: the learning rate follows warmup_tokens and"
            f" decay_tokens set it, at its lowest from step {plan.decay:,} on",
            flush=True,
        )
        if plan.steps > (seen := self.train.ends[0] // plan.settings.batch_size):
            print(
                f"note        after step {seen:,} all data of the first length have been used, and are shuffled again",
                flush=True,
            )

    def _read_former(self, folder: Path) -> None:
        """Restore what earlier releases wrote: Megatron's own format, which gathers the optimizer's state in one
        process.
        """
        model = self.model.module.sharded_state_dict()
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
        for inner in sharded_state.inner_optimizers(self.optimizer):
            if hasattr(inner, "_set_main_param_and_optimizer_states"):
                inner._set_main_param_and_optimizer_states = functools.partial(_set_states, inner)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=True, metadata=metadata)
        state = dist_checkpointing.load({"model": model, "optimizer": optimizer}, str(folder))
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for inner in sharded_state.inner_optimizers(self.optimizer):
            for kept in inner.optimizer.state.values():
                # Megatron gives all weights one and the same tensor, and torch's AdamW counts each weight's step in it.
                kept["step"] = kept["step"].clone()

    def _scalers(self) -> list[Any]:
        """Return the gradient scalers of fp16; none in other dtypes."""
        scalers = (getattr(inner, "grad_scaler", None) for inner in sharded_state.inner_optimizers(self.optimizer))
        return [scaler for scaler in scalers if scaler is not None]

    def _start_optimizer(self) -> None:
        """Run an empty step at rate 0: before its first step torch's AdamW has no state to load into."""
        for inner in sharded_state.inner_optimizers(self.optimizer):
            for group in inner.optimizer.param_groups:
                group["lr"] = 0.0
                for weight in group["params"]:
                    weight.grad = torch.zeros_like(weight)
            inner.optimizer.step()
            inner.optimizer.zero_grad()


def _set_states(optimizer: Any, weight: Any, tensors: dict[str, Any]) -> None:
    """Megatron's distributed optimizer loads every state a weight has, and of torch's AdamW it has not saved one: the
    step, which it keeps once for all weights and has set already."""
    group, index = optimizer.model_param_group_index_map[weight]
    step = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][index]]["step"]
    type(optimizer)._set_main_param_and_optimizer_states(optimizer, weight, {**tensors, "step": step})


def _forward_step(batches: Iterator[tuple[Any, Any, Any]], model: Any) -> tuple[Any, Any]:
    tokens, labels, positions = next(batches)
    losses = model(tokens, positions, None, labels=labels)

    def finish(losses: Any) -> tuple[Any, Any, Any]:
        """(loss to differentiate, tokens, values that the schedule returns)."""
        # Made where the loss is: a number sent there would wait until the GPU has done all work before it.
        total, count = losses.float().sum(), losses.new_full((), labels.numel(), dtype=torch.int)
        return total, count, torch.stack([total.detach(), count.to(total.dtype)])

    return losses, finish
