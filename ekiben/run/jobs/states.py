"""The states of submitted jobs: from their own files, the scheduler's queue and its records."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ekiben.core.errors import EkibenError
from ekiben.core.process import name_exit
from ekiben.run.jobs.records import Run, RunFiles
from ekiben.run.schedulers import Job, Scheduler, load

REQUEUE = 75  # exit code of a job that saved a checkpoint
IDS_AT_ONCE = 1000  # for a scheduler's program; an argument list has an end
_ENDED = ("done", "failed", "skipped", "cancelled")  # "lost": also if the scheduler lost its records
_POLL_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """A job as `status` shows it. ``state``: queued, running, held, done, failed, skipped, cancelled or lost.

    ``image``: its name, "" where that was not recorded; ``names_image``: the job's step names it, beside the run's.
    """

    run: str
    job: str
    id: str
    state: str
    detail: str
    resubmitted: int
    exit_code: int | None
    started: str = ""
    attempt: int = 1
    image: str = ""
    names_image: bool = False

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
    for at in range(0, len(ids), IDS_AT_ONCE):
        queue |= scheduler.jobs(ids[at : at + IDS_AT_ONCE])
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
        if id and (current.state == "lost" or is_killed) and len(asked) < IDS_AT_ONCE:
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
    run, (step, index) = files.run, files.run.elements[job]
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
        state, detail = "queued", f"not started: {run.folder / step.name}.sh is submitted by hand"
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
        image=(step.image or run.record.image).name,
        names_image=step.image is not None,
    )


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
