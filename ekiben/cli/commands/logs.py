"""Print the log of a submitted job.

Default: the newest run, and the job that began last.

\b
Examples:
  ekiben logs -f
  ekiben logs 1234 2-merge
  ekiben logs 1234 --rank 3
"""

from __future__ import annotations

from pathlib import Path

import click

from ekiben.cli.commands._jobs import runs_option
from ekiben.cli.options import Command, NameType
from ekiben.core.errors import UsageError
from ekiben.run.jobs.runs import find_runs, log_lines


@click.command("logs", cls=Command, help=__doc__)
@click.argument("name", required=False, metavar="[RUN]", type=NameType())
@click.argument("job", required=False, metavar="[JOB]", type=NameType())
@click.option("-f", "--follow", is_flag=True, help="Go on until the job is over.")
@click.option("--rank", type=click.IntRange(0), metavar="N", help="Only what this process of the job wrote.")
@runs_option
def command(name: str | None, job: str | None, follow: bool, rank: int | None, runs: Path) -> None:
    """Print line by line."""
    selected = find_runs([name] if name else [], runs)
    if not selected:
        raise UsageError(f"there is no run in {runs}", hint="--runs DIR")
    for line in log_lines(selected[-1], job, rank=rank, follow=follow):
        click.echo(line, nl=False)
