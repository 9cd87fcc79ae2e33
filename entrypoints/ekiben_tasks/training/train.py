"""Train a model from settings, to an exit code."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ekiben_tasks.data.sources import Source, check_locations, parse_sources
from ekiben_tasks.distributed import strategy
from ekiben_tasks.task import caches
from ekiben_tasks.task.adapter_folder import find_config
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.hub import is_hub_model, locate_model
from ekiben_tasks.task.output_lock import claim_output
from ekiben_tasks.training.settings import SAMPLE, Settings, TrainOptions, check, count_processes, resolve_parallel

if TYPE_CHECKING:
    from ekiben_tasks.training.loop import TrainerCallback
    from ekiben_tasks.training.prepare import Prepared


def train(
    settings: Settings,
    recipe: Path,
    output: Path,
    options: TrainOptions | None = None,
    *,
    prepare: Callable[[Settings, list[Source], Any, int, bool], Prepared] | None = None,
    callback: TrainerCallback | None = None,
) -> int:
    """Train as ``settings`` say into ``output`` and return the exit code: 0, or 75 or 130 after a signal.

    recipe: its folder, whose data/sample.jsonl is the data ``sample``. prepare: called instead of prepare_data(), for
    examples that are tokens already. callback: called at the run's events.

    Raises:
        SettingError: settings are wrong.
        DoesNotFitError: the run needs more memory than there is.
        TaskError: the data, the model or the output cannot be used.
    """
    options = options or TrainOptions()
    # Find errors before seconds of imports and minutes of downloads.
    check(settings)
    if settings.method == "lora" and settings.adapter:
        find_config(Path(settings.adapter))
    processes = count_processes(settings, options.dry)
    parallel = resolve_parallel(settings, processes)
    if reason := strategy.find(parallel).unavailable(getattr(settings, parallel, None)):
        raise TaskError(f"setting parallel={parallel}: {reason}")
    sources = parse_sources(_with_sample(settings.data, recipe), settings.validation_split)
    if check_locations(sources) | is_hub_model(settings.model):
        print_once(*caches.prefer_cache(os.environ))
    with contextlib.nullcontext() if options.dry else claim_output(output):
        path = locate_model(settings.model)

        from ekiben_tasks.training.run import Job, run

        job = Job(
            settings=settings,
            parallel=parallel,
            processes=processes,
            sources=sources,
            path=path,
            output=output,
            options=options,
            prepare=prepare,
            callback=callback,
        )
        return run(job)


def _with_sample(data: Any, recipe: Path) -> Any:
    """``data`` with the word 'sample' replaced by the rows that ship with the recipe."""
    items = data if isinstance(data, list) else [data]
    return [str(recipe / "data" / "sample.jsonl") if item == SAMPLE else item for item in items]
