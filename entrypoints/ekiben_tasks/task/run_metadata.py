"""Build the common fields of all tasks' records (run.json), and write metrics.jsonl."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ekiben_tasks.task import hub, input_files
from ekiben_tasks.task.checksums import ModelChecksum
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.files import replace_text
from ekiben_tasks.task.public_values import flatten_settings
from ekiben_tasks.task.trackers import TrackedRun, Trackers, list_trackers


def run_record(settings: Any, exit_code: int | None, started: float) -> dict[str, Any]:
    """Return the fields of every task's record.

    settings: the task's dataclass. exit_code: None for a finished run. started: seconds since the epoch.
    """
    return {
        "status": "finished" if exit_code is None else "interrupted",
        "settings": dataclasses.asdict(settings),
        "site": site(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seed": settings.seed,
        "versions": versions(),
        "image": image(),
    }


def model_record(name: str, checksum: ModelChecksum, *, wait: bool) -> dict[str, Any]:
    """Return the fields of every task's record about a model: its name, the hub's commit or a folder's checksums.

    wait: for checksums that are still computed; a run that was interrupted leaves them out.
    """
    return {"name": name, "commit": hub.model_commit(name), **checksum.record(wait=wait)}


def start_checksum(name: str, record: Path, key: str = "model") -> ModelChecksum:
    """Begin the checksums of model ``name`` where that is a folder, and return them.

    record: the file of an earlier start's record, in which ``key`` may have the checksums of files that are unchanged.
    """
    folder = Path(hub.split_revision(name)[0]).expanduser()
    if not folder.is_dir():
        return ModelChecksum(None)
    try:
        known = input_files.read_object(record, "it is not used")[key]["files"]
        return ModelChecksum(folder, {name: dict(entry) for name, entry in known.items()})
    except (TaskError, ValueError, KeyError, TypeError, AttributeError):
        return ModelChecksum(folder)


def versions() -> dict[str, str]:
    """Return name → version of Python and of the libraries that a run depends on."""
    versions = {"python": platform.python_version()}
    libraries = ("torch", "transformers", "peft", "accelerate", "datasets", "tokenizers", "safetensors", "numpy")
    for name in (*libraries, "lm-eval", "trl"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def image() -> Any:
    """Return the image's metadata with the checksum of the recipe's files in it; None outside an image.

    Where `ekiben run --live` put files of the host over the image's, ``live`` names them instead.
    """
    try:
        metadata = input_files.read_object(Path("/opt/ekiben/image.json"), "build the image again")
        if origin := os.environ.get("EKIBEN_LIVE"):
            return {**metadata, "live": origin}
        return {**metadata, "recipe_sha256": checksum(Path("/opt/ekiben/recipe"))}
    except (OSError, TaskError):
        return None


def checksum(folder: Path) -> str:
    """Return a SHA-256 over all files' names and contents.

    ekiben/publish/catalog/runs.py computes the same of a published image.
    """
    digest = hashlib.sha256()
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    for name in sorted(name for name in files if "__pycache__" not in name):
        data = files[name].read_bytes()
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def site() -> dict[str, str]:
    """Return this host, and the cluster, job and nodes that the scheduler's variables name."""
    names = {
        "cluster": ("SLURM_CLUSTER_NAME", "SGE_CLUSTER_NAME", "PBS_SERVER"),
        "job": ("SLURM_JOB_ID", "JOB_ID", "PBS_JOBID"),
        "nodes": ("SLURM_JOB_NODELIST", "SGE_JOB_HOSTLIST", "PBS_NODEFILE"),
    }
    site = {"host": socket.gethostname()}
    for name, variables in names.items():
        value = next((os.environ[variable] for variable in variables if os.environ.get(variable)), None)
        if value:
            site[name] = value
    return site


class Metrics:
    """Write metrics.jsonl, one line per event. A resumed run first drops the lines after its checkpoint."""

    def __init__(self, file: Path, resume_step: int) -> None:
        """Read the lines of an earlier start.

        Raises:
            TaskError: the file cannot be read, or a line other than the last one is damaged.
        """
        self.file = file
        self.trackers: Trackers | None = None
        self.resume_step = resume_step
        self.lines = [line for line in _read_lines(file) if line["step"] <= resume_step] if resume_step else []
        replace_text(file, "".join(json.dumps(line) + "\n" for line in self.lines))

    def add(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append ``lines`` to the file; each has a ``step``."""
        self.lines += lines
        with self.file.open("a", encoding="utf-8") as out:
            out.write("".join(json.dumps(line) + "\n" for line in lines))
        if self.trackers:
            self.trackers.log(lines)

    def track(self, setting: str | Sequence[str], settings: Any) -> None:
        """Pass these and later lines on to trackers. setting: ``tracker``. settings: the task's dataclass."""
        config = dict(flatten_settings(dataclasses.asdict(settings)))
        run = TrackedRun(self.file.parent, config, self.resume_step)
        self.trackers = Trackers(list_trackers(setting), run, self.lines)

    def close(self, *, finished: bool) -> None:
        """Close the trackers. finished: the run is at its end; else it will continue."""
        if self.trackers:
            self.trackers.close(finished=finished)

    def series(self, key: str) -> list[tuple[float, float]]:
        """Return the (step, value) pairs of one metric."""
        return [(line["step"], line[key]) for line in self.lines if key in line]


# Keys before this release: a run that is resumed continues the file that it has.
_FORMER_KEYS = {"test_loss": "eval_loss", "learnt": "num_target_tokens"}
_METRICS_ADVICE = "remove it, and training resumes without the metrics before its checkpoint"


def _read_lines(file: Path) -> list[dict[str, Any]]:
    if not os.path.lexists(file):
        return []
    lines: list[dict[str, Any]] = []
    problem = ""
    for number, content in input_files.read_lines(file, _METRICS_ADVICE):
        if problem:  # a crash damages the last line alone
            raise TaskError(f"{file}: {problem}; {_METRICS_ADVICE}")
        try:
            line = input_files.as_object(input_files.parse_json(input_files.decode(content)))
            if not isinstance(line.get("step"), int):
                raise ValueError("has no step")
        except ValueError as error:
            problem = f"line {number} {error}"
        else:
            lines.append({_FORMER_KEYS.get(key, key): value for key, value in line.items()})
    return lines
