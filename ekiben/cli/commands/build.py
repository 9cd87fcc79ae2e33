"""Build and verify a recipe's image.

Layers that are stored, published by colleagues or in the registry of layers are reused; the others are built. The
commands that run the image are printed at the end.

\b
Examples:
  ekiben build lora-opencalm
  ekiben build hello --format sif -o /tmp/hello.sif
  ekiben build ../my-recipes/chatbot --engine apptainer
  ekiben build mine --gpu-arch 9.0
  ekiben build lora-opencalm --in-place                  an edited script: rewrite it in ./lora-opencalm.sif
  ekiben build mine --sync                               lock first what was edited
  ekiben build ./Dockerfile --build-arg VERSION=2        an image named after its folder
  ekiben build hello --offline --bundle hello.bundle     where there is no network
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from ekiben.artifacts import exporters
from ekiben.artifacts.exporters import Artifact
from ekiben.artifacts.make import BuildRequest, make_image
from ekiben.builder.plan import Action, BuildContext, Options, plan
from ekiben.builder.verify import Check
from ekiben.builder.wheels import format_savings
from ekiben.cli.commands._sync import resolve_synced, sync_option
from ekiben.cli.context import Context
from ekiben.cli.options import (
    Command,
    OutputFile,
    PathType,
    PluginType,
    RecipeOptions,
    RecipeType,
    engine_option,
    json_option,
    progress_option,
    recipe_options,
    refuse_ignored,
)
from ekiben.core.command_name import command_name
from ekiben.core.decisions import log_decision
from ekiben.core.environment import host_arch
from ekiben.core.errors import UsageError
from ekiben.core.files import format_size
from ekiben.core.progress import Progress
from ekiben.resolve.graph import ResolvedRecipe
from ekiben.store import Image, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """What to do with each recipe: what to make, what builds it, and from what."""

    make: BuildRequest
    engine: str = "auto"
    locked: bool = False
    offline: bool = False
    bundle: Path | None = None
    debug: bool = False
    sync: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageResult:
    """``recipe`` is as a command line names it; ``built`` names the layers that were built; ``data`` are the folders
    that came with a bundle; ``run`` are commands.
    """

    recipe: str
    image: Image
    built: Sequence[str]
    artifacts: Sequence[Artifact]
    checks: Sequence[Check]
    data: Sequence[Path]
    run: Sequence[str]
    is_verified: bool

    def to_json(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        return {
            "recipe": self.image.recipe,
            "stack": self.image.stack,
            "name": self.image.name,
            "image": self.image.image_id,
            "size": self.image.size,
            "layers": [
                {"name": layer.name, "diff_id": layer.diff_id, "digest": layer.digest, "size": layer.size}
                for layer in self.image.layers
            ],
            "built": list(self.built),
            "artifacts": [
                {"kind": item.kind, "ref": item.ref, "size": item.size, "created": item.created, "sha256": item.sha256}
                for item in self.artifacts
            ],
            "checks": [
                {
                    "runtime": item.runtime,
                    "seconds": item.seconds,
                    "known": item.known,
                    "reused": item.reused.to_json() if item.reused else None,
                }
                for item in self.checks
            ],
            "data": [str(path) for path in self.data],
            "run": list(self.run),
        }

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of the text output."""
        image = self.image
        yield f"image   {image.name}  {image.image_id[:19]}  {format_size(image.size)} in {len(image.layers)} layers"
        for item in self.artifacts:
            label = item.kind if exporters.load(item.kind).SUFFIX is None else "file"
            yield f"{label:<7} {item.ref}  {format_size(item.size)}{'' if item.created else '  (existing)'}"
        yield from (f"data    {path}" for path in self.data)
        for check in self.checks:
            reused = f"; not run again: {check.reused}" if check.reused and not check.known else ""
            date = f" on {check.reused.day}" if check.reused and check.reused.date else ""
            before = f" (before{date}, same image)" if check.known else reused
            yield f"tested  under {check.runtime}, {check.seconds:.0f} s{before}"
        later = f"`{command_name()} verify {self.recipe}`"
        if not self.is_verified:
            yield f"tested  no: --no-verify was given; {later} does it"
        elif not self.checks:
            yield f"tested  no: nothing here can run the image; {later} does it where Apptainer or Docker is"
        yield from (f"run     {line}" for line in self.run)


@click.command("build", cls=Command, help=__doc__)
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE…", type=RecipeType())
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=PluginType("ekiben.artifacts.exporters", exporters.GROUP, option="--format", kind="format"),
    help="Output format; may repeat. Default: sif, and docker when a daemon answers.",
)
@engine_option("What runs the %post scripts.")
@click.option("-o", "--output", type=OutputFile(), metavar="FILE", help="Write the file here (default: ./RECIPE.sif).")
@click.option("--squash", is_flag=True, help="Make a SIF of one partition, for tools that read only the first.")
@click.option(
    "rewrite",
    "--in-place/--no-in-place",
    default=None,
    help="Rewrite the last layer in the SIF that is there, where the others are equal (default: config.yaml).",
)
@click.option("--locked", is_flag=True, help="Refuse packages that are not available exactly as locked.")
@sync_option("Lock first where a lock file is missing or out of date; locked versions stay.")
@click.option("--offline", is_flag=True, help="Use no network: packages come from the store or --bundle.")
@click.option("--bundle", type=PathType(), metavar="FILE", help="Build from this bundle. Implies --offline.")
@click.option("--no-verify", is_flag=True, help="Do not run the %test scripts in the finished image.")
@click.option("--debug", is_flag=True, help="Open a shell in the half-built layer when its %post fails.")
@recipe_options
@progress_option
@json_option
@click.pass_obj
def command(
    context: Context,
    /,
    recipes: tuple[str, ...],
    formats: tuple[str, ...],
    output: Path | None,
    squash: bool,
    rewrite: bool | None,
    no_verify: bool,
    engine: str,
    locked: bool,
    sync: bool,
    offline: bool,
    bundle: Path | None,
    debug: bool,
    recipe_options: RecipeOptions,
) -> None:
    """Resolve all recipes, then make one image after the other."""
    check_output(recipes, formats)
    if formats and "sif" not in formats:
        refuse_ignored("is for a SIF, which --format leaves out", "squash", "rewrite")
    if squash and rewrite:
        raise UsageError("--in-place: a SIF of --squash has one layer, which is written anew; leave one of them out")
    if bundle and recipe_options.mirror:
        raise UsageError("--build-arg mirror: --bundle has the packages; leave one of them out")
    if debug and not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise UsageError("--debug opens a shell on a terminal, and this command has none; leave --debug out")
    if sync and (offline or bundle):
        raise UsageError("--sync asks an index, and --offline and --bundle do without; leave one of them out")
    request = ImageRequest(
        make=BuildRequest(
            formats=formats,
            output=output,
            squash=squash,
            rewrite=context.settings.rewrite if rewrite is None else rewrite,
            verify=not no_verify,
        ),
        engine=engine,
        locked=locked,
        offline=offline or bundle is not None,
        bundle=bundle,
        debug=debug,
        sync=sync,
    )
    # A mistake in the last recipe is reported before the first one is built.
    with contextlib.ExitStack() as folders:
        all_resolved = [
            folders.enter_context(_resolved(context, recipe, recipe_options, request)) for recipe in recipes
        ]
        results = [
            _without_folder(recipe, build_recipe(context, recipe_options, resolved, request))
            for recipe, resolved in zip(recipes, all_resolved, strict=True)
        ]
    if context.json and len(results) > 1:
        click.echo(json.dumps([result.to_json() for result in results], indent=1))
        return
    for result in results:
        context.print(result)


@contextlib.contextmanager
def _resolved(
    context: Context, recipe: str, recipe_options: RecipeOptions, request: ImageRequest
) -> Iterator[ResolvedRecipe]:
    """Resolve a recipe, or a Dockerfile, which is converted for the time of the build."""
    from ekiben.project.dockerfile import dockerfile_of

    if (dockerfile := dockerfile_of(recipe)) is None:
        if request.offline:
            yield recipe_options.resolve(recipe)
        else:
            yield resolve_synced(context, recipe_options, recipe, sync=request.sync, engine=request.engine)
        return
    from ekiben.project.dockerfile import Conversion, temporary_recipe

    options = replace(recipe_options, arguments={})  # the conversion uses them
    conversion = Conversion(
        dockerfile=dockerfile, arguments=recipe_options.arguments, arch=recipe_options.arch or host_arch()
    )
    with temporary_recipe(conversion, context.progress.log, offline=request.offline) as folder:
        yield options.resolve(str(folder))


def _without_folder(recipe: str, result: ImageResult) -> ImageResult:
    """Return a result that names the image where a Dockerfile was built, whose recipe is gone afterwards."""
    from ekiben.project.dockerfile import dockerfile_of

    if dockerfile_of(recipe) is None:
        return result
    files = [item.ref for item in result.artifacts if exporters.load(item.kind).SUFFIX is not None]
    return replace(result, recipe=files[0] if files else result.image.name)


def check_output(recipes: Sequence[str], formats: Sequence[str]) -> None:
    """Refuse -o where no file is written, or several. Raises UsageError."""
    files = [name for name in dict.fromkeys(formats) if exporters.load(name).SUFFIX is not None]
    if formats and not files:
        refuse_ignored(f"names a file, and --format {formats[0]} writes none", "output")
    if len(recipes) * max(1, len(files)) > 1:
        refuse_ignored("names one file; build one recipe in one format, or leave -o out", "output")


def build_recipe(
    context: Context, recipe_options: RecipeOptions, resolved: ResolvedRecipe, request: ImageRequest
) -> ImageResult:
    """Plan, build, export, verify."""
    store, progress = context.store, context.progress
    registry = None if request.offline else context.settings.registry
    if request.offline:
        log_decision("registry of layers", "not asked", "--bundle" if request.bundle else "--offline")
    actions = plan(resolved, store, registry=registry, progress=progress)
    missing = [action.layer.name for action in actions if action.decision == "BUILD"]
    report_plan(resolved, store, actions, progress, savings=bool(recipe_options.gpu_arch))
    if missing and request.offline and not request.bundle:
        raise UsageError(
            f"--offline: {', '.join(missing)} would have to be built; "
            f"pass its sources with --bundle FILE ({command_name()} bundle writes one)"
        )
    with build_inputs(context, recipe_options, resolved, request) as (options, data):
        build_context = BuildContext(resolved, store, options, progress)
        result = make_image(build_context, request.make, actions)
    task = next(iter(resolved.recipe.file.tasks), "")
    return ImageResult(
        recipe=resolved.cli_args,
        image=result.image,
        built=[name for name in missing if name not in build_context.reused],
        artifacts=result.artifacts,
        checks=result.checks,
        data=data,
        run=[line for item in result.artifacts for line in exporters.run_commands(item, task)],
        is_verified=request.make.verify,
    )


def report_plan(
    resolved: ResolvedRecipe, store: Store, actions: Sequence[Action], progress: Progress, *, savings: bool
) -> None:
    """Print how much has to be built and pulled; with ``savings``, what fewer GPU architectures save."""
    if savings:
        progress.log(format_savings(resolved, store))
    decisions, count = [action.decision for action in actions], len(actions)
    to_build, to_pull = decisions.count("BUILD"), decisions.count("PULL")
    if to_build:
        summary = f"{to_build} of {count} layers to build" + (f", {to_pull} to pull" if to_pull else "")
    else:
        summary = f"{to_pull} of {count} layers to pull" if to_pull else f"all {count} layers are stored"
    progress.log(f"{resolved.recipe.name}: {summary}")


@contextlib.contextmanager
def build_inputs(
    context: Context, recipe_options: RecipeOptions, resolved: ResolvedRecipe, request: ImageRequest
) -> Iterator[tuple[Options, list[Path]]]:
    """Yield what to build from: the network, or a bundle with its folders of data, which are unpacked."""
    if not request.bundle:
        registry = None if request.offline else context.settings.registry
        options = Options(
            engine=request.engine,
            locked=request.locked,
            mirror=recipe_options.mirror,
            registry=registry,
            debug=request.debug,
        )
        yield options, []
        return
    from ekiben.bundle.read import bundle_sources, check_bundle, import_compiled, open_bundle, unpack_snapshots

    with open_bundle(request.bundle, context.store, context.progress) as bundle:
        check_bundle(bundle, resolved)
        import_compiled(bundle, context.store)
        options = Options(
            engine=request.engine,
            locked=request.locked,
            sources=bundle_sources(bundle, resolved),
            debug=request.debug,
        )
        folder = request.make.output.parent if request.make.output else Path()
        yield options, unpack_snapshots(bundle, folder / f"{resolved.recipe.name}-data")
