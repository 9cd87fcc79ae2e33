"""Add packages to a recipe, and lock it.

requirements.txt or pyproject.toml gets a line, or the layer's definition file with --apt; versions that are locked
stay. Where locking fails, every file stays as it was. FOLDER is the recipe's (default: this one).

\b
Examples:
  ekiben add humanize
  ekiben add 'rich>=13' 'datasets[audio]' ./mine
  ekiben add 'tools @ git+https://git.example.org/lab/tools@main'
  ekiben add ./package                      a folder of the recipe with a pyproject.toml
  ekiben add --apt ffmpeg git
  ekiben add --replace 'rich>=14'           over the version of a layer below
  ekiben add --dry-run trl                  what would be locked
"""

from __future__ import annotations

from typing import Any

import click

from ekiben.cli.commands._packages import change_packages, package_options
from ekiben.cli.context import Context
from ekiben.cli.options import Command
from ekiben.core.errors import UsageError
from ekiben.project.add import add_requirements, replace_packages


@click.command("add", cls=Command, help=__doc__)
@package_options
@click.option("--replace", "replaces", is_flag=True, help="Install them over the versions of the layers below.")
@click.pass_obj
def command(context: Context, /, arguments: tuple[str, ...], replaces: bool, **options: Any) -> None:
    """Edit, lock, and print what changed."""
    if replaces and options["apt"]:
        raise UsageError("--replace is for Python packages; apt installs one version of a package")
    change_packages(context, arguments, replace_packages if replaces else add_requirements, **options)
