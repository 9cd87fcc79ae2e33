"""PBS Professional and OpenPBS. A user's job cannot put itself back into the queue: it submits itself anew, under a new id."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from builder.errors import SchedulerError
from builder.process import run, which
from builder.schedulers import Job, Limits, Parts, Request, clock

PREFIX = "#PBS "
# One job of an array comes back as a job of its own.
_ANEW = """new=$(sed '/^#PBS -J/d' "$script" | qsub -v EKIBEN_INDEX="$index"{}) && echo "$new" >"$run/$name.job\""""
PARTS = Parts(
    job='"$PBS_JOBID"',
    index='"${EKIBEN_INDEX:-${PBS_ARRAY_INDEX:-0}}"',
    nodes='cat "$PBS_NODEFILE"',
    # pbs_tmrsh has PBS itself start what runs on the other nodes: no ssh, and it ends with the job.
    other='pbs_tmrsh "$host" /bin/bash "$script" node "$number" "$nodes" "$port" "$name"',
    again=_ANEW.format(""),
    # PBS keeps a job's output on the node until the job ends, and sends no signal before the walltime is over.
    before='exec >>"$run/$name.log" 2>&1\ncd "$PBS_O_WORKDIR" || exit',
    tells_itself=True,
    wait_again=_ANEW.format(""" -W depend=afterany:"$(cat "$run/$before.job")\""""),
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
    if not which("qsub") or not which("pbsnodes"):
        return "qsub and pbsnodes are not on PATH"
    said = run(["qstat", "-B"], check=False)
    return f"PBS does not answer: {said.stderr.strip()}" if said.returncode else None


def words(nodes: int, gpus: int, cpus: int | None) -> Sequence[str]:
    chunk = [f"select={nodes}", *([f"ncpus={cpus}"] if cpus else []), *([f"ngpus={gpus}"] if gpus else [])]
    return [f"-l {':'.join(chunk)}", *(["-l place=scatter"] if nodes > 1 else [])]


def directives(request: Request) -> list[str]:
    # Up to PBS 18 a name has 15 characters.
    lines = [
        f"-N {request.name[:15]}",
        *request.words,
        "-S /bin/bash",
        "-j oe",
        f"-o {request.log.with_suffix('.pbs.log')}",
    ]
    if request.seconds:
        lines.append(f"-l walltime={clock(request.seconds)}")
    if request.jobs:
        lines.append(f"-J 1-{request.jobs}")
    return [*lines, "-r y"]


def limits(words: Sequence[str]) -> Limits:
    named = next((found for word in words if (found := re.match(r"-q ?(\S+)", word))), None)
    if not named or not which("qstat"):
        return Limits(where="the default queue")
    said = run(["qstat", "-Q", "-f", named[1]], check=False).stdout
    time = re.search(r"resources_max\.walltime = (\d+):(\d+):(\d+)", said)
    seconds = int(time[1]) * 3600 + int(time[2]) * 60 + int(time[3]) if time else None
    return Limits(where=f"queue {named[1]}", seconds=seconds)


def submit(script: Path, words: Sequence[str], after: str | None) -> str:
    wait = ["-W", f"depend=afterany:{after}"] if after else []  # the step itself looks how the one before ended
    done = run(["qsub", *wait, *(part for word in words for part in word.split(" ", 1)), str(script)], check=False)
    if done.returncode:
        raise SchedulerError(done.stderr.strip())
    return done.stdout.strip()


def jobs(ids: Sequence[str]) -> dict[tuple[str, int], Job]:
    if not ids:
        return {}
    done = run(["qstat", "-x", "-t", "-f", "-F", "json", *ids], check=False)
    found = {}
    for name, about in (json.loads(done.stdout).get("Jobs", {}) if done.stdout.strip() else {}).items():
        array = re.fullmatch(r"(\d+)\[(\d*)\](.*)", name)
        if array and not array[2]:
            continue  # the array itself; its jobs follow
        if state := _STATES.get(about["job_state"]):
            key = (f"{array[1]}[]{array[3]}", int(array[2])) if array else (name, 0)
            found[key] = Job(state, _detail(about))
    if done.returncode and not found and "Unknown Job" not in done.stderr:
        raise SchedulerError(done.stderr.strip())
    return found


def _detail(about: dict[str, Any]) -> str:
    nodes = [part.split("/")[0] for part in about.get("exec_host", "").split("+")]
    return ",".join(dict.fromkeys(filter(None, nodes))) or about.get("comment", "")


def cancel(ids: Sequence[str]) -> None:
    done = run(["qdel", *ids], check=False)
    if done.returncode:
        raise SchedulerError(done.stderr.strip())
