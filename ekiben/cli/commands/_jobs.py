"""What the commands about submitted jobs share."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import click
from click.core import ParameterSource

from ekiben.cli.options import Function, PathType
from ekiben.core.errors import UsageError


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
