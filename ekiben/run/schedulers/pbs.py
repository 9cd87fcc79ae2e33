"""PBS Professional and OpenPBS.

A user's job cannot put itself back into the queue: it submits itself again, under a new id.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ekiben.core.checked import Fields, parse_json
from ekiben.core.errors import SchedulerError
from ekiben.core.process import name_exit, run, which
from ekiben.run.schedulers import LIST_SECONDS, Job, JobScriptHooks, Limits, Queue, Request, ask, clock

TITLE = "PBS"
PREFERENCE = 30
SUBMIT = ("qsub",)
PREFIX = "#PBS "
VARIABLES = ("PBS_",)
LOCAL_FOLDER = "PBS_LOCALDIR"
JOB_ID = r"[0-9]{1,12}(\[[0-9]{0,9}\])?(\.[\w-][\w.-]{0,200})?"
GPU_OPTION = None
OPTIONS = {"partition": "-q ", "account": "-P "}
# A requeued job of an array is a job of its own.
_ANEW = (
    """new=$(sed '/^#PBS -J/d' "$script" | qsub "${{command_args[@]}}" -v EKIBEN_INDEX="$index"{})"""
    """ && echo "$new" >"$run/$name.job\""""
)
HOOKS = JobScriptHooks(
    job='"${PBS_JOBID/\\[*\\]/[]}"',
    index='"${EKIBEN_INDEX:-${PBS_ARRAY_INDEX:-0}}"',
    nodes='cat "$PBS_NODEFILE"',
    # pbs_tmrsh has PBS itself start what runs on the other nodes: no ssh, and it ends with the job.
    start_remote='pbs_tmrsh "$host" /bin/bash "$script" node "$number" "$nodes" "$port" "$name"',
    requeue=_ANEW.format(""),
    # PBS keeps a job's output on the node until the job ends, and sends no signal before the walltime is over.
    prepare='exec >>"$run/$name.log" 2>&1\ncd "$PBS_O_WORKDIR" || exit',
    needs_timer=True,
    requeue_waiting=_ANEW.format(""" -W depend=afterany:"$(cat "$run/$before.job")\""""),
    is_queued="""timeout 20 qstat -f "${1/\\[]/[$index]}" 2>/dev/null | grep -q '^ *job_state = [^FMX]'""",
)
_STATES = {
    "R": "running",
    "E": "running",
    "B": "running",
    "H": "held",
    "S": "held",
    "W": "queued",
    "Q": "queued",
    "T": "queued",
}


def unavailable() -> str | None:
    """Return why no job can be submitted to PBS from here, or None."""
    if not which("qsub") or not which("pbsnodes"):
        return "qsub and pbsnodes are not on PATH"
    done = ask(["qstat", "-B"])
    return f"PBS does not answer: {done.stderr.strip()}" if done.returncode else None


def resource_args(nodes: int, gpus: int, cpus: int | None, memory_mib: int | None) -> Sequence[str]:
    """Return qsub's options for nodes and their resources. Raises UsageError where only a site's profile can say it."""
    chunk = [
        f"select={nodes}",
        *([f"ncpus={cpus}"] if cpus else []),
        *([f"ngpus={gpus}"] if gpus else []),
        *([f"mem={memory_mib}mb"] if memory_mib else []),
    ]
    return [f"-l {':'.join(chunk)}", *(["-l place=scatter"] if nodes > 1 else [])]


def requested_gpus(args: Sequence[str]) -> int | None:
    """Return the GPUs per node that qsub's own options request, or None if unknown."""
    counts = [int(count) for arg in args for count in re.findall(r"ngpus=(\d+)", arg)]
    return max(counts) if counts else None if any(arg.startswith("-q") for arg in args) else 0


def example(line: str, gpu: bool) -> str:
    """Return a qsub command for people to paste, which runs the shell command ``line`` for two hours."""
    in_folder = f'cd "$PBS_O_WORKDIR" && {line}'
    return f"echo {shlex.quote(in_folder)} | qsub -l select=1{':ngpus=1' * gpu} -l walltime=2:00:00"


def queue(environment: Mapping[str, str], gpus: bool) -> Queue | None:
    """Return the queue of the PBS job that this process is in, or None outside of one."""
    if "PBS_JOBID" not in environment or not (name := environment.get("PBS_QUEUE")):
        return None
    return Queue(name=name, request=(f"-q {name}", "-l select={nodes}"), group_option="-P")


def directives(request: Request) -> list[str]:
    """Return qsub's options for a job script."""
    # Up to PBS 18 a name has 15 characters.
    lines = [
        f"-N {request.name[:15]}",
        *request.args,
        "-S /bin/bash",
        "-j oe",
        f"-o {_quoted(str(request.log.with_suffix('.pbs.log')))}",
    ]
    if request.seconds:
        lines.append(f"-l walltime={clock(request.seconds)}")
    if request.jobs:
        lines.append(f"-J 1-{request.jobs}")
    return [*lines, "-r y"]


def _quoted(path: str) -> str:
    """Return a path as an option in a script takes it, where ':' ends a host.

    The job writes its log itself, so nothing of it is lost.
    """
    return "/dev/null" if re.search(r"[\"'\\:,]", path) else f'"{path}"' if " " in path else path


def interactive(args: Sequence[str], seconds: int | None, command: Sequence[str]) -> None:
    """Return None: `qsub -I` starts a shell, and no other program."""


def limits(args: Sequence[str]) -> Limits:
    """Return the limits of the queue that ``args`` name, as far as they are known."""
    named = next((match for word in args if (match := re.match(r"-q ?(\S+)", word))), None)
    if not named or not which("qstat"):
        return Limits(where="the default queue")
    done = ask(["qstat", "-Q", "-f", named[1]]).stdout
    time = re.search(r"resources_max\.walltime = (\d+):(\d+):(\d+)", done)
    seconds = int(time[1]) * 3600 + int(time[2]) * 60 + int(time[3]) if time else None
    return Limits(where=f"queue {named[1]}", seconds=seconds)


def submit(script: Path, args: Sequence[str], after: str | None) -> str:
    """Submit a job that waits for job ``after``, and return its id. Raises SchedulerError with qsub's message."""
    wait = ["-W", f"depend=afterany:{after}"] if after else []  # the script itself checks how the previous step ended
    done = run([*SUBMIT, *wait, *(arg for word in args for arg in word.split(" ", 1)), str(script)], check=False)
    if done.returncode:
        raise SchedulerError(done.stderr.strip())
    return done.stdout.strip()


def jobs(ids: Sequence[str]) -> dict[tuple[str, int], Job]:
    """Return the jobs that qstat lists, by (id, index in the array or 0). Raises SchedulerError."""
    if not ids:
        return {}
    done = ask(["qstat", "-x", "-t", "-f", "-F", "json", *ids], timeout=LIST_SECONDS)
    statuses = {}
    for name, record in _records(done.stdout).items():
        array = re.fullmatch(r"(\d+)\[(\d*)\](.*)", name)
        if array and not array[2]:
            continue  # the array itself; its jobs follow
        if state := _STATES.get(record.state):
            key = (f"{array[1]}[]{array[3]}", int(array[2])) if array else (name, 0)
            statuses[key] = Job(state, record.nodes or record.comment, record.started)
    if done.returncode and not statuses and "Unknown Job" not in done.stderr:
        raise SchedulerError(done.stderr.strip())
    return statuses


def ended(ids: Sequence[str]) -> dict[tuple[str, int], Job]:
    """Return how a job ended. The server keeps its history as long as configured (job_history_enable)."""
    done = ask(["qstat", "-x", "-t", "-f", "-F", "json", *ids], timeout=LIST_SECONDS) if ids else None
    statuses = {}
    for name, record in _records(done.stdout if done else "").items():
        array = re.fullmatch(r"(\d+)\[(\d*)\](.*)", name)
        if record.state not in ("F", "X") or (array and not array[2]):
            continue
        code = record.exit_status
        outcome = name_exit(code) if code > 0 else record.comment or f"exit status {code}" if code else ""
        detail = ", ".join(filter(None, (outcome, record.nodes)))
        key = (f"{array[1]}[]{array[3]}", int(array[2])) if array else (name, 0)
        statuses[key] = Job("failed" if code else "done", detail, record.started)
    return statuses


@dataclass(frozen=True, slots=True)
class _Record:
    """qstat's fields of a job; "" and 0 if not known yet. ``nodes``: joined by commas."""

    state: str
    nodes: str
    comment: str
    started: str
    exit_status: int

    @classmethod
    def parse(cls, fields: Fields) -> _Record:
        """Raises ValueError."""
        hosts = (host.split("/")[0] for host in fields.text("exec_host", "").split("+"))
        return cls(
            state=fields.text("job_state"),
            nodes=",".join(dict.fromkeys(filter(None, hosts))),
            comment=fields.text("comment", ""),
            started=fields.text("stime", ""),
            exit_status=int(fields.number("Exit_status")) if "Exit_status" in fields else 0,
        )


def _records(answer: str) -> dict[str, _Record]:
    """Return qstat's fields of each job, by its id. Raises SchedulerError when it is not what PBS documents."""
    if not answer.strip():
        return {}
    try:
        records = Fields.of(parse_json(answer)).mapping("Jobs", {})
        return {name: _Record.parse(Fields.of(record, name)) for name, record in records.items()}
    except ValueError as error:
        raise SchedulerError(f"qstat's answer cannot be read: it {error}") from error


def element_id(id: str, index: int) -> str:
    """Return the id of one job of the array ``id``, as qdel takes it."""
    return id.replace("[]", f"[{index}]")


def cancel(ids: Sequence[str]) -> None:
    """Cancel jobs with qdel. Raises SchedulerError when it refuses."""
    done = run(["qdel", *ids], check=False, timeout=LIST_SECONDS)
    if done.returncode:
        raise SchedulerError(done.stderr.strip())
