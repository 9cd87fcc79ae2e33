"""Plan a run: a JobRequest becomes a JobPlan. Nothing is written."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ekiben.core.checked import TASK
from ekiben.core.command_name import command_name
from ekiben.core.errors import UsageError
from ekiben.core.files import digest_of
from ekiben.run.image import NamedImage, SifState, sif_state
from ekiben.run.jobs._resources import choose_resources, option_of
from ekiben.run.jobs.request import JobRequest
from ekiben.run.live import LiveCopy, live_copy
from ekiben.run.schedulers import load
from ekiben.run.site import Site
from ekiben.spec.recipe import Recipe

SEED = "{seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStep:
    """One task as one job, or as one array of jobs when it has ``seeds``.

    ``gpus`` and ``processes`` are per node; ``processes`` None: one for each GPU that the job turns out to have.
    ``uses_gpus``: whether the task may see GPUs. ``resource_args``: the scheduler's options that ask for nodes.
    ``warning``: what the job will lack.
    """

    name: str
    argv: tuple[str, ...]
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

    ``sif`` is the file itself, never a link to it; ``sif_state`` None when it is not there yet. ``by_hand``: people
    submit the scripts themselves. ``live``: what replaces the recipe's files in the image.

    ``command_args``: options that a site wants on the scheduler's command line; ``directives``: further ones of every
    job.
    """

    folder: Path
    image: NamedImage
    sif: Path
    sif_state: SifState | None
    scheduler: str
    site: Site | None
    request: JobRequest
    steps: tuple[JobStep, ...]
    command_args: tuple[str, ...]
    directives: tuple[str, ...]
    by_hand: bool = False
    live: LiveCopy | None = None


def plan(
    image: NamedImage,
    argv: Sequence[str],
    request: JobRequest,
    *,
    scheduler: str,
    site: Site | None,
    runs: Path,
) -> JobPlan:
    """Return the run that ``argv`` (TASK ARGS…, and after a lone ``+`` the next task) and ``request`` describe.

    Raises UsageError when it can never run, VerifyError when its image lacks the signature that it needs.
    """
    if site and site.file.scheduler and site.file.scheduler.kind != scheduler:
        raise UsageError(f"--scheduler {scheduler}: {site.name} has {site.file.scheduler.kind}")
    tasks = _split(argv)
    launches = {image.launch_of(task[0]) for task in tasks}
    if odd := next((task[0] for task in tasks if not TASK.fullmatch(task[0])), None):
        raise UsageError(
            f"'{odd}' is not a task's name: letters, digits, '.', '_' and '-'",
            hint="a program of the image is named without its folder, or is an argument: sh -c …",
        )
    tasks = _insert_seeds(tasks, request.seeds)
    if "per-gpu" not in launches and (request.nodes > 1 or (request.processes_per_node or 1) > 1):
        raise UsageError(
            f"'{tasks[0][0]}' runs as one process on one node; omit --nodes and --processes-per-node",
            hint="a task that can run on several has `launch: per-gpu` in recipe.yaml",
        )
    steps = tuple(_step(image, number, task, request, scheduler, site) for number, task in enumerate(tasks, start=1))
    on_command, in_script = _account_args(request, scheduler, site)
    name = f"{image.name}-{tasks[0][0]}-{time.strftime('%Y%m%d-%H%M%S')}"
    folders = (runs.absolute() / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    site_options = site.file.scheduler.options if site and site.file.scheduler else ()
    _check_runs(runs)
    # A link such as `current` may point elsewhere by the time the job starts.
    sif = Path(os.path.realpath(image.sif))
    return JobPlan(
        folder=next(folder for folder in folders if not folder.exists()),
        image=image,
        sif=sif,
        sif_state=_state_of(sif, image, request),
        scheduler=scheduler,
        site=site,
        request=request,
        steps=steps,
        command_args=on_command,
        directives=(*in_script, *site_options, *request.scheduler_args),
        live=live_copy(recipe_of(image)) if request.live else None,
    )


def node_args(request: JobRequest, scheduler: str, site: Site | None) -> list[str]:
    """Return the scheduler's options for one interactive node. Raises UsageError when there is no such node."""
    resources = choose_resources(request, scheduler, site, 1, gpus=request.gpus_per_node)
    on_command, in_script = _account_args(request, scheduler, site)
    site_options = site.file.scheduler.options if site and site.file.scheduler else ()
    return [*resources.args, *on_command, *in_script, *site_options, *request.scheduler_args]


def recipe_of(image: NamedImage) -> Recipe:
    """Return the recipe of an image, for --live. Raises UsageError where it has none here."""
    if image.recipe is None:
        raise image.refuse_option("--live")
    return image.recipe


def _state_of(sif: Path, image: NamedImage, request: JobRequest) -> SifState | None:
    """Return the attributes by which jobs verify their image, None where it is not built yet.

    Where a signature is needed, that of the file whose signature was found good, and no checksum that somebody else
    recorded: a job would take any file that has it.
    """
    if not sif.is_file():
        if image.signature:
            raise UsageError(
                f"{sif} is not there, and its signature is checked when a job is submitted: {image.signature.reason}",
                hint=image.build_hint,
            )
        if image.pulled:
            raise UsageError(f"{image.pulled} is a Docker image that was not made by Ekiben, and jobs run SIF files")
        return None
    try:
        state = image.signature.check(sif) if image.signature else sif_state(sif, image.sha256)
        is_read = request.check_digest or (request.copy_local and image.signature)  # a copy is compared with it
        if is_read and not state.sha256:
            state = replace(state, sha256=digest_of(sif).removeprefix("sha256:"))
            if sif_state(sif, state.sha256) != state:
                raise UsageError(f"{sif} was changed while it was read", hint="submit again when it is complete")
        return state
    except OSError as error:
        raise UsageError(f"{sif} cannot be read: {error.strerror}") from error


def _check_runs(runs: Path) -> None:
    """Raise UsageError where no folder of runs is or can be made."""
    folder = next(path for path in (runs.absolute(), *runs.absolute().parents) if os.path.lexists(path))
    if not folder.is_dir():
        raise UsageError(f"--runs {runs}: {folder} is not a folder", hint="name a folder, or one to be made")


def _split(argv: Sequence[str]) -> list[list[str]]:
    tasks: list[list[str]] = [[]]
    for word in argv:
        if word == "+":
            tasks.append([])
        else:
            tasks[-1].append(word)
    if not all(tasks):
        raise UsageError(
            "a task is missing" + (" beside '+'" if len(tasks) > 1 else ""),
            hint=f"{command_name()} submit IMAGE TASK ARGS…, or TASK ARGS… + TASK ARGS… for one after the other",
        )
    return tasks


def _insert_seeds(tasks: list[list[str]], seeds: Sequence[str]) -> list[list[str]]:
    """Return ``tasks`` with the seed inserted: a single task without ``{seed}`` gets the two options every training
    task has.
    """
    has_placeholder = any(SEED in word for task in tasks for word in task)
    if has_placeholder and not seeds:
        raise UsageError(f"{SEED} is in the arguments, but --seeds is missing")
    if has_placeholder or not seeds:
        return tasks
    if len(tasks) > 1:
        raise UsageError(
            f"--seeds: put {SEED} into the arguments at the position of the seed",
            hint=f"train --set seed={SEED} --output result-{SEED} + merge --adapter result-{SEED}/adapter",
        )
    if any(word.split("=")[0] == "--output" for word in tasks[0]):
        raise UsageError(f"--seeds: {len(seeds)} jobs would write into the same --output; put {SEED} into its name")
    return [[*tasks[0], "--set", f"seed={SEED}", "--output", f"result-{SEED}"]]


def _step(
    image: NamedImage, number: int, task: list[str], request: JobRequest, scheduler: str, site: Site | None
) -> JobStep:
    launch = image.launch_of(task[0])
    nodes = request.nodes if launch == "per-gpu" else 1
    resources = choose_resources(request, scheduler, site, nodes, gpus=0 if launch == "cpu" else request.gpus_per_node)
    return JobStep(
        name=f"{number}-{task[0]}",
        argv=tuple(task),
        nodes=nodes,
        gpus=resources.gpus,
        processes=request.processes_per_node if launch == "per-gpu" else 1,
        uses_gpus=launch != "cpu",
        resource_args=resources.args,
        seeds=tuple(request.seeds) if any(SEED in word for word in task) else (),
        warning=None if launch == "cpu" else resources.warning(task[0]),
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
