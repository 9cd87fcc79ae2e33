"""The lines that are printed to run an image: a task's output stays in the caller's folder, owned by the caller."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from ekiben.core.process import which
from ekiben.run.launch import OF_SIF

_NEVER_PULL = "--pull=never"  # another image of this name in a registry must not run here
_HERE = '-v "$PWD:$PWD" -w "$PWD"'
_OWNER = '--user "$(id -u):$(id -g)"'


def sif_lines(path: str | Path, task: str) -> list[str]:
    """Return the line that runs a task in a SIF with the runtime of this machine; without one, a line for each."""
    runtime = which(*OF_SIF)
    programs = [Path(runtime).name] if runtime else OF_SIF[::-1]
    return [f"{program} exec --nv {shlex.quote(str(path))} {task}".rstrip() for program in programs]


def docker_line(tag: str, task: str, *, gpu_args: Sequence[str] = ()) -> str:
    """Return the line to paste into a shell; ``tag`` and ``task`` are quoted for one already.

    gpu_args: the options for GPUs, as container_gpus.docker_args() of ekiben.gpu has them.
    """
    return " ".join(["docker", "run", "--rm", _NEVER_PULL, *gpu_args, _HERE, _OWNER, _target(tag, task)])


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
    return " ".join(["podman", *of_podman, "run --rm", _NEVER_PULL, *of_run, _target(tag, task)])


def _target(tag: str, task: str) -> str:
    return f"{tag.removesuffix(':latest')} {task}".rstrip()
