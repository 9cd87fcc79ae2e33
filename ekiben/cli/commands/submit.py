"""Submit a task to Slurm, Grid Engine, PBS or OAR.

It runs on one node or several. A job checkpoints before its walltime ends and goes back into the queue until it is
done. Options come before IMAGE (see `ekiben run --help`); what follows TASK is the task's. After + the next task
follows, of IMAGE or of another one.

\b
Examples:
  ekiben submit --nodes 2 --gpus-per-node 4 --time 2:00:00 lora-opencalm train --data rows.jsonl
  ekiben submit --site abci-3.0 --account gaa00000 --partition rt_HF --dry-run lora-opencalm train
  ekiben submit --gpus-per-node 1 --seeds 1,2,3 lora-opencalm train
  ekiben submit --gpus-per-node 2 --cpus-per-node 16 --memory 128G --env WANDB_MODE=offline lora-opencalm train
  ekiben submit --dry-run --output my-run lora-opencalm train; sbatch my-run/1-train.sh
  ekiben submit --again 1234
  ekiben submit --gpus-per-node 1 lora-opencalm train --data rows.jsonl + merge --adapter result/adapter
  ekiben submit --gpus-per-node 1 finetune train --data rows.jsonl + evaluate:evaluate --adapter result/adapter
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ekiben.cli.commands._jobs import new_runs_option, request_with_defaults, scheduler_of
from ekiben.cli.commands._start import Rebuild, build_image, buildable, warn_of_edits
from ekiben.cli.commands._sync import offline_option, sync_option, wants_sync
from ekiben.cli.context import Context
from ekiben.cli.named import find_named
from ekiben.cli.options import (
    CountType,
    NameType,
    OutputFolder,
    PathType,
    PluginType,
    RecipeOptions,
    RecipeType,
    TaskCommand,
    TextType,
    include_option,
    json_option,
    refuse_ignored,
)
from ekiben.core.checked import read_regular
from ekiben.core.command_name import command_name
from ekiben.core.decisions import log_decision
from ekiben.core.errors import StoreError, UsageError
from ekiben.images import ImageOptions
from ekiben.run.image import NamedImage, SifState
from ekiben.run.jobs import plan as planning
from ekiben.run.jobs import records
from ekiben.run.jobs import runs as jobs
from ekiben.run.jobs import states as job_states
from ekiben.run.jobs.images import PlannedImage, read_tasks, split_reference
from ekiben.run.jobs.request import JobRequest, memory_mib_of, parse_seeds
from ekiben.run.jobs.script import environment_text, job_program, script
from ekiben.run.launch import Target
from ekiben.run.live import live_files
from ekiben.run.schedulers import load, seconds_of
from ekiben.run.site import find_site
from ekiben.store import known_sif_sha256

_SCHEDULER = PluginType("ekiben.run.schedulers", "ekiben.schedulers", option="--scheduler", kind="scheduler")
_COUNT = CountType(1)
_COUNT_OR_NONE = CountType(0)


@dataclass(frozen=True, slots=True)
class SubmitResult:
    """``ids``: a job's id by its step; ``name`` is how other commands are asked about the run."""

    folder: Path
    ids: Mapping[str, str]
    name: str

    def to_json(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        return {"run": str(self.folder), "jobs": self.ids}

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of the text output."""
        yield f"run     {self.folder}"
        yield from (f"job     {id}  {step}" for step, id in self.ids.items())
        yield f"watch   {command_name()} logs -f {self.name}"


@dataclass(frozen=True, slots=True)
class SubmitPreview:
    """What --dry-run shows: a job's script by its step, and ``program``, which all of them run."""

    folder: Path
    scripts: Mapping[str, str]
    program: str

    def to_json(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        return {"run": str(self.folder), "scripts": dict(self.scripts), "program": self.program}

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of the text output."""
        yield from self.scripts.values()
        yield self.program.removesuffix("\n")


@dataclass(frozen=True, slots=True)
class WrittenRun:
    """What --dry-run --output writes: a run's folder, and the command that submits each step."""

    folder: Path
    submit: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return what --json prints."""
        return {"run": str(self.folder), "submit": dict(self.submit)}

    def to_lines(self) -> Iterator[str]:
        """Yield what is printed."""
        yield f"run     {self.folder}"
        yield from (f"submit  {line}" for line in self.submit.values())
        if len(self.submit) > 1:
            yield "        each when the one before has ended"
        yield f"watch   {command_name()} logs -f {shlex.quote(str(self.folder))}"


@click.command("submit", cls=TaskCommand, help=__doc__)
@click.argument("image", metavar="IMAGE", required=False, type=RecipeType())
@click.argument("argv", nargs=-1, metavar="TASK [ARGS… [+ [IMAGE:]TASK ARGS…]]", type=click.UNPROCESSED)
@click.option("--scheduler", type=_SCHEDULER, help="Default: the site's, else the one on this machine.")
@click.option(
    "--site",
    type=NameType(),
    metavar="NAME|FILE",
    help="A profile of sites/ or a file of yours: the cluster's nodes, and how to request them.",
)
@click.option(
    "--partition",
    type=TextType(),
    metavar="NAME",
    help="One of the site's kinds of nodes (default: the smallest that does), or the scheduler's partition or queue.",
)
@click.option("--account", type=TextType(), metavar="NAME", help="The group or account that pays.")
@click.option("--qos", type=TextType(), metavar="NAME", help="The quality of service, where the scheduler has such.")
@click.option("--nodes", type=_COUNT, metavar="N", default=1, show_default=True, help="For tasks that run on several.")
@click.option(
    "--gpus-per-node",
    type=_COUNT_OR_NONE,
    metavar="N",
    help="Default: those of the site's kind of node, else 0.",
)
@click.option("--cpus-per-node", type=_COUNT, metavar="N", help="Default: in proportion to the GPUs.")
@click.option("--memory", type=TextType(), metavar="64G", help="Memory per node. Default: in proportion to the GPUs.")
@click.option("--exclusive", is_flag=True, default=None, help="Request nodes exclusively.")
@click.option(
    "--env",
    multiple=True,
    type=TextType(),
    metavar="NAME[=VALUE]",
    help="Pass this variable to the task, with its value here or VALUE; may repeat.",
)
@click.option(
    "--bind",
    "binds",
    multiple=True,
    type=PathType(),
    metavar="DIR",
    help="Bind this folder at its own path; may repeat.",
)
@click.option("--processes-per-node", type=_COUNT, metavar="N", help="Default: one for each GPU.")
@click.option(
    "--time", "walltime", type=TextType(), metavar="H:MM:SS", help="Walltime of one job; also 90m, 2h, 1-12:00:00."
)
@click.option(
    "--grace-period",
    type=TextType(),
    metavar="TIME",
    default="5m",
    show_default=True,
    help="Time before the job's end at which it receives the signal to checkpoint.",
)
@click.option(
    "--max-resubmits",
    type=_COUNT_OR_NONE,
    metavar="N",
    default=20,
    show_default=True,
    help="Maximum number of requeues of a job that saved a checkpoint.",
)
@click.option("--seeds", type=TextType(), metavar="1,2,3", help="Submit a job for each; {seed} in ARGS is replaced.")
@click.option(
    "--scheduler-arg",
    "scheduler_args",
    multiple=True,
    type=TextType(),
    metavar="WORDS",
    help="An option of the scheduler's own; may repeat.",
)
@click.option("--sif", type=PathType(), metavar="FILE", help="The file to run (default: ./RECIPE.sif).")
@include_option()
@click.option(
    "--copy-local",
    is_flag=True,
    help="Copy the SIF to each node's own disk first, once for all jobs there.",
)
@click.option(
    "--live",
    is_flag=True,
    help="Use the recipe's scripts from this folder, not the image's; the run keeps copies.",
)
@click.option(
    "--again",
    type=NameType(),
    metavar="RUN",
    help="Submit this run once more, from its record: image, tasks, arguments, request.",
)
@click.option(
    "--force", is_flag=True, help="Submit without these checks: compute nodes, image, the task's own --dry-run."
)
@click.option("--build", is_flag=True, help="If the recipe was edited since the last build, build and test it first.")
@sync_option("The same, and lock first where a lock file is missing or out of date.")
@offline_option
@click.option("--wait", is_flag=True, help="Stay until the run is over; the exit code is 1 when a job failed.")
@click.option("--dry-run", is_flag=True, help="Print the job scripts; submit nothing.")
@click.option(
    "-o",
    "--output",
    type=OutputFolder(),
    metavar="DIR",
    help="With --dry-run: write the scripts to this new folder, ready for sbatch or qsub.",
)
@new_runs_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    image: str | None,
    argv: tuple[str, ...],
    scheduler: str | None,
    site: str | None,
    runs: Path,
    sif: Path | None,
    included: tuple[Path, ...],
    walltime: str | None,
    grace_period: str,
    memory: str | None,
    seeds: str | None,
    again: str | None,
    build: bool,
    sync: bool,
    force: bool,
    wait: bool,
    dry_run: bool,
    output: Path | None,
    **resource_options: Any,
) -> None:
    """Plan the jobs, check the compute nodes, submit."""
    context = ctx.find_object(Context) or Context()
    if dry_run:
        refuse_ignored("is for jobs, and --dry-run submits none", "wait")
    elif output:
        raise UsageError("--output names the folder that --dry-run writes; --runs DIR is for jobs that are submitted")
    if again:
        _check_only_again(ctx)
        (before,) = records.find_runs([again], runs)
        runs, included = runs.absolute(), tuple(path.absolute() for path in included)
        output = output.absolute() if output else None
        with contextlib.chdir(before.record.work or "."):
            run = _plan_again(
                before,
                runs,
                [*(word for known in reversed(context.settings.jobs) for word in known.env), *ctx.params["env"]],
                lambda image, sif: _checked(
                    find_named(context, image, ImageOptions(included=included, sif=sif)), force=force
                ),
            )
            if not force:
                jobs.check_same_image(before, run)
            _submit(context, _at(run, output), runs, force=force, wait=wait, dry_run=dry_run)
        return
    if not image or not argv:
        raise UsageError(
            f"Missing argument '{'TASK' if image else 'IMAGE TASK'}'",
            hint=f"{command_name()} submit IMAGE TASK ARGS…, or --again RUN",
        )
    options = ImageOptions(included=included, sif=sif)
    rebuild = Rebuild(build, sync)
    preparation = _Preparation(context, rebuild, live=resource_options["live"], force=force)
    named = preparation.image_of(image, options)
    further = ImageOptions(included=included)
    tasks = read_tasks(named, argv, lambda other: preparation.image_of(other, further, is_further=True))
    profile = find_site(site) if site else None
    request = JobRequest(
        time_seconds=seconds_of(walltime) if walltime else None,
        grace_seconds=seconds_of(grace_period),
        memory_mib=memory_mib_of(memory) if memory else None,
        seeds=parse_seeds(seeds) if seeds is not None else (),
        **resource_options,
    )
    request = request_with_defaults(context, request, profile)
    if scheduler:
        log_decision("scheduler", scheduler, "--scheduler")
    run = planning.plan(named, tasks, request, scheduler=scheduler or scheduler_of(profile), site=profile, runs=runs)
    _submit(context, _at(run, output), runs, force=force, wait=wait, dry_run=dry_run)


@dataclass(frozen=True, slots=True)
class _Preparation:
    """What is done with each image before a run is planned: see the options of these names."""

    context: Context
    rebuild: Rebuild
    live: bool
    force: bool

    def image_of(self, reference: str, options: ImageOptions, *, is_further: bool = False) -> NamedImage:
        """Find an image to submit; build it first, or print what was edited since it was built.

        ``is_further``: a step names it, beside the run's image; it is built where it is a recipe's.
        """
        image, rebuild = find_named(self.context, reference, options), self.rebuild
        rebuild.refuse_ignored("submits")
        if is_further and image.recipe is None:
            rebuild = Rebuild(build=False, sync=False)
        is_configured = (
            image.recipe is not None and options.sif is None and not click.get_current_context().params["dry_run"]
        )
        is_built = rebuild.is_asked or (is_configured and wants_sync(self.context, False))
        if is_built:
            recipe = buildable(image, rebuild)
            build_image(self.context, RecipeOptions(included=options.included), recipe, "sif", sync=rebuild.sync)
        image = _checked(image, force=self.force)
        if not is_built and image.sif.is_file() and options.sif is None:
            warn_of_edits(self.context, image, Target("", str(image.sif)), live=self.live)
        return _with_sha256(self.context, image)


def _at(run: planning.JobPlan, output: Path | None) -> planning.JobPlan:
    """Return the run with its folder at ``output``, whose scripts the user submits."""
    return replace(run, folder=output.absolute(), by_hand=True) if output else run


def _checked(image: NamedImage, *, force: bool) -> NamedImage:
    """Return an image whose file, where it is here, is a complete SIF. Raises StoreError."""
    if image.sif.is_file() and not force:
        image.check_file()
    return image


_ARGUMENTS = {"image": "image", "argv": "task"}
_WITH_AGAIN = {"again", "included", "env", "runs", "force", "wait", "dry_run", "output", "json", "as_json"}


def _check_only_again(ctx: click.Context) -> None:
    """Raise UsageError for what --again takes from the run's record."""
    named = [
        param
        for param in ctx.command.params
        if param.name
        and param.name not in _WITH_AGAIN
        and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
        and ctx.params.get(param.name)
    ]
    if named:
        shown = ", ".join(
            param.opts[0] if isinstance(param, click.Option) else f"the {_ARGUMENTS[str(param.name)]}"
            for param in named
        )
        raise UsageError(f"--again takes recipe, tasks, arguments and request from the run's record: leave out {shown}")


def _with_sha256(context: Context, image: NamedImage) -> NamedImage:
    """Return an image with the checksum of its SIF, where whoever wrote the file left it."""
    if image.sha256 or not image.sif.is_file():
        return image
    with contextlib.suppress(StoreError):  # the store cannot be read: nothing is known of it
        return replace(image, sha256=known_sif_sha256(image.sif, context.store))
    return image


def _with_recorded_sha256(image: NamedImage, state: SifState | None) -> NamedImage:
    """Return an image with the checksum of a run's record, where its SIF is still that file."""
    with contextlib.suppress(OSError):
        if state and state.is_same(image.sif):
            return replace(image, sha256=state.sha256)
    return image


def _plan_again(
    before: records.Run, runs: Path, env: Sequence[str], find: Callable[[str, Path | None], NamedImage]
) -> planning.JobPlan:
    """Plan a run once more. Raises UsageError when its record has too little in it."""
    profile = find_site(str(before.record.site_path)) if before.record.site_path else None
    defaults = profile.file.scheduler.defaults.env if profile and profile.file.scheduler else ()
    names = set(before.record.request.env) if before.record.request else set[str]()
    known = [word for word in (*defaults, *env) if word.partition("=")[0] in names]
    argv, request = jobs.request_again(before, known)

    def find_recorded(record: records.ImageRecord) -> NamedImage:
        recipe, sif = record.recipe_path, record.sif
        if recipe and not (recipe / "recipe.yaml").is_file():
            raise UsageError(f"{before.folder.name}: its recipe is no longer in {recipe}")
        image = find(f"{recipe}/", sif) if recipe else find(str(sif), None)
        return _with_recorded_sha256(image, record.sif_state)

    images = {split_reference((step.argv or ("",))[0])[0]: step.image for step in before.record.steps if step.image}
    named = {split_reference((step.argv or ("",))[0])[0] for step in before.record.steps}
    if any(record.sif is None for record in images.values()) or named - {"", *images}:
        raise UsageError(f"{before.folder / records.RECORD}: has too little in it to be submitted again")
    image = find_recorded(before.record.image)
    return planning.plan(
        image,
        read_tasks(image, argv, lambda reference: find_recorded(images[reference])),
        request,
        scheduler=before.record.scheduler,
        site=profile,
        runs=runs,
    )


def _submit(context: Context, run: planning.JobPlan, runs: Path, *, force: bool, wait: bool, dry_run: bool) -> None:
    """Print what the jobs will lack, check the compute nodes and the image, and submit."""
    environment_text(context.environment, run.request.env)  # refused now, and with --dry-run, too
    for warning in dict.fromkeys(step.warning for step in run.steps if step.warning):
        context.log(f"warning: {warning}")
    if not dry_run and any("--dry-run" in step.argv for step in run.steps):
        context.log("note: --dry-run is the task's, and the job is submitted; before the image it prints the scripts")
    if run.by_hand:
        jobs.write(run)
        submit = [*load(run.scheduler).SUBMIT, *(arg for word in run.command_args for arg in word.split(" ", 1))]
        scripts = {step.name: str(run.folder / f"{step.name}.sh") for step in run.steps}
        commands = {name: shlex.join([*submit, path]) for name, path in scripts.items()}
        context.print(WrittenRun(run.folder, commands))
        return
    if dry_run:
        scripts = {step.name: script(run, step) for step in run.steps}
        context.print(SubmitPreview(run.folder, scripts, job_program()))
        return
    profile = run.site
    is_complete = all(image.sif.is_file() for image in run.images)
    if profile and is_complete and not force:
        from ekiben.cli.commands._findings import check_compute_nodes  # imported here: needs doctor's rules

        for image in run.images:
            uses_gpus = any(step.gpus for step in run.steps if step.image is image)
            check_compute_nodes(context, profile.file, image.sif, gpu=uses_gpus)
    if is_complete and not force:
        _preflight(context, run)
    ids = jobs.submit(run)
    ctx = click.get_current_context()
    is_elsewhere = ctx.get_parameter_source("runs") is ParameterSource.COMMANDLINE  # then the name alone is not found
    context.print(SubmitResult(run.folder, ids, str(run.folder) if is_elsewhere else run.folder.name))
    if wait:
        (submitted,) = records.find_runs([str(run.folder)], runs)
        try:
            states = job_states.wait(submitted, context.log)
        except KeyboardInterrupt as error:
            error.add_note(f"the jobs stay in the queue: {command_name()} status, logs -f or cancel {run.folder.name}")
            raise
        if any(job.state != "done" for job in states):
            raise click.exceptions.Exit(1)


def _preflight(context: Context, run: planning.JobPlan) -> None:
    """Check that the images have the tasks, and that each one whose inputs are there takes its arguments."""
    from ekiben.doctor.preflight import (  # imported here: needed by a submission only
        JobTask,
        PlannedGpus,
        try_arguments,
        untried_reason,
    )

    scripts = {id(image): _scripts_of(run, image) for image in run.images}
    environment = {**context.environment, **dict(word.split("=", 1) for word in run.request.env if "=" in word)}
    earlier: list[list[str]] = []
    for step in run.steps:
        argv = [word.replace(planning.SEED, step.seeds[0]) if step.seeds else word for word in step.argv]
        image, (texts, mounts) = step.image, scripts[id(step.image)]
        if script := texts.get(argv[0]):
            task = JobTask(argv, script, PlannedGpus(*_gpus_of(run, step)), tuple(earlier), mounts)
            reason = untried_reason(task)
            if reason is None:
                try_arguments(image.sif, task, environment, context.log, image.named.signature)
            elif len(run.steps) > 1:
                context.log(f"{step.name} is not tried: {reason}")
        earlier.append(argv)


def _scripts_of(run: planning.JobPlan, image: PlannedImage) -> tuple[Mapping[str, bytes], Mapping[str, Path]]:
    """Return the entrypoints of an image's tasks, and the mounts that replace files of it. Raises UsageError for a task
    that it lacks.
    """
    from ekiben.doctor.preflight import check_image_of

    scripts = check_image_of(image.sif, image.named, [step.argv[0] for step in run.steps if step.image is image])
    recipe = image.named.recipe
    if not image.live or not recipe:
        return scripts, {}
    entrypoints = {name: recipe.task(name).entrypoint for name in scripts}
    current = {
        name: read_regular(image.live.files[f"entrypoints/{entrypoint}"])
        for name, entrypoint in entrypoints.items()
        if entrypoint
    }
    return current, live_files(recipe).mounts


def _gpus_of(run: planning.JobPlan, step: planning.JobStep) -> tuple[int, str | None]:
    """Return how many GPUs a step has on all its nodes, and which, where the site's profile knows one kind."""
    models = {gpu.model for gpu in run.site.file.node.gpus} if run.site else set()
    count = step.nodes * (step.processes or step.gpus) if step.uses_gpus and step.gpus else 0
    return count, models.pop() if len(models) == 1 else None
