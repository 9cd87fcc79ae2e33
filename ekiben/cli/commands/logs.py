"""Print the log of a submitted job.

Default: the newest run, and the job that began last. Control characters are
shown as \\x1b, but into a file as they are.

\b
Examples:
  ekiben logs -f
  ekiben logs 1234 2-merge
  ekiben logs 1234 --rank 3
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path

import click

from ekiben.cli.commands._jobs import runs_option
from ekiben.cli.context import Context
from ekiben.cli.options import Command, CountType, NameType
from ekiben.core.errors import UsageError
from ekiben.core.printable import printable_pieces
from ekiben.run.jobs.logs import log_content
from ekiben.run.jobs.records import find_runs


@click.command("logs", cls=Command, help=__doc__)
@click.argument("name", required=False, metavar="[RUN]", type=NameType())
@click.argument("job", required=False, metavar="[JOB]", type=NameType())
@click.option("-f", "--follow", is_flag=True, help="Print new lines until the job ends.")
@click.option("--rank", type=CountType(0), metavar="N", help="Only the output of this process of the job.")
@runs_option
@click.pass_obj
def command(context: Context, /, name: str | None, job: str | None, follow: bool, rank: int | None, runs: Path) -> None:
    """Print piece by piece."""
    selected = find_runs([name] if name else [], runs, context.log)
    if not selected:
        raise UsageError(f"there is no run in {runs}", hint="--runs DIR")
    content = log_content(selected[-1], job, rank=rank, follow=follow)
    for piece in content if _is_into_file() else printable_pieces(content):
        click.echo(piece, nl=False)


def _is_into_file() -> bool:
    """Return whether stdout is a file. A pipe is often read by a pager on a terminal."""
    with contextlib.suppress(OSError, ValueError):  # stdout without a descriptor
        return stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
    return False
