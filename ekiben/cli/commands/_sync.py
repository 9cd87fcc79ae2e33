"""Lock a recipe whose lock files are missing or out of date: --sync, or `sync: true` in config.yaml."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ekiben.cli.context import Context
from ekiben.cli.options import Function, RecipeOptions
from ekiben.core.decisions import log_decision
from ekiben.core.errors import NotLockedError

if TYPE_CHECKING:
    from ekiben.project.sources import SourceSettings
    from ekiben.resolve.graph import ResolvedRecipe
    from ekiben.spec.recipe import Recipe


def sync_option(purpose: str) -> Callable[[Function], Function]:
    """Add --sync; the command gets ``sync``."""
    return click.option("--sync", is_flag=True, help=purpose)


def offline_option(function: Function) -> Function:
    """Add --offline, which sets ``Context.offline``."""

    def remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if context := ctx.find_object(Context):
            context.offline = value

    return click.option(
        "--offline",
        is_flag=True,
        expose_value=False,
        callback=remember,
        help="Ask no registry for the image: take what was pulled before. With --build, build without a network.",
    )(function)


def wants_sync(context: Context, sync: bool) -> bool:
    """Return whether locks are to be brought up to date: by the option, or by config.yaml."""
    if not sync and context.offline:
        log_decision("--sync", "off", "--offline")
        return False
    if not sync and context.settings.sync:
        log_decision("--sync", "on", context.settings.sources["sync"])
    return sync or context.settings.sync


def resolve_synced(
    context: Context, options: RecipeOptions, recipe: str | Recipe, *, sync: bool, engine: str = "auto"
) -> ResolvedRecipe:
    """Resolve a recipe; with ``sync``, lock it first where its locks are missing or out of date.

    What is locked stays as long as it fits. Raises UsageError, DefinitionError, and what locking raises.
    """
    named = options.find(recipe) if isinstance(recipe, str) else recipe
    try:
        return options.resolve(named)
    except NotLockedError as error:
        if not wants_sync(context, sync):
            raise
        context.log(f"{error}: locking")
    _lock(context, named, engine)
    return options.resolve(named)


def _lock(context: Context, recipe: Recipe, engine: str) -> None:
    """Lock the tags of bases, and the packages, and print what changed."""
    from ekiben.project.lock import lock_recipe
    from ekiben.project.lock_bases import has_packages, lock_bases, recipe_bases

    for line in lock_bases(recipe_bases(recipe), keep=True):
        context.log(line)
    if has_packages(recipe):
        for line in lock_recipe(recipe, keep=True, settings=_settings(context, engine)):
            context.log(line)


def _settings(context: Context, engine: str) -> SourceSettings:
    from ekiben.builder.build import Options
    from ekiben.project.base import base_reader
    from ekiben.project.sources import SourceSettings, source_builder

    engines = (context.store, Options(engine=engine), context.progress)
    return SourceSettings(source_builder(*engines), context.store.downloads, read_base=base_reader(*engines))
