"""Sections of a command's options in its help, where there are many."""

from __future__ import annotations

import click

_FEW = 9  # options that are one list
_GENERAL = "Options"  # the section of options that are in no other
SECTIONS = {
    "Options of the image": ("sif", "stack", "layers", "included", "arch", "gpu_arch", "arguments"),
    "Options of a build": ("build", "sync", "offline", "engine", "locked", "bundle", "no_verify", "debug"),
    "Options of the container": ("cpu", "runtime", "app", "binds", "env", "copy_local", "live"),
    "Options of the compute nodes": (
        *("scheduler", "site", "partition", "account", "qos", "nodes", "gpus_per_node", "cpus_per_node", "memory"),
        *("exclusive", "processes_per_node", "walltime", "scheduler_args"),
    ),
    "Options of the run": ("grace_period", "max_resubmits", "seeds", "again", "wait", "runs"),
    "Options of the version": ("version", "tags", "pin", "no_current", "modulefile"),
}


def write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the options of a command; those of a command with many in sections, in the order of SECTIONS."""
    options = [param for param in command.get_params(ctx) if isinstance(param, click.Option)]
    shown = [(param.name, record) for param in options if (record := param.get_help_record(ctx))]
    is_long = len(shown) > _FEW + 1  # and --help
    titles = {name: title for title, names in SECTIONS.items() for name in names} if is_long else {}
    for title in (_GENERAL, *SECTIONS):
        records = [record for name, record in shown if titles.get(name or "", _GENERAL) == title]
        if records:
            with formatter.section(title):
                formatter.write_dl(records)
