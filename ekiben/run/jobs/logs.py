"""The logs of submitted jobs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from ekiben.core.errors import UsageError, nearest
from ekiben.run.jobs.records import Run, RunFiles
from ekiben.run.jobs.states import status

_PIECE = 1 << 16  # bytes of a log


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
