"""Options of `shell` and `notebook` that start them on a compute node, as an interactive job."""

from __future__ import annotations

import functools
import os
import shlex
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import click

from ekiben.cli.context import Context
from ekiben.cli.options import CountType, NameType, TextType
from ekiben.core.decisions import log_decision
from ekiben.core.errors import EngineError, UsageError

if TYPE_CHECKING:
    from ekiben.run.image import NamedImage

LOGIN_HOST = "EKIBEN_LOGIN_HOST"  # set for the command that runs on the node: where the user typed it
_COUNT = CountType(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """The requested compute node; all None: this machine."""

    site: str | None
    partition: str | None
    account: str | None
    gpus_per_node: int | None
    cpus_per_node: int | None
    memory: str | None
    walltime: str | None

    @property
    def is_asked(self) -> bool:
        """Return whether a compute node was asked for."""
        return any(getattr(self, item.name) is not None for item in fields(self))


def node_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a compute node; the command gets them as one ``node``."""

    @functools.wraps(function)
    def with_options(*args: Any, **params: Any) -> None:
        node = NodeOptions(**{name: params.pop(name) for name in NodeOptions.__slots__})
        function(*args, node=node, **params)

    for decorate in reversed(_OPTIONS):
        with_options = decorate(with_options)
    return with_options


_OPTIONS: tuple[Callable[[Callable[..., None]], Callable[..., None]], ...] = (
    click.option("--site", type=NameType(), metavar="NAME|FILE", help="On a compute node of this site."),
    click.option("--partition", type=TextType(), metavar="NAME", help="On a compute node of this partition or queue."),
    click.option("--account", type=TextType(), metavar="NAME", help="On a compute node, charged to this account."),
    click.option("--gpus-per-node", type=CountType(0), metavar="N", help="On a compute node, with N of its GPUs."),
    click.option("--cpus-per-node", type=_COUNT, metavar="N", help="On a compute node, with N of its cores."),
    click.option("--memory", type=TextType(), metavar="64G", help="On a compute node, with so much of its memory."),
    click.option(
        "--time", "walltime", type=TextType(), metavar="H:MM:SS", help="On a compute node, for at most this time."
    ),
)


def start_on_node(context: Context, image: NamedImage, node: NodeOptions, *, dry_run: bool) -> None:
    """Replace this process by the scheduler's command for the same command on a node; return if it is this machine.

    Raises UsageError for a node that cannot be had, EngineError where the image is not here or no scheduler is,
    VerifyError where the image lacks the signature that it needs.
    """
    if not node.is_asked or LOGIN_HOST in os.environ:
        return
    # imported here: most commands start on this machine
    from ekiben.cli.commands._jobs import request_with_defaults, scheduler_of
    from ekiben.run.jobs.plan import node_args
    from ekiben.run.jobs.request import JobRequest, memory_mib_of
    from ekiben.run.schedulers import load, seconds_of
    from ekiben.run.site import find_site

    if not image.sif.is_file():
        raise EngineError(f"{image.name} cannot be run on a node: {image.sif} is not there", hint=image.build_hint)
    if image.signature:  # checked before a job waits in the queue
        image.signature.check(image.sif)
    site = find_site(node.site) if node.site else None
    request = JobRequest(
        partition=node.partition,
        account=node.account,
        gpus_per_node=node.gpus_per_node,
        cpus_per_node=node.cpus_per_node,
        memory_mib=memory_mib_of(node.memory) if node.memory else None,
        time_seconds=seconds_of(node.walltime) if node.walltime else None,
    )
    request = request_with_defaults(context, request, site)
    scheduler = scheduler_of(site)
    here = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), "env", f"{LOGIN_HOST}={socket.gethostname()}"]
    command = [*here, *sys.orig_argv]
    argv = load(scheduler).interactive(node_args(request, scheduler, site), request.time_seconds, command)
    if argv is None:
        title = load(scheduler).TITLE
        raise UsageError(
            f"{title} starts only a shell on a node",
            hint="start an interactive job, and this command in it without the options of nodes",
        )
    log_decision("where it runs", "a compute node", "options of a node were given")
    click.echo(f"+ {shlex.join(argv)}", err=not dry_run)
    if not dry_run:
        sys.stdout.flush()
        try:
            os.execvp(argv[0], argv)
        except FileNotFoundError as error:
            raise EngineError(f"{argv[0]} is not on PATH") from error
    raise click.exceptions.Exit(0)
