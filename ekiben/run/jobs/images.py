"""The images of a run's steps: which one each task names, and its file as it is when the run is planned."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ekiben.core.checked import TASK
from ekiben.core.command_name import command_name
from ekiben.core.errors import UsageError
from ekiben.core.files import digest_of
from ekiben.core.printable import single_line
from ekiben.run.image import NamedImage, SifState, sif_state
from ekiben.run.jobs.request import JobRequest
from ekiben.run.live import LiveCopy, live_copy
from ekiben.spec.recipe import Recipe

LIVE = "live"  # the folder of a run that has copies of a recipe's scripts


@dataclass(frozen=True, slots=True)
class StepTask:
    """A task with its arguments, and the image that it runs in.

    ``reference``: how the command line names the image, where that is not the run's.
    """

    argv: tuple[str, ...]
    image: NamedImage
    reference: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedImage:
    """An image of a run.

    ``sif`` is the file itself, never a link to it; ``state`` None when it is not there yet. ``live``: what replaces the
    recipe's files in the image, as copies in ``live_folder`` of the run.
    """

    named: NamedImage
    sif: Path
    state: SifState | None
    live: LiveCopy | None = None
    live_folder: str = LIVE


def read_tasks(
    image: NamedImage, argv: Sequence[str], find: Callable[[str], NamedImage] | None = None
) -> list[StepTask]:
    """Return the tasks of ``argv``: TASK ARGS…, and after a lone ``+`` the next one. IMAGE:TASK names another image.

    ``image``: of the tasks that name none; ``find``: returns the image of a reference, and is called once for each.

    Raises UsageError for a task that is missing, or no name of a task, and what ``find`` raises.
    """
    known: dict[str, NamedImage] = {"": image}
    tasks = []
    for name, *arguments in _split(argv):
        reference, task = split_reference(name)
        if reference and reference not in known:
            if find is None:
                raise UsageError(f"{single_line(name)}: no other image can be named here")
            known[reference] = find(reference)
        tasks.append(StepTask((task, *arguments), known[reference], reference))
    return tasks


def split_reference(word: str) -> tuple[str, str]:
    """Return the image and the task of IMAGE:TASK, and "" and the task without an image.

    Raises UsageError for what is no name of a task.
    """
    reference, colon, task = word.rpartition(":")
    if colon and not (reference and TASK.fullmatch(task)):
        raise UsageError(f"{single_line(word)}: names no task", hint="IMAGE:TASK is a task of another image")
    if not TASK.fullmatch(task):
        raise UsageError(
            f"'{single_line(task)}' is not a task's name: letters, digits, '.', '_' and '-'",
            hint="a program of the image is named without its folder, or is an argument: sh -c …; a task of another"
            " image is IMAGE:TASK",
        )
    return reference, task


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


def plan_images(image: NamedImage, tasks: Sequence[StepTask], request: JobRequest) -> dict[str, PlannedImage]:
    """Return the images of a run by the references of its tasks; the run's own one first, by "".

    Raises UsageError for a file that cannot be read or is no SIF, VerifyError for one without the signature that it
    needs.
    """
    named = {"": image, **{task.reference: task.image for task in tasks if task.reference}}
    return {
        reference: _plan_image(one, request, LIVE if number == 1 else f"{LIVE}-{number}")
        for number, (reference, one) in enumerate(named.items(), start=1)
    }


def _plan_image(image: NamedImage, request: JobRequest, live_folder: str) -> PlannedImage:
    # A link such as `current` may point elsewhere by the time the job starts.
    sif = Path(os.path.realpath(image.sif))
    live = live_copy(recipe_of(image)) if request.live else None
    return PlannedImage(named=image, sif=sif, state=_state_of(sif, image, request), live=live, live_folder=live_folder)


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
