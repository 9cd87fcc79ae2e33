"""Run a recipe's task: the SIF under Apptainer or SingularityCE when both are there, else the Docker image.

Of the host's environment only what a job needs gets in: its scheduler, its GPUs, NCCL, proxies, the hub's token. What
breaks images stays outside (LD_LIBRARY_PATH, PYTHONPATH, CUDA_HOME of loaded modules). Values travel in the environment
of the runtime, never on its command line, which everybody on the machine can read.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ekiben.core.command_name import command_name
from ekiben.core.decisions import log_decision
from ekiben.core.errors import EngineError, UsageError, nearest
from ekiben.core.mounts import bind_args, volume_args
from ekiben.core.paths import expand_home
from ekiben.core.process import which
from ekiben.gpu import container_gpus
from ekiben.run.schedulers import local_folders, variables

OF_SIF = ("apptainer", "singularity")
RUNTIMES = (*OF_SIF, "docker")  # others are executors that keep images
# What a job inside needs of the outside; everything else stays outside.
_LET_THROUGH = {
    "CUDA_CACHE_PATH",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "CUTE_DSL_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED",
    "GROUP_RANK",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "NO_COLOR",
    "NO_PROXY",
    "NVIDIA_DISABLE_REQUIRE",
    "RANK",
    "TERM",
    "TOKENIZERS_PARALLELISM",
    "TZ",
    "WORLD_SIZE",
    "http_proxy",
    "https_proxy",
    "no_proxy",
}
_PREFIXES = (
    "ACCELERATE_",
    "BNB_",
    "DS_",
    "EKIBEN_",
    "FI_",
    "GLOO_",
    "HF_",
    "MKL_",
    "MLFLOW_",
    "NCCL_",
    "OMPI_",
    "OMP_",
    "PMIX_",
    "PMI_",
    "PYTORCH_",
    "TORCHELASTIC_",
    "TORCHINDUCTOR_",
    "TORCH_",
    "TRANSFORMERS_",
    "TRITON_",
    "UCX_",
    "WANDB_",
)
COMPILED_CODE = (
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "CUTE_DSL_CACHE_DIR",
)  # caches of code compiled at run time
FOLDERS = ("EKIBEN_CACHE", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", *COMPILED_CODE)
CERTIFICATES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
# What a site's modules may have set for every container, and what breaks ours.
LEAKS = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME", "PYTHONPATH")
IMAGE_FOLDERS = (
    "/bin",
    "/dev",
    "/etc",
    "/lib",
    "/lib64",
    "/opt/ekiben",
    "/opt/notebook",
    "/opt/venv",
    "/proc",
    "/sbin",
    "/sys",
    "/usr",
)


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
    folders = folders_to_bind(request, environment)
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
    inside = {f"{prefix}{name}": environment[name] for name in _passed(environment) for prefix in prefixes}
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
    return Launch(argv, {**inside, **kept}, tuple(sorted(leaks & environment.keys())))


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
    names = _passed(environment)
    models = expand_home(Path("~/.cache/huggingface"), "the cache of models")
    if (
        not {"HF_HOME", "EKIBEN_CACHE"} & environment.keys() and models.is_dir()
    ):  # what was downloaded before is used again
        settings["HF_HOME"], names, folders = str(models), [*names, "HF_HOME"], _outermost([*folders, str(models)])
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


def passes() -> str:
    """Return the variables that get in, as a pattern for `grep -Ex` in a shell script."""
    prefixes, names = _let_through()
    return "|".join([*(f"{prefix}.*" for prefix in prefixes), *names])


def _let_through() -> tuple[tuple[str, ...], list[str]]:
    """Return prefixes of variables that get in, and whole names."""
    of_jobs = variables()
    prefixes = sorted({*_PREFIXES, *(name for name in of_jobs if name.endswith("_"))})
    names = {
        *_LET_THROUGH,
        *CERTIFICATES,
        *local_folders(),
        "USER",
        *(name for name in of_jobs if not name.endswith("_")),
    }
    return tuple(prefixes), sorted(names)


def _passed(environment: Mapping[str, str]) -> list[str]:
    """Return the names of variables that get in. Names only: a token's value never stands on a command line."""
    prefixes, names = _let_through()
    return sorted(key for key in environment if key in names or key.startswith(prefixes))


# -------------------------------------------------------------------------------------------------------------- folders


def folders_to_bind(request: RunRequest, environment: Mapping[str, str]) -> list[str]:
    """Return what is bound at its own path: this folder, caches, the job's local disk, certificates, what the arguments
    name.
    """
    here = Path.cwd()
    for name in ("HF_HOME", "EKIBEN_CACHE"):
        if cache_dir := environment.get(name):
            _make(name, Path(cache_dir))
    for folder in request.binds:
        if not folder.exists():
            raise UsageError(f"--bind {folder}: does not exist")
    cache_dirs = [environment.get(name) for name in (*FOLDERS, *local_folders())]
    named = [*_named(request.argv, here), *request.binds]
    paths = [
        here,
        *(Path(folder) for folder in cache_dirs if folder and Path(folder).is_dir()),
        *named,
        *(link for folder in named for link in _links_in(folder)),
    ]
    folders = _outermost(str(folder) for path in paths for folder in _with_targets(path))
    # Of a site with a CA of its own the bundle replaces the image's, wherever it lies.
    bundles = {
        os.path.abspath(file) for name in CERTIFICATES if (file := environment.get(name)) and Path(file).is_file()
    }
    return folders + sorted(
        file for file in bundles if not any(Path(file).is_relative_to(folder) for folder in folders)
    )


def _make(name: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{name}={folder}: {error.strerror}", hint=f"point {name} at a folder of your own") from error


def _named(args: Iterable[str], here: Path) -> list[Path]:
    """Return the paths among the arguments, as `--data=../data.jsonl`, `--set model=/models/mine` or `--output
    /scratch/me/run`.
    """
    paths = []
    for word in args:
        values = {
            word.partition("=")[2],
            word.rpartition("=")[2] if "=" in word else "",
            "" if word[:1] == "-" else word,
        }
        for value in sorted(values):
            if not value or "://" in value or not _can_be_path(value):
                continue
            path = Path(os.path.normpath(here / value))
            # What lies in this folder is seen anyway, but not what a link in it, or in a folder in it, points to.
            if "/" not in value and value != ".." and not path.is_symlink() and not path.is_dir():
                continue
            if not any(path.is_relative_to(folder) for folder in IMAGE_FOLDERS):
                paths.append(path)
    return paths


def _can_be_path(value: str) -> bool:
    """Return whether a file system takes ``value``: a prompt with a slash in it is longer than names are."""
    encoded = os.fsencode(value)
    return len(encoded) < 4096 and all(len(name) <= 255 for name in encoded.split(b"/"))


def _links_in(folder: Path) -> Iterator[Path]:
    """Yield the links in a folder, at most a thousand: in a snapshot of the hub, each file is one."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        links = (folder / entry.name for entry in entries if entry.is_symlink())
        yield from itertools.islice(links, 1000)


def _with_targets(path: Path) -> Iterator[Path]:
    """Yield the folder of ``path``, and of each file or folder that a link on the way to it points to.

    Of what is not there yet, it is the first parent that is. A link is followed inside the container, where its target
    has to be.
    """
    path = Path(os.path.abspath(path))
    for _ in range(40):  # as many as the kernel follows
        folder = path
        while not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        yield folder
        link = next((parent for parent in (*reversed(path.parents), path) if parent.is_symlink()), None)
        if link is None:
            return
        path = Path(os.path.normpath(link.parent / link.readlink() / path.relative_to(link)))


def _outermost(paths: Iterable[str]) -> list[str]:
    """Return ``paths`` without those inside others, and without those that are the image's own or would hide it (/opt,
    say).
    """
    kept: list[str] = []
    for text in sorted(set(paths)):
        path = Path(text)
        belongs_to_image = any(
            path.is_relative_to(folder) or Path(folder).is_relative_to(path) for folder in IMAGE_FOLDERS
        )
        if not belongs_to_image and not any(path.is_relative_to(other) for other in kept):
            kept.append(text)
    return kept


# --------------------------------------------------------------------------------------------------------------- caches


def is_private_folder(folder: Path) -> bool:
    """Return whether nobody else can write into a folder, or put another in its place."""
    try:
        info = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o022


def protect_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` with a new folder in place of each cache of compiled code that others can write.

    Code that another user compiled would run as this one. Tasks keep theirs in `ekiben-UID` where no variable names a
    folder.
    """
    bases = [Path(base) for name in local_folders() if (base := environment.get(name))]
    defaults = [base / f"ekiben-{os.getuid()}" for base in (*bases, *map(Path, ("/tmp", "/var/tmp", "/dev/shm")))]
    unsafe_default = any(os.path.lexists(folder) and not is_private_folder(folder) for folder in defaults)
    with contextlib.suppress(OSError):  # before a task makes it, as its umask has it
        Path(environment.get("TMPDIR") or "/tmp", f"ekiben-{os.getuid()}").mkdir(mode=0o700)
    changed, fresh = dict(environment), None
    for name in COMPILED_CODE:
        folder = Path(environment[name]) if environment.get(name) else None
        if (os.path.lexists(folder) and not is_private_folder(folder)) if folder else unsafe_default:
            fresh = fresh or Path(tempfile.mkdtemp(prefix="ekiben-cache-", dir=next(filter(Path.is_dir, bases), None)))
            changed[name] = str(fresh / name)
            log_decision(name, changed[name], f"others can write to {folder or 'the default folder'}")
            (fresh / name).mkdir()
    return changed
