"""Options and steps that `run`, `shell` and `notebook` share: check the machine, then become the container runtime."""

from __future__ import annotations

import functools
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ekiben.cli.commands._node import LOGIN_HOST
from ekiben.cli.commands._sync import offline_option, resolve_synced, sync_option, wants_sync
from ekiben.cli.context import Context
from ekiben.cli.named import find_named
from ekiben.cli.options import (
    PathType,
    RecipeOptions,
    TextType,
    image_options,
    include_option,
    refuse_ignored,
)
from ekiben.core.checked import Fields, parse_json
from ekiben.core.decisions import log_decision
from ekiben.core.errors import EngineError, StoreError, UsageError, nearest
from ekiben.core.process import name_exit, run, which
from ekiben.gpu.devices import GPU_DEVICE, has_gpu
from ekiben.images import ImageOptions
from ekiben.run import launch
from ekiben.run.contract import gives_gpus
from ekiben.run.image import NamedImage
from ekiben.run.live import VARIABLE, LiveFiles, live_files

if TYPE_CHECKING:
    from ekiben.spec.recipe import Recipe

_SHOWN = 4  # edited files that a message names


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """Options of starting an image: runtime, file, binds, variables."""

    cpu: bool
    runtime: str
    stack: str | None
    layers: tuple[str, ...]
    included: tuple[Path, ...]
    sif: Path | None
    binds: tuple[Path, ...]
    copy_local: bool
    live: bool
    build: bool
    sync: bool
    force: bool
    dry_run: bool


def start_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of starting an image; the command gets them as one ``start``."""

    @functools.wraps(function)
    def with_options(*args: Any, **params: Any) -> None:
        start = StartOptions(**{name: params.pop(name) for name in StartOptions.__slots__})
        function(*args, start=start, **params)

    for decorate in reversed(_OPTIONS):
        with_options = decorate(with_options)
    return with_options


_OPTIONS: tuple[Callable[[Callable[..., None]], Callable[..., None]], ...] = (
    click.option("--cpu", is_flag=True, help="Use no GPU, even when there are some."),
    click.option(
        "--runtime",
        default="auto",
        show_default=True,
        metavar="NAME",
        type=TextType(),
        help="apptainer, singularity, docker, or an engine that keeps images: podman.",
    ),
    image_options,
    include_option(),
    click.option(
        "--sif", type=PathType(), metavar="FILE", help="The file to run (default: the recipe's, in this folder)."
    ),
    click.option(
        "--bind",
        "binds",
        multiple=True,
        type=PathType(),
        metavar="DIR",
        help=(
            "Show this folder inside, at its own path; may repeat. This folder, caches and what ARGS name are shown"
            " anyway."
        ),
    ),
    click.option(
        "--copy-local",
        is_flag=True,
        help="Copy the SIF to the node's own disk first, once for all jobs there.",
    ),
    click.option(
        "--live", is_flag=True, help="Use the recipe's scripts from this folder, not the image's; run.json records it."
    ),
    click.option(
        "--build", is_flag=True, help="If the recipe was edited since the last build, build and test it first."
    ),
    sync_option("The same, and lock first where a lock file is missing or out of date."),
    offline_option,
    click.option("--force", is_flag=True, help="Run it even if doctor predicts a failure."),
    click.option("--dry-run", is_flag=True, help="Print the command and do not run it."),
)


def named_image(context: Context, reference: str, start: StartOptions, added_layer: str | None = None) -> NamedImage:
    """Find the image that a command line names, and check the options that name it.

    Raises UsageError, DefinitionError, StoreError.
    """
    for path in start.binds:
        if not path.is_dir() and not path.is_file():
            raise UsageError(
                f"--bind {path}: {'is neither a folder nor a file' if path.exists() else 'no such folder'}"
            )
    if start.sif is not None:
        if not start.sif.is_file():
            raise UsageError(f"--sif: {start.sif} is {'not a file' if start.sif.exists() else 'not there'}")
        refuse_ignored("names another image than the file of --sif", "stack", "layers")
    options = ImageOptions(
        stack=start.stack, layers=start.layers, included=start.included, sif=start.sif, added_layer=added_layer
    )
    image = find_named(context, reference, options)
    if (image.recipe is None or start.sif) and image.sif.is_file() and not start.force:
        image.check_file()  # of a recipe, it may be built first
    if image.recipe:
        _check_names(image.recipe, start)
    return image


def build_or_compare(context: Context, image: NamedImage, start: StartOptions, *, is_on_node: bool = False) -> None:
    """Build a recipe's image with --build; else say what was edited since it was built.

    ``is_on_node``: its file is started on a compute node, whatever runs images on this machine.

    Raises UsageError where there is nothing to build, EngineError where nothing here runs the image.
    """
    rebuild = Rebuild(start.build, start.sync)
    rebuild.refuse_ignored("runs")
    is_configured = image.recipe is not None and start.sif is None and not start.dry_run
    if rebuild.is_asked or (is_configured and wants_sync(context, False)):
        recipe = buildable(image, rebuild)
        build_image(context, RecipeOptions(start.stack), recipe, export_format(start), sync=start.sync)
    elif image.recipe and start.sif is None and is_on_node:
        if image.sif.is_file():
            if not start.force:
                image.check_file()
            warn_of_edits(context, image, launch.Target("", str(image.sif)), stack=start.stack, live=start.live)
    elif image.recipe and start.sif is None:
        warn_of_edits(context, image, _choose_target(image, start), stack=start.stack, live=start.live)


@dataclass(frozen=True, slots=True)
class Rebuild:
    """What is done first: ``build`` what was edited, and ``sync`` the locks, too."""

    build: bool
    sync: bool

    @property
    def is_asked(self) -> bool:
        """Return whether an option asks for it."""
        return self.build or self.sync

    @property
    def option(self) -> str:
        """Return the option, for messages."""
        return "--sync" if self.sync else "--build"

    def refuse_ignored(self, verb: str) -> None:
        """Raise UsageError for options that do not go with it: ``verb`` is what --dry-run does not do."""
        if self.is_asked:
            refuse_ignored(f"{verb} nothing, and {self.option} builds an image; leave one of them out", "dry_run")
            refuse_ignored(f"names the file to run, and {self.option} writes another; leave one of them out", "sif")


def buildable(image: NamedImage, rebuild: Rebuild) -> Recipe:
    """Return the recipe of an image. Raises UsageError where it has none here, and there is nothing to build."""
    if image.recipe is None:
        raise image.refuse_option(rebuild.option)
    return image.recipe


def build_image(
    context: Context, options: RecipeOptions, recipe: Recipe, kind: str, *, verify: bool = True, sync: bool = False
) -> None:
    """Build the image where a layer is missing, and write its file or load it where that is not the present one."""
    from ekiben.artifacts.make import BuildRequest
    from ekiben.cli.commands.build import ImageRequest, build_recipe

    if sync:
        refuse_ignored("asks nothing, and --sync asks an index; leave one of them out", "offline")
    request = ImageRequest(make=BuildRequest(formats=[kind], verify=verify), offline=context.offline)
    resolved = resolve_synced(context, options, recipe, sync=sync)
    result = build_recipe(context, options, resolved, request)
    for line in result.to_lines():
        if not line.startswith("run "):  # of the recipe's tasks
            context.log(line)


def export_format(start: StartOptions) -> str:
    """Return the format of the image that will be started: sif, docker, or the one of an engine that keeps images."""
    if start.sif is not None or start.runtime in launch.OF_SIF:
        return "sif"
    if start.runtime != "auto":
        return start.runtime
    return "sif" if which(*launch.OF_SIF) else "docker"


def warn_of_edits(
    context: Context, image: NamedImage, target: launch.Target, *, stack: str | None = None, live: bool = False
) -> None:
    """Say that an image lacks edits of its recipe, or why that is not known. With ``live`` the recipe's own files are
    not the image's.
    """
    if image.recipe is None:
        return
    # imported here: only these need the resolver
    from ekiben.artifacts.recipe_state import RecipeState, state_in_engine, state_of_sif

    if target.takes_sif:
        state, shown, build = state_of_sif(Path(target.image), image.recipe, stack), target.image, image.build_hint
    else:
        shown, build = image.tag, f"{image.build_hint} --format {Path(target.program).name}"
        try:
            state = state_in_engine(target.image, image.name, image.recipe, context.store, stack)
        except StoreError as error:  # running needs no store
            state = RecipeState("unknown", reason=str(error))
    changed = [*(() if live else state.files), *state.below]
    more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    problems = [f"was built before an edit of {', '.join(changed[:_SHOWN])}{more}"] if changed else []
    if state.reason:
        compared = "not all of it was compared" if changed else "was not compared"
        problems.append(f"{compared} with its recipe: {state.reason}")
    if problems:
        fix = f"{state.fix}, then {build}" if state.fix else f"use --build, or {build}"
        advice = f". To make it again, {fix}" if changed or state.fix is not None else ""
        context.log(f"warning: {shown} {'; '.join(problems)}{advice}")


def start_image(
    context: Context,
    image: NamedImage,
    argv: Sequence[str],
    start: StartOptions,
    *,
    executes: bool,
    publish: str | None = None,
) -> None:
    """Check the machine, then become the container runtime. ``publish``: see RunRequest.

    Raises:
        UsageError: options that do not go together, or a file that is not there.
        EngineError: nothing here runs the image.
        IncompatibleHostError: the image will not work here.
    """
    target = _choose_target(image, start)
    live = _live_files(image) if start.live else LiveFiles({}, "")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    request = launch.RunRequest(
        argv=argv,
        gpu=not start.cpu and gives_gpus(context.environment),
        binds=start.binds,
        mounts=live.mounts,
        terminal=is_terminal,
        executes=executes,
        publish=publish,
    )
    reason = f"{GPU_DEVICE} exists" if has_gpu() else f"{GPU_DEVICE} does not exist"
    if start.cpu or (has_gpu() and not request.gpu):
        reason = "--cpu" if start.cpu else "EKIBEN_CPU is set"
    log_decision("GPUs", "all" if request.gpu else "none", reason)
    if not start.dry_run and not start.force:
        from ekiben.cli.commands._findings import check_this_machine  # imported here: only a start needs doctor's rules

        check_this_machine(context, target.program, image, gpu=request.gpu)
    if not start.dry_run and start.copy_local:
        from ekiben.run.copy_local import copy_local

        target = replace(target, image=str(copy_local(image, context.environment, context.log)))
    # One of an outer run is not this run's.
    environment = {key: value for key, value in context.environment.items() if key not in (VARIABLE, LOGIN_HOST)}
    if live.origin:
        environment[VARIABLE] = live.origin
    ready = launch.launch(target, request, environment)
    click.echo(f"+ {shlex.join(ready.argv)}", err=not start.dry_run)
    for variable in ready.kept_out:
        context.log(f"{variable} is not passed on: the image has its own")
    if not start.dry_run:
        sys.stdout.flush()
        os.execvpe(ready.argv[0], ready.argv, ready.environment)


def engines(asked: str = "auto") -> launch.Engines:
    """Return the engines that keep images; those that ``asked`` cannot mean are not loaded."""
    known: dict[str, Callable[[], launch.Engine]] = {
        "docker": lambda: launch.Engine(docker_image_id, entrypoint=functools.partial(_entrypoint, ["docker"])),
    }
    if asked not in ("auto", "docker", *launch.OF_SIF):
        from ekiben.executors import runtimes

        known |= {
            name: functools.partial(
                launch.Engine, runtime.image_id, runtime.run_argv, functools.partial(_entrypoint_in, runtime.run_argv)
            )
            for name, runtime in runtimes().items()
        }
    return known


def _entrypoint_in(run_argv: Callable[[bool], Sequence[str]], image_id: str) -> Sequence[str]:
    return _entrypoint([*itertools.takewhile("run".__ne__, run_argv(False))], image_id)


def _entrypoint(program: Sequence[str], image_id: str) -> Sequence[str]:
    """Return the entrypoint of an image. Raises EngineError."""
    done = run([*program, "image", "inspect", "--format", "{{json .Config.Entrypoint}}", image_id], check=False)
    try:
        return Fields({"Entrypoint": parse_json(done.stdout) or []}).strings("Entrypoint")
    except ValueError as error:
        lines = done.stderr.strip().splitlines() or [f"the image's Entrypoint {error}"]
        raise EngineError(f"{Path(program[0]).name}: {lines[-1]}") from error


def docker_image_id(name: str) -> str:
    """Return the id of an image in Docker, "" where there is none. Raises EngineError.

    Asked of the program, which may have another daemon (a context, podman's docker) than docker-py finds.
    """
    done = run(["docker", "image", "inspect", "--format", "{{.Id}}", name], check=False)
    if done.returncode and not any(text in done.stderr.lower() for text in ("no such image", "image not known")):
        lines = done.stderr.strip().splitlines() or [name_exit(done.returncode)]
        raise EngineError(f"docker: {lines[-1]}")
    return done.stdout.strip() if not done.returncode else ""


def _live_files(image: NamedImage) -> LiveFiles:
    if image.recipe is None:
        raise image.refuse_option("--live")
    return live_files(image.recipe)


def _check_names(recipe: Recipe, start: StartOptions) -> None:
    """Raise UsageError for a stack or a layer that is not there: the image's name is made of them."""
    if start.stack:
        from ekiben.spec.stack import find_stack

        find_stack(start.stack, recipe.image_folders, asked_by="--stack")
    layers = {path.stem for folder in recipe.image_folders for path in folder.glob("*.def")}
    for layer in start.layers:
        if layer not in layers:
            raise UsageError(f"--layer {layer}: no such layer." + nearest(layer, layers))


def _choose_target(image: NamedImage, start: StartOptions) -> launch.Target:
    """Return what runs the image, once the options are seen to go together with it.

    Raises UsageError, EngineError, VerifyError, and StoreError for a file that is not a complete SIF.
    """
    known = engines(start.runtime)
    if start.runtime in known:  # whether or not it is installed
        _refuse_options_of_sif(start, start.runtime)
    target = launch.choose_target(image, known, start.runtime)
    if not target.takes_sif:
        _refuse_options_of_sif(start, Path(target.program).name)
    elif not start.force:
        image.check_file()
    return target


def _refuse_options_of_sif(start: StartOptions, program: str) -> None:
    if start.sif is not None:
        raise UsageError(f"--sif: {program} cannot run a SIF; omit the option, or choose another --runtime")
    if start.copy_local:
        raise UsageError(f"--copy-local copies a SIF, which {program} cannot run; omit the option")
