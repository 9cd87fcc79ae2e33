"""Write pages about the images published to DIR.

They show contents, GPUs, how to run each image, runs and changes; read them from file:// or a web server.

\b
Examples:
  ekiben catalog /groups/lab/ekiben
  ekiben catalog /groups/lab/ekiben --runs /groups/lab/results --runs ~/results
  ekiben catalog /groups/lab/ekiben -o ~/public_html/images
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ekiben.cli.context import Context
from ekiben.cli.options import Command, OutputFolder, PathType, json_option
from ekiben.publish.catalog._types import SkippedFile
from ekiben.publish.catalog.write import WrittenCatalog, make_catalog


@dataclass(frozen=True, slots=True)
class CatalogResult:
    """``with_runs``: --runs was given."""

    written: WrittenCatalog
    with_runs: bool

    @property
    def counts(self) -> tuple[int, int]:
        """Images and versions."""
        images = self.written.catalog["images"]
        return len(images), sum(len(image["versions"]) for image in images)

    def to_json(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        (images, versions), runs = self.counts, self.written.runs
        return {
            "path": str(self.written.out),
            "images": images,
            "versions": versions,
            "runs": {
                "new": runs.new,
                "known": runs.known,
                "unfinished": runs.unfinished,
                "unmatched": runs.unmatched,
                "jobs": runs.jobs,
                "without_image": len(runs.without_image),
                "unreadable": len(runs.broken),
            },
            "skipped": self.skipped,
        }

    @property
    def skipped(self) -> list[SkippedFile]:
        """Return what was left out, of the published files and of the run records."""
        runs: list[SkippedFile] = [{"file": file, "reason": reason} for file, reason in self.written.runs.skipped()]
        return [*self.written.catalog["skipped"], *runs]

    def to_lines(self) -> Iterator[str]:
        """Yield the lines of the text output."""
        (images, versions), runs = self.counts, self.written.runs
        if self.with_runs:
            yield (
                f"runs     {len(runs.new)} new, {runs.known} known, {runs.unfinished} not finished, "
                f"{runs.unmatched} of other images, {len(runs.without_image)} without an image, "
                f"{len(runs.broken)} unreadable{f', {runs.jobs} of jobs' if runs.jobs else ''}"
            )
        yield f"written  {self.written.out}/index.html  {_counted(images, 'image')}, {_counted(versions, 'version')}"


@click.command("catalog", cls=Command, help=__doc__)
@click.argument("folder", type=PathType(), metavar="DIR")
@click.option("-o", "--output", type=OutputFolder(), metavar="DIR", help="The folder of pages (default: DIR/catalog).")
@click.option(
    "--runs",
    type=PathType(),
    multiple=True,
    metavar="FILE|DIR",
    help=(
        "Search this folder for run.json and OUTPUT.run.json of finished runs, and add their shareable fields to the"
        " versions they used; may repeat."
    ),
)
@json_option
@click.pass_obj
def command(context: Context, /, folder: Path, output: Path | None, runs: tuple[Path, ...]) -> None:
    """Read what was published, write the pages."""
    folder = folder.absolute()
    out = output.absolute() if output else None
    written = make_catalog(folder, context.store_with(folder), out=out, runs=runs, log=context.log)
    result = CatalogResult(written, bool(runs))
    for item in result.skipped:
        context.log(f"skipped: {item['file']}: {item['reason']}")
    context.print(result)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
