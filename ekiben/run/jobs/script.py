"""The job script of a step: the scheduler's options, quoted parameters, and job.sh, which all steps of a run share."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ekiben.core.errors import UsageError
from ekiben.core.mounts import bind_args
from ekiben.core.paths import RECIPE_HOME
from ekiben.run.contract import folders_to_bind, passes, shell_functions
from ekiben.run.copy_local import copy_name
from ekiben.run.image import SifState
from ekiben.run.jobs.images import PlannedImage
from ekiben.run.jobs.plan import SEED, JobPlan, JobStep
from ekiben.run.live import VARIABLE
from ekiben.run.schedulers import JobScriptHooks, Request, load, local_folders, variables
from ekiben.run.site import Site

JOB_PROGRAM = "job.sh"


def job_program() -> str:
    """Return job.sh, which all scripts of a run source: the container contract, and the phases of a job."""
    return f"{shell_functions()}\n{Path(__file__).with_name(JOB_PROGRAM).read_text(encoding='utf-8')}"


def script(plan: JobPlan, step: JobStep) -> str:
    """Return the job script of ``step``. Raises UsageError when an option of the scheduler has a line break."""
    scheduler = load(plan.scheduler)
    seconds = plan.request.time_seconds or _default_seconds(plan.site)
    request = Request(
        name=f"{step.image.named.name}-{step.name.partition('-')[2]}",
        nodes=step.nodes,
        args=[*step.resource_args, *plan.directives],
        seconds=seconds,
        notice=min(plan.request.grace_seconds, (seconds or 0) // 2),
        jobs=len(step.seeds),
        log=plan.folder / f"{step.name}.log",
    )
    directives = scheduler.directives(request)
    for line in directives:
        # A second line would be read as an option, or executed.
        if len(line.splitlines()) > 1 or "\0" in line:
            raise UsageError(f"an option of {plan.scheduler} has a line break in it: {line!r}")
    hooks = scheduler.HOOKS
    grace_period = request.notice if request.seconds else 0
    warn_after = request.seconds - grace_period if hooks.needs_timer and request.seconds else ""
    before = plan.steps[plan.steps.index(step) - 1].jobs if plan.steps.index(step) else ()
    lines = [
        "#!/bin/bash",
        *(scheduler.PREFIX + line for line in directives),
        "",
        (
            "# Written by Ekiben. It needs the folder of its run: job.sh, which reads these parameters, environment and"
            " key. `submit` creates it."
        ),
        f"run={quote(str(plan.folder))}",
        f"step={quote(step.name)}",
        "script=$run/$step.sh",
        f"image={quote(str(step.image.sif))}",
        *_state_lines(step.image, check_digest=plan.request.check_digest),
        f"work={quote(str(Path.cwd()))}",
        f"processes={step.processes or ''}",
        f"planned_gpus={step.gpus}",
        f"uses_gpus={'yes' if step.uses_gpus else ''}",
        f"max_resubmits={plan.request.max_resubmits}",
        f"by_hand={'yes' if plan.by_hand else ''}",
        f"warn_after={warn_after}",
        f"grace_period={grace_period if request.seconds else ''}",
        f"copy_local={'yes' if plan.request.copy_local else ''}",
        f"steps_before=({quote_all(before)})",
        f"run_jobs=({quote_all(job for item in plan.steps for job in item.jobs)})",
        f"binds=({quote_all(_binds(plan, step))})",
        f"live={quote(step.image.live.origin) if step.image.live else ''}",
        f"seeds=({quote_all(step.seeds)})",
        # A function: $seed has its value on the node only.
        f"set_task() {{ task=({' '.join(_with_seed(word) if step.seeds else quote(word) for word in step.argv)}); }}",
        f"set_outputs() {{ outputs=({' '.join(map(_with_seed if step.seeds else quote, _outputs(step.argv)))}); }}",
        f"command_args=({quote_all(arg for word in plan.command_args for arg in word.split(' ', 1))})",
        *_function("load_modules", *(_modules(plan.site) or [":"])),
        *_hook_lines(hooks),
        "",
        '. "$run/job.sh" || exit',
    ]
    return "\n".join(lines) + "\n"


def _state_lines(image: PlannedImage, *, check_digest: bool) -> list[str]:
    """Return the attributes of the image that the job checks; empty ones match any image."""
    state = image.state or SifState()
    needed = state.sha256 if image.named.signature else ""  # jobs do not check a signature, but the file by this
    return [
        f"image_stat={quote(state.stat)}",
        f"image_header={state.header}",
        f"image_sha256={state.sha256}",
        f"check_digest={'yes' if check_digest else ''}",
        f"image_copy={quote(copy_name(image.sif, needed)) if image.state else ''}",
    ]


def quote(word: str) -> str:
    """Return ``word`` as one word of bash on one line, whatever is in it.

    A line break inside quotes would begin a line of the script, and schedulers read lines that begin with `#SBATCH` or
    `#$` wherever they are.
    """
    if word.isprintable():
        return shlex.quote(word)
    safe = (chr(byte) if 32 <= byte < 127 and byte not in b"\\'" else f"\\x{byte:02x}" for byte in os.fsencode(word))
    return f"$'{''.join(safe)}'"


def quote_all(args: Iterable[str]) -> str:
    """Return ``args`` as words of bash on one line."""
    return " ".join(quote(word) for word in args)


def _with_seed(word: str) -> str:
    """Quote ``out-{seed}`` as ``out-"$seed"``."""
    return '"$seed"'.join(quote(text) if text else "" for text in word.split(SEED))


def _outputs(argv: Sequence[str]) -> list[str]:
    """Return the folders that a task's arguments name as its output; the working folder where none is named."""
    named = [after for word, after in itertools.pairwise(argv) if word in ("--output", "-o")]
    named += [word.partition("=")[2] for word in argv if word.startswith(("--output=", "output="))]
    return named or [str(Path.cwd())]


def _function(name: str, *lines: str) -> list[str]:
    """Return a function of bash; none when ``lines`` are empty."""
    body = [line for text in lines for line in text.splitlines()]
    return [f"{name}() {{", *(f"    {line}" for line in body), "}"] if body else []


def _hook_lines(hooks: JobScriptHooks) -> list[str]:
    """Return the scheduler's part of the script, as functions that job.sh calls."""
    # exec: job.sh runs these two in the background, and the process that it ends has to be the program itself.
    start = f"exec {hooks.start_all}" if hooks.start_all else ""
    remote = f"exec {hooks.start_remote}" if hooks.start_remote and not hooks.start_all else ""
    return [
        f"job={hooks.job}",
        f"index={hooks.index}",
        *_function("list_nodes", hooks.nodes),
        *_function("node_number", f'echo "{hooks.node_number}"'),
        *_function("start_all_nodes", start),
        *_function("start_remote_node", remote),
        *_function("requeue", hooks.requeue),
        *_function("requeue_waiting", hooks.requeue_waiting),
        *_function("prepare_job", hooks.prepare),
        *_function("is_queued", hooks.is_queued),
    ]


def _folders(plan: JobPlan, step: JobStep) -> list[str]:
    """Return the folders on shared file systems to bind; a node's own folders are known only there."""
    shared = {name: value for name, value in os.environ.items() if name not in local_folders()}
    folders = folders_to_bind(step.argv, plan.request.binds, shared)
    covered = any(plan.folder.is_relative_to(folder) for folder in folders)
    return folders if covered else [*folders, str(plan.folder)]


def _binds(plan: JobPlan, step: JobStep) -> list[str]:
    """Return the options that bind folders: the user's, and the copies of --live instead of the image's."""
    image = step.image
    live = bind_args(plan.folder / image.live_folder, RECIPE_HOME, read_only=True) if image.live else []
    return [*live, *(word for folder in _folders(plan, step) for word in bind_args(folder))]


def _default_seconds(site: Site | None) -> int | None:
    hours = site.file.scheduler.default_hours if site and site.file.scheduler else None
    return hours * 3600 if hours else None


def _modules(site: Site | None) -> list[str]:
    """Return the commands that load a site's modules and set its variables."""
    if site is None:
        return []
    file = site.file
    module = next((runtime.module for runtime in file.runtimes[:1] if runtime.module), None)
    names = [*file.modules, *([module] if module else [])]
    lines = [f"export {name}={quote(value)}" for name, value in file.environment.items()]
    if names:
        lines += [f"source {quote(file.module_init)}"] if file.module_init else []
        lines.append(f"module load {quote_all(names)}")
    return lines


def environment_text(environment: Mapping[str, str], names: Iterable[str] = ()) -> str:
    """Return the variables that a job gets, as assignments that bash sources.

    ``names``: further variables for the task, NAME or NAME=VALUE. Raises UsageError when one is not set, or has no
    valid name.
    """
    of_a_job = {*variables(), *local_folders(), *_OF_A_JOB}
    prefixes = ("PMI_", "PMIX_", "OMPI_", *(name for name in of_a_job if name.endswith("_")))
    kept = {
        name: value
        for name, value in environment.items()
        if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)
        and re.fullmatch(passes(), name)
        # This shell's own scheduler variables are not the job's.
        and not name.startswith(prefixes)
        and name not in of_a_job
    }
    for word in names:
        name, is_set, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise UsageError(f"--env {word}: a variable's name has letters, digits and '_'")
        if not is_set and name not in environment:
            raise UsageError(f"--env {name}: is not set here; --env {name}=VALUE")
        value = value if is_set else environment[name]
        # The task's variables must not affect the runtime, as PATH or LD_LIBRARY_PATH would. And variables that a
        # site's modules set for containers do not replace those of the request.
        outside = ("",) if re.fullmatch(passes(), name) else ()
        kept |= {f"{prefix}{name}": value for prefix in (*outside, "APPTAINERENV_", "SINGULARITYENV_")}
    return "".join(f"export {name}={quote(value)}\n" for name, value in sorted(kept.items()))


_OF_A_JOB = {
    "CUDA_VISIBLE_DEVICES",
    "EKIBEN_CPU",  # a login node has no GPU
    VARIABLE,  # of a `run --live` around this command
    "TERM",
    "USER",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
}
