"""OAR. It runs a script from its own path, so a requeued job submits itself again, under a new id."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ekiben.core.checked import Fields, parse_json
from ekiben.core.errors import SchedulerError, UsageError
from ekiben.core.process import name_exit, run, which
from ekiben.run.schedulers import LIST_SECONDS, Job, JobScriptHooks, Limits, Queue, Request, ask, clock

TITLE = "OAR"
PREFERENCE = 40
# oarsub uses PWD as the working folder and fails for some names; the script changes to its folder itself.
SUBMIT = ("env", "PWD=/", "oarsub", "-S")
PREFIX = "#OAR "
_MAX_ANSWER = 256 << 20  # bytes: oarstat prints all fields of every job
VARIABLES = ("OAR_",)
LOCAL_FOLDER = None
JOB_ID = r"[0-9]{1,9}"
GPU_OPTION = "-l host=1/gpu=1"
OPTIONS = {"partition": "-q ", "account": "--project "}
# A requeued job of an array is a job of its own with its index as an argument: OAR passes no environment.
_ANEW = (
    """sed '/^#OAR --array/d' "$script" >"$run/$name.again" && chmod 755 "$run/$name.again" &&"""
    """ new=$(oarsub -S "${{command_args[@]}}"{} "$run/$name.again again $index" | sed -n 's/^OAR_JOB_ID=//p')"""
    """ && [ -n "$new" ] &&"""
    """ echo "$new" >"$run/$name.job\""""
)
HOOKS = JobScriptHooks(
    job='"${OAR_ARRAY_ID:-$OAR_JOB_ID}"',
    # A job that is in no array has an index, too.
    index="""$(if [ "${1:-}" = again ]; then echo "$2"; """
    """elif grep -q '^#OAR --array' "$script"; then echo "$OAR_ARRAY_INDEX"; else echo 0; fi)""",
    nodes='cat "$OAR_NODEFILE"',
    start_remote='oarsh "$host" /bin/bash "$script" node "$number" "$nodes" "$port" "$name"',
    requeue=_ANEW.format(""),
    requeue_waiting=_ANEW.format(""" -a "$(cat "$run/$before.job")\""""),
    # Every start truncates OAR's own log files.
    prepare='exec >>"$run/$name.log" 2>&1',
    # A requeued job of an array is in no array, which OAR counts as an array of one.
    is_queued="""timeout 20 oarstat -f --array "$1" 2>/dev/null | awk -v task="$index" '
    $1 == "job_array_index" { at = $3 }
    $1 == "state" { has_ended = $3 ~ /^(Terminated|Error|toError)$/ }
    $1 == "initial_request" && !has_ended && (at == task || !/ --array/) { listed = 1 }
    END { exit !listed }'""",
    # OAR would (--checkpoint), and looks at its jobs every half minute only.
    needs_timer=True,
)
_STATES = {
    "Hold": "held",
    "Suspended": "held",
    "Resuming": "held",
    "Waiting": "queued",
    "toLaunch": "queued",
    "toAckReservation": "queued",
    "Launching": "queued",
    "Running": "running",
    "Finishing": "running",
}


def unavailable() -> str | None:
    """Return why no job can be submitted to OAR from here, or None."""
    if not which("oarsub") or not which("oarstat"):
        return "oarsub and oarstat are not on PATH"
    done = ask(["oarstat", "-J"])
    return f"OAR does not answer: {_reason(done.stderr, done.stdout)}" if done.returncode else None


def resource_args(nodes: int, gpus: int, cpus: int | None, memory_mib: int | None) -> Sequence[str]:
    """Return oarsub's options for nodes and their resources. Raises UsageError where only a site's profile has them."""
    if gpus or cpus or memory_mib:
        raise UsageError(
            "each site has its own OAR properties for GPUs and cores",
            hint=f"--site PROFILE, or the words themselves: --scheduler-arg '{GPU_OPTION}'",
        )
    return [f"-l nodes={nodes}"]


def requested_gpus(args: Sequence[str]) -> int | None:
    """Return the GPUs per node that oarsub's own options request, or None if unknown."""
    counts = [int(count) for arg in args for count in re.findall(r"gpu=(\d+)", arg)]
    return max(counts) if counts else None if any(arg.startswith(("-l", "-q")) for arg in args) else 0


def example(line: str, gpu: bool) -> str:
    """Return a oarsub command for people to paste, which runs the shell command ``line`` for two hours."""
    return f"oarsub -l host=1{'/gpu=1' * gpu},walltime=2:00:00 {shlex.quote(line)}"


def queue(environment: Mapping[str, str], gpus: bool) -> Queue | None:
    """Return the queue of the OAR job that this process is in, or None outside of one."""
    return Queue() if "OAR_JOB_ID" in environment else None


def directives(request: Request) -> list[str]:
    """Return oarsub's options for a job script."""
    # Of several -l OAR chooses the earliest start, so the walltime is added to the existing one.
    asked = list(request.args)
    if request.seconds:
        wall = f"walltime={clock(request.seconds)}"
        at = next((at for at, word in enumerate(asked) if word.startswith("-l")), None)
        if at is None:
            asked.append(f"-l nodes={request.nodes},{wall}")
        else:
            asked[at] += f",{wall}"
    log = request.log.with_suffix(".oar.%jobid%.log")
    # Its own rule for logs; and it reads a script by `cat PATH`, in a shell.
    if not re.fullmatch(r"[\w%./-]+", str(log), re.ASCII):
        raise UsageError(
            f"oarsub takes no script in {log.parent}: besides letters and digits only % . / _ - may be in its path",
            hint="name another folder with --runs",
        )
    lines = [f"-n {request.name}", *asked, f"-O {log}", f"-E {log}"]
    return [*lines, f"--array {request.jobs}"] if request.jobs else lines


def interactive(args: Sequence[str], seconds: int | None, command: Sequence[str]) -> None:
    """Return None: `oarsub -I` starts a shell, and no other program."""


def limits(args: Sequence[str]) -> Limits:
    """Return the limits of the queue that ``args`` name, as far as they are known."""
    return Limits(where="this OAR")  # its admission rules refuse jobs that can never run


def submit(script: Path, args: Sequence[str], after: str | None) -> str:
    """Submit a job that waits for job ``after``, and return its id. Raises SchedulerError with oarsub's message."""
    wait = [word for id in _of_array(after) for word in ("-a", id)] if after else []
    asked = [arg for word in args for arg in word.split(" ", 1)]
    done = run([*SUBMIT, *wait, *asked, str(script)], check=False)
    match = re.search(r"^OAR_ARRAY_ID=(\d+)$", done.stdout, re.MULTILINE) or re.search(
        r"^OAR_JOB_ID=(\d+)$", done.stdout, re.MULTILINE
    )
    if done.returncode or not match:
        raise SchedulerError(_reason(done.stderr, done.stdout))
    return match[1]


def jobs(ids: Sequence[str]) -> dict[tuple[str, int], Job]:
    """Return the jobs that oarstat lists, by (id, index in the array or 0). Raises SchedulerError."""
    statuses = {}
    for record in _all() if ids else ():
        if str(record["array_id"]) in ids and (state := _STATES.get(record["state"])):
            nodes = _nodes(record)
            statuses[_key(record)] = Job(
                state, nodes or str(record.get("message") or ""), _started(record) if nodes else ""
            )
    return statuses


def _key(record: dict[str, Any]) -> tuple[str, int]:
    """Return the array's id and the index in it, 0 for a job that is in none: OAR counts that as an array of one."""
    return str(record["array_id"]), int(record["array_index"]) if "--array" in record["initial_request"] else 0


def _nodes(record: dict[str, Any]) -> str:
    return ",".join(dict.fromkeys(record.get("assigned_network_address") or ()))


def _started(record: dict[str, Any]) -> str:
    start = int(record.get("startTime") or 0)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(start)) if start else ""


def ended(ids: Sequence[str]) -> dict[tuple[str, int], Job]:
    """Return how jobs have ended. OAR keeps all in its database; their events tell who or what ended them."""
    ended_jobs = {}
    for record in (record for id in ids for record in _asked("--array", id)):
        if record["state"] not in ("Terminated", "Error"):
            continue
        events = [event["type"] for event in record.get("events") or ()]
        status = int(record.get("exit_code") or 0)
        code = (
            -(status & 127) or status >> 8 & 255
        )  # of wait(2); 65535 may be there, which waitstatus_to_exitcode() refuses
        if "WALLTIME" in events:
            state, reason = "failed", "the walltime was over"
        elif "FRAG_JOB_REQUEST" in events:
            state, reason = "cancelled", ""
        elif record["state"] == "Error":
            state, reason = "failed", ", ".join(dict.fromkeys(events)) or "OAR's state Error"
        else:
            state, reason = ("failed", name_exit(code)) if code else ("done", "")
        ended_jobs[_key(record)] = Job(state, ", ".join(filter(None, (reason, _nodes(record)))), _started(record))
    return ended_jobs


def element_id(id: str, index: int) -> str:
    """Return the id of one job of the array ``id``, as oardel takes it."""
    return f"{id}[{index}]"


def cancel(ids: Sequence[str]) -> None:
    """Cancel jobs with oardel. Raises SchedulerError when it refuses."""
    numbers = {f"{record['array_id']}[{record['array_index']}]": str(record["Job_Id"]) for record in _all()}
    for id in ids:
        done = run(
            ["oardel", *([numbers.get(id, id)] if "[" in id else ["--array", id])], check=False, timeout=LIST_SECONDS
        )
        if done.returncode:
            raise SchedulerError(_reason(done.stderr, done.stdout))


def _all() -> list[dict[str, Any]]:
    """Every job that is not over. Raises SchedulerError."""
    return _asked()


def _asked(*options: str) -> list[dict[str, Any]]:
    done = ask(["oarstat", "-f", "-J", *options], timeout=LIST_SECONDS)
    if done.returncode:
        raise SchedulerError(_reason(done.stderr, done.stdout))
    return _records(done.stdout)


def _records(answer: str) -> list[dict[str, Any]]:
    """Return oarstat's fields of each job. Raises SchedulerError when it is not what OAR documents."""
    if not answer.strip():
        return []
    try:
        records = Fields.of(parse_json(answer, max_size=_MAX_ANSWER))
        for name in records.data:
            _check_record(records.object(name))
    except ValueError as error:
        raise SchedulerError(f"oarstat's answer cannot be read: it {error}") from error
    return list(records.data.values())


def _check_record(fields: Fields) -> None:
    """Raise ValueError where a field that is used has another type. Perl may write a number as text."""
    for name in ("array_id", "array_index", "Job_Id", "startTime", "exit_code"):
        optional = name in ("startTime", "exit_code") and fields.data.get(name) in (None, "")
        if not optional and not re.fullmatch(r"[0-9]{1,10}", str(fields.data.get(name))):
            fields.refuse(name, "a number")
    fields.text("state"), fields.text("initial_request")
    if fields.data.get("assigned_network_address"):
        fields.strings("assigned_network_address")
    if fields.data.get("events"):
        for event in fields.objects("events"):
            event.text("type")


def _of_array(id: str) -> list[str]:
    """The jobs of an array; of a job that is in none, itself."""
    return [str(record["Job_Id"]) for record in _all() if str(record["array_id"]) == id] or [id]


def _reason(*outputs: str) -> str:
    lines = [
        line
        for text in outputs
        for line in text.splitlines()
        if line.strip() and not line.startswith("[ADMISSION RULE] Mod")
    ]
    return "\n".join(lines) or "no reason given"
