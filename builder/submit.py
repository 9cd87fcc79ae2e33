"""Submits a recipe's tasks to a cluster's scheduler: a readable job script for each, kept with what belongs to the run.

A run is a folder below ekiben-runs/: `1-train.sh` (the script of its first step), `1-train.log`, `launch_node.py` (starts the
processes on a node, inside the container), `environment` (what it gets of this shell's, tokens too: for its owner only),
`key` (what the launchers know each other by), `run.json`. Of every job, whose name is the step's, or `1-train.2` in an array:
`.exit` (the exit code, once it is over), `.times` (how often it went back into the queue), `.job` (its newest id). A job script
needs bash and Apptainer or SingularityCE on the compute nodes, nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from builder.errors import SchedulerError, UsageError, nearest
from builder.launch import LOCAL, Wish, folders_to_bind, passes, staged_name
from builder.recipe import HOUSE, Recipe
from builder.schedulers import Job, Parts, Request, Scheduler, clock, load
from builder.site import Resource, Site

SEED = "{seed}"
REQUEUE = 75
_OF_A_JOB = {"CUDA_VISIBLE_DEVICES", "JOB_ID", "JOB_NAME", "NSLOTS", "PE_HOSTFILE", "TERM", "USER", "RANK", "WORLD_SIZE",
             "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the command line asks for. ``gpus``, ``cpus`` and ``processes`` are per node; None: not said."""

    nodes: int = 1
    gpus: int | None = None
    cpus: int | None = None
    processes: int | None = None
    resource: str | None = None
    group: str | None = None
    seconds: int | None = None
    notice: int = 300
    max_resubmits: int = 20
    seeds: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    stage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One task as one job, or one array of jobs. ``gpus`` and ``processes`` per node; ``seeds`` when it is an array."""

    name: str
    words: tuple[str, ...]
    nodes: int
    gpus: int
    processes: int
    asks: tuple[str, ...]
    seeds: tuple[str, ...] = ()

    @property
    def jobs(self) -> tuple[str, ...]:
        """The names of its jobs."""
        return tuple(f"{self.name}.{at}" for at in range(1, len(self.seeds) + 1)) or (self.name,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything a run will be; nothing is written yet."""

    folder: Path
    recipe: str
    scheduler: str
    site: Site | None
    sif: Path
    wanted: Wanted
    steps: tuple[Step, ...]
    command_words: tuple[str, ...]  # for the command line of the scheduler, where a site wants them there
    directives: tuple[str, ...]  # further ones for every job


# ------------------------------------------------------------------------------------------------- what will be done


def plan(
    recipe: Recipe, words: Sequence[str], wanted: Wanted, *, scheduler: str, site: Site | None, sif: Path, runs: Path
) -> Plan:
    """``words``: TASK ARGS…, and after a lone ``+`` the next task. Errors: UsageError, for what can never run, too."""
    if site and site.file.scheduler and site.file.scheduler.kind != scheduler:
        raise UsageError(f"--scheduler {scheduler}: {site.name} has {site.file.scheduler.kind}")
    tasks = _split(words)
    for task in tasks:
        recipe.task(task[0])
    tasks = _place_seeds(tasks, wanted.seeds)
    alone = not any(recipe.task(task[0]).runs_on == "gpus" for task in tasks)
    if alone and (wanted.nodes > 1 or (wanted.processes or 1) > 1):
        raise UsageError(f"'{tasks[0][0]}' runs as one process on one node, whatever --nodes and --processes-per-node say",
                         hint="recipe.yaml says it of a task that runs on several: runs_on: gpus")  # fmt: skip
    steps = tuple(_step(recipe, at, task, wanted, scheduler, site) for at, task in enumerate(tasks, start=1))
    on_command, in_script = _group_words(wanted.group, site)
    name = f"{recipe.name}-{tasks[0][0]}-{time.strftime('%Y%m%d-%H%M%S')}"
    free = (runs.absolute() / (name if at == 1 else f"{name}-{at}") for at in itertools.count(1))
    return Plan(
        folder=next(folder for folder in free if not folder.exists()), recipe=recipe.name, scheduler=scheduler,
        site=site, sif=sif.absolute(), wanted=wanted, steps=steps, command_words=on_command,
        directives=(*in_script, *(site.file.scheduler.options if site and site.file.scheduler else ()), *wanted.options),
    )  # fmt: skip


def _split(words: Sequence[str]) -> list[list[str]]:
    tasks: list[list[str]] = [[]]
    for word in words:
        if word == "+":
            tasks.append([])
        else:
            tasks[-1].append(word)
    if not all(tasks):
        raise UsageError("a task is missing" + (" beside '+'" if len(tasks) > 1 else ""),
                         hint="build.py submit RECIPE TASK -- ARGS…, or TASK ARGS… + TASK ARGS… for one after the other")  # fmt: skip
    return tasks


def _place_seeds(tasks: list[list[str]], seeds: Sequence[str]) -> list[list[str]]:
    """Where the seed goes. A single task that does not say it gets the two words every training task knows."""
    said = any(SEED in word for task in tasks for word in task)
    if not seeds or said:
        if said and not seeds:
            raise UsageError(f"{SEED} stands in the arguments, and there is no --seeds")
        return tasks
    if len(tasks) > 1:
        raise UsageError(f"--seeds: say with {SEED} in the arguments where the seed goes",
                         hint=f"train --set seed={SEED} --output result-{SEED} + merge --adapter result-{SEED}/adapter")  # fmt: skip
    if any(word.split("=")[0] == "--output" for word in tasks[0]):
        raise UsageError(f"--seeds: {len(seeds)} jobs would write into the same --output; put {SEED} into its name")
    return [[*tasks[0], "--set", f"seed={SEED}", "--output", f"result-{SEED}"]]


def _step(recipe: Recipe, at: int, task: list[str], wanted: Wanted, scheduler: str, site: Site | None) -> Step:
    about = recipe.task(task[0])
    spread = about.runs_on == "gpus"
    nodes = wanted.nodes if spread else 1
    gpus = 0 if about.runs_on == "cpu" else wanted.gpus
    resource = (
        _resource(site, wanted, nodes, gpus) if site and site.file.scheduler and site.file.scheduler.resources else None
    )
    if gpus is None:
        gpus = resource.gpus if resource else 0
    asks = _asks(resource, nodes, gpus, wanted, scheduler)
    if resource is None:
        _check_limits(load(scheduler), [*asks, *wanted.options], nodes, gpus, wanted)
    processes = (wanted.processes or max(gpus, 1)) if spread else 1
    seeds = tuple(wanted.seeds) if any(SEED in word for word in task) else ()
    return Step(name=f"{at}-{task[0]}", words=tuple(task), nodes=nodes, gpus=gpus, processes=processes, asks=asks, seeds=seeds)  # fmt: skip


def _resource(site: Site, wanted: Wanted, nodes: int, gpus: int | None) -> Resource:
    """What the site calls a node with that much: the smallest that does. Errors: UsageError."""
    assert site.file.scheduler is not None
    known = site.file.scheduler.resources
    if wanted.resource is not None:
        if wanted.resource not in known:
            raise UsageError(f"--resource: {site.name} has no '{wanted.resource}'." + nearest(wanted.resource, known))
        # A step without GPUs takes what has none, where the site has such.
        chosen = {wanted.resource: known[wanted.resource]}
        if gpus == 0 and (without := {name: one for name, one in known.items() if not one.gpus}):
            chosen = without
    else:
        chosen = dict(known)
        if gpus is None and (with_gpus := {name: one for name, one in known.items() if one.gpus}):
            chosen = with_gpus
    problems = {name: _too_much(name, one, wanted, nodes, gpus) for name, one in chosen.items()}
    fits = [one for name, one in chosen.items() if not problems[name]]
    if not fits:
        raise UsageError(
            "\n".join(f"{site.name}: {problem}" for problem in dict.fromkeys(problems.values()) if problem)
        )
    return min(fits, key=lambda one: (one.gpus, one.cores or 0))


def _too_much(name: str, one: Resource, wanted: Wanted, nodes: int, gpus: int | None) -> str | None:
    """Why a resource cannot be what is wanted, or None."""
    if (gpus or 0) > one.gpus:
        return f"--gpus-per-node {gpus}: a node of {name} has {one.gpus}"
    if one.max_nodes is not None and nodes > one.max_nodes:
        return f"--nodes {nodes}: {name} allows {one.max_nodes}"
    if one.max_hours is not None and wanted.seconds is not None and wanted.seconds > one.max_hours * 3600:
        return f"--time {clock(wanted.seconds)}: {name} allows {clock(one.max_hours * 3600)}"
    if one.cores is not None and wanted.cpus is not None and wanted.cpus > one.cores:
        return f"--cpus-per-node {wanted.cpus}: a node of {name} has {one.cores}"
    return None


def _asks(resource: Resource | None, nodes: int, gpus: int, wanted: Wanted, scheduler: str) -> tuple[str, ...]:
    if resource is None:
        return () if scheduler == "sge" and wanted.options else tuple(load(scheduler).words(nodes, gpus, wanted.cpus))
    facts = {
        "nodes": nodes,
        "gpus": gpus,
        "cores": wanted.cpus or resource.cores or 1,
        "memory_gib": resource.memory_gib or 1,
    }
    return tuple(word.format(**facts) for word in resource.request)


def _check_limits(scheduler: Scheduler, words: Sequence[str], nodes: int, gpus: int, wanted: Wanted) -> None:
    """Where no site says what there is, the scheduler does, if it is here. Errors: UsageError."""
    if scheduler.unavailable():
        return
    limits = scheduler.limits(words)
    problems = [
        f"{option} {shown}: {limits.where} {has} {allowed}"
        for option, value, allowed, shown, has in [
            ("--gpus-per-node", gpus, limits.gpus, gpus, "has nodes with at most"),
            ("--nodes", nodes, limits.nodes, nodes, "has"),
        ]
        if allowed is not None and value > allowed
    ]  # fmt: skip
    if limits.seconds is not None and wanted.seconds is not None and wanted.seconds > limits.seconds:
        problems.append(f"--time {clock(wanted.seconds)}: {limits.where} allows {clock(limits.seconds)}")
    if problems:
        raise UsageError("\n".join(problems))


def _group_words(group: str | None, site: Site | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(words for the command line, directives) that say who pays. Errors: UsageError."""
    about = site.file.scheduler if site else None
    if group is None:
        if site and about and about.group_required:
            raise UsageError(f"{site.name} wants to know which group pays: --group NAME ({about.group_option} there)")
        return (), ()
    if about is None or about.group_option is None:
        where = site.name if site else "without --site"
        raise UsageError(
            f"--group {group}: {where} no option for it is known",
            hint="--option '--account=…', or as your scheduler has it",
        )
    word = f"{about.group_option}{group}" if about.group_option.endswith("=") else f"{about.group_option} {group}"
    return ((), (word,)) if about.group_in_script else ((word,), ())


# --------------------------------------------------------------------------------------------------- the job script


def script(run: Plan, step: Step) -> str:
    """The job script of a step: bash, to read and to submit by hand."""
    scheduler = load(run.scheduler)
    seconds = run.wanted.seconds or _default_seconds(run.site)
    request = Request(
        name=f"{run.recipe}-{step.name.partition('-')[2]}", nodes=step.nodes, words=[*step.asks, *run.directives],
        seconds=seconds, notice=min(run.wanted.notice, (seconds or 0) // 2), jobs=len(step.seeds), log=run.folder / f"{step.name}.log",
    )  # fmt: skip
    parts = scheduler.PARTS
    filled = {
        "directives": "\n".join(scheduler.PREFIX + line for line in scheduler.directives(request)),
        "title": f"{run.recipe}: {shlex.join(step.words)}",
        "folder": shlex.quote(str(run.folder)), "step": shlex.quote(step.name), "image": shlex.quote(str(run.sif)),
        "work": shlex.quote(str(Path.cwd())),
        "processes": str(step.processes), "nv": " --nv" if step.gpus else "",
        "task": " ".join(quote_seed(word) if step.seeds else shlex.quote(word) for word in step.words),
        "seed": f'    seeds=({shlex.join(step.seeds)})\n    seed=${{seeds[${{name##*.}} - 1]}}\n' if step.seeds else "",
        "passes": passes(), "local": " ".join(f'"${{{name}:-}}"' for name in LOCAL),
        "binds": " ".join(f"--bind {shlex.quote(folder)}" for folder in _binds(run, step)),
        "stage": _stage(run) if run.wanted.stage else "",
        "modules": "".join(f"    {line}\n" for line in _modules(run.site)),
        "max": str(run.wanted.max_resubmits),
        "job": parts.job, "index": parts.index, "nodes": parts.nodes, "again": parts.again,
        "before": f"{parts.before}\n" if parts.before else "",
        "start": _start(parts), "wait_for": _wait_for(run, step, parts),
        **dict(zip(("timer", "timer_end"), _timer(request) if parts.tells_itself and request.seconds else ("", ""), strict=True)),
    }  # fmt: skip
    return re.sub(r"<(\w+)>", lambda found: filled[found[1]], _SCRIPT)


def _binds(run: Plan, step: Step) -> list[str]:
    """What is on the shared file systems; a node's own folders are known there only."""
    shared = {name: value for name, value in os.environ.items() if name not in LOCAL}
    folders = folders_to_bind(Wish(words=step.words, gpu=step.gpus > 0), shared)
    covered = any(run.folder.is_relative_to(folder) for folder in folders)
    return folders if covered else [*folders, str(run.folder)]


def _stage(run: Plan) -> str:
    local = "${SLURM_TMPDIR:-${SGE_LOCALDIR:-${PBS_LOCALDIR:-${TMPDIR:-/tmp}}}}"
    return f"""    # One copy on the node's own disk for all of this user's jobs there, compared, renamed when whole.
    mkdir -m 700 "{local}/ekiben-$UID" 2>/dev/null
    staged={local}/ekiben-$UID/{shlex.quote(staged_name(run.sif) if run.sif.is_file() else run.sif.name)}
    (
        flock 9
        [ -f "$staged" ] || {{ cp "$image" "$staged.part" && cmp "$image" "$staged.part" && mv "$staged.part" "$staged"; }}
    ) 9>"$staged.lock" && image=$staged || echo "the image could not be copied to this node's disk; it is read from $image" >&2
"""


def quote_seed(word: str) -> str:
    """``out-{seed}`` → ``out-"$seed"``, the rest quoted for a shell."""
    return '"$seed"'.join(shlex.quote(part) if part else "" for part in word.split(SEED))


def _default_seconds(site: Site | None) -> int | None:
    hours = site.file.scheduler.default_hours if site and site.file.scheduler else None
    return hours * 3600 if hours else None


def _modules(site: Site | None) -> list[str]:
    if site is None:
        return []
    file = site.file
    module = next((runtime.module for runtime in file.runtimes[:1] if runtime.module), None)
    names = [*file.modules, *([module] if module else [])]
    lines = [f"export {name}={shlex.quote(value)}" for name, value in file.environment.items()]
    if names:
        lines += [f"source {shlex.quote(file.module_init)}"] if file.module_init else []
        lines.append(f"module load {shlex.join(names)}")
    return lines


def _start(parts: Parts) -> str:
    if parts.start:
        return f"{parts.start} &\npids=($!)"
    return f"""pids=() number=0
for host in ${{nodes//,/ }}; do
    if [ "$number" = 0 ]; then
        bash "$script" node 0 "$nodes" "$port" "$name" &
    else
        {parts.other} &
    fi
    pids+=($!) number=$((number + 1))
done"""


def _timer(request: Request) -> tuple[str, str]:
    assert request.seconds is not None
    begin = f"( trap 'kill $!' TERM; sleep {request.seconds - request.notice} & wait $! && touch"
    return f'\n{begin} "$run/$name.notice" ) >/dev/null 2>&1 &\ntimer=$!', 'kill "$timer" 2>/dev/null\n'


def _wait_for(run: Plan, step: Step, parts: Parts) -> str:
    """Not every scheduler can wait for a job that ended well and was not put back into the queue under another id."""
    at = run.steps.index(step)
    if at == 0:
        return ""
    again = ""
    if parts.wait_again:
        again = f"""
    # It went back into the queue under another id since this job waits: wait for that one.
    since=$(cat "$run/$before.times" 2>/dev/null)
    if [ ! -e "$run/$before.exit" ] && [ "$since" != "$(cat "$run/$name.waited.$before" 2>/dev/null)" ]; then
        echo "$since" >"$run/$name.waited.$before"
        {parts.wait_again} && exit
    fi"""
    return f"""
# ---- not before the step before has ended well
for before in {shlex.join(run.steps[at - 1].jobs)}; do{again}
    ended=$(cat "$run/$before.exit" 2>/dev/null)
    if [ "$ended" != 0 ]; then
        echo "error: $name is not started, for $before ${{ended:+ended with exit code }}${{ended:-did not end}}"
        echo 1 >"$run/$name.exit"
        exit 1
    fi
done

"""


_SCRIPT = r"""#!/bin/bash
<directives>

# <title>
# Written by build.py submit, to be read; and it can be submitted by hand.

run=<folder>
step=<step>
script=$run/$step.sh
image=<image>

# ---- on every node: the container, and in it the launcher of this node's processes
if [ "${1:-}" = node ]; then
    number=${SLURM_NODEID:-$2} nodes=$3 port=$4 name=$5
    cd <work> || exit
<modules>    . "$run/environment"
    runtime=$(command -v apptainer || command -v singularity) ||
        { echo "error: $(hostname) has neither apptainer nor singularity on PATH" >&2; exit 127; }
    # Of the outside the task gets what a job needs; what is meant for programs of the host breaks those of the image.
    while read -r variable; do
        export "APPTAINERENV_$variable=${!variable}" "SINGULARITYENV_$variable=${!variable}"
    done < <(compgen -e | grep -Ex '<passes>')
    binds=(<binds>)
    for folder in <local>; do [ ! -d "$folder" ] || binds+=(--bind "$folder"); done
<stage><seed>    task=(<task>)
    "$runtime" exec --cleanenv<nv> "${binds[@]}" --pwd "$PWD" "$image" \
        python3 "$run/launch_node.py" --node "$number" --nodes "$nodes" --processes <processes> \
        --port "$port" --key "$run/key" --notice "$run/$name.notice" -- "${task[@]}" &
    container=$!
    # A signal to this node's part of the job is for the processes inside.
    trap 'kill -USR1 "$container"' USR1 USR2 XCPU
    trap 'kill -TERM "$container"' TERM
    code=129
    while [ "$code" -gt 128 ] && kill -0 "$container" 2>/dev/null; do wait "$container"; code=$?; done
    exit "$code"
fi

# ---- the job
job=<job> index=<index>
name=$step
[ "$index" = 0 ] || name=$step.$index
cd <work> || exit
<before>rm -f "$run/$name.exit" "$run/$name.notice"
<wait_for>nodes=$(<nodes> | awk '!seen[$1]++ { print $1 }' | paste -sd, -)
port=$((20000 + $(echo "$job.$index" | cksum | cut -d ' ' -f 1) % 12000))
times=$(cat "$run/$name.times" 2>/dev/null || echo 0)
echo "job         $job on $nodes, start $((times + 1)), $(date '+%F %T')"

# Told that the walltime is nearly over, or that the nodes are wanted back: the processes save, and end.
trap 'touch "$run/$name.notice"' USR1 USR2 XCPU TERM<timer>

<start>

# When it fails on one node, it is ended on the others; the exit code is that of the first.
code=0
while [ ${#pids[@]} -gt 0 ]; do
    wait -n "${pids[@]}"
    for at in "${!pids[@]}"; do
        if kill -0 "${pids[at]}" 2>/dev/null; then continue; fi
        wait "${pids[at]}"
        ended=$?
        unset "pids[at]"
        if [ "$code" = 0 ] && [ "$ended" != 0 ]; then
            code=$ended
            [ ${#pids[@]} = 0 ] || kill "${pids[@]}" 2>/dev/null
        fi
    done
done
<timer_end>
# ---- 75: saved, not finished. The same job again, until it is done.
if [ "$code" = 75 ] && [ ! -e "$run/cancelled" ]; then
    if [ "$times" -lt <max> ]; then
        echo $((times + 1)) >"$run/$name.times"
        echo "again       saved, not finished: back into the queue, $((times + 1)) of at most <max> times"
        <again> && exit "$code"
        echo "$times" >"$run/$name.times"
    else
        echo "error: saved, not finished, and back in the queue <max> times: that is --max-resubmits"
    fi
fi
echo "$code" >"$run/$name.exit"
echo "ended       $job with exit code $code, $(date '+%F %T')"
exit "$code"
"""


# ------------------------------------------------------------------------------------------------------ doing it


def submit(run: Plan) -> dict[str, str]:
    """Write the run's folder and submit its steps; step → job id. Errors: SchedulerError; then nothing is left in the queue."""
    if not run.sif.is_file():
        raise UsageError(f"{run.sif} is not there", hint=f"make image recipe={run.recipe}, or --sif PATH")
    scheduler = load(run.scheduler)
    _write(run)
    ids: dict[str, str] = {}
    after = None
    try:
        for step in run.steps:
            after = ids[step.name] = scheduler.submit(run.folder / f"{step.name}.sh", run.command_words, after)
            for job in step.jobs:
                (run.folder / f"{job}.job").write_text(after + "\n")
    except SchedulerError:
        if ids:
            scheduler.cancel(list(ids.values()))
        shutil.rmtree(run.folder)
        raise
    return ids


def _write(run: Plan) -> None:
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        run.folder.mkdir()
    except FileExistsError:
        raise UsageError(f"{run.folder} is there already; submit again in a second") from None
    shutil.copy(HOUSE / "entrypoints" / "launch_node.py", run.folder)
    for step in run.steps:
        (run.folder / f"{step.name}.sh").write_text(script(run, step))
        os.chmod(run.folder / f"{step.name}.sh", 0o755)
    _write_private(run.folder / "key", secrets.token_hex(16))
    # Tokens may be among them, so the file is for its owner only. What this shell has of a scheduler is not the job's.
    kept = {name: value for name, value in os.environ.items() if name not in LOCAL and re.fullmatch(passes(), name)
            and not name.startswith(("SLURM_", "SGE_", "PBS_", "PMI_", "PMIX_", "OMPI_")) and name not in _OF_A_JOB}  # fmt: skip
    _write_private(
        run.folder / "environment",
        "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(kept.items())),
    )
    about = {
        "recipe": run.recipe, "scheduler": run.scheduler, "site": run.site.name if run.site else None, "sif": str(run.sif),
        "submitted": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "steps": [asdict(step) for step in run.steps],
    }  # fmt: skip
    (run.folder / "run.json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n")


def _write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(text)


# ---------------------------------------------------------------------------------------------------- looking after it


@dataclass(frozen=True, slots=True)
class Run:
    """A run that was submitted."""

    folder: Path
    about: Mapping[str, Any]

    @property
    def jobs(self) -> list[str]:
        """The names of all its jobs, in order."""
        return [f"{step['name']}.{at}" if step["seeds"] else step["name"]
                for step in self.about["steps"] for at in range(1, (len(step["seeds"]) or 1) + 1)]  # fmt: skip

    @property
    def ids(self) -> dict[str, str]:
        """Job → its newest id."""
        return {job: self._read(f"{job}.job") for job in self.jobs}

    def exit_code(self, job: str) -> int | None:
        text = self._read(f"{job}.exit")
        return int(text) if text else None

    def times(self, job: str) -> int:
        return int(self._read(f"{job}.times") or 0)

    def _read(self, name: str) -> str:
        try:
            return (self.folder / name).read_text().strip()
        except FileNotFoundError:
            return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A job as `status` shows it. ``state``: queued, running, held, done, failed, skipped, cancelled or lost."""

    run: str
    job: str
    id: str
    state: str
    detail: str
    resubmitted: int
    exit_code: int | None

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "failed", "skipped", "cancelled", "lost")


def find_runs(names: Sequence[str], runs: Path) -> list[Run]:
    """Runs by folder, by name below ``runs``, or by a job's id; all of ``runs`` when none is named. Errors: UsageError."""
    known = {
        path.parent.name: path.parent for path in sorted(runs.glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    }
    if not names:
        return [_open_run(folder) for folder in known.values()]
    found = []
    for name in names:
        if (Path(name) / "run.json").is_file():
            found.append(_open_run(Path(name).absolute()))
        elif name in known:
            found.append(_open_run(known[name]))
        elif same := [run for run in map(_open_run, known.values()) if name in run.ids.values()]:
            found.append(same[0])
        else:
            raise UsageError(
                f"no run '{name}' in {runs}." + nearest(name, known), hint="--runs DIR, or the run's folder"
            )
    return found


def _open_run(folder: Path) -> Run:
    return Run(folder, json.loads((folder / "run.json").read_text()))


def status(runs: Sequence[Run]) -> list[Row]:
    """Every job of ``runs``. The scheduler is asked once for each kind of it. Errors: SchedulerError."""
    asked = {run.folder: run.ids for run in runs}
    waiting: dict[str, set[str]] = {}
    for run in runs:
        # A job that left 75 may be in the queue again.
        ids = {id for job, id in asked[run.folder].items() if run.exit_code(job) in (None, REQUEUE)}
        waiting.setdefault(run.about["scheduler"], set()).update(ids)
    queues = {name: load(name).jobs(sorted(ids)) for name, ids in waiting.items()}
    return [_row(run, job, asked[run.folder][job], queues[run.about["scheduler"]]) for run in runs for job in run.jobs]


def _row(run: Run, job: str, id: str, queue: Mapping[tuple[str, int], Job]) -> Row:
    at = int(job.partition(".")[2] or 0)
    code = run.exit_code(job)  # read after the queue was asked: a job leaves its code behind before it leaves
    here = queue.get((id, at)) or queue.get((id, 0))
    if code is not None and not (code == REQUEUE and here):  # Slurm puts a job back that it preempted
        state, detail = ("done", "") if code == 0 else ("failed", f"exit code {code}")
    elif here:
        state, detail = here.state, here.detail
    elif run.ids[job] != id:
        state, detail = "queued", f"as job {run.ids[job]}"  # while the queue was asked
    elif (run.folder / "cancelled").exists():
        state, detail = "cancelled", ""
    elif failed := [other for other in run.jobs[: run.jobs.index(job)] if run.exit_code(other)]:
        state, detail = "skipped", f"{failed[0]} failed"
    else:
        state, detail = "lost", "neither in the queue nor ended by itself; its log may tell"
    return Row(
        run=run.folder.name, job=job, id=id, state=state, detail=detail, resubmitted=run.times(job), exit_code=code
    )


def cancel(run: Run) -> list[str]:
    """Take what is not over out of the queue; the ids. Errors: SchedulerError."""
    (run.folder / "cancelled").touch()  # so that no job puts itself back
    ids = sorted({row.id for row in status([run]) if not row.is_over})
    if ids:
        load(run.about["scheduler"]).cancel(ids)
    return ids


def wait(run: Run, tell: Callable[[str], None], every: float = 5.0) -> list[Row]:
    """Until all jobs of the run are over; what changes is told. Errors: SchedulerError."""
    told: dict[str, str] = {}
    while True:
        rows = status([run])
        for row in rows:
            line = f"{row.job}: {row.state}{f' ({row.detail})' if row.detail and row.state != 'running' else ''}"
            if told.get(row.job) != line:
                told[row.job] = line
                tell(line)
        if all(row.is_over for row in rows):
            return rows
        time.sleep(every)


def log_lines(run: Run, job: str | None, *, follow: bool) -> Iterator[str]:
    """What a job wrote so far, and with ``follow`` what it writes until it is over. Errors: UsageError, SchedulerError."""
    if job is not None and job not in run.jobs:
        raise UsageError(f"{run.folder.name} has no job '{job}'." + nearest(job, run.jobs))
    begun = [name for name in run.jobs if (run.folder / f"{name}.log").exists()]
    name = job or (begun[-1] if begun else run.jobs[0])
    path, place = run.folder / f"{name}.log", 0
    while True:
        over = not follow or all(row.is_over for row in status([run]) if row.job == name)
        with contextlib.suppress(FileNotFoundError), path.open(errors="replace") as stream:
            stream.seek(place)
            yield from stream
            place = stream.tell()
        if over:
            return
        time.sleep(1)
