"""Provide what the tasks that score a model share: settings, a command line, a claimed output and the run's record."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from ekiben_tasks.task import adapter_folder, caches, command, files, input_files
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.errors import SettingError, TaskError
from ekiben_tasks.task.output_lock import claim_output
from ekiben_tasks.task.settings import option

RECORD = "run.json"
_RUN = ".run.json"  # record of the settings of an earlier start's answers


@dataclass(frozen=True)
class EvaluationSettings:
    """Define the settings that every task which scores a model has."""

    model: str = option(
        "cyberagent/open-calm-3b",
        "a hub id, perhaps ID@REVISION, or a folder; not used with an adapter, which names its base; --model",
    )
    adapter: str = option("", "folder of an adapter, which is not merged; empty: none; --adapter")
    output: str = option("evaluation", "folder of run.json and of the answers; --output")
    batch_size: int = option(8, "examples at a time")
    bits: Literal[16, 8, 4] = option(16, "of the weights: 8 and 4 need a GPU and save memory")
    seed: int = option(1234, "seed of the choice of examples and of the sampling")
    model_checksum: bool = option(
        True, "record the SHA-256 of a local model's files; they are read in the background, once the model is loaded"
    )
    hang_minutes: float = option(30, "minutes that one of several processes may take for a batch; 0: an hour")
    device: Literal["auto", "cpu"] = option("auto", "auto: the GPU; cpu: the CPU, which is slow")


S = TypeVar("S", bound=EvaluationSettings)
Data = TypeVar("Data")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer(Generic[S, Data]):
    """Describe a task that scores a model on data, which --data names.

    sample: the file of the recipe's data/ that the setting data=sample names. find_data: get the settings and the
    sample's path, and return the data and whether some of it is on the hub. describe: return a line about the data;
    read it, and skip invalid examples with the last argument. smoke: test with a tiny model. evaluate: get the
    settings, the data, skip and overwrite, and return the exit code.
    """

    prog: str
    doc: str | None
    settings: type[S]
    data_option: dict[str, Any]  # of the parser
    invalid_help: str
    sample: str
    check: Callable[[S], None]
    find_data: Callable[[S, Path], tuple[Data, bool]]
    describe: Callable[[S, Data, bool], str]
    smoke: Callable[[S, Path], int]
    evaluate: Callable[[S, Data, bool, bool], int]

    def run(self, script: str, arguments: Sequence[str] | None) -> int:
        """Run the task and return its exit code; with --gpus above 1, replace this process by the launcher.

        script: the task's file. arguments: the command line without the program's name; None: that of this process.

        Raises:
            SettingError: an option or a setting is wrong.
            TaskError: the data, the model or the output cannot be used.
        """
        parser = create_parser(self.prog, self.doc, self.settings, arguments)
        parser.add_argument("--data", **self.data_option)
        parser.add_argument("--skip-invalid", action="store_true", help=self.invalid_help)
        args = parser.parse_args(arguments)
        if not args.dry_run:
            command.start_processes(script, args.gpus, arguments)
        settings = read_settings(self.settings, args)
        self.check(settings)
        sample = command.recipe_folder(args.config, script) / "data" / self.sample
        if args.smoke:
            return self.smoke(settings, sample)
        data, uses_hub = self.find_data(settings, sample)
        check_model(settings, uses_hub=uses_hub)
        if args.dry_run:
            print_once(f"data        {self.describe(settings, data, args.skip_invalid)}")
            print_once(f"model       {settings.adapter or settings.model}", "dry run     nothing was loaded or written")
            return 0
        return self.evaluate(settings, data, args.skip_invalid, args.overwrite)


def create_parser(
    prog: str, doc: str | None, settings: type[EvaluationSettings], arguments: Sequence[str] | None
) -> argparse.ArgumentParser:
    """Return the parser of a task that scores a model.

    Raises:
        SettingError: the file of --config cannot be read, or holds a wrong setting.
    """
    parser = command.command(prog, doc, settings, arguments)
    parser.add_argument("--model", metavar="MODEL", help="instead of the setting model")
    parser.add_argument("--adapter", metavar="DIR", help="instead of the setting adapter")
    parser.add_argument("--output", metavar="DIR", help="instead of the setting output")
    parser.add_argument("--gpus", type=int, metavar="N", help="one process for each of N GPUs of this node")
    parser.add_argument("--dry-run", action="store_true", help="print what would be scored, and stop")
    parser.add_argument("--overwrite", action="store_true", help="start again, though --output holds answers")
    parser.add_argument("--smoke", action="store_true", help="test with a tiny model, offline")
    return parser


def read_settings(settings: type[S], args: argparse.Namespace) -> S:
    """Return the settings of ``args``, which a parser of create_parser() has read, and prepare the caches for them.

    Raises:
        SettingError: a setting is wrong, or the model is named twice.
    """
    loaded = options.load(settings, args.config, args.set)
    named = ("model", "adapter", "output", "data")
    loaded = replace(loaded, **{name: value for name in named if (value := vars(args).get(name))})
    if args.model and loaded.adapter:
        raise SettingError(
            f"--model {args.model}: the adapter {loaded.adapter} names a base model; leave --model out, or the"
            " adapter (--set adapter=)"
        )
    if loaded.batch_size < 1:
        raise SettingError(f"setting batch_size: must be at least 1, not {loaded.batch_size}")
    if not loaded.hang_minutes >= 0:
        raise SettingError(f"setting hang_minutes: must be at least 0 (0: an hour), not {loaded.hang_minutes}")
    print_once(*caches.prepare_caches(os.environ))
    if args.smoke:
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # a model this small only waits for a second thread
    return loaded


def check_model(settings: EvaluationSettings, *, uses_hub: bool = False) -> None:
    """Check that the model or adapter is there, and use the cache alone where the hub cannot be reached.

    uses_hub: the data comes from there.

    Raises:
        TaskError: a folder does not exist, or holds no model or adapter.
    """
    if adapter_folder.check_source(settings.model, settings.adapter) | uses_hub:
        print_once(*caches.prefer_cache(os.environ))


@contextlib.contextmanager
def claim(settings: EvaluationSettings, *, overwrite: bool) -> Iterator[Path]:
    """Hold the output folder for this run, and yield it; it may have answers of an earlier start of the same run.

    overwrite: remove what an earlier run has written.

    Raises:
        TaskError: it cannot be written, holds a finished run, or has answers of other settings.
    """
    output = Path(settings.output)
    with claim_output(output):
        if is_main_process():
            _begin(output, _fingerprint(settings), overwrite=overwrite)
        yield output


def is_main_process() -> bool:
    """Return whether this is the first process of the run, which writes. Works before the processes have met, too."""
    return os.environ.get("RANK", "0") == "0"


def finish(output: Path) -> None:
    """Remove what is only of use to a start that continues this run."""
    for file in _leftovers(output):
        file.unlink(missing_ok=True)


def response_cache(output: Path) -> Path:
    """Return the start of the names of the files that keep a run's answers until it is finished."""
    return output / ".answers"


def _begin(output: Path, fingerprint: str, *, overwrite: bool) -> None:
    record, current = output / RECORD, output / _RUN
    if overwrite:
        finish(output)
        record.unlink(missing_ok=True)
    if record.exists():
        raise TaskError(
            f"{output}: holds a finished evaluation; give another --output, or overwrite it with --overwrite"
        )
    if current.exists() and input_files.read_object(current, "start again with --overwrite").get("run") != fingerprint:
        raise TaskError(
            f"{output}: has answers of other settings; give another --output, or start again with --overwrite"
        )
    files.write_json(current, {"run": fingerprint})


def _leftovers(output: Path) -> list[Path]:
    return [output / _RUN, *output.glob(f"{response_cache(output).name}*")]


def _fingerprint(settings: EvaluationSettings) -> str:
    """Return a digest of the settings that decide the answers."""
    free = {"device", "output", "model_checksum", "hang_minutes"}
    values = {name: value for name, value in dataclasses.asdict(settings).items() if name not in free}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def print_scores(scores: dict[str, dict[str, Any]]) -> None:
    """Print the scores, a line for each: task → metric → value."""
    for task, metrics in scores.items():
        for metric, value in metrics.items():
            shown = f"{value:.4f}" if isinstance(value, float) else str(value)
            print(f"score       {task}  {metric}  {shown}", flush=True)
