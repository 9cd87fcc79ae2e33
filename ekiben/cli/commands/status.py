"""Show the state of submitted jobs.

A run is named by its folder, its name, or a job's id; without a name, all are shown.

\b
Examples:
  ekiben status
  ekiben status 1234 --json
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from ekiben.cli.commands._jobs import runs_option
from ekiben.cli.context import Context
from ekiben.cli.options import Command, NameType, json_option
from ekiben.run.jobs.records import find_runs
from ekiben.run.jobs.states import JobStatus, status


@dataclass(frozen=True, slots=True)
class StatusResult:
    """The jobs of the runs asked about."""

    jobs: Sequence[JobStatus]

    def to_json(self) -> list[dict[str, Any]]:
        """Return the object that --json prints."""
        return [asdict(job) for job in self.jobs]

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of the text output."""
        for job in self.jobs:
            again = f"  (start {job.resubmitted + 1})" if job.resubmitted else ""
            again = f"  (attempt {job.attempt})" + again if job.attempt > 1 else again
            began = f"  started {job.started}" if job.started and job.started != "N/A" else ""
            image = f"  image {job.image}" if job.names_image else ""
            yield f"{job.run}  {job.job:<12}  {job.id:<8}  {job.state:<9}  {job.detail}{began}{again}{image}".rstrip()


@click.command("status", cls=Command, help=__doc__)
@click.argument("names", nargs=-1, metavar="[RUN…]", type=NameType())
@runs_option
@json_option
@click.pass_obj
def command(context: Context, /, names: tuple[str, ...], runs: Path) -> None:
    """Ask the scheduler."""
    context.print(StatusResult(status(find_runs(names, runs, context.log), None if names else context.log)))
