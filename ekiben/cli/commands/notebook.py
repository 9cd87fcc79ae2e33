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
  ekiben notebook lora-opencalm --sif lora-opencalm-notebook.sif --ip 0.0.0.0      (in a job)
"""

from __future__ import annotations

import errno
import socket

import click

from ekiben.cli.commands._start import StartOptions, named_image, start_image, start_options
from ekiben.cli.context import Context
from ekiben.cli.options import (
    Command,
    RecipeOptions,
    RecipeType,
    TextType,
    bind_arguments,
    definition_options,
    refuse_ignored,
)
from ekiben.core.command_name import command_name
from ekiben.core.errors import UsageError
from ekiben.core.process import which
from ekiben.run.image import NamedImage, read_in_sif
from ekiben.run.launch import OF_SIF
from ekiben.spec.recipe import Recipe

LAYER = "notebook"
_PORTS = range(8888, 8988)
_ANY = "0.0.0.0"
_PROGRAM = "usr/local/bin/ekiben-notebook"  # of the layer


@click.command("notebook", cls=Command, help=__doc__)
@click.argument("recipe", metavar="IMAGE", type=RecipeType())
@click.option(
    "--port", type=click.IntRange(1, 65535), metavar="PORT", help="Listen on this port (default: a free one from 8888)."
)
@click.option(
    "--ip",
    default="127.0.0.1",
    show_default=True,
    type=TextType(),
    metavar="ADDRESS",
    help="Listen on this address; 0.0.0.0 is for others on the network, who need the token, too.",
)
@click.option("--no-start", is_flag=True, help="Build the image, start nothing.")
@click.option("--no-verify", is_flag=True, help="Do not run the %test scripts in a new image.")
@definition_options
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
    start: StartOptions,
) -> None:
    """Build what is missing, then become the container runtime with JupyterLab."""
    if no_start:
        refuse_ignored(
            "is for starting the image, which --no-start leaves out",
            *("port", "ip", "cpu", "binds", "copy_local", "live", "force", "dry_run"),
        )
    image = named_image(context, recipe, start, LAYER)
    kind = _export_format(start)
    if image.recipe is None:
        _check_file(image, recipe)
    elif start.sif is not None:
        refuse_ignored(
            "is for building the image, and --sif names one", "no_start", "no_verify", "gpu_arch", "arguments"
        )
    elif image.recipe and not start.dry_run:
        _build(
            context,
            RecipeOptions(start.stack, gpu_arch, bind_arguments(arguments)),
            image.recipe,
            kind,
            verify=not no_verify,
        )
    elif image.recipe and kind == "sif" and not image.sif.is_file():
        raise UsageError(f"--dry-run: {image.sif} is not built yet, and would be first", hint="--no-start builds it")
    if no_start:
        return
    port = _choose_port(ip, port)
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
            hint=f"{command_name()} image RECIPE --layer {LAYER} builds an image that has it",
        )


def _export_format(start: StartOptions) -> str:
    """Return the format of the image that will be started: sif, docker, or the one of an engine that keeps images."""
    if start.sif is not None or start.runtime in OF_SIF:
        return "sif"
    if start.runtime != "auto":
        return start.runtime
    return "sif" if which(*OF_SIF) else "docker"


def _build(context: Context, options: RecipeOptions, recipe: Recipe, kind: str, *, verify: bool) -> None:
    """Build the image where a layer is missing, and write its file or load it where that is not the present one."""
    from ekiben.artifacts.make import BuildRequest
    from ekiben.cli.commands.image import ImageRequest, build_recipe

    request = ImageRequest(make=BuildRequest(formats=[kind], verify=verify))
    result = build_recipe(context, options, options.resolve(recipe), request)
    for line in result.to_lines():
        if not line.startswith("run "):  # of the recipe's tasks
            context.log(line)


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
