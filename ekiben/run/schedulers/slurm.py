"""Slurm. A requeued job keeps its id, so that jobs that depend on it keep waiting."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ekiben.core.errors import SchedulerError
from ekiben.core.process import name_exit, run, which
from ekiben.run.schedulers import LIST_SECONDS, Job, JobScriptHooks, Limits, Queue, Request, ask, clock, seconds_of

TITLE = "Slurm"
PREFERENCE = 10
SUBMIT = ("sbatch",)
PREFIX = "#SBATCH "
VARIABLES = ("SLURM_",)
LOCAL_FOLDER = "SLURM_TMPDIR"
JOB_ID = r"[0-9]{1,9}"
GPU_OPTION = None
OPTIONS = {
    "partition": "--partition=",
    "account": "--account=",
    "qos": "--qos=",
    "exclusive": "--exclusive",
    "cpus": "--cpus-per-task=",
    "memory": "--mem=",
}
HOOKS = JobScriptHooks(
    job='"${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}"',
    # From 22.05 on srun does not inherit the CPUs of sbatch.
    prepare='[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK',
    index='"${SLURM_ARRAY_TASK_ID:-0}"',
    nodes='scontrol show hostnames "$SLURM_JOB_NODELIST"',
    # One task on each node, which has all of the node's GPUs. The launchers end together, and with one exit code;
    # --wait is for a node on which no process started.
    start_all='srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=60 bash "$script" node 0 "$nodes" "$port" "$name"',
    node_number="${SLURM_NODEID:-$1}",
    # Slurm would requeue a cancelled job, too; such a job is COMPLETING. Slurm ends a requeued one.
    requeue=(
        'scontrol --oneliner show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING && scontrol requeue "$SLURM_JOB_ID"'
    ),
    # Without --states: those of jobs that have not ended.
    is_queued=(
        '[ "$index" = 0 ] || set -- "$1_$index"\n'
        'timeout 20 squeue --noheader --array --format %T --jobs "$1" 2>/dev/null | grep -q .'
    ),
)
_STATES = {"PENDING": "queued", "SUSPENDED": "held", "CONFIGURING": "queued", "REQUEUED": "queued"}


def unavailable() -> str | None:
    """Return why no job can be submitted to Slurm from here, or None."""
    if not which("sbatch"):
        return "sbatch is not on PATH"
    done = ask(["sinfo", "--noheader", "--format", "%P"])
    return f"Slurm does not answer: {done.stderr.strip()}" if done.returncode else None


def resource_args(nodes: int, gpus: int, cpus: int | None, memory_mib: int | None) -> Sequence[str]:
    """Return sbatch's options for nodes and their resources. Raises UsageError where only a site's profile has them."""
    asked = [f"--nodes={nodes}"]
    if gpus:
        asked.append(f"--gpus-per-node={gpus}")
    if cpus:
        asked.append(f"--cpus-per-task={cpus}")
    if memory_mib:
        asked.append(f"--mem={memory_mib}")
    return asked


def requested_gpus(args: Sequence[str]) -> int | None:
    """Return the GPUs per node that sbatch's own options request, or None if unknown."""
    counts = [re.search(r"(?:^-G ?|gpus?(?:-per-\w+)?)(?:$|[=: ](?:[^\d:]\w*:)?(\d+)?)", arg) for arg in args]
    requested = [int(count[1] or 1) for count in counts if count]
    return max(requested) if requested else None if any(arg.startswith("--exclusive") for arg in args) else 0


def example(line: str, gpu: bool) -> str:
    """Return a sbatch command for people to paste, which runs the shell command ``line`` for two hours."""
    return f"sbatch{' --gpus-per-node=1' * gpu} --time=2:00:00 --wrap {shlex.quote(line)}"


def queue(environment: Mapping[str, str], gpus: bool) -> Queue | None:
    """Return the queue of the Slurm job that this process is in, or None outside of one."""
    if not (partition := environment.get("SLURM_JOB_PARTITION")):
        return None
    request = (f"--partition={partition}", "--nodes={nodes}", *(["--gpus-per-node={gpus}"] if gpus else []))
    return Queue(name=partition, request=request, group_option="--account=")


def directives(request: Request) -> list[str]:
    """Return sbatch's options for a job script."""
    lines = [f"--job-name={request.name}", *request.args, "--ntasks-per-node=1"]
    if request.seconds:
        lines += [f"--time={clock(request.seconds)}", f"--signal=B:USR1@{request.notice}"]
    if request.jobs:
        lines.append(f"--array=1-{request.jobs}")
    return [*lines, "--requeue", f"--output={_output(request.log, array=bool(request.jobs))}", "--open-mode=append"]


def _output(log: Path, *, array: bool) -> str:
    """Return the log's path as the option takes it: `%` begins a pattern there, and blanks and quotes have a
    meaning.
    """
    escaped = str(log).replace("%", "%%")
    if array:
        escaped = f"{escaped.removesuffix('.log')}.%a.log"
    if re.fullmatch(r"[\w@%+=:,./-]+", escaped):
        return escaped
    return '"' + re.sub(r'(["\\])', r"\\\1", escaped) + '"'


def interactive(args: Sequence[str], seconds: int | None, command: Sequence[str]) -> list[str]:
    """Return the srun command that runs ``command`` on a node, in this terminal."""
    options = [word for arg in args for word in arg.split(" ", 1)]
    time = [f"--time={clock(seconds)}"] if seconds else []
    terminal = ["--pty"] if sys.stdin.isatty() else []
    return ["srun", "--ntasks=1", *options, *time, *terminal, *command]


def limits(args: Sequence[str]) -> Limits:
    """Return the limits of the queue that ``args`` name, as far as they are known."""
    named = next((match for word in args if (match := re.match(r"(?:--partition[= ]|-p ?)(\S+)", word))), None)
    partition = ["--partition", named[1]] if named else []
    lines = ask(["sinfo", "--noheader", *partition, "--format", "%P|%l|%D|%G|%c|%m"]).stdout.splitlines()
    cut = [line.split("|") for line in lines if named or line.split("|")[0].endswith("*")]
    if not cut:
        return Limits(where="the default partition")
    gpus = [sum(int(count) for count in re.findall(r"gpu(?::[^:,(]+)?:(\d+)", fields[3])) for fields in cut]
    cpus, memory = (min(int(fields[column].rstrip("+")) for fields in cut) for column in (4, 5))
    time = cut[0][1]
    return Limits(
        where=f"partition {cut[0][0].rstrip('*')}",
        gpus=max(gpus),
        cpus=cpus,
        memory_mib=memory if memory > 1 else None,
        nodes=sum(int(fields[2]) for fields in cut),
        seconds=None if time in ("infinite", "n/a") else seconds_of(time if time.count(":") > 1 else f"0:{time}"),
    )


def submit(script: Path, args: Sequence[str], after: str | None) -> str:
    """Submit a job that waits for job ``after``, and return its id. Raises SchedulerError with sbatch's message."""
    wait = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    done = run([*SUBMIT, "--parsable", *wait, *args, str(script)], check=False)
    if done.returncode:
        raise SchedulerError(done.stderr.strip())
    return done.stdout.strip().split(";")[0]


def jobs(ids: Sequence[str]) -> dict[tuple[str, int], Job]:
    """Return the jobs that squeue lists, by (id, index in the array or 0). Raises SchedulerError."""
    if not ids:
        return {}
    done = ask(
        [
            "squeue",
            "--noheader",
            "--array",
            "--states=all",
            "--jobs",
            ",".join(ids),
            "--format",
            "%F|%K|%T|%N|%r|%M|%S",
        ],
        timeout=LIST_SECONDS,
    )
    if done.returncode and "Invalid job id" not in done.stderr:
        raise SchedulerError(done.stderr.strip())
    return _read_queue(done.stdout)


def _read_queue(text: str) -> dict[tuple[str, int], Job]:
    """Return the jobs of what squeue prints, in the format above. Just after sbatch its reason is the word None."""
    statuses = {}
    for line in text.splitlines():
        job, index, state, nodes, reason, elapsed, started = line.split("|")
        if state in ("RUNNING", "COMPLETING", *_STATES):
            detail = f"{nodes}, {elapsed}" if nodes else reason if reason != "None" else ""
            statuses[job, int(index) if index.isdigit() else 0] = Job(
                _STATES.get(state, "running"), detail, started if nodes else ""
            )
    return statuses


_ENDED = {"COMPLETED": "done", "CANCELLED": "cancelled"}


def ended(ids: Sequence[str]) -> dict[tuple[str, int], Job]:
    """Return how jobs ended. slurmctld knows them for some minutes (MinJobAge), accounting, where there is one, for
    good.
    """
    if not ids:
        return {}
    named = ",".join(ids)
    recent = ask(
        ["squeue", "--noheader", "--array", "--states=all", "--jobs", named, "--format", "%F_%K|%T|%N|%S|"],
        timeout=LIST_SECONDS,
    )
    kept = ask(
        [
            "sacct",
            "--noheader",
            "--allocations",
            "--parsable",
            "--array",
            "--jobs",
            named,
            "--format",
            "JobID,State,NodeList,Start,ExitCode",
        ],
        timeout=LIST_SECONDS,
    )
    return _read_ended(recent.stdout + kept.stdout)


def _read_ended(text: str) -> dict[tuple[str, int], Job]:
    """Return how jobs have ended, from the lines of squeue and sacct in the formats above."""
    ended_jobs = {}
    for line in text.splitlines():
        job, state, nodes, started, code = line.split("|")[:5]
        state = state.partition(" ")[0]  # CANCELLED by 1000
        id, _, index = job.partition("_")
        if state in ("RUNNING", "COMPLETING", *_STATES):
            continue
        reason = "" if state in ("COMPLETED", "FAILED", "CANCELLED") else state
        where = nodes if nodes and nodes != "None assigned" else ""
        exited = name_exit(int(code.partition(":")[0])) if state == "FAILED" and code else ""
        detail = ", ".join(filter(None, (reason, exited, where)))
        ended_jobs[id, int(index) if index.isdigit() else 0] = Job(
            _ENDED.get(state, "failed"), detail, started if where else ""
        )
    return ended_jobs


def element_id(id: str, index: int) -> str:
    """Return the id of one job of the array ``id``, as scancel takes it."""
    return f"{id}_{index}"


def cancel(ids: Sequence[str]) -> None:
    """Cancel jobs with scancel. Raises SchedulerError when it refuses."""
    done = run(["scancel", *ids], check=False, timeout=LIST_SECONDS)
    if done.returncode:
        raise SchedulerError(done.stderr.strip())
