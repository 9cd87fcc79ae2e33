"""Open a shell in an image.

As `run` does it: the same folders, environment and GPUs. The tasks are commands there; leave with exit. PROGRAM runs in
place of the shell, with the arguments after it. (`ekiben exec` is for programs alone.)

\b
Examples:
  ekiben shell lora-opencalm
  ekiben shell --live lora-opencalm                    (edited scripts, no new image)
  ekiben shell lora-opencalm nvidia-smi
  ekiben shell --gpus-per-node 1 --time 1:00:00 lora-opencalm     (on a compute node)
"""

from __future__ import annotations

import click

from ekiben.cli.commands._node import LOGIN_HOST, NodeOptions, node_options, start_on_node
from ekiben.cli.commands._start import StartOptions, build_or_compare, named_image, start_image, start_options
from ekiben.cli.context import Context
from ekiben.cli.options import RecipeType, TaskCommand

# Not every base has bash.
_SHELL = ("sh", "-c", "if command -v bash >/dev/null; then exec bash; fi; exec sh -i")


@click.command("shell", cls=TaskCommand, help=__doc__)
@click.argument("image", metavar="IMAGE", type=RecipeType())
@click.argument("argv", nargs=-1, metavar="[PROGRAM…]", type=click.UNPROCESSED)
@node_options
@start_options
@click.pass_obj
def command(context: Context, /, image: str, argv: tuple[str, ...], node: NodeOptions, start: StartOptions) -> None:
    """Check the machine, then become the container runtime with a shell."""
    named = named_image(context, image, start)
    if LOGIN_HOST not in context.environment:  # on a node, the login node has done it
        build_or_compare(context, named, start, is_on_node=node.is_asked)
    start_on_node(context, named, node, dry_run=start.dry_run)
    start_image(context, named, argv or _SHELL, start, executes=True)
