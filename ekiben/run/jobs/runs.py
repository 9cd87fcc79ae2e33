"""Submitted runs: their folders and records, status, logs, cancel.

A run is a folder below ekiben-runs/: `1-train.sh` (the script of its first step), `1-train.log`, `job.sh` (what all
scripts do), `launch_node.py` and `launch_network.py` (start the processes on a node, inside the container),
`environment` (what it gets of this shell's, tokens too: for its owner only, and removed when all jobs have ended),
`key` (by which the launchers know each other), `run.json`. Of every job, whose name is the step's, or `1-train.2` in an
array: `.exit` (the exit code, once it is over), `.times` (how often it went back into the queue), `.job` (its newest
id; of an array, `1-train.array` has the array's), `.processes` (how many on each node), `.ranks/3.log` (what one of
several processes wrote), `.cancelled`. A job script needs bash and Apptainer or SingularityCE on the compute nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any

from ekiben.core.checked import Fields, parse_json, read_regular
from ekiben.core.command_name import command_name
from ekiben.core.errors import EngineError, SchedulerError, StoreError, UsageError, nearest
from ekiben.core.files import atomic_write
from ekiben.core.paths import PROJECT_ROOT
from ekiben.formats.sif import read_sif
from ekiben.run.jobs.plan import JobPlan, JobStep
from ekiben.run.jobs.request import JobRequest
from ekiben.run.jobs.script import JOB_PROGRAM, environment_text, script
from ekiben.run.schedulers import Job, load
from ekiben.spec.recipe import LAUNCHER

REQUEUE = 75
_POLL_SECONDS = 5.0
_ENDED = ("done", "failed", "skipped", "cancelled")  # "lost" is what a scheduler says that lost its records, too
RECORD = "run.json"
RECORD_FORMAT = 2  # of run.json; in 1, which has no key of its own, argv was `words`, resource_args `asks`


# ------------------------------------------------------------------------------------------------------ submitting


def submit(plan: JobPlan) -> dict[str, str]:
    """Write the run's folder, submit its steps, and return step → job id.

    Raises SchedulerError when the scheduler refuses one; then nothing is left in the queue.
    """
    if not plan.sif.is_file():
        raise UsageError(
            f"{plan.sif} is not there",
            hint=f"{command_name()} image {shlex.quote(str(plan.recipe_folder))}, or --sif PATH",
        )
    scheduler = load(plan.scheduler)
    if reason := scheduler.unavailable():
        raise EngineError(f"{scheduler.TITLE} cannot be used here: {reason}")
    _write(plan)
    ids: dict[str, str] = {}
    after = None
    try:
        for step in plan.steps:
            after = ids[step.name] = scheduler.submit(plan.folder / f"{step.name}.sh", plan.command_args, after)
            if step.seeds:
                (plan.folder / f"{step.name}.array").write_text(after + "\n", encoding="utf-8")
            for job in step.jobs:
                (plan.folder / f"{job}.job").write_text(after + "\n", encoding="utf-8")
    except SchedulerError:
        if ids:
            scheduler.cancel(list(ids.values()))
        shutil.rmtree(plan.folder)
        raise
    return ids


def _write(plan: JobPlan) -> None:
    scripts = {step.name: script(plan, step) for step in plan.steps}
    environment = environment_text(os.environ, plan.request.env)
    plan.folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        plan.folder.mkdir()
    except FileExistsError:
        raise UsageError(f"{plan.folder} exists already; submit again in a second") from None
    try:
        _write_files(plan, scripts, environment)
    except BaseException as error:
        shutil.rmtree(plan.folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise UsageError(f"{plan.folder} cannot be written: {error.strerror}") from error
        raise


def _write_files(plan: JobPlan, scripts: Mapping[str, str], environment: str) -> None:
    for path in (*(PROJECT_ROOT / "entrypoints" / name for name in LAUNCHER), JOB_PROGRAM):
        shutil.copy(path, plan.folder)
    for name, text in scripts.items():
        (plan.folder / f"{name}.sh").write_text(text, encoding="utf-8")
        os.chmod(plan.folder / f"{name}.sh", 0o755)
    _write_private(plan.folder / "key", secrets.token_hex(16))
    # Tokens may be among them.
    _write_private(plan.folder / "environment", environment)
    text = json.dumps(_record(plan), indent=1, ensure_ascii=False) + "\n"
    # An argument may have bytes that are no UTF-8; JSON takes them as escapes.
    atomic_write(plan.folder / "run.json", text.encode("utf-8", "backslashreplace"))


def _record(plan: JobPlan) -> dict[str, Any]:
    """Return the content of run.json."""
    sif_id = None
    with contextlib.suppress(StoreError):  # a SIF of another make, which a runtime may read
        sif_id = read_sif(plan.sif).id
    return {
        "format": RECORD_FORMAT,
        "recipe": plan.recipe,
        "recipe_path": str(plan.recipe_folder),
        "request": _request_record(plan.request),
        "scheduler": plan.scheduler,
        "site": plan.site.name if plan.site else None,
        "site_path": str(plan.site.path.absolute()) if plan.site else None,
        "sif": str(plan.sif),
        "sif_id": sif_id,
        "sif_sha256": plan.sif_sha256,
        "work": str(Path.cwd()),
        "submitted": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "steps": [_step_record(step) for step in plan.steps],
    }


def _step_record(step: JobStep) -> dict[str, Any]:
    return {
        "name": step.name,
        "argv": step.argv,
        "nodes": step.nodes,
        "gpus": step.gpus,
        "processes": step.processes,
        "resource_args": step.resource_args,
        "seeds": step.seeds,
    }


def _request_record(request: JobRequest) -> dict[str, Any]:
    """Return what was requested, without the values of variables, which may be secret."""
    env = [word.partition("=")[0] if "=" in word else word for word in request.env]
    return {**asdict(request), "env": env, "binds": [str(folder) for folder in request.binds]}


def request_again(run: Run, env: Sequence[str] = ()) -> tuple[str, list[str], JobRequest]:
    """Return the recipe's folder, the tasks with their arguments, and the request of a run, to submit it again.

    ``env``: NAME=VALUE for variables whose values are not recorded. Raises UsageError for a record that has too little
    in it.
    """
    if run.record.get("format", 1) < RECORD_FORMAT:
        raise UsageError(f"{run.folder} was submitted by an earlier version, which did not record what it requested")
    with _refuse_damage(run.folder / RECORD):
        record = Fields.of(run.record)
        argv = [word for step in record.objects("steps") for word in ("+", *step.strings("argv"))][1:]
        for name in ("site_path", "work", "sif", "sif_sha256"):
            record.text(name, "")
        request = _parse_request(record.object("request"))
        values = {word.partition("=")[0]: word for word in (*request.env, *env)}
        return record.text("recipe_path"), argv, replace(request, env=tuple(values.values()))


def check_same_image(run: Run, plan: JobPlan) -> None:
    """Raise UsageError when the image of ``run`` is another file now."""
    if plan.sif_sha256 and plan.sif_sha256 != run.record.get("sif_sha256"):
        raise UsageError(
            f"{plan.sif} is not what it was when {run.folder.name} was submitted",
            hint="--force submits with the image that is there now",
        )


_TYPES: Mapping[str, type | UnionType] = {
    "int": int,
    "int | None": int | None,
    "str | None": str | None,
    "bool": bool,
    "bool | None": bool | None,
}


def _parse_request(record: Fields) -> JobRequest:
    """Raises ValueError. A later version's fields are left out."""
    known: dict[str, Any] = {}
    for item in (item for item in fields(JobRequest) if item.name in record.data):
        value, kind = record.data[item.name], str(item.type)
        if kind in ("tuple[str, ...]", "tuple[Path, ...]"):
            known[item.name] = tuple(map(Path if "Path" in kind else str, record.strings(item.name)))
        elif isinstance(value, _TYPES[kind]) and ("bool" in kind or not isinstance(value, bool)):
            known[item.name] = value
        else:
            record.refuse(item.name, kind)
    return JobRequest(**known)


def _write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
        stream.write(text)


# ------------------------------------------------------------------------------------------------------ reading runs


@dataclass(frozen=True, slots=True)
class Run:
    """A run that was submitted; ``record`` is its run.json."""

    folder: Path
    record: Mapping[str, Any]

    @property
    def jobs(self) -> list[str]:
        """Return the names of all its jobs, in order."""
        return [
            f"{step['name']}.{index}" if step["seeds"] else step["name"]
            for step in self.record["steps"]
            for index in range(1, (len(step["seeds"]) or 1) + 1)
        ]

    @property
    def ids(self) -> dict[str, str]:
        """Job → its newest id; all jobs of an array have the array's until they go back into the queue by
        themselves.
        """
        return {job: self._read(f"{job}.job") for job in self.jobs}

    def single_id(self, job: str, id: str) -> str:
        """Return the id by which the scheduler knows this job alone; ``id`` may be its array's."""
        step, _, index = job.partition(".")
        is_element = index and id == self._read(f"{step}.array")
        return load(self.record["scheduler"]).element_id(id, int(index)) if is_element else id

    def is_cancelled(self, job: str) -> bool:
        """Return whether `cancel` was asked to end the job, alone or with all of its run."""
        return (self.folder / "cancelled").exists() or (self.folder / f"{job}.cancelled").exists()

    def exit_code(self, job: str) -> int | None:
        """Return the exit code of a job that is over, else None."""
        return _number(self._read(f"{job}.exit"))

    def times(self, job: str) -> int:
        """Return how often a job went back into the queue."""
        return _number(self._read(f"{job}.times")) or 0

    def remove_environment(self) -> None:
        """Remove the variables that its jobs got, tokens among them, and the key.

        A job does so when it is the last to end.
        """
        for name in ("environment", "key"):
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()

    def ranks(self, job: str) -> int | None:
        """Return how many processes a job has on all its nodes; None before it has started."""
        processes = _number(self._read(f"{job}.processes"))
        nodes = next(step["nodes"] for step in self.record["steps"] if step["name"] == job.partition(".")[0])
        return processes * int(nodes) if processes is not None else None

    def _read(self, name: str) -> str:
        try:
            return (self.folder / name).read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """A job as `status` shows it. ``state``: queued, running, held, done, failed, skipped, cancelled or lost."""

    run: str
    job: str
    id: str
    state: str
    detail: str
    resubmitted: int
    exit_code: int | None
    started: str = ""

    @property
    def is_over(self) -> bool:
        """Return whether the job has ended, in whatever way."""
        return self.state in ("done", "failed", "skipped", "cancelled", "lost")


def find_runs(names: Sequence[str], runs: Path, log: Callable[[str], None] = lambda line: None) -> list[Run]:
    """Return runs by folder, by name below ``runs``, or by a job's id; all of ``runs`` when none is named.

    ``log`` gets a line for each that cannot be read and was not named. Raises UsageError when there is no such run.
    """
    known = {
        path.parent.name: path.parent for path in sorted(runs.glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    }
    if not names:
        return _readable(known.values(), log)
    named_runs = []
    for name in names:
        if (Path(name) / "run.json").is_file():
            named_runs.append(_open_run(Path(name).absolute()))
        elif name in known:
            named_runs.append(_open_run(known[name]))
        elif with_id := [
            run for run in _readable(known.values(), log) if name in run.ids.values() or jobs_named(run, name)
        ]:
            named_runs.append(with_id[0])
        else:
            raise UsageError(
                f"no run '{name}' in {runs}." + nearest(name, known), hint="--runs DIR, or the run's folder"
            )
    return named_runs


def _readable(folders: Iterable[Path], log: Callable[[str], None]) -> list[Run]:
    readable = []
    for folder in folders:
        try:
            readable.append(_open_run(folder))
        except UsageError as error:
            log(f"skipped: {error}")
    return readable


def _open_run(folder: Path) -> Run:
    with _refuse_damage(folder / RECORD):
        record = Fields.of(parse_json(read_regular(folder / RECORD, follow=True)))
        if record.data.get("format", 1) not in range(1, RECORD_FORMAT + 1):
            raise ValueError("written by a later version of Ekiben")
        record.basename("scheduler")
        for step in record.objects("steps"):
            step.basename("name")
            step.strings("seeds")
            if "nodes" in step:
                step.size("nodes")
        return Run(folder, record.data)


@contextlib.contextmanager
def _refuse_damage(path: Path) -> Iterator[None]:
    """Turn a ValueError or an OSError of the block into a UsageError that names the record."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path}: cannot be read: {error}", hint="remove the folder of a run that cannot be read"
        ) from error


def _number(text: str) -> int | None:
    """None for what a job did not finish writing, too."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


# ---------------------------------------------------------------------------------------- status, cancel, wait, logs


def status(runs: Sequence[Run]) -> list[JobStatus]:
    """Return every job of ``runs``.

    Each kind of scheduler is asked once. Raises SchedulerError when it does not answer.
    """
    ids_before = {run.folder: run.ids for run in runs}
    waiting: dict[str, set[str]] = {}
    for run in runs:
        # A job that left 75 may be in the queue again.
        ids = {id for job, id in ids_before[run.folder].items() if run.exit_code(job) in (None, REQUEUE)}
        waiting.setdefault(run.record["scheduler"], set()).update(ids)
    queues = {name: load(name).jobs(sorted(ids)) for name, ids in waiting.items()}
    statuses = [
        (run, job_status(run, job, ids_before[run.folder][job], queues[run.record["scheduler"]]))
        for run in runs
        for job in run.jobs
    ]
    states = _with_records(statuses, ids_before)
    for run in runs:
        if all(job.state in _ENDED for job in states if job.run == run.folder.name):
            run.remove_environment()
    return states


def _with_records(statuses: Sequence[tuple[Run, JobStatus]], ids: Mapping[Path, Mapping[str, str]]) -> list[JobStatus]:
    """Return the status of jobs with what the scheduler's records say of those that did not end by themselves."""
    unknown: dict[str, set[str]] = {}
    for run, current in statuses:
        if current.state == "lost" or (current.state == "failed" and current.exit_code in (REQUEUE, 128 + 9, 128 + 15)):
            unknown.setdefault(run.record["scheduler"], set()).add(ids[run.folder][current.job])
    records = {name: load(name).ended(sorted(ids_of_jobs)) for name, ids_of_jobs in unknown.items()}
    result = []
    for run, current in statuses:
        id, index = ids[run.folder][current.job], int(current.job.partition(".")[2] or 0)
        known = records.get(run.record["scheduler"], {})
        job = known.get((id, index)) or known.get((id, 0))
        if job and (current.state == "lost" or job.state != "done"):
            state = "failed" if job.state == "done" else job.state  # done leaves an exit code behind
            detail = job.detail or "ended without an exit code; its log may tell"
            if current.exit_code and state == "failed" and "exit code" not in detail:
                detail = f"{current.detail}, {detail}"
            current = replace(current, state=state, detail=detail, started=job.started)
        result.append(current)
    return result


def job_status(run: Run, job: str, id: str, queue: Mapping[tuple[str, int], Job]) -> JobStatus:
    """Return the status of one job, whose id was ``id`` before the scheduler was asked for ``queue``."""
    index = int(job.partition(".")[2] or 0)
    code = run.exit_code(job)  # read after the queue was asked: a job leaves its code behind before it leaves
    queued = queue.get((id, index)) or queue.get((id, 0))
    started = ""
    if code is not None and not (code == REQUEUE and queued):  # Slurm puts a job back that it preempted
        state, detail = ("done", "") if code == 0 else ("failed", f"exit code {code}")
        if code and run.is_cancelled(job):
            state = "cancelled"
    elif queued:
        state, detail, started = queued.state, queued.detail, queued.started
    elif run.ids[job] != id:
        state, detail = "queued", f"as job {run.ids[job]}"  # while the queue was asked
    elif run.is_cancelled(job):
        state, detail = "cancelled", ""
    elif failed := [other for other in run.jobs[: run.jobs.index(job)] if run.exit_code(other)]:
        state, detail = "skipped", f"{failed[0]} failed"
    else:
        state, detail = "lost", "neither in the queue nor ended by itself; its log may tell"
    return JobStatus(
        run=run.folder.name,
        job=job,
        id=run.single_id(job, id),
        state=state,
        detail=detail,
        resubmitted=run.times(job),
        exit_code=code,
        started=started,
    )


def cancel(run: Run, only: Sequence[str] = ()) -> list[str]:
    """Take what is not over out of the queue, all of the run or ``only`` these jobs, and return the ids.

    Raises UsageError when the run has no such job, SchedulerError when the scheduler refuses.
    """
    for job in only:
        if job not in run.jobs:
            raise UsageError(f"{run.folder.name} has no job '{job}'." + nearest(job, run.jobs))
    for marker in [f"{job}.cancelled" for job in only] or ["cancelled"]:
        (run.folder / marker).touch()  # so that no job puts itself back
    newest = run.ids
    unfinished = [job for job in status([run]) if not job.is_over and (not only or job.job in only)]
    ids = sorted({job.id if only else newest[job.job] for job in unfinished})
    if ids:
        load(run.record["scheduler"]).cancel(ids)
    if not only:
        run.remove_environment()
    return ids


def jobs_named(run: Run, name: str) -> list[str]:
    """Return the jobs of an array that ``name`` is the own id of; none where it names all of a run."""
    newest = run.ids
    return [job for job, id in newest.items() if id != name and run.single_id(job, id) == name]


def wait(run: Run, log: Callable[[str], None]) -> list[JobStatus]:
    """Wait until all jobs of the run are over; ``log`` gets each change. Raises SchedulerError."""
    shown: dict[str, str] = {}
    while True:
        jobs = status([run])
        for job in jobs:
            line = f"{job.job}: {job.state}{f' ({job.detail})' if job.detail and job.state != 'running' else ''}"
            if shown.get(job.job) != line:
                shown[job.job] = line
                log(line)
        if all(job.is_over for job in jobs):
            return jobs
        time.sleep(_POLL_SECONDS)


def log_lines(run: Run, job: str | None, *, rank: int | None = None, follow: bool) -> Iterator[str]:
    """Yield what a job, or one rank of it, wrote, and with ``follow`` what it writes until it is over.

    Raises UsageError when the run has no such job or the job no such rank, SchedulerError when the scheduler does not
    answer.
    """
    if job is not None and job not in run.jobs:
        raise UsageError(f"{run.folder.name} has no job '{job}'." + nearest(job, run.jobs))
    started = [name for name in run.jobs if (run.folder / f"{name}.log").exists()]
    name = job or (started[-1] if started else run.jobs[0])
    path, offset = run.folder / f"{name}.log", 0
    if rank is not None:
        path = _rank_log(run, name, rank)
    while True:
        over = not follow or all(job.is_over for job in status([run]) if job.job == name)
        with contextlib.suppress(FileNotFoundError), path.open(errors="replace") as stream:
            stream.seek(offset)
            yield from stream
            offset = stream.tell()
        if over:
            return
        time.sleep(1)


def _rank_log(run: Run, job: str, rank: int) -> Path:
    """Return the log of one rank; of the only one, the job's.

    Raises UsageError when the job has no such rank, or no such logs.
    """
    count = run.ranks(job)
    if count is None:
        raise UsageError(f"{job} of {run.folder.name} has not started yet: its ranks are not known")
    if rank >= count:
        raise UsageError(
            f"--rank {rank}: {job} has {f'{count} ranks, 0 to {count - 1}' if count > 1 else 'one rank, 0'}"
        )
    if count == 1:
        return run.folder / f"{job}.log"
    logs = run.folder / f"{job}.ranks"
    if run.exit_code(job) is not None and not logs.exists():
        raise UsageError(f"{job} of {run.folder.name} has no logs of single ranks", hint="leave out --rank")
    return logs / f"{rank}.log"
