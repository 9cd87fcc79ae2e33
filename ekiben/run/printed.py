"""The `docker run` and `podman run` lines that are printed: what a task writes stays in the caller's folder, and is the
caller's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

_HERE = '-v "$PWD:$PWD" -w "$PWD"'
_OWNER = '--user "$(id -u):$(id -g)"'


def docker_line(tag: str, task: str, *, gpu_args: Sequence[str] = ()) -> str:
    """Return the line to paste into a shell; ``tag`` and ``task`` are quoted for one already.

    gpu_args: the options for GPUs, as container_gpus.docker_args() of ekiben.gpu has them.
    """
    return " ".join(["docker", "run", "--rm", *gpu_args, _HERE, _OWNER, _target(tag, task)])


def podman_line(tag: str, task: str, *, gpu: bool, options: tuple[Sequence[str], Sequence[str]]) -> str:
    """Return the line to paste into a shell of this user.

    gpu: with all GPUs, which a CDI file has to describe. options: of podman, and of `podman run`, that this machine
    needs.
    """
    of_podman, of_run = options
    if gpu:
        of_run = ["--device nvidia.com/gpu=all", *of_run]
    # The network of the host, as under Apptainer: NCCL needs it. Where SELinux is on, a container cannot write to a
    # folder without its label.
    of_run = [
        *of_run,
        "--network host",
        "--security-opt label=disable",
        _HERE,
        _OWNER if os.geteuid() == 0 else "--userns keep-id",
    ]
    return " ".join(["podman", *of_podman, "run --rm", *of_run, _target(tag, task)])


def _target(tag: str, task: str) -> str:
    return f"{tag.removesuffix(':latest')} {task}".rstrip()
