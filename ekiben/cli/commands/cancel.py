"""Cancel the jobs of runs, also running ones.

None goes back into the queue. RUN is a run's folder, its name, or a job's id; the id of one job of an array cancels
that job alone.

\b
Examples:
  ekiben cancel 1234
  ekiben cancel 1234_2
  ekiben cancel 1234 --job 2-merge
"""

from __future__ import annotations

from pathlib import Path

import click

from ekiben.cli.commands._jobs import runs_option
from ekiben.cli.options import Command, NameType, TextType
from ekiben.core.printable import printable
from ekiben.run.jobs.records import find_runs, jobs_named
from ekiben.run.jobs.runs import cancel


@click.command("cancel", cls=Command, help=__doc__)
@click.argument("names", nargs=-1, required=True, metavar="RUN…", type=NameType())
@click.option(
    "--job", "jobs", multiple=True, type=TextType(), metavar="JOB", help="Only this job of the run; may repeat."
)
@runs_option
def command(names: tuple[str, ...], jobs: tuple[str, ...], runs: Path) -> None:
    """Cancel, and print the ids."""
    for name, run in zip(names, find_runs(names, runs), strict=True):
        ids = cancel(run, [*jobs, *jobs_named(run, name)])
        result = " ".join(["cancelled", *ids]) if ids else "nothing to cancel, every job has ended"
        click.echo(printable(f"{run.folder.name}: {result}"))
