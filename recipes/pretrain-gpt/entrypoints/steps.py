"""The steps of pretraining: Megatron-Core's schedules, optimizer and sharded checkpoints; our order, record and signals."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module

import flops
import gpt
import record
from loop import Meter
from settings import TaskError
from shapes import Shape, training_flops
from world import REQUEUE, Stop, World

KEEP = 2
CHECKPOINTS = "checkpoints"
_ABOUT = "about.json"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will do, decided before its first step. Batches are counted in sequences."""

    shape: Shape
    dtype: torch.dtype
    tensor: int
    pipeline: int
    sequence_parallel: bool
    distributed_optimizer: bool
    recompute: bool
    batch: int
    micro_batch: int
    steps: int
    warmup: int
    decay: int
    learning_rate: float
    min_learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    max_grad_norm: float
    init_std: float
    dropout: float
    eval_every: int
    eval_batches: int
    save_every: int
    log_seconds: float
    seed: int

    def rate(self, step: int) -> float:
        """Learning rate of ``step``: up linearly over the warm-up, then down a half cosine to the lowest."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = min((step - self.warmup) / max(self.decay - self.warmup, 1), 1.0)
        return (
            self.min_learning_rate + (self.learning_rate - self.min_learning_rate) * (1 + math.cos(math.pi * done)) / 2
        )


@dataclass(frozen=True, slots=True)
class _Ends:
    """What Megatron's data sets ask of a tokenizer."""

    unique_identifiers: dict[str, str]
    vocab_size: int
    eod: int
    pad: int = -1  # no token: every sequence is full


class Run:
    def __init__(
        self, plan: Plan, data: Path, split: str, output: Path, fingerprint: dict[str, Any], world: World, stop: Stop,
        device: torch.device, peak: float | None,
    ) -> None:  # fmt: skip
        self.plan, self.output, self.world, self.stop, self.device = plan, output, world, stop, device
        self.fingerprint, self.peak, self.on_gpu = fingerprint, peak, device.type == "cuda"
        self.copies = parallel_state.get_data_parallel_world_size()
        model_parallel_cuda_manual_seed(plan.seed)
        config = gpt.configure(
            plan.shape, dtype=plan.dtype, dropout=plan.dropout, tensor=plan.tensor, pipeline=plan.pipeline,
            sequence_parallel=plan.sequence_parallel, recompute=plan.recompute, on_gpu=self.on_gpu, init_std=plan.init_std,
        )  # fmt: skip
        config.finalize_model_grads_func = finalize_model_grads
        part = gpt.build(plan.shape, config, seed=plan.seed)
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=plan.distributed_optimizer,
                overlap_grad_reduce=self.copies > 1, bucket_size=40_000_000,
            ),
            Float16Module(config, part) if config.bf16 or config.fp16 else part,
        )  # fmt: skip
        config.no_sync_func = self.model.no_sync
        half = {"bf16": plan.dtype == torch.bfloat16, "fp16": plan.dtype == torch.float16}
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=plan.learning_rate, weight_decay=plan.weight_decay, adam_beta1=plan.betas[0],
                adam_beta2=plan.betas[1], clip_grad=plan.max_grad_norm, params_dtype=plan.dtype, **half,
                use_distributed_optimizer=plan.distributed_optimizer, initial_loss_scale=2.0**11, loss_scale_window=500,
            ),
            [self.model],
        )  # fmt: skip
        config.grad_scale_func = self.optimizer.scale_loss
        self.schedule = get_forward_backward_func()
        self.train, self.valid = self._open(data, split)
        self.flops = training_flops(plan.shape, plan.batch)
        self.step, self.first_step = 0, 0
        self.meter, self.started, self.wall_before = Meter(), time.monotonic(), 0.0
        self.last_loss, self.last_test_loss = math.nan, math.nan
        self.ahead: dict[int, tuple[Any, Any, Any]] = {}  # first row → micro-batch, of the step to come

    # ------------------------------------------------------------------ the story

    def fit(self) -> int | None:
        """Train to the end, or until a signal: then the exit code to leave with."""
        self._resume()
        self.first_step = self.step
        if self.world.leads:
            self.metrics = record.Metrics(self.output / "metrics.jsonl", self.step)
        self.stop.saves = True
        self.started = reported = time.monotonic()
        self.meter.lap()
        while self.step < self.plan.steps:
            stopped = self._step()
            first, last = self.step == self.first_step + 1, self.step == self.plan.steps
            evaluates = last or (self.plan.eval_every > 0 and self.step % self.plan.eval_every == 0)
            saves = last or stopped or (self.plan.save_every > 0 and self.step % self.plan.save_every == 0)
            if first or evaluates or saves or time.monotonic() - reported > self.plan.log_seconds:
                self.meter.lap() if first else self.meter.keep()
                self._say()
                reported = time.monotonic()
            if evaluates and not stopped:
                self._evaluate()
            if saves:
                self._save()
            if evaluates or saves:
                self.meter.lap()
            if stopped and not last:
                if self.world.leads:
                    print(
                        f"saved step {self.step} of {self.plan.steps}; the same command goes on from here", flush=True
                    )
                return self.stop.exit_code
        return None

    @property
    def wall(self) -> float:
        """Seconds of training so far, earlier starts included."""
        return self.wall_before + time.monotonic() - self.started

    def speed(self) -> tuple[float, float | None]:
        """(tokens per second, MFU or None) of all GPUs together."""
        if not self.meter.tokens:
            return 0.0, None
        meter = self.meter
        mfu = flops.utilisation(meter.flops, meter.seconds, self.world.size, self.peak) if self.peak else None
        return meter.tokens / meter.seconds, mfu

    # ------------------------------------------------------------------ one step

    def _step(self) -> bool:
        """One step of the optimizer. True when any process was told to stop: all learn of it in the same step."""
        if self.plan.dropout:
            # Each step seeds itself: a resumed run drops out the same units without keeping a generator's state.
            model_parallel_cuda_manual_seed(self.plan.seed + self.step)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        rate = self.plan.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self._forward(self.train, self.step * self.plan.batch, 1, forward_only=False)
        # The optimizer waits for the GPU: until then, the next step's first rows are fetched.
        self.ahead = self._fetch_ahead()
        applied, norm, _ = self.optimizer.step()
        self.step += 1
        total, tokens, stops = self._add_up(loss, float(self.stop.exit_code or 0))
        self.last_loss = total / tokens
        self.meter.count(int(tokens), self.flops)
        if not math.isfinite(self.last_loss):
            raise TaskError(
                f"the loss is {self.last_loss} at step {self.step}: try --set learning_rate={rate / 3:.2g}; "
                f"the checkpoint before it is kept in {self.output}"
            )
        line = {"step": self.step, "loss": self.last_loss, "lr": rate, "grad_norm": float(norm) if applied else None}
        if self.world.leads:
            self.metrics.add([line])
        if stops:
            self.stop.exit_code = self.stop.exit_code or REQUEUE
        return bool(stops)

    def _forward(self, data: Any, first: int, batches: int, *, forward_only: bool) -> list[Any]:
        """[(loss summed, tokens) of each micro-batch]: on the last pipeline stage only."""
        count = batches * self.plan.batch // (self.plan.micro_batch * self.copies)
        found: list[Any] = self.schedule(
            forward_step_func=_forward_step, data_iterator=self._batches(data, first, count), model=[self.model],
            num_microbatches=count, seq_length=self.plan.shape.positions, micro_batch_size=self.plan.micro_batch,
            forward_only=forward_only,
        )  # fmt: skip
        return found

    def _batches(self, data: Any, first: int, count: int) -> Iterator[tuple[Any, Any, Any]]:
        """This process's micro-batches: (tokens, labels, positions), each [micro_batch, positions]."""
        mine = first + parallel_state.get_data_parallel_rank() * self.plan.micro_batch
        for number in range(count):
            start = mine + number * self.plan.micro_batch * self.copies
            fetched = self.ahead.pop(start, None) if data is self.train else None
            yield fetched or self._micro_batch(data, start)

    def _fetch_ahead(self) -> dict[int, tuple[Any, Any, Any]]:
        if self.step + 1 >= self.plan.steps:
            return {}
        start = (self.step + 1) * self.plan.batch + parallel_state.get_data_parallel_rank() * self.plan.micro_batch
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
        self.world.sum(numbers)
        total, tokens, votes = numbers.tolist()
        return total, tokens, votes

    # ------------------------------------------------------------------ around the steps

    def _open(self, data: Path, split: str) -> tuple[Any, Any]:
        """Megatron's data sets for learning and for testing: shuffled sequences over all documents, by the seed."""
        about = json.loads((data / "prepared.json").read_text(encoding="utf-8"))
        tests = self.plan.eval_batches * self.plan.batch
        config = GPTDatasetConfig(
            random_seed=self.plan.seed, sequence_length=self.plan.shape.positions, blend=([str(data / "text_document")], None),
            split=split, path_to_cache=str(self.output / "cache"), create_attention_mask=False,
            tokenizer=_Ends({"sha256": about["tokenizer"]}, about["vocab_size"], about["end_of_document"]),
            reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, allow_ambiguous_pad_tokens=True,
        )  # fmt: skip
        sizes = [self.plan.steps * self.plan.batch, tests, None]
        builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config)
        train, valid, _ = builder.build()
        if train is None or not len(train):
            raise TaskError(f"data {data}: split {split} leaves no document to learn from")
        return train, valid

    def _evaluate(self) -> None:
        if self.valid is None or not self.plan.eval_batches:
            return
        self.model.eval()
        # Compiled code for evaluation would take longer to make than it saves.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            losses = self._forward(self.valid, 0, self.plan.eval_batches, forward_only=True)
        self.model.train()
        total, tokens, _ = self._add_up(losses, 0.0)
        self.last_test_loss = total / tokens
        if self.world.leads:
            self.metrics.add([{"step": self.step, "test_loss": self.last_test_loss}])
            perplexity = math.exp(min(self.last_test_loss, 100))
            print(
                f"step {self.step}/{self.plan.steps}  test loss {self.last_test_loss:.4f}  perplexity {perplexity:.2f}",
                flush=True,
            )

    def _state(self, *, loading: bool) -> dict[str, Any]:
        model = self.model.module.sharded_state_dict()
        # One form, whatever the number of GPUs and how the model is split among them.
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False
        }  # fmt: skip
        return {
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata),
        }

    def _save(self) -> None:
        """Written under another name, then renamed: a checkpoint is whole or not there."""
        folder = self.output / CHECKPOINTS
        final, staged = folder / f"step-{self.step:07d}", folder / f".staged-{self.step:07d}"
        if final.is_dir():
            return
        if self.world.leads:
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)
        self.world.wait()
        try:
            dist_checkpointing.save(self._state(loading=False), str(staged))
        except OSError as error:
            raise TaskError(f"{staged}: cannot be written: {error.strerror or error}") from error
        self.world.wait()
        if self.world.leads:
            about = {
                "step": self.step, "shape": asdict(self.plan.shape), "fingerprint": self.fingerprint, "meter": self.meter.state(), "wall": self.wall,
                "last_loss": self.last_loss, "last_test_loss": self.last_test_loss,
            }  # fmt: skip
            record.write_json(staged / _ABOUT, about)
            for file in staged.iterdir():
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
            staged.rename(final)
            for old in list_checkpoints(folder)[:-KEEP]:
                shutil.rmtree(old, ignore_errors=True)
        self.world.wait()

    def _resume(self) -> None:
        found = list_checkpoints(self.output / CHECKPOINTS)
        if not found:
            return
        about = json.loads((found[-1] / _ABOUT).read_text(encoding="utf-8"))
        changed = [
            f"{name} was {about['fingerprint'].get(name)!r} and is {value!r}"
            for name, value in self.fingerprint.items()
            if about["fingerprint"].get(name) != value
        ]
        if changed:
            raise TaskError(
                f"{found[-1].parent}: belongs to another run ({'; '.join(changed)}); give another --output, "
                "or start again in this one with --fresh"
            )
        self._start_optimizer()
        try:
            state = dist_checkpointing.load(self._state(loading=True), str(found[-1]))
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise TaskError(
                f"{found[-1]}: cannot be read ({reason}); remove it, or start again with --fresh"
            ) from error
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for kept in part.optimizer.state.values():
                # Megatron gives all weights one and the same tensor, and torch's AdamW counts each weight's step in it.
                kept["step"] = kept["step"].clone()
        self.step, self.meter, self.wall_before = about["step"], Meter(**about["meter"]), about["wall"]
        self.last_loss, self.last_test_loss = about["last_loss"], about["last_test_loss"]
        if self.world.leads:
            print(f"resumed     {found[-1]} (step {self.step} of {self.plan.steps})", flush=True)

    def _start_optimizer(self) -> None:
        """torch's AdamW has nothing to load into before its first step: so a step of nothing, at rate 0."""
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for group in part.optimizer.param_groups:
                group["lr"] = 0.0
                for weight in group["params"]:
                    weight.grad = torch.zeros_like(weight)
            part.optimizer.step()
            part.optimizer.zero_grad()
            if hasattr(part, "_set_main_param_and_optimizer_states"):
                part._set_main_param_and_optimizer_states = functools.partial(_set_states, part)

    def _say(self) -> None:
        if not self.world.leads:
            return
        speed, mfu = self.speed()
        left = (time.monotonic() - self.started) / (self.step - self.first_step) * (self.plan.steps - self.step)
        parts = [
            f"step {self.step}/{self.plan.steps}", f"loss {self.last_loss:.4f}", f"lr {self.plan.rate(self.step - 1):.2e}",
            f"{speed:,.0f} tokens/s" if speed else "", f"MFU {mfu:.0%}" if mfu else "", f"{left / 60:,.0f} min left",
        ]  # fmt: skip
        print("  ".join(part for part in parts if part), flush=True)


def _set_states(part: Any, weight: Any, tensors: dict[str, Any]) -> None:
    """Megatron's distributed optimizer loads every state a weight has, and of torch's AdamW it has not saved one: the
    step, which it keeps once for all weights and has set already."""
    group, place = part.model_param_group_index_map[weight]
    step = part.optimizer.state[part.optimizer.param_groups[group]["params"][place]]["step"]
    type(part)._set_main_param_and_optimizer_states(part, weight, {**tensors, "step": step})


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole ones, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / _ABOUT).is_file())


def _forward_step(batches: Iterator[tuple[Any, Any, Any]], model: Any) -> tuple[Any, Any]:
    tokens, labels, positions = next(batches)
    losses = model(tokens, positions, None, labels=labels)

    def finish(losses: Any) -> tuple[Any, Any, Any]:
        """(loss to differentiate, tokens, what the schedule hands back)."""
        # Made where the loss is: a number sent there would wait until the GPU has done all work before it.
        total, count = losses.float().sum(), losses.new_full((), labels.numel(), dtype=torch.int)
        return total, count, torch.stack([total.detach(), count.to(total.dtype)])

    return losses, finish
