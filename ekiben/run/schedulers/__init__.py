"""Schedulers of clusters: each is a module of this folder that fits one Protocol.

To add a scheduler, add one file here and nothing elsewhere; its name is the file's name. It has what `Scheduler` lists:
the parts of a job script that differ (`HOOKS`), how options are written (`PREFIX`, `resource_args`, `directives`), what
there is (`unavailable`, `limits`), and `submit`, `jobs`, `cancel`. `VARIABLES` says which environment variables are a
job's own, `LOCAL_FOLDER` where a job's folder on the node's disk is. A distribution of your own can offer one, too: an
entry point of the group `ekiben.schedulers` that names the module. tests/unit/test_plugins.py holds each against its
Protocol, tests/unit/ekiben/run/test_job_program.py its job scripts against bash. A module whose name begins with an
underscore is none.
"""

from __future__ import annotations

import functools
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from ekiben.core import plugins
from ekiben.core.decisions import log_decision
from ekiben.core.errors import EngineError, UsageError
from ekiben.core.process import TIMED_OUT, run


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a job asks for. ``args``: the options that request nodes and GPUs, one directive each.

    ``seconds``: walltime, ``notice``: how long before its end the job gets a signal; ``jobs``: of an array, 0: it is
    none. ``log`` is where the scheduler's own words go.
    """

    name: str
    nodes: int
    args: Sequence[str]
    seconds: int | None
    notice: int
    jobs: int
    log: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScriptHooks:
    """The scheduler's part of a job script, as bash.

    ``job``, ``index``: the job's id, of an array the array's, and its index there (from 1; 0: it is in none).
    ``nodes``: prints their names, the first one first. ``start_all``: starts `bash "$script" node NUMBER "$nodes"
    "$port" "$name"` on all nodes together; else ``start_remote`` starts one node other than the first. ``requeue``:
    puts this very job back into the queue; options that a site wants on the command line are in the array
    ``command_args``. ``prepare``: first lines. ``needs_timer``: the scheduler sends no signal before the walltime
    ends. ``requeue_waiting``: puts a job back whose turn has not come. ``node_number``: the node's number, from 0,
    where ``start_all`` cannot pass it. ``is_queued``: succeeds where job ``$1``, in an array its element ``$index``,
    waits or runs; fails where it has ended, and where the scheduler does not answer within seconds.
    """

    job: str
    index: str
    nodes: str
    requeue: str
    start_all: str = ""
    start_remote: str = ""
    node_number: str = "$1"
    prepare: str = ""
    needs_timer: bool = False
    requeue_waiting: str = ""
    is_queued: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one queue allows; None: not known.

    ``where`` names it. ``gpus``, ``cpus`` and ``memory_mib`` are of a node.
    """

    where: str
    gpus: int | None = None
    nodes: int | None = None
    seconds: int | None = None
    cpus: int | None = None
    memory_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A queue in a site profile: ``request`` is its options; None: its jobs cannot determine it."""

    name: str | None = None
    request: tuple[str, ...] = ()
    group_option: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A job in the queue: ``queued``, ``running``, or ``held``; one that has ended: ``done``, ``failed`` or
    ``cancelled``.

    ``detail``: nodes, why it waits, or how it ended. ``started``: when, as the scheduler writes it.
    """

    state: str
    detail: str = ""
    started: str = ""


class Scheduler(Protocol):
    """As per PEP 544, ``self`` is ignored when the protocol is applied to a module."""

    TITLE: str  # as people call it
    PREFERENCE: int  # of several schedulers on a machine, the smallest is used
    HOOKS: JobScriptHooks
    SUBMIT: Sequence[str]  # of a command that submits the script after it
    PREFIX: str  # prefix of an option line in the script
    VARIABLES: tuple[str, ...]  # environment variables that belong to a job: prefixes that end with _, and names
    LOCAL_FOLDER: str | None  # the variable with the job's own folder on the node's disk
    JOB_ID: str  # a regular expression for the id of a job or an array, for `jobs` and `cancel`
    GPU_OPTION: str | None  # how most ask for a GPU where each site names them itself, and `resource_args` cannot

    def unavailable(self) -> str | None:
        """Why nothing can be submitted from here, or None."""

    OPTIONS: Mapping[
        str, str
    ]  # its option for the partition, account, qos, cpus and memory (in MiB) of a job, and exclusive

    def resource_args(self, nodes: int, gpus: int, cpus: int | None, memory_mib: int | None) -> Sequence[str]:
        """Return options for nodes and their resources, without a site profile.

        Raises UsageError where only a site can.
        """

    def requested_gpus(self, args: Sequence[str]) -> int | None:
        """Return the GPUs per node that the scheduler's own options request; None if unknown."""

    def example(self, line: str, gpu: bool) -> str:
        """Return a command that submits the shell command ``line`` as a job of two hours, for people to paste."""

    def queue(self, environment: Mapping[str, str], gpus: bool) -> Queue | None:
        """Return the queue this very job runs in, for a site profile; None outside of its jobs.

        ``gpus``: the node has some.
        """

    def directives(self, request: Request) -> list[str]:
        """Return the options of a job script."""

    def limits(self, args: Sequence[str]) -> Limits:
        """Return the limits of the queue that ``args`` name."""

    def interactive(self, args: Sequence[str], seconds: int | None, command: Sequence[str]) -> list[str] | None:
        """Return the command line for ``command`` on a node, in this terminal; None if only shells can be started."""

    def submit(self, script: Path, args: Sequence[str], after: str | None) -> str:
        """Submit a job that waits for job ``after``, and return its id.

        Raises SchedulerError with the scheduler's message.
        """

    def jobs(self, ids: Sequence[str]) -> Mapping[tuple[str, int], Job]:
        """Return the jobs in the queue, by (id, index in the array or 0). Raises SchedulerError."""

    def ended(self, ids: Sequence[str]) -> Mapping[tuple[str, int], Job]:
        """Return the end of jobs from the scheduler's records; empty where it keeps none."""

    def element_id(self, id: str, index: int) -> str:
        """Return the id of one job of the array ``id``, as users and ``cancel`` name it."""

    def cancel(self, ids: Sequence[str]) -> None:
        """Raise SchedulerError when the scheduler refuses."""


GROUP = "ekiben.schedulers"


def names() -> list[str]:
    """Name every scheduler, installed or not. Nothing is imported."""
    return plugins.names(__name__, GROUP)


def load(name: str) -> Scheduler:
    """Import one scheduler. Raises UsageError when there is none of this name."""
    return cast(Scheduler, plugins.load(__name__, GROUP, name, option="--scheduler", kind="scheduler"))


@functools.cache
def job_id_pattern(name: str) -> re.Pattern[str]:
    """Return the pattern of job ids of the scheduler ``name``: other texts could be options, or lists."""
    return re.compile(load(name).JOB_ID, re.ASCII)


def by_preference() -> dict[str, Scheduler]:
    """Return every scheduler by name, in the order in which they are tried."""
    schedulers = [(name, load(name)) for name in names()]
    return dict(sorted(schedulers, key=lambda one: (one[1].PREFERENCE, one[0])))


def variables() -> tuple[str, ...]:
    """Return the variables of a job, of whichever scheduler: prefixes that end with _, and names."""
    return tuple(dict.fromkeys(name for one in by_preference().values() for name in one.VARIABLES))


def local_folders() -> tuple[str, ...]:
    """Return the variables that name a job's own folder on the node, best first; TMPDIR is the last."""
    return (*(one.LOCAL_FOLDER for one in by_preference().values() if one.LOCAL_FOLDER), "TMPDIR")


ANSWER_SECONDS = 20.0  # for a small question: Slurm's own programs retry for minutes when its controller is down
LIST_SECONDS = 120.0  # for lists and records of jobs, which may be long
_SILENT_SECONDS = 300.0  # pause before asking a program that did not answer
_GAVE_UP_SECONDS = 3.0  # or that failed so late: sinfo tries for 9 s where its controller's address refuses connections
_silent: dict[str, tuple[float, subprocess.CompletedProcess[str]]] = {}


def ask(argv: Sequence[str], *, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a scheduler's program that asks and changes nothing, and return what it printed; exit code 124 where it does
    not answer.

    timeout: seconds, ANSWER_SECONDS where none are given. That there was no answer holds for some minutes: a command
    asks several times.
    """
    since, answer = _silent.get(argv[0], (0.0, None))
    if answer and time.monotonic() - since < _SILENT_SECONDS:
        return answer
    began = time.monotonic()
    done = run(argv, check=False, timeout=timeout or ANSWER_SECONDS)
    if done.returncode == TIMED_OUT or (done.returncode and time.monotonic() - began > _GAVE_UP_SECONDS):
        _silent[argv[0]] = time.monotonic(), done
    return done


def choose() -> str:
    """Return the scheduler of this machine. Raises EngineError with each one's reason."""
    reasons = {name: scheduler.unavailable() for name, scheduler in by_preference().items()}
    usable = next((name for name, reason in reasons.items() if reason is None), None)
    if usable is None:
        raise EngineError(
            "no scheduler can be used here:\n" + "\n".join(f"  {name}: {reason}" for name, reason in reasons.items()),
            hint="submit on a login node of the cluster; `--scheduler NAME --dry-run` writes a script anywhere",
        )
    alternatives = [
        f"{name}: {reason or 'usable, of lower preference'}" for name, reason in reasons.items() if name != usable
    ]
    log_decision("scheduler", usable, "; ".join(["usable here", *alternatives]))
    return usable


_TIMES = re.compile(r"(?:(?P<d>\d+)-)?(?P<h>\d+):(?P<m>[0-5]?\d)(?::(?P<s>[0-5]?\d))?")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_of(text: str) -> int:
    """Return the seconds of ``2:00:00``, ``1-12:00:00``, ``90m``, ``2h`` or ``3d``. Raises UsageError."""
    if match := re.fullmatch(r"(\d+)([smhd])", text):
        seconds = int(match[1]) * _UNITS[match[2]]
    elif match := _TIMES.fullmatch(text):
        days, hours, minutes, rest = (int(match[name] or 0) for name in "dhms")
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
        if match["d"] is None and match["s"] is None:
            raise UsageError(
                f"--time {text}: hours and minutes, or minutes and seconds, as Slurm has it? Write "
                f"{hours}:{minutes:02}:00, or {hours}m"
            )
    else:
        seconds = 0
    if not seconds:
        raise UsageError(f"--time {text}: expected H:MM:SS, D-HH:MM:SS, or a number with m, h or d: 1:30:00, 90m")
    return seconds


def clock(seconds: int) -> str:
    """Return H:MM:SS, which all schedulers read; hours may be more than 24."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
