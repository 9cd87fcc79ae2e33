"""Grid Engine, in any of its versions (Sun, Son of, Altair).

A job that ends with 99 goes back into the queue under its own id.
"""

from __future__ import annotations

import re
import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

from ekiben.core.errors import SchedulerError, UsageError
from ekiben.core.process import run, which
from ekiben.run.schedulers import LIST_SECONDS, Job, JobScriptHooks, Limits, Queue, Request, ask, clock

TITLE = "Grid Engine"
PREFERENCE = 20
SUBMIT = ("qsub",)
PREFIX = "#$ "
VARIABLES = ("SGE_", "JOB_ID", "JOB_NAME", "NSLOTS", "PE_HOSTFILE")
LOCAL_FOLDER = "SGE_LOCALDIR"
JOB_ID = r"[0-9]{1,9}"
GPU_OPTION = "-l gpu=1"
OPTIONS = {"partition": "-q ", "account": "-P "}
# A requeued job of an array is a job of its own.
_ANEW = (
    """new=$(sed -e '/^#[$] -t/d' -e "/^#[$] -o/s/[$]TASK_ID/$index/" "$script" |"""
    """ qsub -terse "${{command_args[@]}}" -v EKIBEN_INDEX="$index"{})"""
    """ && echo "$new" >"$run/$name.job\""""
)
HOOKS = JobScriptHooks(
    job='"$JOB_ID"',
    index='"${EKIBEN_INDEX:-$([ "${SGE_TASK_ID:-undefined}" = undefined ] && echo 0 || echo "$SGE_TASK_ID")}"',
    # The nodes of a parallel job are in a file; a job of one node may have none.
    nodes='{ cat -- "${SGE_JOB_HOSTLIST:-$PE_HOSTFILE}" || hostname; } 2>/dev/null',
    # Grid Engine itself starts what runs on the other nodes (tight integration): no ssh, and it ends with the job.
    # qrsh makes one line of shell of its words.
    start_remote=(
        'qrsh -inherit -nostdin "$host" /bin/bash "$(printf %q "$script")" node "$number" "$nodes" "$port" "$name"'
    ),
    # 99: back into the queue under the same id. A job of several hosts then waits on (8.1.9: "host cleanup has not
    # finished"), so it submits itself again, where it may.
    requeue=f"{{ [[ $nodes = *,* ]] && {_ANEW.format('')}; }} || code=99",
    prepare='exec >>"$run/$name.log" 2>&1',
    requeue_waiting=_ANEW.format(""" -hold_jid "$(cat "$run/$before.job")\""""),
    # A requeued job of an array is in no array.
    is_queued="""timeout 20 qstat -xml -g d -u '*' 2>/dev/null | awk -F '[<>]' -v job="$1" -v task="$index" '
    $2 == "JB_job_number" { id = $3; at = task }
    $2 == "tasks" { at = $3 }
    $2 == "/job_list" && id == job && at == task { listed = 1 }
    END { exit !listed }'""",
    # Grid Engine would (s_rt, -notify), by a signal to every process of the job; docs/decisions.md says what that ends.
    needs_timer=True,
)


def unavailable() -> str | None:
    """Return why no job can be submitted to Grid Engine from here, or None."""
    if not which("qsub") or not which("qconf"):
        return "qsub and qconf are not on PATH"
    done = ask(["qconf", "-sss"])
    return f"Grid Engine does not answer: {(done.stderr or done.stdout).strip()}" if done.returncode else None


def resource_args(nodes: int, gpus: int, cpus: int | None, memory_mib: int | None) -> Sequence[str]:
    """Return qsub's options for nodes and their resources. Raises UsageError where only a site's profile can say it."""
    if nodes > 1 or gpus or cpus or memory_mib:
        raise UsageError(
            "each site has its own names for nodes, GPUs and cores",
            hint="--site PROFILE, or the words themselves: --scheduler-arg '-l gpu=1' --scheduler-arg '-pe mpi 2'",
        )
    return []


def requested_gpus(args: Sequence[str]) -> int | None:
    """Return the GPUs per node that qsub's own options request, or None if unknown."""
    counts = [int(count) for arg in args for count in re.findall(r"gpu=(\d+)", arg)]
    return max(counts) if counts else None if any(arg.startswith(("-l", "-q")) for arg in args) else 0


def example(line: str, gpu: bool) -> str:
    """Return a qsub command for people to paste, which runs the shell command ``line`` for two hours."""
    return f"qsub -cwd -V -b y -shell n{' -l gpu=1' * gpu} -l h_rt=2:00:00 {line}"


def queue(environment: Mapping[str, str], gpus: bool) -> Queue | None:
    """Return the queue of the Grid Engine job that this process is in, or None outside of one."""
    return Queue() if "SGE_ROOT" in environment and "JOB_ID" in environment else None


def directives(request: Request) -> list[str]:
    """Return qsub's options for a job script."""
    lines = [f"-N {request.name}", *request.args, "-S /bin/bash", "-cwd", "-j y", "-r y"]
    if request.seconds:
        lines.append(f"-l h_rt={clock(request.seconds)}")
    if request.jobs:
        lines.append(f"-t 1-{request.jobs}")
    log = request.log.with_suffix(".$TASK_ID.log") if request.jobs else request.log
    # An option in a script cannot have a quote in a quoted word, and ':' and ',' divide hosts and paths; the job writes
    # its log itself.
    return [
        *lines,
        "-o /dev/null" if re.search(r"[\"'\\:,]", str(log)) else f'-o "{log}"' if " " in str(log) else f"-o {log}",
    ]


def interactive(args: Sequence[str], seconds: int | None, command: Sequence[str]) -> list[str]:
    """Return the qrsh command that runs ``command`` on a node, in this terminal. It makes one line of shell of it."""
    options = [word for arg in args for word in arg.split(" ", 1)]
    time = ["-l", f"h_rt={clock(seconds)}"] if seconds else []
    return ["qrsh", "-cwd", "-now", "n", *options, *time, shlex.join(command)]


def limits(args: Sequence[str]) -> Limits:
    """Return the limits of the queue that ``args`` name, as far as they are known."""
    return Limits(
        where="this Grid Engine"
    )  # limits come from the site's profile; -w e makes the scheduler check the rest


def submit(script: Path, args: Sequence[str], after: str | None) -> str:
    """Submit a job that waits for job ``after``, and return its id. Raises SchedulerError with qsub's message."""
    wait = ["-hold_jid", after] if after else []
    # -w e: refuse jobs that no queue can ever run.
    done = run(
        [*SUBMIT, "-terse", "-w", "e", *wait, *(arg for word in args for arg in word.split(" ", 1)), str(script)],
        check=False,
    )
    if done.returncode:
        raise SchedulerError((done.stderr or done.stdout).strip())
    return re.split(r"[.\s]", done.stdout.strip().splitlines()[-1])[0]


def jobs(ids: Sequence[str]) -> dict[tuple[str, int], Job]:
    """Return the jobs that qstat lists, by (id, index in the array or 0). Raises SchedulerError."""
    if not ids:
        return {}
    done = ask(["qstat", "-xml", "-g", "d", "-u", "*"], timeout=LIST_SECONDS)
    if done.returncode:
        raise SchedulerError((done.stderr or done.stdout).strip())
    try:
        answer = ElementTree.fromstring(done.stdout)
    except ElementTree.ParseError as error:
        raise SchedulerError(f"qstat's answer is not XML: {error}") from error
    statuses = {}
    for element in answer.iter("job_list"):
        job, task = element.findtext("JB_job_number", ""), element.findtext("tasks", "")
        if job in ids:
            code = element.findtext("state", "")
            state = "held" if code.startswith("h") or "s" in code.lower() else "running" if "r" in code else "queued"
            detail = (
                "Grid Engine put it into its error state: qstat -j tells why"
                if "E" in code
                else element.findtext("queue_name", "")
            )
            statuses[job, int(task) if task.isdigit() else 0] = Job(
                state, detail or "", element.findtext("JAT_start_time") or ""
            )
    return statuses


def ended(ids: Sequence[str]) -> dict[tuple[str, int], Job]:
    """Return qacct's records of jobs that have ended."""
    statuses = {}
    for id in ids:
        for record in ask(["qacct", "-j", id], timeout=LIST_SECONDS).stdout.split("=" * 62)[1:]:
            accounting = {
                name: value.strip() for name, _, value in (line.partition(" ") for line in record.splitlines())
            }
            failed, code = accounting.get("failed", "0"), accounting.get("exit_status", "0")
            reason = failed.partition(":")[2].strip() if failed != "0" else ""
            problems = ", ".join(filter(None, (reason, f"exit status {code}" if code != "0" else "")))
            state = "failed" if problems else "done"
            detail = ", ".join(filter(None, (problems, accounting.get("hostname", ""))))
            index = accounting.get("taskid", "")
            statuses[id, int(index) if index.isdigit() else 0] = Job(
                state, detail, accounting.get("start_time", "").replace("-/-", "")
            )
    return statuses


def element_id(id: str, index: int) -> str:
    """Return the id of one job of the array ``id``, as qdel takes it."""
    return f"{id}.{index}"


def cancel(ids: Sequence[str]) -> None:
    """Cancel jobs with qdel. Raises SchedulerError when it refuses."""
    # For a task 7.2 of an array, the index is passed with -t.
    commands = [["qdel", id, *(["-t", index] if index else [])] for id, _, index in (id.partition(".") for id in ids)]
    done = next(
        (done for command in commands if (done := run(command, check=False, timeout=LIST_SECONDS)).returncode), None
    )
    if done is not None:
        raise SchedulerError((done.stderr or done.stdout).strip())
