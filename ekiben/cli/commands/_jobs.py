"""Options and checks shared by the commands for jobs."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import click
from click.core import ParameterSource

from ekiben.cli.context import Context
from ekiben.cli.options import Function, PathType
from ekiben.core.decisions import log_decision
from ekiben.core.errors import UsageError
from ekiben.run.jobs.request import JobRequest, with_defaults
from ekiben.run.schedulers import choose, load
from ekiben.run.site import Site


def _check_folder(ctx: click.Context, param: click.Parameter, value: Path) -> Path:
    """Refuse a folder that was named and is not there; the default one is there after the first job."""
    is_named = ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
    if is_named and not value.is_dir():
        raise UsageError(f"--runs: {value} is {'not a folder' if value.exists() else 'not there'}")
    if is_named and not os.access(value, os.R_OK | os.X_OK):
        raise UsageError(f"--runs: {value}: {os.strerror(errno.EACCES)}")
    return value


def runs_option(function: Function) -> Function:
    """Add --runs, a folder in which there are runs."""
    return _runs_option(_check_folder)(function)


def new_runs_option(function: Function) -> Function:
    """Add --runs, a folder that is made where it is missing."""
    return _runs_option(None)(function)


def _runs_option(callback: Callable[..., Path] | None) -> Callable[[Function], Function]:
    return click.option(
        "--runs",
        callback=callback,
        type=PathType(),
        envvar="EKIBEN_RUNS",
        default=Path("ekiben-runs"),
        show_default=True,
        metavar="DIR",
        help="The folder of runs, on a file system that the compute nodes share. Or $EKIBEN_RUNS.",
    )


def request_with_defaults(context: Context, request: JobRequest, site: Site | None) -> JobRequest:
    """Return a request completed by the user's settings and the site. Raises UsageError for a wrong one."""
    defaults = [
        *context.settings.jobs,
        *([site.file.scheduler.defaults] if site and site.file.scheduler else []),
    ]
    for source, known in zip(
        (*context.settings.job_sources, f"the site {site.name if site else None}"), defaults, strict=False
    ):
        log_decision("defaults of jobs", known.describe() or "none", source)
    return with_defaults(request, defaults)


def scheduler_of(site: Site | None) -> str:
    """Return the site's scheduler, or the one that is here. Raises UsageError when a site names none."""
    if site and site.file.scheduler is None:
        raise UsageError(f"{site.name} names no scheduler; use --scheduler")
    if site and site.file.scheduler:
        scheduler = site.file.scheduler.kind
        log_decision("scheduler", scheduler, f"of the site {site.name}")
    else:
        scheduler = choose()
    load(scheduler)
    return scheduler
