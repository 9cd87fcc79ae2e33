"""Grid Engine, in any of its versions (Sun, Son of, Altair). A job that ends with 99 goes back into the queue under its own id."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from builder.errors import SchedulerError, UsageError
from builder.process import run, which
from builder.schedulers import Job, Limits, Parts, Request, clock

PREFIX = "#$ "
# One job of an array comes back as a job of its own.
_ANEW = (
    """new=$(sed -e '/^#[$] -t/d' -e "/^#[$] -o/s/[$]TASK_ID/$index/" "$script" | qsub -terse -v EKIBEN_INDEX="$index"{})"""
    """ && echo "$new" >"$run/$name.job\""""
)
PARTS = Parts(
    job='"$JOB_ID"',
    index='"${EKIBEN_INDEX:-$([ "${SGE_TASK_ID:-undefined}" = undefined ] && echo 0 || echo "$SGE_TASK_ID")}"',
    # The nodes of a parallel job are in a file; a job of one node may have none.
    nodes='{ cat -- "${SGE_JOB_HOSTLIST:-$PE_HOSTFILE}" || hostname; } 2>/dev/null',
    # Grid Engine itself starts what runs on the other nodes (tight integration): no ssh, and it ends with the job.
    other='qrsh -inherit -nostdin "$host" /bin/bash "$script" node "$number" "$nodes" "$port" "$name"',
    # 99: back into the queue under the same id. A job of several hosts then waits on (8.1.9: "host cleanup has not finished"), so it
    # submits itself anew, where it may.
    again=f"{{ [[ $nodes = *,* ]] && {_ANEW.format('')}; }} || code=99",
    wait_again=_ANEW.format(""" -hold_jid "$(cat "$run/$before.job")\""""),
    # Grid Engine would (s_rt, -notify), by a signal to every process of the job; see CONTRIBUTING.md for what that ends.
    tells_itself=True,
)


def unavailable() -> str | None:
    if not which("qsub") or not which("qconf"):
        return "qsub and qconf are not on PATH"
    said = run(["qconf", "-sss"], check=False)
    return f"Grid Engine does not answer: {(said.stderr or said.stdout).strip()}" if said.returncode else None


def words(nodes: int, gpus: int, cpus: int | None) -> Sequence[str]:
    if nodes > 1 or gpus or cpus:
        raise UsageError("how a Grid Engine names nodes, GPUs and cores is each site's own affair",
                         hint="--site PROFILE, or the words themselves: --option '-l gpu=1' --option '-pe mpi 2'")  # fmt: skip
    return []


def directives(request: Request) -> list[str]:
    lines = [f"-N {request.name}", *request.words, "-S /bin/bash", "-cwd", "-j y", "-r y"]
    if request.seconds:
        lines.append(f"-l h_rt={clock(request.seconds)}")
    if request.jobs:
        lines.append(f"-t 1-{request.jobs}")
    place = request.log.with_suffix(".$TASK_ID.log") if request.jobs else request.log
    return [*lines, f"-o {place}"]


def limits(words: Sequence[str]) -> Limits:
    return Limits(where="this Grid Engine")  # a site's profile knows; -w e has the scheduler refuse the rest


def submit(script: Path, words: Sequence[str], after: str | None) -> str:
    wait = ["-hold_jid", after] if after else []
    # -w e: what no queue can ever run is refused instead of waiting for ever.
    done = run(
        ["qsub", "-terse", "-w", "e", *wait, *(part for word in words for part in word.split(" ", 1)), str(script)],
        check=False,
    )
    if done.returncode:
        raise SchedulerError((done.stderr or done.stdout).strip())
    return re.split(r"[.\s]", done.stdout.strip().splitlines()[-1])[0]


def jobs(ids: Sequence[str]) -> dict[tuple[str, int], Job]:
    if not ids:
        return {}
    done = run(["qstat", "-xml", "-g", "d", "-u", "*"], check=False)
    if done.returncode:
        raise SchedulerError((done.stderr or done.stdout).strip())
    found = {}
    for row in ElementTree.fromstring(done.stdout).iter("job_list"):
        job, task = row.findtext("JB_job_number", ""), row.findtext("tasks", "")
        if job in ids:
            code = row.findtext("state", "")
            state = "held" if code.startswith("h") or "s" in code.lower() else "running" if "r" in code else "queued"
            detail = (
                "Grid Engine put it into its error state: qstat -j tells why"
                if "E" in code
                else row.findtext("queue_name", "")
            )
            found[job, int(task) if task.isdigit() else 0] = Job(state, detail or "")
    return found


def cancel(ids: Sequence[str]) -> None:
    done = run(["qdel", *ids], check=False)
    if done.returncode:
        raise SchedulerError((done.stderr or done.stdout).strip())
