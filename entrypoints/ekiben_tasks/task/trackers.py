"""Pass a run's metrics on to trackers: TensorBoard, Weights & Biases, trackio, MLflow.

The main process alone does, and without a network: what W&B, trackio and MLflow write lies in OUTPUT/ekiben-trackers,
until the user syncs it; their own variables (WANDB_MODE, MLFLOW_TRACKING_URI …) change that. A tracker that fails is
dropped with a warning: it never ends a run. Settings are passed on as public_values.py chooses them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ekiben_tasks.task import files, input_files
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.event_file import EventFile

HELP = (
    "where metrics go, besides metrics.jsonl: none, tensorboard, or wandb, trackio or mlflow of the layer tracking; a"
    " list: to several"
)
FOLDER = "ekiben-trackers"  # job.sh knows it: what is written there is no progress of a run
_PACKAGES = {"tensorboard": "", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}
_PROJECT = "ekiben"
_ID = re.compile(r"[\w-]{1,64}", re.ASCII)
_PASSWORD = re.compile(r"://[^/@\s]+@")


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Describe a run to its trackers.

    output: its folder. config: its settings. first_step: the step after which it continues, 0 for a new one. id: of the
    run in a tracker that has such ids; the same for all starts of a run.
    """

    output: Path
    config: Mapping[str, Any]
    first_step: int
    id: str = ""

    @property
    def name(self) -> str:
        """Return the name that people see."""
        return f"{self.output.absolute().name}-{self.id[:8]}"

    @property
    def folder(self) -> Path:
        """Return the folder of the trackers' files."""
        return self.output.absolute() / FOLDER


class Tracker(Protocol):
    """Write the metrics of a run where a tracker keeps them. Every method may raise what its library raises."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""

    def close(self, *, finished: bool) -> None:
        """Write what is pending. finished: the run is at its end; else it will continue."""


class TensorBoard:
    """Write an event file beside metrics.jsonl."""

    def __init__(self, run: TrackedRun) -> None:
        self._events = EventFile(run.output, run.first_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""
        self._events.add(step, values)

    def close(self, *, finished: bool) -> None:
        """Do nothing: every value is in the file."""


class Wandb:
    """Write a run of Weights & Biases; `wandb sync` sends it."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("WANDB_MODE", "offline")
        import wandb

        options = wandb.Settings(console="off", disable_git=True, save_code=False, silent=True, x_disable_meta=True)
        run.folder.mkdir(exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=os.environ.get("WANDB_NAME", run.name),
            id=run.id,
            dir=str(run.folder),
            resume="allow",
            config=dict(run.config),
            settings=options,
        )
        # Its own steps may not go back, and those of a resumed run may.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""
        self._run.log({**values, "step": step})

    def close(self, *, finished: bool) -> None:
        """End this start's part of the run."""
        self._run.finish(exit_code=0)


class Trackio:
    """Write a run of trackio into its database; `trackio sync` sends it."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.folder / "trackio"))
        with contextlib.redirect_stdout(io.StringIO()):
            import trackio

            self._finish = trackio.finish  # a run's own method would run again, and print, at the end of the process
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", _PROJECT),
                name=run.name,
                config=dict(run.config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""
        self._run.log(dict(values), step=step)

    def close(self, *, finished: bool) -> None:
        """Write what is pending."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._finish()


class MLflow:
    """Write a run of MLflow into its database, or to the server that MLFLOW_TRACKING_URI names."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "mlflow.store.db.utils", "alembic"):
            logging.getLogger(name).setLevel(logging.ERROR)  # of the tables that they create

        self._metric = Metric
        run.folder.mkdir(exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        with contextlib.redirect_stderr(io.StringIO()):
            runs = self._runs(run)
        tag = f"tags.ekiben_run = '{run.id}'"
        if known := self._client.search_runs([runs], filter_string=tag, max_results=1):
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(runs, run_name=run.name, tags={"ekiben_run": run.id}).info.run_id
            params = [Param(name, str(value)) for name, value in run.config.items()]
            self._client.log_batch(self._id, params=params[:100])

    def _runs(self, run: TrackedRun) -> str:
        """Return the id of the experiment that has the runs; it is created where there is none."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        if experiment := self._client.get_experiment_by_name(name):
            return str(experiment.experiment_id)
        location = None if os.environ.get("MLFLOW_TRACKING_URI") else (run.folder / "artifacts").as_uri()
        return str(self._client.create_experiment(name, artifact_location=location))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id, metrics=[self._metric(name, value, now, step) for name, value in values.items()]
        )

    def close(self, *, finished: bool) -> None:
        """Record how this start has ended."""
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


_KINDS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": MLflow,
}


def list_trackers(setting: str | Sequence[str]) -> list[str]:
    """Return the names in the setting ``tracker``, each once."""
    names = [setting] if isinstance(setting, str) else setting
    return [name for name in dict.fromkeys(names) if name != "none"]


def tracker_problems(setting: str | Sequence[str]) -> list[str]:
    """Return why trackers of the setting ``tracker`` cannot be had; their packages are not imported."""
    problems = []
    for name in list_trackers(setting):
        if name not in _PACKAGES:
            problems.append(f"setting tracker: must be of none, {', '.join(_PACKAGES)}, not {name!r}")
        elif _PACKAGES[name] and importlib.util.find_spec(_PACKAGES[name]) is None:
            problems.append(
                f"setting tracker={name}: this image has no {name}; build it with --layer tracking, or take tensorboard"
            )
    return problems


class Trackers:
    """Pass the metrics of a run on to its trackers. No method raises what a tracker raises."""

    def __init__(self, names: Sequence[str], run: TrackedRun, earlier: Sequence[Mapping[str, Any]] = ()) -> None:
        """Open the trackers. earlier: the lines of the run's metrics until now, which a new tracker gets, too.

        Raises:
            TaskError: the file of the run's ids is damaged.
        """
        self._open: dict[str, Tracker] = {}
        known = _read_ids(run) if run.first_step else {}
        ids = {name: known.get(name) or secrets.token_hex(8) for name in names}
        for name in names:
            started = TrackedRun(run.output, run.config, run.first_step, ids[name])
            with self._guarded(name):
                self._open[name] = _KINDS[name](started)
            if name in self._open and earlier and name not in known:
                self._log(name, earlier)
        with contextlib.suppress(OSError):  # a resumed run is then a new one to its trackers
            if names:
                run.folder.mkdir(exist_ok=True)
                files.write_json(run.folder / "ids.json", ids)

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write lines of metrics; each has a ``step``. Values that are no finite numbers are left out."""
        for name in list(self._open):
            self._log(name, lines)

    def close(self, *, finished: bool) -> None:
        """Close the trackers. finished: the run is at its end; else it will continue."""
        for name, tracker in self._open.items():
            with self._guarded(name, "the run is complete; its last values may be missing there"):
                tracker.close(finished=finished)
        self._open = {}

    def _log(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        failed = True
        with self._guarded(name):
            for line in lines:
                numbers = {key: value for key, value in line.items() if key != "step" and _is_finite(value)}
                if numbers:
                    self._open[name].log(line["step"], numbers)
            failed = False
        if failed:
            self._open.pop(name, None)

    @contextlib.contextmanager
    def _guarded(self, name: str, consequence: str = "training continues without it") -> Iterator[None]:
        """Turn an exception of a tracker into a warning."""
        try:
            yield
        except (Exception, SystemExit) as error:
            reason = _PASSWORD.sub("://", " ".join(str(error).split()))[:300]
            print(
                f"warning: tracker {name}: {type(error).__name__}: {reason}; {consequence}",
                file=sys.stderr,
                flush=True,
            )


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read_ids(run: TrackedRun) -> dict[str, str]:
    file = run.folder / "ids.json"
    if not file.is_file():
        return {}
    try:
        ids = input_files.read_object(file, "")
    except TaskError:  # of a start that was killed while it wrote: a new run to the trackers
        return {}
    return {name: value for name, value in ids.items() if isinstance(value, str) and _ID.fullmatch(value)}
