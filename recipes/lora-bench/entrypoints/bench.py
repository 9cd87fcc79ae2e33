"""Time how long LoRA training takes to a quality target: several runs with seeds of their own, their logs, the olympic mean.

train                                                a reference run, which sets the target, and all runs, one after the
                                                     other; started again, it goes on
train --set target_loss=1.9                          all runs, to a target of your own
train --reference                                    the reference run alone, as a job of a cluster
train --run 3                                        the third run alone, likewise
train --gpus 4                                       each run on several GPUs of this node
train --summary                                      what the runs so far come to
train --dry-run
train --smoke                                        every task on a tiny model and sample rows, offline
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import dolly
import places
import settings as options
import train as training
from settings import SettingError, TaskError, option
from train_settings import Settings as Training

if TYPE_CHECKING:
    from rows import Source

RESULT = "result.json"
LOG = "mlperf.log"
REFERENCE = 0  # the number of the run that sets the target: its seed is the one before the first run's


@dataclass(frozen=True)
class Settings:
    target_loss: float | Literal["auto"] | None = option(
        "auto",
        "cross-entropy of the test rows to reach; auto: what a reference run has half way through; null: none, runs go "
        "to their end and prove no time",
    )
    runs: int = option(10, "how many; MLPerf asks for 10 of a benchmark like this")
    organisation: str = option("unofficial", "who runs it, in the log")
    platform: str = option("auto", "what it runs on, in the log; auto: the device's name")
    benchmark: str = option("llama2_70b_lora", "MLPerf's benchmark that this one imitates, in the log: open division")
    train: Training = field(default_factory=Training)


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    settings = options.load(Settings, args.config, args.set)
    if settings.runs < 1 or (args.run is not None and args.run < 1):
        raise SettingError("setting runs: must be at least 1, and --run counts from 1")
    if args.smoke:
        import prove_bench

        return prove_bench.prove(options.recipe_folder(args.config, __file__))
    if args.summary:
        summarise(args.output, settings.runs)
        return 0
    single = REFERENCE if args.reference else args.run
    if args.dry_run:
        return run_once(settings, single or REFERENCE, args.output, config=args.config, dry=True)
    if single is not None:
        options.start_processes(__file__, args.gpus, arguments)
        return run_once(settings, single, args.output, config=args.config)
    if "RANK" in os.environ:
        raise TaskError(
            "as one of several processes each run is started by itself: give --reference, --run 1, --run 2 ..."
        )
    places.claim_folder(args.output)
    for number in range(REFERENCE if settings.target_loss == "auto" else 1, settings.runs + 1):
        if (_folder(args.output, number) / RESULT).is_file():
            print(f"{_label(number):<12}done before", flush=True)
            continue
        # Each in a process of its own: none finds what another has warmed up.
        given = list(sys.argv[1:] if arguments is None else arguments)
        which = ["--reference"] if number == REFERENCE else ["--run", str(number)]
        code = subprocess.run([sys.executable, str(Path(__file__).resolve()), *given, *which]).returncode
        if code:
            return code
    summarise(args.output, settings.runs)
    return 0


def run_once(settings: Settings, number: int, output: Path, *, config: Path | None, dry: bool = False) -> int:
    """Train once, from the beginning, until the target is reached; the exit code. Errors: TaskError.

    The clock starts before the data is first touched. A run that was interrupted is run again: a benchmark may not pause.
    """
    data = Path(str(settings.train.data))
    about = dolly.read_record(data)
    if number == REFERENCE:
        settings = replace(settings, target_loss=None)
    elif settings.target_loss == "auto":
        settings = replace(settings, target_loss=read_target(output, settings.train.model, about["data"]))
    seed = settings.train.seed + number - 1
    tuned = replace(settings.train, data=[str(data)], seed=seed, save_minutes=1e9)
    if about["model"] != tuned.model:
        raise TaskError(
            f"setting train.model: {data} was made for {about['model']}, not {tuned.model}; preprocess again"
        )
    folder = _folder(output, number)
    if os.environ.get("RANK", "0") == "0":
        print("".join(f"{line}\n" for line in places.prepare_caches(os.environ)), end="", flush=True)
    log = _Log(settings, tuned, about, None if dry else folder, config)
    log.open()

    def prepare(
        train: Training, sources: list[Source], tokenizer: Any, context: int, skip_bad: bool
    ) -> training.Prepared:
        log.clock_starts()
        return load(data, about, min(train.max_length, context))

    recipe = options.recipe_folder(config, __file__)
    try:
        code = training.train(tuned, recipe, folder, dry=dry, fresh=True, prepare=prepare, watch=log.watch())
    except BaseException:
        log.close("aborted")
        log.shut()
        raise
    log.close("success" if log.reached else "aborted")  # MLPerf knows no third word
    log.shut()
    if log.leads and not dry and not code:
        from record import write_json

        write_json(folder / RESULT, log.result(number, seed))
        state = f"target {settings.target_loss} reached" if log.reached else "no target reached"
        if number == REFERENCE:
            state = f"the target is {log.target_for_others()}"
        print(
            f"{_label(number):<12}{log.seconds:,.1f} s, test loss {log.loss:.4f}: {state}; log {folder / LOG}",
            flush=True,
        )
    return code


def read_target(output: Path, model: str, data: str) -> float:
    """The target that the reference run in ``output`` has set. Errors: TaskError."""
    file = _folder(output, REFERENCE) / RESULT
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TaskError(
            "setting target_loss=auto: no reference run has set the target yet; train --reference does, "
            "or give one with --set target_loss=1.9"
        ) from None
    if (found["model"], found["data"]) != (model, data):
        raise TaskError(
            f"{file}: the reference run was of another model or other data ({found['model']}); take another --output"
        )
    return float(found["sets_target"])


def load(folder: Path, about: dict[str, Any], limit: int) -> training.Prepared:
    """What preprocess wrote, as the training loop takes it. Errors: TaskError."""
    import numpy

    from prompt import Example
    from rows import Rows

    parts, too_long = [], 0
    for name in ("train", "test"):
        rows = dolly.read_split(folder, name)
        kept = [(ids, labels) for ids, labels in rows if len(ids) <= limit]
        too_long += len(rows) - len(kept)
        starts = [next(place for place, label in enumerate(labels) if label >= 0) for _, labels in kept]
        parts.append(
            [Example(numpy.array(ids, dtype=numpy.int32), start) for (ids, _), start in zip(kept, starts, strict=True)]
        )
    if not parts[0] or not parts[1]:
        raise TaskError(f"setting train.max_length: no row of {folder} fits {limit} tokens")
    counts = {str(folder): sum(map(len, parts))}
    return training.Prepared(parts[0], parts[1], Rows(counts=counts, sha256=about["data"]), too_long)


def olympic_mean(seconds: Sequence[float]) -> float | None:
    """The mean without the fastest and the slowest; None for fewer than three, or where more than one did not converge.

    seconds: of each run; infinite for one that did not reach the target. MLPerf training rules, section on results:
    one such run is dropped as the slowest, two make the result invalid.
    """
    if len(seconds) < 3 or sum(math.isinf(each) for each in seconds) > 1:
        return None
    kept = sorted(seconds)[1:-1]
    return sum(kept) / len(kept)


def summarise(output: Path, wanted: int) -> dict[str, Any]:
    """Write summary.json and say what is in it. Errors: TaskError without a finished run."""
    from record import write_json

    files = [_folder(output, number) / RESULT for number in range(1, wanted + 1)]
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
    if not results:
        raise TaskError(f"{output.absolute()}: no finished run there")
    seconds = [result["seconds"] if result["reached"] else math.inf for result in results]
    mean = olympic_mean(seconds)
    targets = {result["target_loss"] for result in results}
    if len(targets) > 1:
        raise TaskError(
            f"{output}: runs with different targets ({', '.join(map(str, targets))}); take another --output"
        )
    summary = {
        "runs": results, "finished": len(results), "wanted": wanted,
        "reached": sum(math.isfinite(each) for each in seconds),
        "olympic_mean_s": None if mean is None else round(mean, 3), "target_loss": targets.pop(),
    }  # fmt: skip
    write_json(output / "summary.json", summary)
    for result in results:
        state = "reached" if result["reached"] else "not reached"
        print(f"run {result['run']:<8}{result['seconds']:>10,.1f} s  loss {result['loss']:.4f}  "
              f"perplexity {result['perplexity']:.2f}  {result['samples']:,} rows  {state}")  # fmt: skip
    said = f"{mean:,.1f} s" if mean is not None else "none: it takes three runs, and all but one must reach the target"
    print(
        f"result      olympic mean {said}; {summary['reached']} of {len(results)} runs reached {summary['target_loss']}"
    )
    return summary


class _Log:
    """One run's log in MLPerf's form, by its own library; on the leading process only."""

    def __init__(
        self, settings: Settings, tuned: Training, about: dict[str, Any], folder: Path | None, config: Path | None
    ) -> None:
        self.settings, self.tuned, self.about, self.folder, self.config = settings, tuned, about, folder, config
        self.leads = os.environ.get("RANK", "0") == "0"
        self.reached, self.closed, self.started = False, False, 0.0
        self.seconds, self.loss, self.samples = 0.0, math.nan, 0
        self.tests: list[tuple[int, float]] = []  # (step, loss)

    def open(self) -> None:
        if self.leads and self.folder:
            places.claim_folder(self.folder)
            (self.folder / LOG).unlink(missing_ok=True)
            import logging

            from mlperf_logging.mllog.mllog import MLLogger

            quiet = logging.Logger("ekiben.mlperf")  # to the file alone: standard output is for people
            quiet.addHandler(logging.FileHandler(self.folder / LOG, encoding="utf-8"))
            self.logger: Any = MLLogger(
                logger=quiet, root_dir=str(Path(__file__).resolve().parent), default_stack_offset=2
            )
        else:
            self.logger = None
        self.event("cache_clear", False)  # that needs root; the log says so rather than claim it
        self.start("init_start")

    def event(self, key: str, value: Any, **metadata: Any) -> None:
        if self.logger:
            self.logger.event(key=key, value=value, metadata=metadata)

    def start(self, key: str, **metadata: Any) -> None:
        if self.logger:
            self.logger.start(key=key, metadata=metadata)

    def end(self, key: str, **metadata: Any) -> None:
        if self.logger:
            self.logger.end(key=key, metadata=metadata)

    def clock_starts(self) -> None:
        import torch

        found = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        platform = found if self.settings.platform == "auto" else self.settings.platform
        for key, value in {
            "submission_benchmark": self.settings.benchmark, "submission_division": "open",
            "submission_org": self.settings.organisation, "submission_status": "research",
            "submission_platform": f"{os.environ.get('WORLD_SIZE', '1')} x {platform}",
        }.items():  # fmt: skip
            self.event(key, value)
        self.end("init_stop")
        self.start("run_start")
        self.started = time.monotonic()

    def describe(self, run: Any) -> None:
        """What has to be disclosed, once what the run does is known."""
        tuned, plan = self.tuned, run.plan
        precision = {"torch.bfloat16": "bfloat16", "torch.float16": "fp16", "torch.float32": "fp32"}[
            str(run.device.dtype)
        ]
        values = {
            "seed": tuned.seed, "config_filename": str(self.config or "defaults"),
            "global_batch_size": plan.batch_size, "gradient_accumulation_steps": 1, "micro_batch_size": plan.max_rows,
            "train_samples": len(run.train), "eval_samples": len(run.test), "max_steps": run.steps,
            "max_sequence_length": tuned.max_length, "opt_name": "adamw", "opt_base_learning_rate": plan.learning_rate,
            "opt_learning_rate_warmup_steps": min(plan.warmup_steps, run.steps // 10),
            "opt_learning_rate_training_steps": run.steps, "opt_learning_rate_decay_schedule": tuned.schedule,
            "opt_adamw_weight_decay": plan.weight_decay, "opt_gradient_clip_norm": plan.max_grad_norm,
            "lora_rank": tuned.lora.r, "lora_alpha": tuned.lora.alpha, "lora_dropout": tuned.lora.dropout,
            "lowest_numerical_precision_in_linear": precision, "lowest_numerical_precision_in_attn": precision,
            "lowest_numerical_precision_in_comm": "fp32", "tensor_parallelism": 1, "pipeline_parallelism": 1,
            "context_parallelism": 1, "expert_parallelism": 1,
            "model": tuned.model, "dataset": dolly.NAME, "dataset_sha256": self.about["data"],
            "target_loss": self.settings.target_loss,
        }  # fmt: skip
        for key, value in values.items():
            self.event(key, value)

    def tested(self, run: Any) -> bool:
        """Log the test's outcome; whether the target is reached.

        MLPerf's checker wants an eval_accuracy below 1: that is the cross-entropy in nats per byte of the responses,
        which models with different tokenizers can be compared by. The target is of nats per token, beside it.
        """
        self.loss, self.samples = run.last_test_loss, run.step * run.plan.batch_size
        learnt = sum(row.learnt for row in run.test)
        self.event("eval_accuracy", self.loss * learnt / self.about["test"]["bytes"], samples_count=self.samples)
        self.event("eval_loss", self.loss, samples_count=self.samples)
        self.event("eval_perplexity", math.exp(min(self.loss, 100)), samples_count=self.samples)
        self.end("eval_stop", samples_count=self.samples)
        target = self.settings.target_loss
        self.tests.append((run.step, self.loss))
        self.reached = isinstance(target, float) and self.loss <= target
        return self.reached

    def target_for_others(self) -> float:
        """The loss of the first test in the second half, to three digits, up: what a run with another seed gets to as well."""
        half = self.tests[-1][0] / 2
        return math.ceil(1000 * next(loss for step, loss in self.tests if step >= half)) / 1000

    def close(self, status: str) -> None:
        if self.closed or not self.started:
            return
        self.closed, self.seconds = True, time.monotonic() - self.started
        self.end("run_stop", status=status, samples_count=self.samples)

    def shut(self) -> None:
        for handler in self.logger.logger.handlers if self.logger else []:
            handler.close()

    def result(self, number: int, seed: int) -> dict[str, Any]:
        return {
            "run": number, "seed": seed, "reached": self.reached, "target_loss": self.settings.target_loss,
            "seconds": round(self.seconds, 3), "loss": self.loss, "perplexity": math.exp(min(self.loss, 100)),
            "samples": self.samples, "log": LOG, "model": self.tuned.model, "data": self.about["data"],
            **({"sets_target": self.target_for_others()} if number == REFERENCE else {}),
        }  # fmt: skip

    def watch(self) -> Any:
        """As the training loop takes it; made here, since its class needs torch, which takes seconds to import."""
        import loop

        log = self

        class Watch(loop.Watch):
            def starts(self, run: loop.Run) -> None:
                log.describe(run)
                log.start("block_start", samples_count=0)

            def tests(self, run: loop.Run) -> None:
                log.end("block_stop", samples_count=run.step * run.plan.batch_size)
                log.start("eval_start", samples_count=run.step * run.plan.batch_size)

            def tested(self, run: loop.Run) -> bool:
                reached = log.tested(run)
                if reached:
                    log.close("success")  # the clock stops here: saving is no part of it
                elif run.step < run.steps:
                    log.start("block_start", samples_count=log.samples)
                return reached

        return Watch()


def _folder(output: Path, number: int) -> Path:
    return output / ("reference" if number == REFERENCE else f"run-{number}")


def _label(number: int) -> str:
    return "reference" if number == REFERENCE else f"run {number}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = options.command("train", __doc__, Settings, arguments)
    parser.add_argument("--output", type=Path, metavar="DIR", default=Path("bench"), help="default: bench")
    parser.add_argument("--run", type=int, metavar="N", help="this run alone, from 1; its seed is train.seed + N - 1")
    parser.add_argument(
        "--reference", action="store_true", help="the run alone that sets the target (target_loss auto)"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="each run on N GPUs of this node")
    parser.add_argument("--summary", action="store_true", help="say what the finished runs come to")
    parser.add_argument("--dry-run", action="store_true", help="say what a run would do, and stop")
    parser.add_argument("--smoke", action="store_true", help="a tiny model through every task, offline, and check it")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options.run(main)
