"""Run the benchmark: train once to the target, set the target by a reference run, and summarise all runs."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dolly
from bench_settings import REFERENCE, Settings, check_settings
from ekiben_tasks.task import caches, command, input_files
from ekiben_tasks.task.command import DryRun, print_once
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.files import write_json
from ekiben_tasks.training.settings import Settings as Training
from ekiben_tasks.training.settings import TrainOptions
from ekiben_tasks.training.train import train as train_model
from mlperf_log import LOG, RunLog

if TYPE_CHECKING:
    from ekiben_tasks.data.sources import Source
    from ekiben_tasks.training.prepare import Prepared

RESULT = "result.json"


def run_once(
    settings: Settings,
    number: int,
    output: Path,
    *,
    config: Path | None,
    dry: DryRun | None = None,
    temporary: bool = False,
) -> int:
    """Train once, from the beginning, until the target is reached, and return the exit code.

    The clock starts before the data is first read. An interrupted run starts again: a benchmark may not pause. number:
    of the run, from 1, or REFERENCE. dry: print the plan for these GPUs, and stop. temporary: ``output`` is removed
    afterwards, so no message names it.

    Raises:
        SettingError: a setting has a value that no run would use.
        TaskError: there is no target, the data was prepared for another model, or the run fails.
    """
    check_settings(settings)
    data = Path(str(settings.train.data))
    record = dolly.read_record(data)
    if number == REFERENCE:
        settings = replace(settings, target_loss=None)
    elif settings.target_loss == "auto":
        settings = replace(settings, target_loss=read_target(output, settings.train.model, record["data"]))
    seed = settings.train.seed + number - 1
    tuned = replace(settings.train, data=[str(data)], seed=seed, save_minutes=1e9)
    if record["model"] != tuned.model:
        raise TaskError(
            f"setting train.model: {data} was made for {record['model']}, not {tuned.model}; preprocess again"
        )
    folder = run_folder(output, number)
    print_once(*caches.prepare_caches(os.environ))
    log = RunLog(settings, tuned, record, None if dry else folder, config)
    log.open()

    def prepare(train: Training, sources: list[Source], tokenizer: Any, context: int, skip_bad: bool) -> Prepared:
        log.clock_starts()
        return load(data, record, min(train.max_length, context))

    recipe = command.recipe_folder(config, __file__)
    try:
        code = train_model(
            tuned,
            recipe,
            folder,
            TrainOptions(dry, fresh=True, temporary=temporary),
            prepare=prepare,
            callback=log.callback(),
        )
    except BaseException:
        with contextlib.suppress(TaskError):  # the log cannot be written: report the earlier error
            log.close("aborted")
        log.shut()
        raise
    log.close("success" if log.reached else "aborted")  # MLPerf has no third value
    log.shut()
    if log.is_main_process and not dry and not code:
        write_json(folder / RESULT, log.result(number, seed))
        state = f"target {settings.target_loss} reached" if log.reached else "no target reached"
        if number == REFERENCE:
            state = f"the target is {log.target_for_runs()}"
        print(
            f"{run_label(number):<12}{log.seconds:,.1f} s, test loss {log.loss:.4f}: {state}; log {folder / LOG}",
            flush=True,
        )
    return code


def read_target(output: Path, model: str, data: str) -> float:
    """Return the target that the reference run in ``output`` has set, in nats per token.

    Raises:
        TaskError: there is no reference run, or it was of another model or other data.
    """
    file = run_folder(output, REFERENCE) / RESULT
    if not file.exists():
        raise TaskError(
            "setting target_loss=auto: no reference run has set the target yet; train --reference does, "
            "or give one with --set target_loss=1.9"
        )
    reference = input_files.read_object(file, "run train --reference again")
    if (reference.get("model"), reference.get("data")) != (model, data):
        raise TaskError(
            f"{file}: the reference run used another model or other data ({reference.get('model')}); give another"
            " --output"
        )
    if not isinstance(reference.get("sets_target"), (int, float)):
        raise TaskError(f"{file}: has no sets_target; run train --reference again")
    return float(reference["sets_target"])


def load(folder: Path, record: dict[str, Any], limit: int) -> Prepared:
    """Return the examples that preprocess wrote into ``folder``. limit: the most tokens that one may have.

    Longer examples are left out and counted. record: the record that preprocess wrote.

    Raises:
        TaskError: a file cannot be read, or no example of a split fits.
    """
    import numpy

    from ekiben_tasks.data.sources import SplitExamples
    from ekiben_tasks.data.tokenize import Example
    from ekiben_tasks.training.prepare import Prepared

    parts, too_long = [], 0
    for name in ("train", "test"):
        rows = dolly.read_split(folder, name)
        kept = [(ids, labels) for ids, labels in rows if len(ids) <= limit]
        too_long += len(rows) - len(kept)
        starts = [next(position for position, label in enumerate(labels) if label >= 0) for _, labels in kept]
        parts.append(
            [
                Example(numpy.array(ids, dtype=numpy.int32), ((start, len(ids)),))
                for (ids, _), start in zip(kept, starts, strict=True)
            ]
        )
    if not parts[0] or not parts[1]:
        raise TaskError(f"setting train.max_length: no row of {folder} fits {limit} tokens")
    counts = {str(folder): sum(map(len, parts))}
    return Prepared(parts[0], parts[1], SplitExamples(counts=counts, sha256=record["data"]), too_long, limit)


def olympic_mean(seconds: Sequence[float]) -> float | None:
    """Return the mean in seconds without the fastest and the slowest run, or None where there is no valid one.

    seconds: of each run; infinite for one that did not reach the target. After the MLPerf training rules, section on
    results: one such run is dropped as the slowest, two make the result invalid. It takes three runs.
    """
    if len(seconds) < 3 or sum(math.isinf(each) for each in seconds) > 1:
        return None
    kept = sorted(seconds)[1:-1]
    return sum(kept) / len(kept)


def summarise(output: Path, run_count: int) -> dict[str, Any]:
    """Write summary.json of the first ``run_count`` runs, print it, and return it.

    Raises:
        TaskError: no run is finished, or runs have different targets.
    """
    files = [run_folder(output, number) / RESULT for number in range(1, run_count + 1)]
    results = [input_files.read_object(file, "repeat this run") for file in files if file.exists()]
    if not results:
        raise TaskError(f"{output.absolute()}: no finished run there")
    seconds = [result["seconds"] if result["reached"] else math.inf for result in results]
    mean = olympic_mean(seconds)
    targets = {result["target_loss"] for result in results}
    if len(targets) > 1:
        raise TaskError(f"{output}: runs with different targets ({', '.join(map(str, targets))}); use another --output")
    summary = {
        "runs": results,
        "finished": len(results),
        "wanted": run_count,
        "reached": sum(math.isfinite(each) for each in seconds),
        "olympic_mean_s": None if mean is None else round(mean, 3),
        "target_loss": targets.pop(),
    }
    write_json(output / "summary.json", summary)
    for result in results:
        state = "reached" if result["reached"] else "not reached"
        print(
            f"run {result['run']:<8}{result['seconds']:>10,.1f} s  loss {result['loss']:.4f}  "
            f"perplexity {result['perplexity']:.2f}  {result['samples']:,} rows  {state}"
        )
    shown = f"{mean:,.1f} s" if mean is not None else "none: it takes three runs, and all but one must reach the target"
    print(
        f"result      olympic mean {shown}; {summary['reached']} of {len(results)} runs reached"
        f" {summary['target_loss']}"
    )
    return summary


def run_folder(output: Path, number: int) -> Path:
    """Return the folder in ``output`` of the run ``number``."""
    return output / ("reference" if number == REFERENCE else f"run-{number}")


def run_label(number: int) -> str:
    """Return the name of the run ``number`` for messages."""
    return "reference" if number == REFERENCE else f"run {number}"
