"""Plan a run: a JobRequest becomes a JobPlan. Nothing is written."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ekiben.core.errors import UsageError
from ekiben.run.image import NamedImage
from ekiben.run.jobs._resources import choose_resources, option_of
from ekiben.run.jobs.images import PlannedImage, StepTask, plan_images
from ekiben.run.jobs.request import JobRequest
from ekiben.run.schedulers import load
from ekiben.run.site import Site

SEED = "{seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStep:
    """One task as one job, or as one array of jobs when it has ``seeds``.

    ``image``: what it runs in; ``reference``: how the command line names that, where it is not the run's image.
    ``gpus`` and ``processes`` are per node; ``processes`` None: one for each GPU that the job turns out to have.
    ``uses_gpus``: whether the task may see GPUs. ``resource_args``: the scheduler's options that ask for nodes.
    ``warning``: what the job will lack.
    """

    name: str
    argv: tuple[str, ...]
    image: PlannedImage
    reference: str
    nodes: int
    gpus: int
    processes: int | None
    uses_gpus: bool
    resource_args: tuple[str, ...]
    seeds: tuple[str, ...] = ()
    warning: str | None = None

    @property
    def jobs(self) -> tuple[str, ...]:
        """Return the names of its jobs."""
        return tuple(f"{self.name}.{index}" for index in range(1, len(self.seeds) + 1)) or (self.name,)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The complete plan of a run.

    ``image``: of the steps that name none. ``by_hand``: people submit the scripts themselves.

    ``command_args``: options that a site wants on the scheduler's command line; ``directives``: further ones of every
    job.
    """

    folder: Path
    image: PlannedImage
    scheduler: str
    site: Site | None
    request: JobRequest
    steps: tuple[JobStep, ...]
    command_args: tuple[str, ...]
    directives: tuple[str, ...]
    by_hand: bool = False

    @property
    def images(self) -> tuple[PlannedImage, ...]:
        """Return the images of the run and its steps, each once."""
        return tuple({id(image): image for image in (self.image, *(step.image for step in self.steps))}.values())


def plan(
    image: NamedImage,
    tasks: Sequence[StepTask],
    request: JobRequest,
    *,
    scheduler: str,
    site: Site | None,
    runs: Path,
) -> JobPlan:
    """Return the run of ``tasks``, one after the other, as ``request`` describes it.

    ``image``: of the tasks that name none.

    Raises UsageError when it can never run, VerifyError when its image lacks the signature that it needs.
    """
    if site and site.file.scheduler and site.file.scheduler.kind != scheduler:
        raise UsageError(f"--scheduler {scheduler}: {site.name} has {site.file.scheduler.kind}")
    launches = {task.image.launch_of(task.argv[0]) for task in tasks}
    tasks = _insert_seeds(tasks, request.seeds)
    if "per-gpu" not in launches and (request.nodes > 1 or (request.processes_per_node or 1) > 1):
        raise UsageError(
            f"'{tasks[0].argv[0]}' runs as one process on one node; omit --nodes and --processes-per-node",
            hint="a task that can run on several has `launch: per-gpu` in recipe.yaml",
        )
    images = plan_images(image, tasks, request)
    steps = tuple(
        _step(images[task.reference], number, task, request, scheduler, site)
        for number, task in enumerate(tasks, start=1)
    )
    on_command, in_script = _account_args(request, scheduler, site)
    name = f"{image.name}-{tasks[0].argv[0]}-{time.strftime('%Y%m%d-%H%M%S')}"
    folders = (runs.absolute() / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    site_options = site.file.scheduler.options if site and site.file.scheduler else ()
    _check_runs(runs)
    return JobPlan(
        folder=next(folder for folder in folders if not folder.exists()),
        image=images[""],
        scheduler=scheduler,
        site=site,
        request=request,
        steps=steps,
        command_args=on_command,
        directives=(*in_script, *site_options, *request.scheduler_args),
    )


def node_args(request: JobRequest, scheduler: str, site: Site | None) -> list[str]:
    """Return the scheduler's options for one interactive node. Raises UsageError when there is no such node."""
    resources = choose_resources(request, scheduler, site, 1, gpus=request.gpus_per_node)
    on_command, in_script = _account_args(request, scheduler, site)
    site_options = site.file.scheduler.options if site and site.file.scheduler else ()
    return [*resources.args, *on_command, *in_script, *site_options, *request.scheduler_args]


def _check_runs(runs: Path) -> None:
    """Raise UsageError where no folder of runs is or can be made."""
    folder = next(path for path in (runs.absolute(), *runs.absolute().parents) if os.path.lexists(path))
    if not folder.is_dir():
        raise UsageError(f"--runs {runs}: {folder} is not a folder", hint="name a folder, or one to be made")


def _insert_seeds(tasks: Sequence[StepTask], seeds: Sequence[str]) -> Sequence[StepTask]:
    """Return ``tasks`` with the seed inserted: a single task without ``{seed}`` gets the two options every training
    task has.
    """
    has_placeholder = any(SEED in word for task in tasks for word in task.argv)
    if has_placeholder and not seeds:
        raise UsageError(f"{SEED} is in the arguments, but --seeds is missing")
    if has_placeholder or not seeds:
        return tasks
    if len(tasks) > 1:
        raise UsageError(
            f"--seeds: put {SEED} into the arguments at the position of the seed",
            hint=f"train --set seed={SEED} --output result-{SEED} + merge --adapter result-{SEED}/adapter",
        )
    if any(word.split("=")[0] == "--output" for word in tasks[0].argv):
        raise UsageError(f"--seeds: {len(seeds)} jobs would write into the same --output; put {SEED} into its name")
    argv = (*tasks[0].argv, "--set", f"seed={SEED}", "--output", f"result-{SEED}")
    return [replace(tasks[0], argv=argv)]


def _step(
    image: PlannedImage, number: int, task: StepTask, request: JobRequest, scheduler: str, site: Site | None
) -> JobStep:
    launch = task.image.launch_of(task.argv[0])
    nodes = request.nodes if launch == "per-gpu" else 1
    resources = choose_resources(request, scheduler, site, nodes, gpus=0 if launch == "cpu" else request.gpus_per_node)
    return JobStep(
        name=f"{number}-{task.argv[0]}",
        argv=task.argv,
        image=image,
        reference=task.reference,
        nodes=nodes,
        gpus=resources.gpus,
        processes=request.processes_per_node if launch == "per-gpu" else 1,
        uses_gpus=launch != "cpu",
        resource_args=resources.args,
        seeds=tuple(request.seeds) if any(SEED in word for word in task.argv) else (),
        warning=None if launch == "cpu" else resources.warning(task.argv[0]),
    )


def _account_args(request: JobRequest, scheduler: str, site: Site | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the options that name the account that pays and the QOS: (on the command line, in the script).

    Raises UsageError when the site requires an account, or the scheduler has no such option.
    """
    profile = site.file.scheduler if site else None
    known = load(scheduler)
    in_script = () if request.qos is None else (option_of(known, "qos", request.qos),)
    if request.account is None:
        if site and profile and profile.group_required:
            raise UsageError(
                f"{site.name} requires the account that pays: --account NAME ({profile.group_option} there)"
            )
        return (), in_script
    if profile is None or profile.group_option is None:
        return (), (option_of(known, "account", request.account), *in_script)
    option = profile.group_option
    word = f"{option}{request.account}" if option.endswith("=") else f"{option} {request.account}"
    return ((), (word, *in_script)) if profile.group_in_script else ((word,), in_script)
