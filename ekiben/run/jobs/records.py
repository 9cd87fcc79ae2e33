"""Submitted runs on disk: folders, run.json, and the small files that jobs write there.

A run's folder may be a colleague's, or part of a repository that was cloned. So each file is opened relative to the
folder's descriptor, no link is followed, only regular files of limited size are read, and each value is checked before
it is used.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from ekiben.core.checked import Fields, parse_json, shorten
from ekiben.core.errors import UsageError, nearest
from ekiben.core.folder import Folder
from ekiben.core.inner_path import InnerPath
from ekiben.run.image import SifState
from ekiben.run.jobs.request import MAX_JOBS, JobRequest
from ekiben.run.schedulers import job_id_pattern, load
from ekiben.run.schedulers import names as scheduler_names

RECORD = "run.json"
RECORD_FORMAT = 3  # of run.json; an older one is listed, and cannot be submitted again
_MAX_SMALL = 4096  # bytes of a file that holds an id or a number
_MAX_COUNT = 2**31 - 1
_STEP = re.compile(r"[1-9][0-9]{0,5}-[A-Za-z0-9][\w.-]{0,200}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_MINIMUM = {
    "nodes": 1,
    "cpus_per_node": 1,
    "memory_mib": 1,
    "processes_per_node": 1,
    "time_seconds": 1,
    "gpus_per_node": 0,
    "grace_seconds": 0,
    "max_resubmits": 0,
}


# ------------------------------------------------------------------------------------------------------------ run.json


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRecord:
    """The image of a run, or of a step that has another one. None: not recorded, or there was none."""

    name: str
    recipe_path: Path | None
    sif: Path | None
    sif_state: SifState | None

    @classmethod
    def parse(cls, record: Fields, name: str) -> ImageRecord:
        """Raises ValueError for what is wrong. ``name``: the field with the image's name."""
        return cls(
            name=_text(record.text(name), record, name) if name in record else "",
            recipe_path=_path(record, "recipe_path"),
            sif=_path(record, "sif"),
            sif_state=_parse_state(record.object("sif_state")) if "sif_state" in record else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A step of a run. ``argv`` is None where an earlier version recorded none.

    ``image``: that of a step which names one, as the first word of its ``argv`` does; None: the run's.
    """

    name: str
    image: ImageRecord | None
    nodes: int
    argv: tuple[str, ...] | None
    seeds: tuple[str, ...]

    @classmethod
    def parse(cls, step: Fields) -> StepRecord:
        """Raises ValueError for what is wrong."""
        return cls(
            name=step.matching("name", _STEP, "a step's name (its number, '-', and a task)"),
            image=ImageRecord.parse(step.object("image"), "name") if "image" in step else None,
            nodes=_count(step, "nodes") if "nodes" in step else 1,
            argv=_texts(step, "argv", lines=True) if "argv" in step else None,
            seeds=_texts(step, "seeds"),
        )

    @property
    def jobs(self) -> list[str]:
        """Return the names of its jobs, in order."""
        return [f"{self.name}.{index}" for index in range(1, len(self.seeds) + 1)] or [self.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The content of run.json, checked. None: an earlier version did not record it, or there is none."""

    format: int
    scheduler: str
    image: ImageRecord
    site_path: Path | None
    work: Path | None
    request: JobRequest | None
    steps: tuple[StepRecord, ...]
    by_hand: bool = False  # people submit its scripts themselves

    @classmethod
    def parse(cls, data: bytes) -> RunRecord:
        """Raises ValueError for what is wrong, and for a record of a later version."""
        record = Fields.of(parse_json(data))
        format = record.size("format") if "format" in record else 1
        if format not in range(1, RECORD_FORMAT + 1):
            raise ValueError("written by a later version of Ekiben")
        scheduler = record.basename("scheduler")
        if scheduler not in scheduler_names():
            raise ValueError(f"no scheduler '{scheduler}'." + nearest(scheduler, scheduler_names()))
        many = record.objects("steps")
        if not many:
            record.refuse("steps", "a list of one step or more")
        steps = tuple(map(StepRecord.parse, many[: MAX_JOBS + 1]))
        if sum(len(step.seeds) or 1 for step in steps) > MAX_JOBS:
            raise ValueError(f"has more than {MAX_JOBS} jobs")
        jobs = [job for step in steps for job in step.jobs]
        if len(set(jobs)) < len(jobs):
            raise ValueError("'steps' has two jobs of one name")
        return cls(
            format=format,
            scheduler=scheduler,
            steps=steps,
            image=ImageRecord.parse(record, "image"),
            site_path=_path(record, "site_path"),
            work=_path(record, "work"),
            request=_parse_request(record.object("request")) if "request" in record else None,
            by_hand=record.data.get("by_hand") is True,
        )


def _parse_state(record: Fields) -> SifState:
    """Raises ValueError."""
    sha256 = record.hex_digest("sha256") if record.data.get("sha256") else ""
    return SifState(record.text("stat"), record.hex_digest("header"), sha256)


def _parse_request(record: Fields) -> JobRequest:
    """Raises ValueError. A later version's fields are left out."""
    known: dict[str, Any] = {}
    for item in (item for item in fields(JobRequest) if item.name in record.data):
        name, kind = item.name, str(item.type)
        if record.data[name] is None and "None" in kind:
            known[name] = None
        elif name == "binds":
            known[name] = tuple(map(Path, _texts(record, name, lines=True)))
        elif kind.startswith("tuple"):
            known[name] = _texts(record, name)
        elif "bool" in kind:
            known[name] = record.data[name] if isinstance(record.data[name], bool) else record.refuse(name, kind)
        elif "int" in kind:
            known[name] = _count(record, name, _MINIMUM[name])
        else:
            known[name] = _text(record.text(name), record, name)
    request = JobRequest(**known)
    if any(not _VARIABLE.fullmatch(name) for name in request.env):
        record.refuse("env", "a list of names of variables")
    if len(set(request.seeds)) < len(request.seeds) or not all(seed.strip() for seed in request.seeds):
        record.refuse("seeds", "a list of different seeds")
    return request


def _count(record: Fields, name: str, minimum: int = 1) -> int:
    value = record.data.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= _MAX_COUNT:
        return value
    return record.refuse(name, f"an integer from {minimum} to {_MAX_COUNT}")


def _texts(record: Fields, name: str, *, lines: bool = False) -> tuple[str, ...]:
    return tuple(_text(text, record, name, lines=lines) for text in record.strings(name))


def _text(text: str, record: Fields, name: str, *, lines: bool = False) -> str:
    """Return ``text``, which may be an argument of a program, and has line breaks with ``lines`` only."""
    with contextlib.suppress(UnicodeEncodeError):
        if b"\0" not in os.fsencode(text) and (lines or len(text.splitlines()) <= 1):
            return text
    return record.refuse(name, "text of one line")


def _path(record: Fields, name: str) -> Path | None:
    """Return an absolute path; None where there is none."""
    if name not in record:
        return None
    path = _text(record.text(name), record, name, lines=True)
    return Path(path) if path.startswith("/") else record.refuse(name, "an absolute path")


# ---------------------------------------------------------------------------------------------------------- run folders


@dataclass(frozen=True, eq=False)
class Run:
    """A run that was submitted: its folder, and what its run.json says."""

    location: InnerPath
    record: RunRecord

    @property
    def folder(self) -> Path:
        """Return the folder's path, for messages."""
        return self.location.path

    @cached_property
    def elements(self) -> dict[str, tuple[StepRecord, int]]:
        """Return each job's step and its index in the step's array, 0 where that has one job only."""
        return {
            job: (step, index if step.seeds else 0)
            for step in self.record.steps
            for index, job in enumerate(step.jobs, start=1)
        }

    @property
    def jobs(self) -> list[str]:
        """Return the names of all its jobs, in order."""
        return list(self.elements)

    @contextlib.contextmanager
    def files(self) -> Iterator[RunFiles]:
        """Yield the files of its jobs. Raises UsageError for what cannot be read."""
        try:
            folder = self.location.open_folder()
        except OSError as error:
            raise UsageError(f"{self.folder}: cannot be read: {error.strerror}") from error
        with folder:
            yield RunFiles(self, folder, frozenset(folder.names()))

    @property
    def ids(self) -> dict[str, str]:
        """Job → its newest id; jobs of an array have the array's until they go back into the queue by themselves."""
        with self.files() as files:
            return {job: files.id(job) for job in self.elements}

    def remove_environment(self) -> None:
        """Remove the variables of its jobs, tokens among them, and the key. The job that ends last does so, too."""
        with contextlib.suppress(OSError), self.location.open_folder() as folder:
            for name in ("environment", "key"):
                with contextlib.suppress(OSError):
                    folder.remove(name)


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of a run's open folder.

    Each method raises UsageError for a link, and for what is not a regular file of its kind's size.

    ``names``: what was there when the folder was opened. Most jobs of a large array have no file yet.
    """

    run: Run
    folder: Folder
    names: frozenset[str]

    def id(self, job: str) -> str:
        """Return the newest id of a job; none before it was submitted, and for a text that is not an id."""
        return self._id(f"{job}.job")

    def single_id(self, job: str, id: str) -> str:
        """Return the id by which the scheduler knows this job alone; ``id`` may be its array's."""
        step, index = self.run.elements[job]
        is_element = index and id and id == self._id(f"{step.name}.array")
        return load(self.run.record.scheduler).element_id(id, index) if is_element else id

    def is_cancelled(self, job: str) -> bool:
        """Return whether `cancel` was asked to end the job, alone or with all of its run."""
        return "cancelled" in self.names or f"{job}.cancelled" in self.names

    def exit_code(self, job: str) -> int | None:
        """Return the exit code of a job that is over, else None."""
        return self._number(f"{job}.exit")

    def times(self, job: str) -> int:
        """Return how often a job went back into the queue."""
        return self._number(f"{job}.times") or 0

    def attempt(self, job: str) -> int:
        """Return which attempt of a job this is, from 1: submitting an ended job's script starts another."""
        return self._number(f"{job}.attempt") or 1

    def ranks(self, job: str) -> int | None:
        """Return how many processes a job has on all its nodes; None before it has started."""
        processes = self._number(f"{job}.processes")
        return processes * self.run.elements[job][0].nodes if processes is not None else None

    def open_log(self, job: str, rank: int | None = None) -> BinaryIO | None:
        """Open the log of a job, or of one rank; None where it does not exist yet."""
        name = f"{job}.log" if rank is None else f"{job}.ranks/{rank}.log"
        with self._explained(name):
            if rank is None:
                return self.folder.open_file(name)
            with self.folder.folder(f"{job}.ranks") as ranks:
                return ranks.open_file(f"{rank}.log")
        return None

    def has_log(self, job: str) -> bool:
        """Return whether a job wrote something."""
        return f"{job}.log" in self.names

    def _id(self, name: str) -> str:
        text = self._read(name)
        return text if job_id_pattern(self.run.record.scheduler).fullmatch(text) else ""

    def _number(self, name: str) -> int | None:
        """Return a record; None also for one that a job did not finish writing."""
        text = self._read(name)
        return int(text) if _NUMBER.fullmatch(text) else None

    def _read(self, name: str) -> str:
        if name not in self.names:
            return ""
        with self._explained(name):
            return self.folder.read(name, max_size=_MAX_SMALL).decode("utf-8", "replace").strip()
        return ""

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Turn an error of the block into a UsageError that names the file. A missing file is not an error."""
        try:
            yield
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise UsageError(f"{self.run.folder / name}: cannot be read: {reason}") from error


def find_runs(names: Sequence[str], runs: Path, log: Callable[[str], None] = lambda line: None) -> list[Run]:
    """Return runs by folder, by name below ``runs``, or by a job's id; all of ``runs``, the newest last, for no name.

    ``log`` gets a line for each that cannot be read and was not named. Raises UsageError when there is no such run.
    """
    known = _run_folders(runs, log)
    if not names:
        return list(_readable(known.values(), log))
    named_runs = []
    for name in names:
        if os.path.lexists(Path(name) / RECORD):
            named_runs.append(_open_run(InnerPath.below(Path(name).absolute(), keep=False)))
        elif name in known:
            named_runs.append(_open_run(known[name]))
        elif with_id := next((run for run in _readable(known.values(), log) if _has_job(run, name, log)), None):
            named_runs.append(with_id)
        else:
            raise UsageError(
                f"no run '{name}' in {runs}." + nearest(name, known), hint="--runs DIR, or the run's folder"
            )
    return named_runs


def jobs_named(run: Run, name: str) -> list[str]:
    """Return the jobs of an array that ``name`` is the own id of; none where it names all of a run."""
    with run.files() as files:
        ids = {job: files.id(job) for job, (_, index) in run.elements.items() if index}
        return [job for job, id in ids.items() if id != name and files.single_id(job, id) == name]


def _has_job(run: Run, id: str, log: Callable[[str], None]) -> bool:
    try:
        return id in run.ids.values() or bool(jobs_named(run, id))
    except UsageError as error:
        log(f"skipped: {error}")
        return False


def _run_folders(runs: Path, log: Callable[[str], None]) -> dict[str, InnerPath]:
    """Return the folders of ``runs`` that have a record, by name, in the order of the records' times."""
    folders = InnerPath.below(runs, keep=False)
    times: dict[str, int] = {}
    with contextlib.suppress(OSError), folders.open_folder() as top:
        for name in top.names():
            try:
                with top.folder(name) as folder:
                    time = folder.status(RECORD).st_mtime_ns
            except OSError:
                if top.link_target(name) is not None and os.path.lexists(runs / name / RECORD):
                    log(f"skipped: {shorten(name)} in {runs} is a link; name its target")
                continue
            if name.isprintable():
                times[name] = time
            else:
                log(f"skipped: {shorten(name)} in {runs}: its name has characters that cannot be printed")
    return {name: folders / name for name in sorted(times, key=lambda name: times[name])}


def _readable(folders: Iterable[InnerPath], log: Callable[[str], None]) -> Iterator[Run]:
    for folder in folders:
        try:
            yield _open_run(folder)
        except UsageError as error:
            log(f"skipped: {error}")


def _open_run(folder: InnerPath) -> Run:
    """Raises UsageError for a record that cannot be read, or says what no run can be."""
    try:
        return Run(folder, RunRecord.parse((folder / RECORD).read()))
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UsageError(
            f"{folder / RECORD}: cannot be read: {reason}", hint="remove the folder of a run that cannot be read"
        ) from error
