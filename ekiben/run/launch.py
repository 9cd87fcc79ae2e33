"""Run an image's task: the SIF under Apptainer or SingularityCE when both are there, else the Docker image.

What it gets of this machine: ekiben/run/contract.py.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ekiben.core.decisions import log_decision
from ekiben.core.errors import EngineError, UsageError, nearest
from ekiben.core.mounts import bind_args, volume_args
from ekiben.core.paths import ENGINE_SETUP, expand_home
from ekiben.core.process import name_exit, run, which
from ekiben.formats.evaluated import with_start
from ekiben.gpu import container_gpus
from ekiben.run.contract import LEAKS, NO_EVALUATION, folders_to_bind, outermost, passed, protect_caches
from ekiben.run.image import NamedImage, RequiredSignature

OF_SIF = ("apptainer", "singularity")


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that keeps images.

    ``image_id``: tag → the id of the image here, "" where there is none; raises EngineError where the engine does not
    answer. ``run_argv``: the words that begin its command, given whether GPUs are wanted; None: as Docker has them.
    ``entrypoint``: id → the entrypoint of the image.
    """

    image_id: Callable[[str], str]
    run_argv: Callable[[bool], Sequence[str]] | None = None
    entrypoint: Callable[[str], Sequence[str]] = lambda image_id: ()


Engines = Mapping[str, Callable[[], Engine]]  # by the name of the program, loaded when needed


@dataclass(frozen=True, slots=True)
class Target:
    """The runtime and the image.

    ``program`` is Apptainer, SingularityCE or an engine; ``image`` a SIF's path, or the id of an image that the engine
    stores: never a name, which an engine would pull from a registry. ``signature``: the policy for the SIF.
    """

    program: str
    image: str
    engine: Engine | None = None
    signature: RequiredSignature | None = None

    @property
    def takes_sif(self) -> bool:
        """Return whether the program runs a SIF."""
        return self.engine is None


@dataclass(frozen=True, slots=True)
class Launch:
    """The command to execute: ``argv`` with ``environment``.

    ``kept_out``: variables set for containers that are not passed.
    """

    argv: list[str]
    environment: dict[str, str]
    kept_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A request to run a task.

    ``argv``: the task and its arguments, or any program with ``executes``, which the runscript does not see; ``binds``:
    further folders; ``mounts``: path inside → file or folder that is shown there read-only; ``terminal``: attach one;
    ``publish``: ADDRESS:PORT of this machine, forwarded to the same port inside, where Docker gives the container a
    network of its own.
    """

    argv: Sequence[str]
    gpu: bool
    binds: Sequence[Path] = ()
    mounts: Mapping[str, Path] = field(default_factory=dict)
    terminal: bool = False
    executes: bool = False
    publish: str | None = None


def choose_target(image: NamedImage, engines: Engines, asked: str = "auto") -> Target:
    """Return the runtime for the image here: Apptainer or SingularityCE with its SIF, else Docker with its own image.

    ``asked``: "auto", or the program. Raises UsageError when there is no such program, EngineError when nothing here
    runs it, VerifyError when it lacks the signature that it needs.
    """
    if asked != "auto":
        target = _asked_target(image, engines, asked)
        log_decision("runtime", target.program, "--runtime")
        return target
    runtime, has_sif = which(*OF_SIF), image.sif.is_file()
    if runtime and has_sif:
        log_decision("runtime", runtime, f"it runs SIF files, and {image.sif} is here")
        return _sif_target(image, runtime)
    if image.pulled and (docker := which("docker")):
        return _pulled_target(image, docker, "docker", engines)
    missing = [] if runtime else ["neither apptainer nor singularity is on PATH"]
    missing += [] if has_sif else [f"{image.sif} is not there"]
    if image.build_args and (docker := which("docker")):
        if image.signature:
            raise image.signature.refuse_engine(image.name, "docker", image.build_hint)
        engine = engines["docker"]()
        try:
            if image_id := engine.image_id(image.tag):
                log_decision("runtime", docker, "; ".join(missing))
                return Target(docker, image_id, engine)
            missing.append(f"docker has no image {image.tag}")
        except EngineError as error:
            missing.append(str(error))
    hint = ENGINE_SETUP if has_sif else image.build_hint
    raise EngineError(f"{image.name} cannot be run here: {'; '.join(missing)}", hint=hint)


def _sif_target(image: NamedImage, program: str) -> Target:
    """Return the runtime for the image's SIF. Raises VerifyError."""
    if image.signature:  # before anything is started or looked for in the image
        image.signature.check(image.sif)
    return Target(program, str(image.sif), signature=image.signature)


def _asked_target(image: NamedImage, engines: Engines, asked: str) -> Target:
    known = (*OF_SIF, *engines)
    if asked not in known:
        raise UsageError(f"--runtime: no runtime '{asked}'." + nearest(asked, ["auto", *known]))
    program = which(asked)
    if program is None:
        hint = ENGINE_SETUP if asked in OF_SIF else None
        raise EngineError(f"{image.name} cannot be run here: {asked} is not on PATH", hint=hint)
    if asked in OF_SIF:
        if not image.sif.is_file():
            raise EngineError(f"{image.name} cannot be run here: {image.sif} is not there", hint=image.build_hint)
        return _sif_target(image, program)
    if image.pulled:
        return _pulled_target(image, program, asked, engines)
    if not image.build_args:
        raise UsageError(f"--runtime {asked}: {image.sif} is a SIF file, which {asked} does not run")
    if image.signature:
        raise image.signature.refuse_engine(image.name, asked, image.build_hint)
    engine = engines[asked]()
    image_id = engine.image_id(image.tag)
    if not image_id:
        hint = f"{image.build_hint} --format {asked}"
        raise EngineError(f"{image.name} cannot be run here: {asked} has no image {image.tag}", hint=hint)
    return Target(program, image_id, engine)


def _pulled_target(image: NamedImage, program: str, name: str, engines: Engines) -> Target:
    """Let an engine pull an image by its digest, where it does not have it, and return it by its id.

    Raises VerifyError where a signature is needed, EngineError.
    """
    if image.signature:
        raise image.signature.refuse_engine(image.name, name, None)
    engine = engines[name]()
    image_id = engine.image_id(image.pulled)
    if not image_id and not image.may_pull:
        raise EngineError(f"--offline: {name} does not have {image.pulled}", hint="run it once without --offline")
    if not image_id:
        begin = (
            [program] if engine.run_argv is None else list(itertools.takewhile("run".__ne__, engine.run_argv(False)))
        )
        done = run([*begin, "pull", "--quiet", image.pulled], check=False)
        image_id = engine.image_id(image.pulled)
        if not image_id:
            reason = (done.stderr.strip().splitlines() or [name_exit(done.returncode)])[-1]
            raise EngineError(f"{image.pulled} cannot be pulled by {name}: {reason}")
    log_decision("runtime", program, f"it has {image.pulled}")
    return Target(program, image_id, engine)


def launch(target: Target, request: RunRequest, environment: Mapping[str, str]) -> Launch:
    """Return the command that does ``request`` in the image. Makes the folders of caches.

    Raises UsageError when one cannot be made, or a folder to bind is not there; VerifyError when the SIF, or its copy
    on this node, lacks the signature that it needs.
    """
    if target.signature:
        target.signature.check(Path(target.image))
    environment = protect_caches(environment)
    folders = folders_to_bind(request.argv, request.binds, environment)
    if target.engine is None:
        return _sif(target, request, environment, folders)
    begin = target.engine.run_argv(request.gpu) if target.engine.run_argv else _docker_argv(request, environment)
    if request.executes:  # the image's own program would get the command as its arguments
        begin = [*begin, *_without_program(target.engine.entrypoint(target.image))]
    return _container(begin, target.image, request, environment, folders)


def _without_program(entrypoint: Sequence[str]) -> list[str]:
    kept = with_start(entrypoint, ())
    return [] if kept == [*entrypoint] else ["--entrypoint", *(kept or [""])]


def _sif(target: Target, request: RunRequest, environment: Mapping[str, str], folders: Sequence[str]) -> Launch:
    """Apptainer reads APPTAINERENV_*, SingularityCE SINGULARITYENV_*; a program named singularity may be either."""
    prefixes = ["APPTAINERENV_"] if Path(target.program).name == "apptainer" else ["APPTAINERENV_", "SINGULARITYENV_"]
    leaks = {f"{prefix}{name}" for prefix in ("APPTAINERENV_", "SINGULARITYENV_") for name in LEAKS}
    kept = {name: value for name, value in environment.items() if name not in leaks}
    inside = {f"{prefix}{name}": environment[name] for name in passed(environment) for prefix in prefixes}
    here = Path.cwd()
    action = "exec" if request.executes else "run"
    argv = [
        target.program,
        action,
        "--cleanenv",
        *(["--nv"] if request.gpu else []),
        "--pwd",
        str(here),
        *(word for folder in folders for word in bind_args(folder)),
        *(word for inside, path in request.mounts.items() for word in bind_args(path, inside, read_only=True)),
        target.image,
        *request.argv,
    ]
    return Launch(argv, {**inside, **kept, **NO_EVALUATION}, tuple(sorted(leaks & environment.keys())))


def _docker_argv(request: RunRequest, environment: Mapping[str, str]) -> list[str]:
    limits = ["--ulimit", "memlock=-1", "--ulimit", "stack=67108864"]  # for NCCL's pinned memory, and its threads
    gpus = [*container_gpus.docker_args(), *limits]
    port = ["--publish", f"{request.publish}:{request.publish.rpartition(':')[2]}"] if request.publish else []
    return [
        "docker",
        "run",
        "--rm",
        "--init",
        "--pull",
        "never",
        *_identity(environment),
        *(gpus if request.gpu else []),
        *port,
    ]


def _container(
    argv: Sequence[str], image: str, request: RunRequest, environment: Mapping[str, str], folders: Sequence[str]
) -> Launch:
    """Return the command for a program with Docker's options; ``argv`` begins it, and asks for the GPUs."""
    settings = dict(environment)
    names = passed(environment)
    models = expand_home(Path("~/.cache/huggingface"), "the cache of models")
    if (
        not {"HF_HOME", "EKIBEN_CACHE"} & environment.keys() and models.is_dir()
    ):  # the runtime's own cache of downloads is used
        settings["HF_HOME"], names, folders = str(models), [*names, "HF_HOME"], outermost([*folders, str(models)])
    more = ["--device", "/dev/infiniband"] if request.gpu and Path("/dev/infiniband").exists() else []
    if not request.gpu:  # where NVIDIA's runtime is the default, the image's value `all` would apply
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
        image,
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
