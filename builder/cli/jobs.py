"""Commands that run tasks: here, or through a scheduler; and say beforehand whether they will."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from builder.cli.group import Command, chain_options, json_option, main, open_store, resolved
from builder.errors import StoreError, UnfitError, UsageError

if TYPE_CHECKING:
    from builder.doctor import Finding
    from builder.site import SiteFile
    from builder.store import Store


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("recipe")
@click.argument("words", nargs=-1, metavar="[TASK] [-- ARGS…]", type=click.UNPROCESSED)
@click.option("--cpu", is_flag=True, help="Without GPUs, even when there are some.")
@click.option("--stack", help="The image of another stack than the recipe's own.")
@click.option("--sif", type=click.Path(path_type=Path), help="The file to run (default: ./<recipe>.sif).")
@click.option(
    "--bind",
    "binds",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A folder to see inside, at its own path; may repeat. This one, caches and what ARGS name are seen anyway.",
)
@click.option("--stage", is_flag=True, help="Copy the SIF to the node's own disk first, once for all jobs there.")
@click.option("--force", is_flag=True, help="Even where doctor says that it will fail.")
@click.option("--dry-run", is_flag=True, help="Print the command, run nothing.")
@click.pass_obj
def run(
    store_path: Path | None,
    /,
    recipe: str,
    words: tuple[str, ...],
    cpu: bool,
    stack: str | None,
    sif: Path | None,
    binds: tuple[Path, ...],
    stage: bool,
    force: bool,
    dry_run: bool,
) -> None:
    """Run a task of a recipe's image: Apptainer or SingularityCE with the SIF, else Docker.

    Of your environment the image sees what a job needs: its scheduler's variables, NCCL's, proxies, HF_TOKEN; not
    LD_LIBRARY_PATH or PYTHONPATH.

    \b
    Examples:
      build.py run lora-opencalm train -- --smoke
      build.py run lora-opencalm train --stage -- --data=/groups/mine/talk.jsonl --output=/scratch/me/run
      build.py run hello --cpu
    """  # fmt: skip
    import shlex

    from builder import launch
    from builder.machine import has_gpu
    from builder.recipe import find_recipe

    found = find_recipe(recipe)
    if words:
        found.task(words[0])
    name = found.image_name(stack)
    sif = sif or Path(f"{name}.sif")
    wish = launch.Wish(
        words=words, gpu=not cpu and has_gpu(), binds=binds, terminal=sys.stdin.isatty() and sys.stdout.isatty()
    )
    program = launch.choose_runtime(name, sif)
    if not dry_run:
        if not force:
            warn_or_refuse(store_path, program, sif, name, gpu=wish.gpu)
        if stage and Path(program).name != "docker":
            sif = launch.stage(sif, os.environ, lambda line: click.echo(line, err=True))
    ready = launch.launch(program, sif, f"ekiben/{name}:latest", wish, os.environ)
    click.echo(f"+ {shlex.join(ready.argv)}", err=not dry_run)
    for variable in ready.kept_out:
        click.echo(f"{variable} is not passed on: the image has its own", err=True)
    if not dry_run:
        sys.stdout.flush()
        os.execvpe(ready.argv[0], ready.argv, ready.environment)


def warn_or_refuse(store_path: Path | None, program: str, sif: Path, name: str, *, gpu: bool) -> None:
    """What doctor says about running it here, before it is run. Errors: UnfitError when it will fail."""
    from builder.doctor import check_here, refuse
    from builder.store import Store

    try:
        store = open_store(store_path)
    except StoreError:  # what runs needs none: the image's facts are read again each time
        store = Store(Path(os.devnull))
    findings = check_here(store, program, sif, name, gpu=gpu, tell=lambda line: click.echo(line, err=True))
    refuse(findings)
    warn(findings)


def warn_or_refuse_there(store: Store, site: SiteFile, sif: Path, *, gpu: bool) -> None:
    """The same for a site's compute nodes, before a job waits for them."""
    from builder.doctor import check_image, check_runtimes, known_stacks, refuse
    from builder.facts import facts_of_sif

    facts = facts_of_sif(sif, store, lambda line: click.echo(line, err=True))
    findings = check_image(site, facts, known_stacks()) if gpu else check_runtimes(site.runtimes, site.node, facts)
    refuse(findings)
    warn(findings)


def warn(findings: Iterable[Finding]) -> None:
    for finding in findings:
        if finding.level == "but":
            click.echo(f"{finding.topic}: {finding.said}" + (f" ({finding.do})" if finding.do else ""), err=True)


@main.command()
@click.argument("image", required=False, metavar="[RECIPE|FILE.sif]")
@click.argument("words", nargs=-1, metavar="[TASK] [-- ARGS…]", type=click.UNPROCESSED)
@click.option(
    "--site", help="A site of sites/, one of your own, or a path to a profile: its compute nodes, not this machine."
)
@click.option(
    "--record", is_flag=True, help="Write this machine as a site profile; best in a batch job on a compute node."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="With --record: the file (default: stdout). Else: where the image would be written.",
)
@chain_options
@json_option
@click.pass_obj
def doctor(
    store_path: Path | None,
    /,
    image: str | None,
    words: tuple[str, ...],
    site: str | None,
    record: bool,
    output: Path | None,
    stack: str | None,
    gpu_arch: str | None,
    arguments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say whether it will run, and why: on this machine, or on a site's compute nodes from a login node without GPU.

    Exit code 10 when it will fail. Facts of an image are read from its layers; only with TASK something is run: its
    --dry-run, without a GPU, for the memory it expects.

    \b
    Examples:
      build.py doctor                              can one build here, which stacks run on these GPUs
      build.py doctor lora-opencalm                this image on this machine
      build.py doctor --site abci-3.0 lora-opencalm
      build.py doctor --site abci-2.0 lora-opencalm train -- --data=talk.jsonl
      build.py doctor --record -o ~/.config/ekiben/sites/mine.yaml
    """  # fmt: skip
    from builder.doctor import consult, report, text, worst
    from builder.site import find_site

    if record:
        if image or site or as_json:
            raise UsageError("--record describes this machine; leave out the image, --site and --json")
        record_machine(output)
        return
    place = find_site(site).file if site else None
    sections = consult(open_store(store_path), image, place, output or Path(), words=words, stack=stack,
                       resolved=lambda name: resolved(name, stack, arguments, gpu_arch),
                       tell=lambda line: click.echo(line, err=True))  # fmt: skip
    click.echo(json.dumps(report(sections), indent=1) if as_json else text(sections))
    if any(worst(section.findings) == "fail" for section in sections if section.does != "suit"):
        sys.exit(UnfitError.exit_code)


def record_machine(output: Path | None) -> None:
    import socket
    from datetime import UTC, datetime

    from builder.files import write_whole
    from builder.machine import profile_text, record_site

    host = socket.gethostname()
    name = output.stem if output else host.split(".")[0]
    made: SiteFile = record_site(name, os.environ)
    said = f"Recorded by `build.py doctor --record` on {host}, {datetime.now(UTC):%Y-%m-%d}. What could not be seen is left out."
    text = profile_text(made, said)
    if output is None:
        click.echo(text, nl=False)
        return
    write_whole(output, text)
    click.echo(output)


def runs_option(command: Command) -> Command:
    return click.option(
        "--runs", type=click.Path(path_type=Path), envvar="EKIBEN_RUNS", default=Path("ekiben-runs"), show_default=True,
        help="The folder of runs; it must be on a file system that the compute nodes share. Or $EKIBEN_RUNS.",
    )(command)  # fmt: skip


@main.command()
@click.argument("recipe")
@click.argument("words", nargs=-1, required=True, metavar="TASK [-- ARGS… [+ TASK ARGS…]]", type=click.UNPROCESSED)
@click.option("--scheduler", metavar="slurm|sge|pbs", help="Default: the site's, else the one that is here.")
@click.option("--site", help="A profile of sites/ or of your own: what the cluster's nodes are, and how it is asked.")
@click.option("--resource", metavar="NAME", help="One of the site's kinds of nodes. Default: the smallest that does.")
@click.option("--group", metavar="NAME", help="Which group or account pays, where the site wants to know.")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="For tasks that run on several.")
@click.option(
    "--gpus-per-node", "gpus", type=click.IntRange(0), help="Default: what the site's kind of node has, else 0."
)
@click.option("--cpus-per-node", "cpus", type=click.IntRange(1), help="CPUs, where the kind of node leaves a choice.")
@click.option("--processes-per-node", "processes", type=click.IntRange(1), help="Default: one for each GPU.")
@click.option("--time", "walltime", metavar="H:MM:SS", help="Walltime of one job; also 90m, 2h, 1-12:00:00.")
@click.option("--notice", default="5m", show_default=True, help="How long before its end a job is told to save.")
@click.option("--max-resubmits", type=click.IntRange(0), default=20, show_default=True,
              help="How often a job that saved goes back into the queue.")  # fmt: skip
@click.option("--seeds", metavar="1,2,3", help="A job for each; {seed} in ARGS is replaced.")
@click.option(
    "--option", "options", multiple=True, metavar="WORDS", help="An option of the scheduler's own; may repeat."
)
@click.option("--sif", type=click.Path(path_type=Path), help="The file to run (default: ./<recipe>.sif).")
@click.option("--stage", is_flag=True, help="Copy the SIF to each node's own disk first, once for all jobs there.")
@click.option("--force", is_flag=True, help="Even where doctor says that it will fail.")
@click.option("--wait", is_flag=True, help="Stay until the run is over; the exit code is 1 when a job failed.")
@click.option("--dry-run", is_flag=True, help="Print the job scripts, submit nothing.")
@runs_option
@json_option
@click.pass_obj
def submit(
    store_path: Path | None, /, recipe: str, words: tuple[str, ...], scheduler: str | None, site: str | None, runs: Path, sif: Path | None,
    walltime: str | None, notice: str, seeds: str | None, force: bool, wait: bool, dry_run: bool, as_json: bool, **wanted: Any,
) -> None:  # fmt: skip
    """Submit a task to Slurm, Grid Engine or PBS, on one node or several; it goes back into the queue until it is done.

    \b
    Examples:
      build.py submit lora-opencalm train --nodes 2 --gpus-per-node 4 --time 2:00:00 -- --data rows.jsonl
      build.py submit lora-opencalm train --site abci-3.0 --group gaa00000 --resource rt_HF --dry-run
      build.py submit lora-opencalm train --gpus-per-node 1 --seeds 1,2,3
      build.py submit lora-opencalm --gpus-per-node 1 -- train --data rows.jsonl + merge --adapter result/adapter
    """
    from builder import submit as jobs
    from builder.recipe import find_recipe
    from builder.schedulers import choose, load, seconds_of
    from builder.site import find_site

    found = find_recipe(recipe)
    profile = find_site(site) if site else None
    if scheduler is None:
        if profile and profile.file.scheduler is None:
            raise UsageError(f"{profile.name} names no scheduler; say --scheduler")
        scheduler = profile.file.scheduler.kind if profile and profile.file.scheduler else choose()
    load(scheduler)
    asked = jobs.Wanted(
        seconds=seconds_of(walltime) if walltime else None, notice=seconds_of(notice),
        seeds=tuple(seeds.split(",")) if seeds else (), **wanted,
    )  # fmt: skip
    run = jobs.plan(
        found, words, asked, scheduler=scheduler, site=profile, sif=sif or Path(f"{found.name}.sif"), runs=runs
    )
    if dry_run:
        click.echo("\n".join(jobs.script(run, step) for step in run.steps))
        return
    if profile and run.sif.is_file() and not force:
        warn_or_refuse_there(open_store(store_path), profile.file, run.sif, gpu=any(step.gpus for step in run.steps))
    ids = jobs.submit(run)
    if as_json:
        click.echo(json.dumps({"run": str(run.folder), "jobs": ids}, indent=1))
    else:
        click.echo(f"run     {run.folder}")
        for step, id in ids.items():
            click.echo(f"job     {id}  {step}")
        click.echo(f"watch   build.py logs -f {run.folder.name}")
    if wait:
        (submitted,) = jobs.find_runs([str(run.folder)], runs)
        rows = jobs.wait(submitted, lambda line: click.echo(line, err=True))
        if any(row.state != "done" for row in rows):
            raise click.exceptions.Exit(1)


@main.command()
@click.argument("names", nargs=-1, metavar="[RUN…]")
@runs_option
@json_option
def status(names: tuple[str, ...], runs: Path, as_json: bool) -> None:
    """Say how the jobs of runs are. A run is named by its folder, its name, or a job's id.

    \b
    Examples:
      build.py status
      build.py status 1234 --json
    """
    import dataclasses

    from builder.submit import find_runs
    from builder.submit import status as ask

    rows = ask(find_runs(names, runs))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
        return
    for row in rows:
        again = f"  (start {row.resubmitted + 1})" if row.resubmitted else ""
        click.echo(f"{row.run}  {row.job:<12}  {row.id:<8}  {row.state:<9}  {row.detail}{again}".rstrip())


@main.command()
@click.argument("name", required=False, metavar="[RUN]")
@click.argument("job", required=False, metavar="[JOB]")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job is over.")
@runs_option
def logs(name: str | None, job: str | None, follow: bool, runs: Path) -> None:
    """Print what a job of a run wrote: by default the newest run, and the job that began last.

    \b
    Examples:
      build.py logs -f
      build.py logs 1234 2-merge
    """
    from builder.submit import find_runs, log_lines

    found = find_runs([name] if name else [], runs)
    if not found:
        raise UsageError(f"there is no run in {runs}", hint="--runs DIR")
    for line in log_lines(found[-1], job, follow=follow):
        click.echo(line, nl=False)


@main.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN…")
@runs_option
def cancel(names: tuple[str, ...], runs: Path) -> None:
    """Take the jobs of runs out of the queue, running ones as well; none goes back into it.

    \b
    Example:
      build.py cancel 1234
    """
    from builder.submit import cancel as end
    from builder.submit import find_runs

    for run in find_runs(names, runs):
        ids = end(run)
        click.echo(f"{run.folder.name}: {' '.join(['cancelled', *ids]) if ids else 'nothing to cancel, all is over'}")
