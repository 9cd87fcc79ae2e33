"""Runs: write, submit, submit again and cancel them. records.py reads them, states.py asks for their jobs' states.

A run is a folder below ekiben-runs/: `1-train.sh` (the script of its first step), `1-train.log`, `job.sh` (what all
scripts do), `live/` (of --live: the recipe's scripts as they were; `live-2/`: those of another image's),
`launch_node.py` and three modules of it (start the processes on a node, inside the container), `environment` (what it
gets of this shell's, tokens too: for its owner only, and removed when all jobs have ended), `key` (by which the
launchers know each other), `run.json`. Of every job, whose name is the step's, or `1-train.2` in an array: `.exit` (the
exit code, once it is over), `.times` (how often it went back into the queue), `.attempt` (which one this is, where an
ended job's script was submitted again), `.job` (its newest id; of an array, `1-train.array` has the array's),
`.processes` (how many on each node), `.ranks/3.log` (what one of several processes wrote), `.cancelled`. A job script
needs bash and Apptainer or SingularityCE on the compute nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ekiben.core.errors import EngineError, SchedulerError, StoreError, UsageError, nearest
from ekiben.core.files import open_regular
from ekiben.core.folder import Folder
from ekiben.core.paths import PROJECT_ROOT
from ekiben.formats.sif import read_sif
from ekiben.run.jobs.images import PlannedImage
from ekiben.run.jobs.plan import JobPlan, JobStep
from ekiben.run.jobs.records import RECORD, RECORD_FORMAT, Run
from ekiben.run.jobs.request import JobRequest
from ekiben.run.jobs.script import JOB_PROGRAM, environment_text, job_program, script
from ekiben.run.jobs.states import IDS_AT_ONCE, status
from ekiben.run.schedulers import Scheduler, load
from ekiben.spec.recipe import LAUNCHER

# ------------------------------------------------------------------------------------------------------ submitting


def submit(plan: JobPlan) -> dict[str, str]:
    """Write the run's folder, submit its steps, and return step → job id.

    Raises SchedulerError when the scheduler refuses one; then nothing is left in the queue.
    """
    _check_images(plan)
    scheduler = load(plan.scheduler)
    if reason := scheduler.unavailable():
        raise EngineError(f"{scheduler.TITLE} cannot be used here: {reason}")
    with _new_run(plan) as (runs, folder):
        return _submit_steps(plan, scheduler, runs, folder)


def write(plan: JobPlan) -> None:
    """Write the run's folder, whose scripts are submitted by hand. Raises UsageError where it cannot be written."""
    _check_images(plan)
    with _new_run(plan):
        pass


def _check_images(plan: JobPlan) -> None:
    for image in plan.images:
        if not image.sif.is_file():
            hint = f"{image.named.build_hint}, or --sif PATH" if image is plan.image else image.named.build_hint
            raise UsageError(f"{image.sif} is not there", hint=hint)


def _submit_steps(plan: JobPlan, scheduler: Scheduler, runs: Folder, folder: Folder) -> dict[str, str]:
    ids: dict[str, str] = {}
    after = None
    try:
        for step in plan.steps:
            after = ids[step.name] = scheduler.submit(plan.folder / f"{step.name}.sh", plan.command_args, after)
            for name in (*([f"{step.name}.array"] if step.seeds else []), *(f"{job}.job" for job in step.jobs)):
                with contextlib.suppress(FileExistsError):  # the job has begun, and has a newer id
                    _write_file(folder, name, after + "\n", 0o644)
    except (SchedulerError, OSError) as error:
        if ids:
            scheduler.cancel(list(ids.values()))
        runs.remove_tree(plan.folder.name)
        if isinstance(error, OSError):
            raise UsageError(f"{plan.folder} cannot be written: {error.strerror}") from error
        raise
    return ids


@contextlib.contextmanager
def _new_run(plan: JobPlan) -> Iterator[tuple[Folder, Folder]]:
    """Yield the folder of all runs, which other users may write, and in it the new one with all that its jobs need."""
    scripts = {step.name: script(plan, step) for step in plan.steps}
    environment = environment_text(os.environ, plan.request.env)
    name = plan.folder.name
    with contextlib.ExitStack() as stack:
        try:
            plan.folder.parent.mkdir(parents=True, exist_ok=True)
            runs = stack.enter_context(Folder.open(plan.folder.parent))
            runs.new_folder(name)
        except FileExistsError:
            hint = "name a new one" if plan.by_hand else "submit again in a second"
            raise UsageError(f"{plan.folder} exists already", hint=hint) from None
        except OSError as error:
            raise UsageError(
                f"{plan.folder} cannot be made: {error.strerror}", hint="--output DIR" if plan.by_hand else "--runs DIR"
            ) from error
        try:
            folder = stack.enter_context(runs.folder(name))
            _write_files(plan, folder, scripts, environment)
        except BaseException as error:
            runs.remove_tree(name)
            if isinstance(error, OSError):
                raise UsageError(f"{plan.folder} cannot be written: {error.strerror}") from error
            raise
        yield runs, folder


def _write_files(plan: JobPlan, folder: Folder, scripts: Mapping[str, str], environment: str) -> None:
    for path in (PROJECT_ROOT / "entrypoints" / name for name in LAUNCHER):
        _write_file(folder, path.name, path.read_text(encoding="utf-8"), path.stat().st_mode & 0o777)
    _write_file(folder, JOB_PROGRAM, job_program(), 0o644)
    for image in plan.images:
        if image.live:
            folder.new_folder(image.live_folder)
            with folder.folder(image.live_folder) as copies:
                for inside, path in image.live.files.items():
                    _copy_file(copies, inside, path)
    for name, text in scripts.items():
        _write_file(folder, f"{name}.sh", text, 0o755)
    _write_file(folder, "key", secrets.token_hex(16), 0o600)
    # Tokens may be among them.
    _write_file(folder, "environment", environment, 0o600)
    text = json.dumps(_record(plan), indent=1, ensure_ascii=False) + "\n"
    # Written last: a run exists from its record on. Bytes of an argument that are not UTF-8 become JSON escapes.
    _write_file(folder, f".{RECORD}", text.encode("utf-8", "backslashreplace"), 0o644)
    folder.move(f".{RECORD}", RECORD)


def _write_file(folder: Folder, name: str, content: str | bytes, mode: int) -> None:
    with folder.create(name) as stream:
        os.fchmod(stream.fileno(), mode)
        data = memoryview(content.encode() if isinstance(content, str) else content)
        while data:
            data = data[stream.write(data) :]


def _copy_file(folder: Folder, inside: str, path: Path) -> None:
    """Copy a file to the path ``inside`` of a folder; its folders are made."""
    above, _, rest = inside.partition("/")
    if rest:
        if not folder.lexists(above):
            folder.new_folder(above)
        with folder.folder(above) as lower:
            _copy_file(lower, rest, path)
        return
    with open_regular(path) as source, folder.create(inside) as copy:
        os.fchmod(copy.fileno(), 0o644 | os.fstat(source.fileno()).st_mode & 0o111)
        shutil.copyfileobj(source, copy)


def _record(plan: JobPlan) -> dict[str, Any]:
    """Return the content of run.json."""
    name, image = plan.image.named.name, _image_record(plan.image)
    return {
        "format": RECORD_FORMAT,
        "image": name,
        **image,
        "request": _request_record(plan.request),
        "scheduler": plan.scheduler,
        "site": plan.site.name if plan.site else None,
        "site_path": str(plan.site.path.absolute()) if plan.site else None,
        "work": str(Path.cwd()),
        **({"by_hand": True} if plan.by_hand else {}),
        "submitted": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "steps": [_step_record(step) for step in plan.steps],
    }


def _image_record(image: PlannedImage) -> dict[str, Any]:
    """Return the fields about an image."""
    sif_id = None
    with contextlib.suppress(StoreError):  # a SIF of another program, which a runtime may read
        sif_id = read_sif(image.sif).id
    recipe = image.named.recipe
    return {
        "recipe_path": str(recipe.folder.absolute()) if recipe else None,
        "sif": str(image.sif),
        "sif_id": sif_id,
        "sif_state": asdict(image.state) if image.state else None,
        **({"live": image.live.origin} if image.live else {}),
    }


def _step_record(step: JobStep) -> dict[str, Any]:
    """Return the content of run.json about a step; of one with another image than the run's, with that image."""
    task, *arguments = step.argv
    image = {"image": {"name": step.image.named.name, **_image_record(step.image)}} if step.reference else {}
    return {
        "name": step.name,
        "argv": [f"{step.reference}:{task}" if step.reference else task, *arguments],
        **image,
        "nodes": step.nodes,
        "gpus": step.gpus,
        "processes": step.processes,
        "resource_args": step.resource_args,
        "seeds": step.seeds,
    }


def _request_record(request: JobRequest) -> dict[str, Any]:
    """Return what was requested, without the values of variables, which may be secret."""
    env = [word.partition("=")[0] if "=" in word else word for word in request.env]
    return {**asdict(request), "env": env, "binds": [str(folder) for folder in request.binds]}


def request_again(run: Run, env: Sequence[str] = ()) -> tuple[list[str], JobRequest]:
    """Return the tasks with their arguments, and the request of a run, to submit it again.

    ``env``: NAME=VALUE for variables whose values are not recorded. Raises UsageError for a record that has too little
    in it.
    """
    record, arguments = run.record, [step.argv for step in run.record.steps]
    if record.format < RECORD_FORMAT:
        raise UsageError(f"{run.folder} was submitted by an earlier version, which did not record what it requested")
    if not record.request or not record.image.sif or not all(arguments):
        raise UsageError(f"{run.folder / RECORD}: has too little in it to be submitted again")
    argv = [word for step in arguments for word in ("+", *(step or ()))][1:]
    values = {word.partition("=")[0]: word for word in (*record.request.env, *env)}
    return argv, replace(record.request, env=tuple(values.values()))


def check_same_image(run: Run, plan: JobPlan) -> None:
    """Raise UsageError when an image of ``run`` was replaced."""
    steps = zip(plan.steps, run.record.steps, strict=False)
    pairs = [(plan.image, run.record.image), *((step.image, known.image) for step, known in steps if known.image)]
    for image, known in pairs:
        if image.state and known.sif_state and not known.sif_state.is_same(image.sif):
            raise UsageError(
                f"{image.sif} was changed since {run.folder.name} was submitted",
                hint="--force submits with the image that is there now",
            )


def cancel(run: Run, only: Sequence[str] = ()) -> list[str]:
    """Cancel the jobs that have not ended, all of the run or ``only`` these, and return the ids.

    Raises UsageError when the run has no such job, SchedulerError when the scheduler refuses.
    """
    for job in only:
        if job not in run.elements:
            raise UsageError(f"{run.folder.name} has no job '{job}'." + nearest(job, run.jobs))
    with run.files() as files:
        for marker in [f"{job}.cancelled" for job in only] or ["cancelled"]:
            with contextlib.suppress(FileExistsError):
                files.folder.create(marker, 0o666).close()  # so that no job requeues itself
        newest = {job: files.id(job) for job in run.elements}
    unfinished = [job for job in status([run]) if not job.is_over and (not only or job.job in only)]
    ids = sorted({job.id if only else newest[job.job] for job in unfinished} - {""})
    for at in range(0, len(ids), IDS_AT_ONCE):
        load(run.record.scheduler).cancel(ids[at : at + IDS_AT_ONCE])
    if not only:
        run.remove_environment()
    return ids
