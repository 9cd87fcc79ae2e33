"""Submitted runs: write and submit them, status, logs, cancel. records.py reads them.

A run is a folder below ekiben-runs/: `1-train.sh` (the script of its first step), `1-train.log`, `job.sh` (what all
scripts do), `live/` (of --live: the recipe's scripts as they were), `launch_node.py` and `launch_network.py` (start the
processes on a node, inside the container), `environment` (what it gets of this shell's, tokens too: for its owner only,
and removed when all jobs have ended), `key` (by which the launchers know each other), `run.json`. Of every job, whose
name is the step's, or `1-train.2` in an array: `.exit` (the exit code, once it is over), `.times` (how often it went
back into the queue), `.attempt` (which one this is, where an ended job's script was submitted again), `.job` (its
newest id; of an array, `1-train.array` has the array's), `.processes` (how many on each node), `.ranks/3.log` (what one
of several processes wrote), `.cancelled`. A job script needs bash and Apptainer or SingularityCE on the compute nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ekiben.core.errors import EkibenError, EngineError, SchedulerError, StoreError, UsageError, nearest
from ekiben.core.files import open_regular
from ekiben.core.folder import Folder
from ekiben.core.paths import PROJECT_ROOT
from ekiben.core.process import name_exit
from ekiben.formats.sif import read_sif
from ekiben.run.jobs.plan import JobPlan, JobStep
from ekiben.run.jobs.records import RECORD, RECORD_FORMAT, Run, RunFiles
from ekiben.run.jobs.request import JobRequest
from ekiben.run.jobs.script import JOB_PROGRAM, LIVE, environment_text, job_program, script
from ekiben.run.schedulers import Job, Scheduler, load
from ekiben.spec.recipe import LAUNCHER

REQUEUE = 75
_POLL_SECONDS = 5.0
_ENDED = ("done", "failed", "skipped", "cancelled")  # "lost": also if the scheduler lost its records
_IDS_AT_ONCE = 1000  # for a scheduler's program; an argument list has an end
_PIECE = 1 << 16  # bytes of a log


# ------------------------------------------------------------------------------------------------------ submitting


def submit(plan: JobPlan) -> dict[str, str]:
    """Write the run's folder, submit its steps, and return step → job id.

    Raises SchedulerError when the scheduler refuses one; then nothing is left in the queue.
    """
    _check_image(plan)
    scheduler = load(plan.scheduler)
    if reason := scheduler.unavailable():
        raise EngineError(f"{scheduler.TITLE} cannot be used here: {reason}")
    with _new_run(plan) as (runs, folder):
        return _submit_steps(plan, scheduler, runs, folder)


def write(plan: JobPlan) -> None:
    """Write the run's folder, whose scripts are submitted by hand. Raises UsageError where it cannot be written."""
    _check_image(plan)
    with _new_run(plan):
        pass


def _check_image(plan: JobPlan) -> None:
    if not plan.sif.is_file():
        raise UsageError(f"{plan.sif} is not there", hint=f"{plan.image.build_hint}, or --sif PATH")


def _submit_steps(plan: JobPlan, scheduler: Scheduler, runs: Folder, folder: Folder) -> dict[str, str]:
    ids: dict[str, str] = {}
    after = None
    try:
        for step in plan.steps:
            after = ids[step.name] = scheduler.submit(plan.folder / f"{step.name}.sh", plan.command_args, after)
            for name in (*([f"{step.name}.array"] if step.seeds else []), *(f"{job}.job" for job in step.jobs)):
                with contextlib.suppress(FileExistsError):  # the job has begun, and has a newer id
                    _write_file(folder, name, after + "\n", 0o644)
    except (SchedulerError, OSError) as error:
        if ids:
            scheduler.cancel(list(ids.values()))
        runs.remove_tree(plan.folder.name)
        if isinstance(error, OSError):
            raise UsageError(f"{plan.folder} cannot be written: {error.strerror}") from error
        raise
    return ids


@contextlib.contextmanager
def _new_run(plan: JobPlan) -> Iterator[tuple[Folder, Folder]]:
    """Yield the folder of all runs, which other users may write, and in it the new one with all that its jobs need."""
    scripts = {step.name: script(plan, step) for step in plan.steps}
    environment = environment_text(os.environ, plan.request.env)
    name = plan.folder.name
    with contextlib.ExitStack() as stack:
        try:
            plan.folder.parent.mkdir(parents=True, exist_ok=True)
            runs = stack.enter_context(Folder.open(plan.folder.parent))
            runs.new_folder(name)
        except FileExistsError:
            hint = "name a new one" if plan.by_hand else "submit again in a second"
            raise UsageError(f"{plan.folder} exists already", hint=hint) from None
        except OSError as error:
            raise UsageError(
                f"{plan.folder} cannot be made: {error.strerror}", hint="--output DIR" if plan.by_hand else "--runs DIR"
            ) from error
        try:
            folder = stack.enter_context(runs.folder(name))
            _write_files(plan, folder, scripts, environment)
        except BaseException as error:
            runs.remove_tree(name)
            if isinstance(error, OSError):
                raise UsageError(f"{plan.folder} cannot be written: {error.strerror}") from error
            raise
        yield runs, folder


def _write_files(plan: JobPlan, folder: Folder, scripts: Mapping[str, str], environment: str) -> None:
    for path in (PROJECT_ROOT / "entrypoints" / name for name in LAUNCHER):
        _write_file(folder, path.name, path.read_text(encoding="utf-8"), path.stat().st_mode & 0o777)
    _write_file(folder, JOB_PROGRAM, job_program(), 0o644)
    if plan.live:
        folder.new_folder(LIVE)
        with folder.folder(LIVE) as copies:
            for inside, path in plan.live.files.items():
                _copy_file(copies, inside, path)
    for name, text in scripts.items():
        _write_file(folder, f"{name}.sh", text, 0o755)
    _write_file(folder, "key", secrets.token_hex(16), 0o600)
    # Tokens may be among them.
    _write_file(folder, "environment", environment, 0o600)
    text = json.dumps(_record(plan), indent=1, ensure_ascii=False) + "\n"
    # Written last: a run exists from its record on. Bytes of an argument that are not UTF-8 become JSON escapes.
    _write_file(folder, f".{RECORD}", text.encode("utf-8", "backslashreplace"), 0o644)
    folder.move(f".{RECORD}", RECORD)


def _write_file(folder: Folder, name: str, content: str | bytes, mode: int) -> None:
    with folder.create(name) as stream:
        os.fchmod(stream.fileno(), mode)
        data = memoryview(content.encode() if isinstance(content, str) else content)
        while data:
            data = data[stream.write(data) :]


def _copy_file(folder: Folder, inside: str, path: Path) -> None:
    """Copy a file to the path ``inside`` of a folder; its folders are made."""
    above, _, rest = inside.partition("/")
    if rest:
        if not folder.lexists(above):
            folder.new_folder(above)
        with folder.folder(above) as lower:
            _copy_file(lower, rest, path)
        return
    with open_regular(path) as source, folder.create(inside) as copy:
        os.fchmod(copy.fileno(), 0o644 | os.fstat(source.fileno()).st_mode & 0o111)
        shutil.copyfileobj(source, copy)


def _record(plan: JobPlan) -> dict[str, Any]:
    """Return the content of run.json."""
    sif_id = None
    with contextlib.suppress(StoreError):  # a SIF of another program, which a runtime may read
        sif_id = read_sif(plan.sif).id
    return {
        "format": RECORD_FORMAT,
        "image": plan.image.name,
        "recipe_path": str(plan.image.recipe.folder.absolute()) if plan.image.recipe else None,
        "request": _request_record(plan.request),
        "scheduler": plan.scheduler,
        "site": plan.site.name if plan.site else None,
        "site_path": str(plan.site.path.absolute()) if plan.site else None,
        "sif": str(plan.sif),
        "sif_id": sif_id,
        "sif_state": asdict(plan.sif_state) if plan.sif_state else None,
        "work": str(Path.cwd()),
        **({"by_hand": True} if plan.by_hand else {}),
        **({"live": plan.live.origin} if plan.live else {}),
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


def request_again(run: Run, env: Sequence[str] = ()) -> tuple[list[str], JobRequest]:
    """Return the tasks with their arguments, and the request of a run, to submit it again.

    ``env``: NAME=VALUE for variables whose values are not recorded. Raises UsageError for a record that has too little
    in it.
    """
    record, arguments = run.record, [step.argv for step in run.record.steps]
    if record.format < RECORD_FORMAT:
        raise UsageError(f"{run.folder} was submitted by an earlier version, which did not record what it requested")
    if not record.request or not record.sif or not all(arguments):
        raise UsageError(f"{run.folder / RECORD}: has too little in it to be submitted again")
    argv = [word for step in arguments for word in ("+", *(step or ()))][1:]
    values = {word.partition("=")[0]: word for word in (*record.request.env, *env)}
    return argv, replace(record.request, env=tuple(values.values()))


def check_same_image(run: Run, plan: JobPlan) -> None:
    """Raise UsageError when the image of ``run`` was replaced."""
    if plan.sif_state and run.record.sif_state and not run.record.sif_state.is_same(plan.sif):
        raise UsageError(
            f"{plan.sif} was changed since {run.folder.name} was submitted",
            hint="--force submits with the image that is there now",
        )


# ---------------------------------------------------------------------------------------- status, cancel, wait, logs


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
    attempt: int = 1

    @property
    def is_over(self) -> bool:
        """Return whether the job has ended, successfully or not."""
        return self.state in ("done", "failed", "skipped", "cancelled", "lost")


def status(runs: Sequence[Run], log: Callable[[str], None] | None = None) -> list[JobStatus]:
    """Return every job of ``runs``. Each kind of scheduler is asked once.

    log: gets a line for each run whose files cannot be read, or whose scheduler does not answer, while others can be
    shown; without it such a run raises UsageError or SchedulerError.
    """
    readable: list[tuple[Run, Mapping[str, str]]] = []
    waiting: dict[str, set[str]] = {}
    for run in runs:
        with _skipped(log if len(runs) > 1 else None), run.files() as files:
            newest = {job: files.id(job) for job in run.elements}
            # A job that left 75 may be in the queue again.
            unended = {id for job, id in newest.items() if id and files.exit_code(job) in (None, REQUEUE)}
            waiting.setdefault(run.record.scheduler, set()).update(unended)
            readable.append((run, newest))
    queues = {}
    for name, asked in waiting.items():
        with _skipped(log if len(waiting) > 1 else None, f"the runs of {name}"):
            queues[name] = _queue(load(name), sorted(asked))
    statuses: list[tuple[Run, str, JobStatus]] = []
    for run, ids in readable:
        if run.record.scheduler in queues:
            with _skipped(log if len(runs) > 1 else None):
                jobs = _run_status(run, ids, queues[run.record.scheduler])
                statuses += [(run, ids[current.job], current) for current in jobs]
    states = _with_records(statuses)
    open_runs = {run.location for (run, _, _), job in zip(statuses, states, strict=True) if job.state not in _ENDED}
    for run in dict.fromkeys(run for run, _, _ in statuses):
        if run.location not in open_runs:
            run.remove_environment()
    return states


@contextlib.contextmanager
def _skipped(log: Callable[[str], None] | None, what: str = "") -> Iterator[None]:
    """Log an error of the block, if there is a ``log``. ``what`` names the skipped item in it."""
    try:
        yield
    except EkibenError as error:
        if log is None:
            raise
        log(f"skipped: {what}: {error}" if what else f"skipped: {error}")


def _queue(scheduler: Scheduler, ids: Sequence[str]) -> dict[tuple[str, int], Job]:
    """Return the jobs in the queue of those with ``ids``, in several queries: a command line is limited."""
    queue: dict[tuple[str, int], Job] = {}
    for at in range(0, len(ids), _IDS_AT_ONCE):
        queue |= scheduler.jobs(ids[at : at + _IDS_AT_ONCE])
    return queue


def _run_status(run: Run, ids: Mapping[str, str], queue: Mapping[tuple[str, int], Job]) -> Iterator[JobStatus]:
    failed = ""
    with run.files() as files:  # opened again: a job writes its exit code before it leaves the queue
        for job in run.elements:
            current = job_status(files, job, ids[job], queue, failed)
            failed = failed or (job if current.exit_code else "")
            yield current


def _with_records(statuses: Sequence[tuple[Run, str, JobStatus]]) -> list[JobStatus]:
    """Return the status of jobs, completed by the scheduler's records for those that were ended."""
    unknown: dict[str, dict[str, None]] = {}
    for run, id, current in reversed(statuses):
        asked = unknown.setdefault(run.record.scheduler, {})
        is_killed = current.state == "failed" and current.exit_code in (REQUEUE, 128 + 9, 128 + 15)
        if id and (current.state == "lost" or is_killed) and len(asked) < _IDS_AT_ONCE:
            asked[id] = None
    records = {name: load(name).ended(sorted(ids)) for name, ids in unknown.items() if ids}
    result = []
    for run, id, current in statuses:
        known, index = records.get(run.record.scheduler, {}), run.elements[current.job][1]
        job = known.get((id, index)) or known.get((id, 0)) if id in unknown[run.record.scheduler] else None
        if job and (current.state == "lost" or job.state != "done"):
            state = "failed" if job.state == "done" else job.state  # done leaves an exit code behind
            detail = job.detail or "ended without an exit code; its log may tell"
            if current.exit_code and state == "failed" and "exit code" not in detail:
                detail = f"{current.detail}, {detail}"
            current = replace(current, state=state, detail=detail, started=job.started)
        result.append(current)
    return result


def job_status(
    files: RunFiles, job: str, id: str, queue: Mapping[tuple[str, int], Job], failed_before: str = ""
) -> JobStatus:
    """Return the status of one job, whose id was ``id`` before the scheduler was asked for ``queue``, and ``files``
    opened.

    failed_before: the first job of the run before it that failed.
    """
    run, index = files.run, files.run.elements[job][1]
    code = files.exit_code(job)
    queued = (queue.get((id, index)) or queue.get((id, 0))) if id else None
    started = ""
    if code is not None and not (code == REQUEUE and queued):  # Slurm requeues a job that it preempted
        state, detail = ("done", "") if code == 0 else ("failed", name_exit(code))
        if code and files.is_cancelled(job):
            state = "cancelled"
    elif queued:
        state, detail, started = queued.state, queued.detail, queued.started
    elif (newest := files.id(job)) != id:
        state, detail = "queued", f"as job {newest}"  # it ended during the query
    elif files.is_cancelled(job):
        state, detail = "cancelled", ""
    elif failed_before:
        state, detail = "skipped", f"{failed_before} failed"
    elif not id and run.record.by_hand:
        state, detail = "queued", f"not started: {run.folder / run.elements[job][0].name}.sh is submitted by hand"
    elif not id:
        state, detail = "lost", f"no job's id is in {job}.job"
    else:
        state, detail = "lost", "neither in the queue nor ended by itself; its log may tell"
    return JobStatus(
        run=run.folder.name,
        job=job,
        id=files.single_id(job, id),
        state=state,
        detail=detail,
        resubmitted=files.times(job),
        exit_code=code,
        started=started,
        attempt=files.attempt(job),
    )


def cancel(run: Run, only: Sequence[str] = ()) -> list[str]:
    """Cancel the jobs that have not ended, all of the run or ``only`` these, and return the ids.

    Raises UsageError when the run has no such job, SchedulerError when the scheduler refuses.
    """
    for job in only:
        if job not in run.elements:
            raise UsageError(f"{run.folder.name} has no job '{job}'." + nearest(job, run.jobs))
    with run.files() as files:
        for marker in [f"{job}.cancelled" for job in only] or ["cancelled"]:
            with contextlib.suppress(FileExistsError):
                files.folder.create(marker, 0o666).close()  # so that no job requeues itself
        newest = {job: files.id(job) for job in run.elements}
    unfinished = [job for job in status([run]) if not job.is_over and (not only or job.job in only)]
    ids = sorted({job.id if only else newest[job.job] for job in unfinished} - {""})
    for at in range(0, len(ids), _IDS_AT_ONCE):
        load(run.record.scheduler).cancel(ids[at : at + _IDS_AT_ONCE])
    if not only:
        run.remove_environment()
    return ids


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


# --------------------------------------------------------------------------------------------------------------- logs


def log_content(run: Run, job: str | None, *, rank: int | None = None, follow: bool) -> Iterator[bytes]:
    """Yield what a job, or one rank of it, wrote, and with ``follow`` what it writes until it is over: pieces of
    limited size.

    Raises UsageError when the run has no such job, the job no such rank, or its log is a link or no regular file,
    SchedulerError when the scheduler does not answer.
    """
    if job is not None and job not in run.elements:
        raise UsageError(f"{run.folder.name} has no job '{job}'." + nearest(job, run.jobs))
    with run.files() as files:
        name = job or next((name for name in reversed(run.elements) if files.has_log(name)), run.jobs[0])
        number = None if rank is None else _log_of_rank(files, name, rank)
    offset = 0
    while True:
        over = not follow or all(job.is_over for job in status([run]) if job.job == name)
        with run.files() as files:
            log = files.open_log(name, number)
        with log or contextlib.nullcontext():
            if log:
                log.seek(offset)
                while piece := log.read(_PIECE):
                    offset += len(piece)
                    yield piece
        if over:
            return
        time.sleep(1)


def _log_of_rank(files: RunFiles, job: str, rank: int) -> int | None:
    """Return the rank whose log to read; None for the only one, which has the job's.

    Raises UsageError when the job has no such rank, or no such logs.
    """
    count, name = files.ranks(job), files.run.folder.name
    if count is None:
        raise UsageError(f"{job} of {name} has not started yet: its ranks are not known")
    if rank >= count:
        raise UsageError(
            f"--rank {rank}: {job} has {f'{count} ranks, 0 to {count - 1}' if count > 1 else 'one rank, 0'}"
        )
    if count == 1:
        return None
    if files.exit_code(job) is not None and f"{job}.ranks" not in files.names:
        raise UsageError(f"{job} of {name} has no logs of single ranks", hint="leave out --rank")
    return rank
