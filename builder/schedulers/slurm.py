"""Slurm. The job goes back into the queue under its own id, so that what waits for it goes on waiting."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from builder.errors import SchedulerError
from builder.process import run, which
from builder.schedulers import Job, Limits, Parts, Request, clock, seconds_of

PREFIX = "#SBATCH "
PARTS = Parts(
    job='"$SLURM_JOB_ID"',
    index='"${SLURM_ARRAY_TASK_ID:-0}"',
    nodes='scontrol show hostnames "$SLURM_JOB_NODELIST"',
    # One task on each node, which has all of the node's GPUs. The launchers end together, and with one exit code; --wait is for
    # a node on which none came up.
    start='srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=60 bash "$script" node 0 "$nodes" "$port" "$name"',
    # Slurm would put a cancelled job back, too; such a job is COMPLETING. One that is put back is ended by Slurm.
    again='scontrol --oneliner show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING && scontrol requeue "$SLURM_JOB_ID"',
)
_STATES = {"PENDING": "queued", "SUSPENDED": "held", "CONFIGURING": "queued", "REQUEUED": "queued"}


def unavailable() -> str | None:
    if not which("sbatch"):
        return "sbatch is not on PATH"
    said = run(["sinfo", "--noheader", "--format", "%P"], check=False)
    return f"Slurm does not answer: {said.stderr.strip()}" if said.returncode else None


def words(nodes: int, gpus: int, cpus: int | None) -> Sequence[str]:
    asked = [f"--nodes={nodes}"]
    if gpus:
        asked.append(f"--gpus-per-node={gpus}")
    if cpus:
        asked.append(f"--cpus-per-task={cpus}")
    return asked


def directives(request: Request) -> list[str]:
    lines = [f"--job-name={request.name}", *request.words, "--ntasks-per-node=1"]
    if request.seconds:
        lines += [f"--time={clock(request.seconds)}", f"--signal=B:USR1@{request.notice}"]
    if request.jobs:
        lines.append(f"--array=1-{request.jobs}")
    place = request.log.with_suffix(".%a.log") if request.jobs else request.log
    return [*lines, "--requeue", f"--output={place}", "--open-mode=append"]


def limits(words: Sequence[str]) -> Limits:
    named = next((found for word in words if (found := re.match(r"(?:--partition[= ]|-p ?)(\S+)", word))), None)
    rows = run(["sinfo", "--noheader", *(["--partition", named[1]] if named else []), "--format", "%P|%l|%D|%G"],
               check=False).stdout.splitlines()  # fmt: skip
    cut = [row.split("|") for row in rows if named or row.split("|")[0].endswith("*")]
    if not cut:
        return Limits(where="the default partition")
    gpus = [sum(int(count) for count in re.findall(r"gpu(?::[^:,(]+)?:(\d+)", row[3])) for row in cut]
    time = cut[0][1]
    return Limits(
        where=f"partition {cut[0][0].rstrip('*')}", gpus=max(gpus), nodes=sum(int(row[2]) for row in cut),
        seconds=None if time in ("infinite", "n/a") else seconds_of(time if time.count(":") > 1 else f"0:{time}"),
    )  # fmt: skip


def submit(script: Path, words: Sequence[str], after: str | None) -> str:
    wait = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    done = run(["sbatch", "--parsable", *wait, *words, str(script)], check=False)
    if done.returncode:
        raise SchedulerError(done.stderr.strip())
    return done.stdout.strip().split(";")[0]


def jobs(ids: Sequence[str]) -> dict[tuple[str, int], Job]:
    if not ids:
        return {}
    done = run(["squeue", "--noheader", "--array", "--states=all", "--jobs", ",".join(ids), "--format", "%F|%K|%T|%N|%r|%M"], check=False)  # fmt: skip
    if done.returncode and "Invalid job id" not in done.stderr:
        raise SchedulerError(done.stderr.strip())
    found = {}
    for row in done.stdout.splitlines():
        job, index, state, nodes, reason, elapsed = row.split("|")
        if state in ("RUNNING", "COMPLETING", *_STATES):
            detail = f"{nodes}, {elapsed}" if nodes else reason
            found[job, int(index) if index.isdigit() else 0] = Job(_STATES.get(state, "running"), detail)
    return found


def cancel(ids: Sequence[str]) -> None:
    done = run(["scancel", *ids], check=False)
    if done.returncode:
        raise SchedulerError(done.stderr.strip())
