"""Run a recipe's task: the SIF under Apptainer or SingularityCE when both are there, else the Docker image.

What it gets of this machine: ekiben/run/contract.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ekiben.core.command_name import command_name
from ekiben.core.decisions import log_decision
from ekiben.core.errors import EngineError, UsageError, nearest
from ekiben.core.mounts import bind_args, volume_args
from ekiben.core.paths import expand_home
from ekiben.core.process import which
from ekiben.gpu import container_gpus
from ekiben.run.contract import LEAKS, NO_EVALUATION, folders_to_bind, outermost, passed, protect_caches

OF_SIF = ("apptainer", "singularity")
RUNTIMES = (*OF_SIF, "docker")  # others are executors that keep images
# Program → the words that begin its command, given whether GPUs are wanted; the rest is as Docker has it.
Containers = Mapping[str, Callable[[bool], Sequence[str]]]
_NONE: Containers = {}


@dataclass(frozen=True, slots=True)
class Launch:
    """What to execute: ``argv`` with ``environment``.

    ``kept_out``: variables set for containers that are not passed.
    """

    argv: list[str]
    environment: dict[str, str]
    kept_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What to run.

    ``argv``: the task and its arguments, or any program with ``executes``, which the runscript does not see; ``binds``:
    further folders; ``mounts``: path inside → file or folder that is shown there read-only; ``terminal``: attach one;
    ``publish``: ADDRESS:PORT of this machine that leads to the same port inside, where Docker gives the container a
    network of its own.
    """

    argv: Sequence[str]
    gpu: bool
    binds: Sequence[Path] = ()
    mounts: Mapping[str, Path] = field(default_factory=dict)
    terminal: bool = False
    executes: bool = False
    publish: str | None = None


def choose_runtime(
    name: str, sif: Path, asked: str = "auto", containers: Containers = _NONE, build_args: str = ""
) -> str:
    """Return the program that runs it here: apptainer or singularity for a SIF that exists, else docker.

    ``asked`` is one of these, or of ``containers``; ``build_args``: the arguments of a command that builds it (default:
    its name). Raises UsageError when it is none of them, EngineError when nothing here can run it.
    """
    if asked != "auto":
        program = _asked_runtime(asked, name, sif, containers, build_args or name)
        log_decision("runtime", program, "--runtime")
        return program
    runtime = which("apptainer", "singularity")
    if runtime and sif.is_file():
        log_decision("runtime", runtime, f"it runs SIF files, and {sif} is here")
        return runtime
    if docker := which("docker"):
        missing = f"{sif} is not here" if runtime else "neither apptainer nor singularity is on PATH"
        log_decision("runtime", docker, missing)
        return docker
    missing = f"{sif} is not there" if runtime else "neither apptainer nor singularity nor docker is on PATH"
    raise EngineError(f"{name} cannot be run here: {missing}", hint=f"{command_name()} image {build_args or name}")


def takes_sif(program: str) -> bool:
    """Return whether ``program`` runs a SIF; what does not runs an image that it keeps itself."""
    return Path(program).name in OF_SIF


def _asked_runtime(asked: str, name: str, sif: Path, containers: Containers, build_args: str) -> str:
    known = (*RUNTIMES, *containers)
    if asked not in known:
        raise UsageError(f"--runtime: no runtime '{asked}'." + nearest(asked, ["auto", *known]))
    program = which(asked)
    if program is None:
        raise EngineError(f"{name} cannot be run here: {asked} is not on PATH")
    if asked in OF_SIF and not sif.is_file():
        raise EngineError(f"{name} cannot be run here: {sif} is not there", hint=f"{command_name()} image {build_args}")
    return program


def launch(
    program: str,
    sif: Path,
    tag: str,
    request: RunRequest,
    environment: Mapping[str, str],
    containers: Containers = _NONE,
) -> Launch:
    """Return the command that does ``request`` in the image. Makes the folders of caches.

    Raises UsageError when one cannot be made, or a folder to bind is not there.
    """
    environment = protect_caches(environment)
    folders = folders_to_bind(request.argv, request.binds, environment)
    if Path(program).name == "docker":
        return _container(_docker_argv(request, environment), tag, request, environment, folders)
    if not takes_sif(program):
        return _container(containers[Path(program).name](request.gpu), tag, request, environment, folders)
    return _sif(program, sif, request, environment, folders)


def _sif(
    program: str, sif: Path, request: RunRequest, environment: Mapping[str, str], folders: Sequence[str]
) -> Launch:
    """Apptainer reads APPTAINERENV_*, SingularityCE SINGULARITYENV_*; whoever is called singularity may be either."""
    prefixes = ["APPTAINERENV_"] if Path(program).name == "apptainer" else ["APPTAINERENV_", "SINGULARITYENV_"]
    leaks = {f"{prefix}{name}" for prefix in ("APPTAINERENV_", "SINGULARITYENV_") for name in LEAKS}
    kept = {name: value for name, value in environment.items() if name not in leaks}
    inside = {f"{prefix}{name}": environment[name] for name in passed(environment) for prefix in prefixes}
    here = Path.cwd()
    action = "exec" if request.executes else "run"
    argv = [
        program,
        action,
        "--cleanenv",
        *(["--nv"] if request.gpu else []),
        "--pwd",
        str(here),
        *(word for folder in folders for word in bind_args(folder)),
        *(word for inside, path in request.mounts.items() for word in bind_args(path, inside, read_only=True)),
        str(sif),
        *request.argv,
    ]
    return Launch(argv, {**inside, **kept, **NO_EVALUATION}, tuple(sorted(leaks & environment.keys())))


def _docker_argv(request: RunRequest, environment: Mapping[str, str]) -> list[str]:
    limits = ["--ulimit", "memlock=-1", "--ulimit", "stack=67108864"]  # what NCCL pins, and its threads
    gpus = [*container_gpus.docker_args(), *limits]
    port = ["--publish", f"{request.publish}:{request.publish.rpartition(':')[2]}"] if request.publish else []
    return ["docker", "run", "--rm", "--init", *_identity(environment), *(gpus if request.gpu else []), *port]


def _container(
    argv: Sequence[str], tag: str, request: RunRequest, environment: Mapping[str, str], folders: Sequence[str]
) -> Launch:
    """Return the command for a program with Docker's options; ``argv`` begins it, and asks for the GPUs."""
    settings = dict(environment)
    names = passed(environment)
    models = expand_home(Path("~/.cache/huggingface"), "the cache of models")
    if (
        not {"HF_HOME", "EKIBEN_CACHE"} & environment.keys() and models.is_dir()
    ):  # what was downloaded before is used again
        settings["HF_HOME"], names, folders = str(models), [*names, "HF_HOME"], outermost([*folders, str(models)])
    more = ["--device", "/dev/infiniband"] if request.gpu and Path("/dev/infiniband").exists() else []
    if not request.gpu:  # where NVIDIA's runtime is the default, the image's own `all` counts
        more += ["--env", "NVIDIA_VISIBLE_DEVICES=void"]
    argv = [
        *argv,
        "--interactive",
        *(["--tty"] if request.terminal else []),
        *more,
        "--shm-size",
        str(_shared_memory()),
        "--workdir",
        os.getcwd(),
        *(word for folder in folders for word in volume_args(folder, folder)),
        *(word for inside, path in request.mounts.items() for word in volume_args(path, inside, read_only=True)),
        *(word for name in names for word in ("--env", name)),
        tag,
        *request.argv,
    ]
    return Launch([*argv], settings)


def _identity(environment: Mapping[str, str]) -> list[str]:
    """A rootless daemon's root is this user already."""
    if environment.get("DOCKER_HOST", "").startswith("unix:///run/user/"):
        return []
    return ["--user", f"{os.getuid()}:{os.getgid()}"]


def _shared_memory() -> int:
    """Return the bytes for /dev/shm: half the memory, as a host has.

    Docker's 64 MB are too few for NCCL and for data loaders.
    """
    return max(1 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
