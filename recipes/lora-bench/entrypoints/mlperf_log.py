"""Write a run's log in MLPerf's format."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import dolly
from bench_settings import REFERENCE, Settings
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.files import ensure_output_dir
from ekiben_tasks.training.settings import Settings as Training

LOG = "mlperf.log"


class _LogFile(logging.FileHandler):
    """End the run when the log cannot be written; logging's own handler prints a traceback for every line."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        raise TaskError(
            f"{self.baseFilename}: cannot be written ({getattr(error, 'strerror', None) or error}); make room and give"
            " the same command again: a run without its log proves nothing, so this one starts again"
        ) from error


class RunLog:
    """Write one run's log with MLPerf's own library, in the main process only. folder: None writes no log."""

    def __init__(
        self, settings: Settings, tuned: Training, record: dict[str, Any], folder: Path | None, config: Path | None
    ) -> None:
        self.settings, self.tuned, self.record, self.folder, self.config = settings, tuned, record, folder, config
        self.is_main_process = os.environ.get("RANK", "0") == "0"
        self.reached, self.closed, self.started = False, False, 0.0
        self.seconds, self.loss, self.samples = 0.0, math.nan, 0
        self.tests: list[tuple[int, float]] = []  # (step, loss)

    def open(self) -> None:
        """Start a new log file and its section init_start."""
        if self.is_main_process and self.folder:
            ensure_output_dir(self.folder)
            (self.folder / LOG).unlink(missing_ok=True)
            from mlperf_logging.mllog.mllog import MLLogger

            quiet = logging.Logger("ekiben.mlperf")  # only to the file: standard output is for the user
            quiet.addHandler(_LogFile(self.folder / LOG, encoding="utf-8"))
            self.logger: Any = MLLogger(
                logger=quiet, root_dir=str(Path(__file__).resolve().parent), default_stack_offset=2
            )
        else:
            self.logger = None
        self.event("cache_clear", False)  # dropping caches needs root; the log records that it was not done
        self.start("init_start")

    def event(self, key: str, value: Any, **metadata: Any) -> None:
        """Log the value of a key at this moment."""
        if self.logger:
            self.logger.event(key=key, value=value, metadata=metadata)

    def start(self, key: str, **metadata: Any) -> None:
        """Log the start of an interval, such as ``run_start``."""
        if self.logger:
            self.logger.start(key=key, metadata=metadata)

    def end(self, key: str, **metadata: Any) -> None:
        """Log the end of an interval, such as ``run_stop``."""
        if self.logger:
            self.logger.end(key=key, metadata=metadata)

    def clock_starts(self) -> None:
        """Log submitter and platform, end the initialisation, and start the clock."""
        import torch

        device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        platform = device_name if self.settings.platform == "auto" else self.settings.platform
        for key, value in {
            "submission_benchmark": self.settings.benchmark,
            "submission_division": "open",
            "submission_org": self.settings.organisation,
            "submission_status": "research",
            "submission_platform": f"{os.environ.get('WORLD_SIZE', '1')} x {platform}",
        }.items():
            self.event(key, value)
        self.end("init_stop")
        self.start("run_start")
        self.started = time.monotonic()

    def describe(self, run: Any) -> None:
        """Log the settings that MLPerf requires to be disclosed, once the plan of ``run`` is known."""
        tuned, plan = self.tuned, run.plan
        precision = {"torch.bfloat16": "bfloat16", "torch.float16": "fp16", "torch.float32": "fp32"}[
            str(run.device.dtype)
        ]
        lora = {"lora_rank": tuned.lora.r, "lora_alpha": tuned.lora.alpha, "lora_dropout": tuned.lora.dropout}
        values = {
            "seed": tuned.seed,
            "config_filename": str(self.config or "defaults"),
            "global_batch_size": tuned.batch_size,
            "gradient_accumulation_steps": 1,
            "micro_batch_size": plan.max_rows,
            "train_samples": run.batches.data.count,
            "eval_samples": len(run.batches.data.test),
            "max_steps": run.steps,
            "max_sequence_length": tuned.max_length,
            "opt_name": tuned.optimizer,
            "opt_adamw_beta_1": tuned.adam_beta1,
            "opt_adamw_beta_2": tuned.adam_beta2,
            "opt_base_learning_rate": tuned.learning_rate,
            "opt_learning_rate_warmup_steps": plan.warmup(run.steps),
            "opt_learning_rate_training_steps": run.steps,
            "opt_learning_rate_decay_schedule": tuned.schedule,
            "opt_end_learning_rate": tuned.min_learning_rate,
            "opt_adamw_weight_decay": tuned.weight_decay,
            "opt_gradient_clip_norm": tuned.max_grad_norm,
            **(lora if tuned.method == "lora" else {}),
            "lowest_numerical_precision_in_linear": precision,
            "lowest_numerical_precision_in_attn": precision,
            "lowest_numerical_precision_in_comm": "fp32",
            "tensor_parallelism": 1,
            "pipeline_parallelism": 1,
            "context_parallelism": 1,
            "expert_parallelism": 1,
            "model": tuned.model,
            "dataset": dolly.NAME,
            "dataset_sha256": self.record["data"],
            "target_loss": self.settings.target_loss,
        }
        for key, value in values.items():
            self.event(key, value)

    def record_evaluation(self, run: Any) -> bool:
        """Log the result of an evaluation, and return whether the target is reached.

        MLPerf's checker requires an eval_accuracy below 1: that is the cross-entropy in nats per byte of the responses,
        by which models with different tokenizers can be compared. The target, in nats per token, is logged beside it.
        """
        self.loss, self.samples = run.last_eval_loss, run.step * run.plan.settings.batch_size
        num_target_tokens = sum(row.num_target_tokens for row in run.batches.data.test)
        self.event(
            "eval_accuracy", self.loss * num_target_tokens / self.record["test"]["bytes"], samples_count=self.samples
        )
        self.event("eval_loss", self.loss, samples_count=self.samples)
        self.event("eval_perplexity", math.exp(min(self.loss, 100)), samples_count=self.samples)
        self.end("eval_stop", samples_count=self.samples)
        target = self.settings.target_loss
        self.tests.append((run.step, self.loss))
        self.reached = isinstance(target, float) and self.loss <= target
        return self.reached

    def target_for_runs(self) -> float:
        """Return the first loss evaluated in the second half of the run, rounded up to three decimals.

        Runs with other seeds reach that loss, too.
        """
        half = self.tests[-1][0] / 2
        return math.ceil(1000 * next(loss for step, loss in self.tests if step >= half)) / 1000

    def close(self, status: str) -> None:
        """Stop the clock and log ``status``, "success" or "aborted".

        Does nothing a second time, or before the clock started.
        """
        if self.closed or not self.started:
            return
        self.closed, self.seconds = True, time.monotonic() - self.started
        self.end("run_stop", status=status, samples_count=self.samples)

    def shut(self) -> None:
        """Close the log file."""
        for handler in self.logger.logger.handlers if self.logger else []:
            with contextlib.suppress(OSError):  # the write error has been reported
                handler.close()

    def result(self, number: int, seed: int) -> dict[str, Any]:
        """Return the content of result.json. ``seconds`` are those of the clock, ``loss`` is in nats per token."""
        return {
            "run": number,
            "seed": seed,
            "reached": self.reached,
            "target_loss": self.settings.target_loss,
            "seconds": round(self.seconds, 3),
            "loss": self.loss,
            "perplexity": math.exp(min(self.loss, 100)),
            "samples": self.samples,
            "log": LOG,
            "model": self.tuned.model,
            "data": self.record["data"],
            **({"sets_target": self.target_for_runs()} if number == REFERENCE else {}),
        }

    def callback(self) -> Any:
        """Return the callback with which the training loop writes this log.

        Its class is defined here because its base class needs torch, which takes seconds to import.
        """
        from ekiben_tasks.training import loop

        log = self

        class LogCallback(loop.TrainerCallback):
            def on_train_begin(self, run: loop.Run) -> None:
                log.describe(run)
                log.start("block_start", samples_count=0)

            def on_evaluate_begin(self, run: loop.Run) -> None:
                log.end("block_stop", samples_count=run.step * run.plan.settings.batch_size)
                log.start("eval_start", samples_count=run.step * run.plan.settings.batch_size)

            def on_evaluate(self, run: loop.Run) -> bool:
                reached = log.record_evaluation(run)
                if reached:
                    log.close("success")  # the clock stops here: saving is not timed
                elif run.step < run.steps:
                    log.start("block_start", samples_count=log.samples)
                return reached

        return LogCallback()
