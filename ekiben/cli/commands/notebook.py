"""Start JupyterLab in a recipe's image.

The image is the recipe's with one layer more, which holds JupyterLab in an environment of its own; it is built once, as
./RECIPE-notebook.sif or in Docker. FILE.sif, a published NAME[:VERSION] or a registry's image is started as it is,
where it has JupyterLab. Cells run in the recipe's Python. The server listens on this machine only, and prints its URL
with a random token. Ctrl-C ends it.

\b
Examples:
  ekiben notebook lora-opencalm
  ekiben notebook lora-opencalm --port 9000
  ekiben notebook ./mine-notebook.sif
  ekiben notebook lora-opencalm --no-start             (build the image, where there is a network)
  ekiben notebook lora-opencalm --gpus-per-node 1 --time 2:00:00      (on a compute node)
"""

from __future__ import annotations

import errno
import socket

import click

from ekiben.cli.commands._node import LOGIN_HOST, NodeOptions, node_options, start_on_node
from ekiben.cli.commands._start import (
    StartOptions,
    build_image,
    export_format,
    named_image,
    start_image,
    start_options,
)
from ekiben.cli.context import Context
from ekiben.cli.options import (
    Command,
    CountType,
    RecipeOptions,
    RecipeType,
    TextType,
    bind_arguments,
    definition_options,
    refuse_ignored,
)
from ekiben.core.command_name import command_name
from ekiben.core.errors import UsageError
from ekiben.run.image import NamedImage, read_in_sif

LAYER = "notebook"
_PORTS = range(8888, 8988)
_ANY = "0.0.0.0"
_PROGRAM = "usr/local/bin/ekiben-notebook"  # of the layer


@click.command("notebook", cls=Command, help=__doc__)
@click.argument("recipe", metavar="IMAGE", type=RecipeType())
@click.option(
    "--port", type=CountType(1, 65535), metavar="PORT", help="Listen on this port (default: a free one from 8888)."
)
@click.option(
    "--ip",
    default="127.0.0.1",
    show_default=True,
    type=TextType(),
    metavar="ADDRESS",
    help="Listen on this address; 0.0.0.0 admits other machines, which need the token, too.",
)
@click.option("--no-start", is_flag=True, help="Build the image only.")
@click.option("--no-verify", is_flag=True, help="Do not run the %test scripts in a new image.")
@definition_options
@node_options
@start_options
@click.pass_obj
def command(
    context: Context,
    /,
    recipe: str,
    port: int | None,
    ip: str,
    no_start: bool,
    no_verify: bool,
    gpu_arch: str | None,
    arguments: tuple[str, ...],
    node: NodeOptions,
    start: StartOptions,
) -> None:
    """Build what is missing, then become the container runtime with JupyterLab."""
    if no_start:
        refuse_ignored(
            "is for starting the image, which --no-start leaves out",
            *("port", "ip", "cpu", "binds", "copy_local", "live", "force", "dry_run"),
            *NodeOptions.__slots__,
        )
    image = named_image(context, recipe, start, LAYER)
    kind = export_format(start)
    if image.recipe is None:
        _check_file(image, recipe)
    elif start.sif is not None:
        refuse_ignored(
            "is for building the image, and --sif names one", "no_start", "no_verify", "gpu_arch", "arguments"
        )
    elif not start.dry_run and LOGIN_HOST not in context.environment:  # on a node it is built already
        build_image(
            context,
            RecipeOptions(start.stack, gpu_arch, bind_arguments(arguments)),
            image.recipe,
            kind,
            verify=not no_verify,
            sync=start.sync,
        )
    elif image.recipe and kind == "sif" and not image.sif.is_file():
        raise UsageError(
            f"--dry-run: {image.sif} is not built yet; it would be built first", hint="--no-start builds it"
        )
    if no_start:
        return
    start_on_node(context, image, node, dry_run=start.dry_run)
    port = _choose_port(ip, port)
    if login := context.environment.get(LOGIN_HOST):
        context.log(f"from your machine: ssh -N -L {port}:{ip}:{port} -J {login} {socket.gethostname()}")
    publish = f"{ip}:{port}" if kind == "docker" else None
    address = socket.gethostname() if ip == _ANY else ip
    argv = ["ekiben-notebook", f"--port={port}", f"--ip={_ANY if publish else ip}", f"--address={address}"]
    start_image(context, image, argv, start, executes=True, publish=publish)


def _check_file(image: NamedImage, reference: str) -> None:
    """Raise UsageError where an image that is not built here has no JupyterLab, or for options of building one."""
    refuse_ignored("is for building the image, and this one is built", "no_start", "no_verify", "gpu_arch", "arguments")
    if image.sif.is_file() and read_in_sif(image.sif, _PROGRAM) is None:
        raise UsageError(
            f"{reference} has no JupyterLab: there is no /{_PROGRAM} in it",
            hint=f"{command_name()} build RECIPE --layer {LAYER} builds an image that has it",
        )


def _choose_port(ip: str, asked: int | None) -> int:
    """Return the port asked for, or the first free one.

    Raises UsageError when none is free, or ``ip`` is none of this machine's.
    """
    for port in [asked] if asked else _PORTS:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(ip, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
            return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UsageError(
                    f"--ip {ip}: {error.strerror or error}", hint="give an address of this machine"
                ) from error
    if asked:
        raise UsageError(f"--port {asked} is in use", hint="choose another, or leave --port out")
    raise UsageError(f"every port from {_PORTS[0]} to {_PORTS[-1]} is in use", hint="choose another with --port")
