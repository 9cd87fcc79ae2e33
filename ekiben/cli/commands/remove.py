"""Remove packages from a recipe, and lock it.

Where locking fails, every file stays as it was. FOLDER is the recipe's (default: this one).

\b
Examples:
  ekiben remove humanize
  ekiben remove rich datasets ./mine
  ekiben remove --apt ffmpeg
"""

from __future__ import annotations

from typing import Any

import click

from ekiben.cli.commands._packages import change_packages, package_options
from ekiben.cli.context import Context
from ekiben.cli.options import Command
from ekiben.project.add import remove_requirements


@click.command("remove", cls=Command, help=__doc__)
@package_options
@click.pass_obj
def command(context: Context, /, arguments: tuple[str, ...], **options: Any) -> None:
    """Edit, lock, and print what changed."""
    change_packages(context, arguments, remove_requirements, **options)
