"""Runs a recipe's task: the SIF under Apptainer or SingularityCE when both are there, else the Docker image.

Of the host's environment only what a job needs gets in: its scheduler, its GPUs, NCCL, proxies, the hub's token. What
breaks images stays outside (LD_LIBRARY_PATH, PYTHONPATH, CUDA_HOME of loaded modules). Values travel in the environment
of the runtime, never on its command line, which everybody on the machine can read.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from builder.errors import EngineError, StoreError, UsageError
from builder.process import which
from builder.sif import read_sif

# What a job inside needs of the outside; everything else stays outside.
_LET_THROUGH = {
    "CUDA_CACHE_PATH", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "GROUP_RANK", "HTTPS_PROXY",
    "HTTP_PROXY", "JOB_ID", "JOB_NAME", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK",
    "NO_COLOR", "NO_PROXY", "NSLOTS", "NVIDIA_DISABLE_REQUIRE", "PE_HOSTFILE", "RANK", "TERM", "TOKENIZERS_PARALLELISM",
    "TZ", "WORLD_SIZE", "http_proxy", "https_proxy", "no_proxy",
}  # fmt: skip
_PREFIXES = (
    "ACCELERATE_", "BNB_", "DS_", "EKIBEN_", "FI_", "GLOO_", "HF_", "MKL_", "MLFLOW_", "NCCL_", "OMPI_", "OMP_", "PBS_", "PMIX_",
    "PMI_", "PYTORCH_", "SGE_", "SLURM_", "TORCHELASTIC_", "TORCHINDUCTOR_", "TORCH_", "TRANSFORMERS_", "TRITON_", "UCX_", "WANDB_",
)  # fmt: skip
FOLDERS = (
    "EKIBEN_CACHE", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
)  # fmt: skip
LOCAL = ("SLURM_TMPDIR", "SGE_LOCALDIR", "PBS_LOCALDIR", "TMPDIR")  # a job's own folder on the node, best first
CERTIFICATES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
# What a site's modules may have set for every container, and what breaks ours.
LEAKS = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME", "PYTHONPATH")
IMAGES_OWN = ("/bin", "/dev", "/etc", "/lib", "/lib64", "/opt/ekiben", "/opt/venv", "/proc", "/sbin", "/sys", "/usr")


@dataclass(frozen=True, slots=True)
class Launch:
    """What to exec: ``argv`` with ``environment``. ``kept_out``: variables that were set for containers and are not passed."""

    argv: list[str]
    environment: dict[str, str]
    kept_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for. ``words``: the task and its arguments; ``binds``: further folders; ``terminal``: a user sits there."""

    words: Sequence[str]
    gpu: bool
    binds: Sequence[Path] = ()
    terminal: bool = False


def choose_runtime(name: str, sif: Path) -> str:
    """The program that runs it here: apptainer or singularity for a SIF that is there, else docker. Errors: EngineError."""
    runtime = which("apptainer", "singularity")
    if runtime and sif.is_file():
        return runtime
    if docker := which("docker"):
        return docker
    missing = f"{sif} is not there" if runtime else "neither apptainer nor singularity nor docker is on PATH"
    raise EngineError(f"{name} cannot be run here: {missing}", hint=f"make image recipe={name}")


def launch(program: str, sif: Path, tag: str, wish: Wish, environment: Mapping[str, str]) -> Launch:
    """The command that does ``wish`` in the image. Folders that caches are to go to are made. Errors: UsageError."""
    folders = folders_to_bind(wish, environment)
    if Path(program).name == "docker":
        return _docker(tag, wish, environment, folders)
    return _sif(program, sif, wish, environment, folders)


def _sif(program: str, sif: Path, wish: Wish, environment: Mapping[str, str], folders: Sequence[str]) -> Launch:
    """Apptainer reads APPTAINERENV_*, SingularityCE SINGULARITYENV_*; whoever is called singularity may be either."""
    prefixes = ["APPTAINERENV_"] if Path(program).name == "apptainer" else ["APPTAINERENV_", "SINGULARITYENV_"]
    leaks = {f"{prefix}{name}" for prefix in ("APPTAINERENV_", "SINGULARITYENV_") for name in LEAKS}
    kept = {name: value for name, value in environment.items() if name not in leaks}
    inside = {f"{prefix}{name}": environment[name] for name in _passed(environment) for prefix in prefixes}
    here = Path.cwd()
    argv = [program, "run", "--cleanenv", *(["--nv"] if wish.gpu else []), "--pwd", str(here),
            *(word for folder in folders for word in ("--bind", folder)), str(sif), *wish.words]  # fmt: skip
    return Launch(argv, {**inside, **kept}, tuple(sorted(leaks & environment.keys())))


def _docker(tag: str, wish: Wish, environment: Mapping[str, str], folders: Sequence[str]) -> Launch:
    settings = dict(environment)
    names = _passed(environment)
    models = Path("~/.cache/huggingface").expanduser()
    if (
        not {"HF_HOME", "EKIBEN_CACHE"} & environment.keys() and models.is_dir()
    ):  # what was downloaded before is used again
        settings["HF_HOME"], names, folders = str(models), [*names, "HF_HOME"], _outermost([*folders, str(models)])
    gpu = ["--gpus", "all", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864"]  # what NCCL pins, and its threads
    if wish.gpu and Path("/dev/infiniband").exists():
        gpu += ["--device", "/dev/infiniband"]
    cpu = [
        "--env",
        "NVIDIA_VISIBLE_DEVICES=void",
    ]  # where NVIDIA's runtime is the default, the image's own `all` counts
    argv = ["docker", "run", "--rm", "--init", "--interactive", *(["--tty"] if wish.terminal else []),
            *(gpu if wish.gpu else cpu), "--shm-size", str(_shared_memory()), *_identity(environment), "--workdir", os.getcwd(),
            *(word for folder in folders for word in ("--volume", f"{folder}:{folder}")),
            *(word for name in names for word in ("--env", name)), tag, *wish.words]  # fmt: skip
    return Launch(argv, settings)


def _identity(environment: Mapping[str, str]) -> list[str]:
    """A rootless daemon's root is this user already."""
    if environment.get("DOCKER_HOST", "").startswith("unix:///run/user/"):
        return []
    return ["--user", f"{os.getuid()}:{os.getgid()}"]


def _shared_memory() -> int:
    """Bytes for /dev/shm: half the memory, as a host has. Docker's 64 MB are too few for NCCL and for data loaders."""
    return max(1 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)


def passes() -> str:
    """Which names get in, as a pattern for `grep -Ex` in a job script."""
    return "|".join([*(f"{prefix}.*" for prefix in _PREFIXES), *sorted({*_LET_THROUGH, *CERTIFICATES, *LOCAL, "USER"})])


def staged_name(sif: Path) -> str:
    """What a copy of this very file is called on a node's own disk."""
    about = sif.stat()
    key = hashlib.sha256(f"{read_sif(sif).id} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:16]
    return f"{sif.stem}-{key}.sif"


def _passed(environment: Mapping[str, str]) -> list[str]:
    """Names only: a token's value never stands on a command line."""
    wanted = {*_LET_THROUGH, *CERTIFICATES, *LOCAL, "USER"}
    return sorted(key for key in environment if key in wanted or key.startswith(_PREFIXES))


# -------------------------------------------------------------------------------------------------------------- folders


def folders_to_bind(wish: Wish, environment: Mapping[str, str]) -> list[str]:
    """What is bound at its own path: this folder, caches, the job's local disk, certificates, what the arguments name."""
    here = Path.cwd()
    for name in ("HF_HOME", "EKIBEN_CACHE"):
        if place := environment.get(name):
            _make(name, Path(place))
    for folder in wish.binds:
        if not folder.exists():
            raise UsageError(f"--bind {folder}: is not there")
    places = [environment.get(name) for name in (*FOLDERS, *LOCAL)]
    wanted = [
        here,
        *(Path(place) for place in places if place and Path(place).is_dir()),
        *_named(wish.words, here),
        *wish.binds,
    ]
    folders = _outermost(os.path.abspath(path) for path in wanted)
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


def _named(words: Iterable[str], here: Path) -> list[Path]:
    """Folders of paths among the arguments, as `--data=../data.jsonl`, `--set model=/models/mine` or `--output /scratch/me/run`:
    of what is not there yet, the first parent that is."""
    found = []
    for word in words:
        values = {
            word.partition("=")[2],
            word.rpartition("=")[2] if "=" in word else "",
            "" if word[:1] == "-" else word,
        }
        for value in sorted(values):
            if ("/" not in value and value != "..") or "://" in value:
                continue
            path = Path(os.path.normpath(here / value))
            if any(path.is_relative_to(own) for own in IMAGES_OWN):
                continue
            while not path.is_dir() and path != path.parent:
                path = path.parent
            found.append(path)
    return found


def _outermost(paths: Iterable[str]) -> list[str]:
    """Without what lies in another of them, and without what is the image's own or would hide it (/opt, say)."""
    kept: list[str] = []
    for text in sorted(set(paths)):
        path = Path(text)
        images_own = any(path.is_relative_to(own) or Path(own).is_relative_to(path) for own in IMAGES_OWN)
        if not images_own and not any(path.is_relative_to(other) for other in kept):
            kept.append(text)
    return kept


# -------------------------------------------------------------------------------------------------------------- staging


def local_folder(environment: Mapping[str, str]) -> Path:
    """This user's folder on the node's own disk, made. Errors: StoreError."""
    places = [place for name in LOCAL if (place := environment.get(name)) and os.access(place, os.W_OK)]
    folder = Path(places[0] if places else "/tmp") / f"ekiben-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be made: {error.strerror}", hint="set TMPDIR to a folder of your own"
        ) from error
    if about.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
        raise StoreError(f"{folder} is not a folder of {getpass.getuser()}", hint="set TMPDIR to a folder of your own")
    return folder


def stage(sif: Path, environment: Mapping[str, str], tell: Callable[[str], None]) -> Path:
    """The SIF on the node's own disk: copied once for all of this user's jobs there, compared, renamed when whole.

    flock is dependable here: the folder is local. Errors: StoreError.
    """
    folder, about = local_folder(environment), sif.stat()
    if about.st_dev == folder.stat().st_dev:
        return sif
    target = folder / staged_name(sif)
    with (folder / f".{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"another job copies {sif} to {folder}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            _copy_checked(sif, target, about.st_size, tell)
    return target


def _copy_checked(source: Path, target: Path, size: int, tell: Callable[[str], None]) -> None:
    """Under the lock: what a killed job left is removed first."""
    for left in target.parent.glob(f".{target.name}.*.part"):
        left.unlink(missing_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < size:
        raise StoreError(f"{target.parent} has {free / 1e9:.1f} GB free, and {source} has {size / 1e9:.1f} GB",
                         hint="make room there, or run it without --stage")  # fmt: skip
    tell(f"copying {source} ({size / 1e9:.1f} GB) to {target}")
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    try:
        with open(handle, "w+b") as copy, source.open("rb") as original:
            read = hashlib.sha256()
            while chunk := original.read(1 << 22):
                read.update(chunk)
                copy.write(chunk)
            copy.flush()
            copy.seek(0)
            if hashlib.file_digest(copy, "sha256").digest() != read.digest():
                raise StoreError(f"{target}: what was written is not what was read from {source}",
                                 hint="the node's disk is damaged; run it without --stage")  # fmt: skip
        os.chmod(temporary, 0o500)
        os.rename(temporary, target)
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror}", hint="run it without --stage") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
