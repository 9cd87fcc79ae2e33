"""Load tasks of lm-evaluation-harness, answer them with a model on every GPU there is, and write the scores."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import torch
import yaml
from lm_eval import evaluator
from lm_eval.api import model as lm_eval_model
from lm_eval.api import task as lm_eval_task
from lm_eval.models import huggingface
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from ekiben_tasks.data import formats
from ekiben_tasks.distributed.context import DistributedContext, Stop, init_distributed
from ekiben_tasks.distributed.heartbeat import Heartbeat, Phase
from ekiben_tasks.evaluation import frame
from ekiben_tasks.generation.record import RunRecord
from ekiben_tasks.models.adapter import load_ready
from ekiben_tasks.models.device import choose_device
from ekiben_tasks.task import files, input_files
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.errors import SettingError, TaskError, nearest
from ekiben_tasks.task.hub import format_hub_error
from harness_settings import Settings

PROGRESS_SECONDS = 60.0  # between lines of progress
_TASK_FILE = "correct the task file; its form is lm-evaluation-harness's"


class HarnessModel(huggingface.HFLM):  # type: ignore[misc]
    """Answer requests with a loaded model: one of the processes of the run, each of which has all of it."""

    def __init__(self, model: Any, tokenizer: Any, settings: Settings, world: DistributedContext) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=settings.batch_size)
        self._rank, self._world_size, self.world = world.rank, world.size, world
        self.heartbeat = Heartbeat(settings.hang_minutes, step="batch", lockstep=False)
        self.batches, self.printed = 0, time.monotonic()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the numbers of all processes, ``[processes]``. tensor: one number."""
        gathered = [torch.zeros_like(tensor) for _ in range(self.world.size)]
        self.heartbeat.beat(Phase.WAIT, self.batches)
        torch.distributed.all_gather(gathered, tensor)
        return torch.stack(gathered)

    def barrier(self) -> None:
        """Wait until all processes have answered."""
        self.heartbeat.beat(Phase.WAIT, self.batches)
        self.world.barrier()

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Answer without the other processes: after a restart they may have nothing left to answer."""
        self._world_size = 1
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self._world_size = self.world.size

    def _model_call(self, *args: Any, **kwargs: Any) -> Any:
        self._beat()
        return super()._model_call(*args, **kwargs)

    def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
        self._beat()
        return super()._model_generate(*args, **kwargs)

    def _beat(self) -> None:
        self.batches += 1
        self.heartbeat.beat(Phase.ANSWER, self.batches)
        if time.monotonic() - self.printed > PROGRESS_SECONDS:
            self.printed = time.monotonic()
            print_once(f"batch {self.batches:,}  of {self._world_size} processes each")


def evaluate(settings: Settings, folder: Path | None, *, is_dry: bool = False, overwrite: bool = False) -> int:
    """Score the model on the tasks of ``settings`` and return 0.

    folder: of task files, as an absolute path; None: lm-eval's own alone.

    Raises:
        TaskError: a task, its data, the model or the output cannot be used.
    """
    began = time.time()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        _silence_bars()
    with _quiet_datasets():
        manager, tasks = load_tasks(settings, folder)
    leaves = _leaves(tasks)
    sizes = {name: _count(task, settings.examples) for name, task in leaves.items()}
    for name, size in sizes.items():
        print_once(f"task        {name}: {size:,} examples, {task_kind(leaves[name])}")
    if is_dry:
        print_once(f"model       {settings.adapter or settings.model}", "dry run     nothing was loaded or written")
        return 0
    world = init_distributed(settings.device, hang_minutes=settings.hang_minutes)
    if few := [name for name, size in sizes.items() if size < world.size]:
        raise TaskError(f"task {few[0]}: has {sizes[few[0]]} examples for {world.size} processes; start fewer (--gpus)")
    Stop("stopping; the same command continues after the answers so far").listen()
    with frame.claim(settings, overwrite=overwrite) as output:
        world.barrier()  # nobody reads answers of an earlier start before the main process has checked them
        device = choose_device(settings.device, world.local_rank)
        print_once(f"loading     {settings.adapter or settings.model} on {device.name}")
        model, tokenizer = load_ready(settings.model, settings.adapter, device, bits=settings.bits)
        _check_template(settings, tokenizer)
        record = RunRecord(settings, device, world, began, output / frame.RECORD)
        answering = HarnessModel(model, tokenizer, settings, world)
        started = time.monotonic()
        with _quiet_datasets():
            results = _score(settings, answering, manager, tasks, output)
        if results is not None:
            record.data = {"tasks": {name: _describe(task, sizes[name]) for name, task in leaves.items()}}
            record.counts = {"scores": read_scores(results), "seconds": round(time.monotonic() - started, 1)}
            _write(output, record, results)
        world.barrier()
        world.destroy()
    return 0


def load_tasks(settings: Settings, folder: Path | None) -> tuple[TaskManager, list[Any]]:
    """Return (the manager, tasks and groups by ``settings.tasks``), with their data loaded.

    Raises:
        SettingError: a task is unknown.
        TaskError: a task's file or its data cannot be read.
    """
    local = _index(folder, has_defaults=False) if folder else None
    simple = local is not None and set(settings.tasks) <= {*local.all_subtasks}
    # To read lm-eval's own 14,000 tasks takes seconds, which tasks of the folder alone need not wait for.
    manager = local if local is not None and simple else _index(folder, has_defaults=True)
    for name in settings.tasks:
        if name not in manager.all_tasks:
            where = f" in {folder} or" if folder else ""
            hint = nearest(name, manager.all_tasks)
            raise SettingError(f"setting tasks: '{name}' is not a task{where} of lm-evaluation-harness.{hint}")
    loaded: list[Any] = []
    with contextlib.chdir(folder) if folder else contextlib.nullcontext():  # where relative data_files lie
        for name in dict.fromkeys(settings.tasks):
            parts = _load(manager, name, folder)
            group = parts.get("groups", {}).get(name)
            loaded += [group] if group is not None else parts["tasks"].values()
    for name, task in _leaves(loaded).items():
        _check_examples(name, task)
    return manager, loaded


def _check_examples(name: str, task: Any) -> None:
    """Raise TaskError for the first example that a task's templates do not fit, before a model is loaded."""
    for number, example in enumerate(task.eval_docs, 1):
        try:
            task.doc_to_text(example)
            task.doc_to_target(example)
            if task_kind(task) == "multiple_choice" and not task.doc_to_choice(example):
                raise ValueError("has no choices")
        except Exception as error:
            raise TaskError(
                f"task {name}: example {number}: {_one_line(error)}; correct it, or the templates of the task file"
            ) from error


def _index(folder: Path | None, *, has_defaults: bool) -> TaskManager:
    for file in sorted(folder.rglob("*.yaml")) if folder else ():
        text = input_files.read_text(file, _TASK_FILE)
        try:
            yaml.compose(text, Loader=yaml.SafeLoader)  # without its values: tags such as !function are lm-eval's
        except yaml.YAMLError as error:
            raise TaskError(f"{file}: is not valid YAML: {' '.join(str(error).split())}; {_TASK_FILE}") from None
    return TaskManager(include_path=str(folder) if folder else None, include_defaults=has_defaults)


def _load(manager: TaskManager, name: str, folder: Path | None) -> Any:
    try:
        return manager.load([name])
    except Exception as error:
        if damaged := _find_damaged(manager, name, folder or Path()):
            raise TaskError(f"task {name}: {damaged}") from error
        path = manager.task_index[name].yaml_path
        if path is not None and folder is not None and Path(path).is_relative_to(folder):
            raise TaskError(f"{path}: {type(error).__name__}: {_one_line(error)}; {_TASK_FILE}") from error
        raise TaskError(format_hub_error(error, f"of task {name}", "data set")) from error


def _find_damaged(manager: TaskManager, name: str, folder: Path) -> str | None:
    """Return what is wrong with the local data files of a task, or None. folder: where relative ones lie."""
    config = getattr(manager.task_index[name], "cfg", None)
    named = ((config or {}).get("dataset_kwargs") or {}).get("data_files") or {}
    for value in named.values() if isinstance(named, Mapping) else [named]:
        for file in value if isinstance(value, list) else [value]:
            try:
                problems = (f"{where}: {item}" for where, item in formats.read_file(folder / file) if _is_damaged(item))
                if first := next(problems, None):
                    return first
            except TaskError as error:
                return str(error)
    return None


def _is_damaged(item: Any) -> bool:
    return isinstance(item, ValueError)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _leaves(tasks: list[Any]) -> dict[str, Any]:
    """Return name → task, of the tasks and of those in the groups."""
    single = [task for item in tasks for task in (item.get_all_tasks() if hasattr(item, "get_all_tasks") else [item])]
    return {task.task_name: task for task in single}


def _count(task: Any, limit: int) -> int:
    total = len(task.eval_docs)
    return min(total, limit) if limit else total


def task_kind(task: Any) -> str:
    """Return what a task asks of the model: lm-eval's ``output_type``."""
    return str(task.get_config("output_type") or task.OUTPUT_TYPE)


def _describe(task: Any, size: int) -> dict[str, Any]:
    return {
        "examples": size,
        "kind": task_kind(task),
        "version": task.VERSION,
        "few_shot": task.get_config("num_fewshot"),
    }


def _check_template(settings: Settings, tokenizer: Any) -> None:
    if settings.chat_template and not tokenizer.chat_template:
        name = settings.adapter or settings.model
        raise TaskError(f"setting chat_template: the tokenizer of {name} has none; use --set chat_template=false")


def _score(
    settings: Settings, model: HarnessModel, manager: TaskManager, tasks: list[Any], output: Path
) -> dict[str, Any] | None:
    """Return lm-eval's results; None in other processes than the first."""
    try:
        results: dict[str, Any] | None = evaluator.simple_evaluate(
            model=model,
            tasks=tasks,
            task_manager=manager,
            num_fewshot=settings.few_shot,
            batch_size=settings.batch_size,
            use_cache=str(frame.response_cache(output)),
            limit=settings.examples or None,
            log_samples=settings.keep_answers,
            apply_chat_template=settings.chat_template,
            random_seed=settings.seed,
            numpy_random_seed=settings.seed,
            torch_random_seed=settings.seed,
            fewshot_random_seed=settings.seed,
            confirm_run_unsafe_code=settings.run_generated_code,
        )
    except ValueError as error:
        if "unsafe" not in str(error):
            raise
        raise TaskError(
            f"setting tasks: {_one_line(error).split('.')[0]}; --set run_generated_code=true allows it, with the rights"
            " of this container"
        ) from None
    return results


def read_scores(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return task or group → metric → value, as lm-eval names them: ``acc,none`` and ``acc_stderr,none``."""
    tables = {**results["results"], **results.get("groups", {})}
    return {
        name: {
            metric: value
            for metric, value in metrics.items()
            if isinstance(value, (int, float)) and metric != "sample_len"
        }
        for name, metrics in tables.items()
    }


def _write(output: Path, record: RunRecord, results: dict[str, Any]) -> None:
    """Write results.json, the answers and the record, and print the scores."""
    for name, samples in (results.pop("samples", None) or {}).items():
        text = "".join(json.dumps(sample, ensure_ascii=False, default=str) + "\n" for sample in samples)
        files.replace_text(output / f"samples-{name}.jsonl", text)
    files.replace_text(output / "results.json", json.dumps(results, ensure_ascii=False, indent=2, default=str) + "\n")
    file = record.write(None)
    frame.finish(output)
    frame.print_scores(record.counts["scores"])
    print(f"done        {output / 'results.json'}   record {file}", flush=True)


@contextlib.contextmanager
def _quiet_datasets() -> Iterator[None]:
    datasets.disable_progress_bars()
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity_error()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)


def _silence_bars() -> None:
    """Leave out lm-eval's progress bars, whose every update is a line where there is no terminal."""

    def hidden(*args: Any, **options: Any) -> Any:
        return tqdm(*args, **{**options, "disable": True})

    for module in (huggingface, lm_eval_model, lm_eval_task):
        module.tqdm = hidden
