"""Find errors of a job before it is submitted, and not after its hours in the queue.

The image is the recipe's and has the tasks; and each task's own ``--dry-run``, where it has one and a runtime is here,
accepts the arguments for the job's GPUs: no misspelt setting, no file that is missing, no model that does not fit. Of a
chain, a task that reads what one before it writes is not tried.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ekiben.core.errors import UsageError, nearest
from ekiben.core.process import name_exit, run, which
from ekiben.run.image import RECIPE_FOLDER, NamedImage, RequiredSignature, read_in_sif, shipped_recipe
from ekiben.run.launch import RunRequest, Target, launch

_CONCLUSIVE = (2, 3)  # exit codes of tasks: a wrong option or setting; it will not fit
_RUNTIME_FAILED = 255  # Apptainer's and SingularityCE's own exit code


def check_image_of(sif: Path, image: NamedImage, tasks: Sequence[str]) -> Mapping[str, bytes]:
    """Return the entrypoint of each task in the image that has one; none for an image that is not of Ekiben.

    Raises UsageError when it was built from another recipe, or lacks a task.
    """
    try:
        shipped = shipped_recipe(sif)
    except ValueError as error:
        raise UsageError(
            f"{sif}: /{RECIPE_FOLDER}/recipe.yaml {error}", hint="--force submits without looking into the image"
        ) from error
    if shipped is None:
        return {}
    if image.recipe and shipped.name != image.recipe.file.name:
        raise UsageError(
            f"{sif} is an image of the recipe '{shipped.name}', not of '{image.recipe.file.name}'",
            hint="--sif FILE, or --force",
        )
    for task in tasks:
        if task not in shipped.tasks:
            raise UsageError(
                f"{sif} has no task '{task}'." + nearest(task, shipped.tasks),
                hint="build the image again: recipe.yaml has the task, and the image is older; or --force",
            )
    entrypoints = {task: shipped.tasks[task].entrypoint for task in tasks}
    scripts = {
        task: read_in_sif(sif, f"{RECIPE_FOLDER}/entrypoints/{entrypoint}")
        for task, entrypoint in entrypoints.items()
        if entrypoint
    }
    return {task: script for task, script in scripts.items() if script is not None}


@dataclass(frozen=True, slots=True)
class PlannedGpus:
    """The GPUs of a planned job: their number on all nodes, and their model if a profile has it."""

    count: int
    model: str | None = None

    def options(self, script: bytes, arguments: Sequence[str]) -> list[str]:
        """Return the options by which a task's --dry-run plans for them; none for a task that has no such options."""
        is_chosen = any(word.partition("=")[0] in ("--gpus", "--on") for word in arguments)
        if self.count < 1 or is_chosen or b"add_on_option(" not in script:
            return []
        return ["--gpus", str(self.count), *(["--on", self.model] if self.model else [])]


@dataclass(frozen=True, slots=True)
class JobTask:
    """A task of a job that is not submitted yet: its arguments, and its entrypoint's ``script`` as the image has it.

    ``earlier``: the arguments of the tasks that the job runs before it; ``mounts``: see RunRequest.
    """

    argv: Sequence[str]
    script: bytes
    gpus: PlannedGpus = PlannedGpus(0)
    earlier: Sequence[Sequence[str]] = ()
    mounts: Mapping[str, Path] = field(default_factory=dict)


def untried_reason(task: JobTask) -> str | None:
    """Return why a task gets no dry run before it is submitted, or None."""
    if which("apptainer", "singularity") is None:
        return "there is neither apptainer nor singularity here"
    if b'"--dry-run"' not in task.script:
        return "it has no --dry-run"
    for word in task.argv[1:]:
        path = word.rpartition("=")[2]
        for before in task.earlier:
            if not Path(path).exists() and any(_is_within(path, output) for output in outputs_of(before)):
                return f"it reads {path}, which {before[0]} writes"
    return None


def outputs_of(argv: Sequence[str]) -> list[str]:
    """Return the outputs that the arguments of a task name: by ``--output``, or the setting ``output``."""
    pairs = zip(argv, [*argv[1:], ""], strict=True)
    names = [
        value if word == "--output" else word.rpartition("=")[2]
        for word, value in pairs
        if word == "--output" or word.startswith(("--output=", "output=", "--set=output="))
    ]
    return [name for name in names if name]


def _is_within(path: str, output: str) -> bool:
    return os.path.abspath(path) == os.path.abspath(output) or Path(output).absolute() in Path(path).absolute().parents


def try_arguments(
    sif: Path,
    task: JobTask,
    environment: Mapping[str, str],
    log: Callable[[str], None],
    signature: RequiredSignature | None = None,
) -> None:
    """Run a task with --dry-run in the image, where it has that option and a runtime is here.

    ``signature``: what the image needs to be run.

    Tasks before it may write files that it lacks now. Then only a wrong option or setting, or a model that does not
    fit, is an error; anything else is a warning.

    Raises UsageError with the task's last lines when it ends with an error, VerifyError without the signature.
    """
    program, gpus = which("apptainer", "singularity"), task.gpus
    name, *arguments = task.argv
    if program is None or b'"--dry-run"' not in task.script:
        return
    options = gpus.options(task.script, arguments)
    shown = " ".join([name, "--dry-run", *options])
    log(f"running {shown} with these arguments")
    request = RunRequest(argv=[name, "--dry-run", *options, *arguments], gpu=False, mounts=task.mounts)
    ready = launch(Target(program, str(sif), signature=signature), request, environment)
    done = run(ready.argv, env=ready.environment, check=False)
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
    if done.returncode == _RUNTIME_FAILED:
        log(f"{name} --dry-run could not be tried here: {' '.join(lines)}")
    elif done.returncode and gpus.model and any(line.startswith(f"error: --on {gpus.model}") for line in lines):
        log(f"{name} knows no memory size of {gpus.model}: whether it fits is not checked")
        try_arguments(sif, replace(task, gpus=PlannedGpus(gpus.count)), environment, log, signature)
    elif done.returncode and task.earlier and done.returncode not in _CONCLUSIVE:
        log(
            f"warning: {shown} ended with {name_exit(done.returncode)}, and may need the output of an earlier task:"
            f" {' '.join(lines)}"
        )
    elif done.returncode:
        raise UsageError(
            "\n".join([f"{shown} ended with {name_exit(done.returncode)}:", *lines]),
            hint="--force submits without trying the arguments",
        )
