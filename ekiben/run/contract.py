"""The container contract: variables, folders, caches and GPUs of this machine, for every way to start one.

Of the host's environment only what a job needs gets in: its scheduler, its GPUs, NCCL, proxies, the hub's token. What
breaks images stays outside (LD_LIBRARY_PATH, PYTHONPATH, CUDA_HOME of loaded modules). Values travel in the environment
of the runtime, never on its command line, which everybody on the machine can read.

`run`, `shell`, `notebook` and the Python interface read these tables (ekiben/run/launch.py); a module's commands and a
job's script source them as functions of a shell (container.sh).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ekiben.core.decisions import log_decision
from ekiben.core.errors import UsageError
from ekiben.gpu.devices import GPU_DEVICE, has_gpu
from ekiben.run.schedulers import local_folders, variables

# Variables of the host that a task needs; no others are passed.
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
# Variables of a site's modules for every container, which break ours.
LEAKS = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME", "PYTHONPATH")
# Apptainer (1.1) and SingularityCE (3.10) let a shell in the container evaluate values, unless this is set.
NO_EVALUATION = {"APPTAINER_NO_EVAL": "1", "SINGULARITY_NO_EVAL": "1"}
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

_SHELL_FUNCTIONS = Path(__file__).with_name("container.sh")


def gives_gpus(environment: Mapping[str, str]) -> bool:
    """Return whether a container gets this machine's GPUs, where nothing asks for the CPU."""
    return has_gpu() and not environment.get("EKIBEN_CPU")


def shell_functions() -> str:
    """Return the same contract as functions of a POSIX shell, for modulefiles and job scripts."""
    tables = {
        "compiled_code": COMPILED_CODE,
        "gpu_device": (GPU_DEVICE,),
        "leaks": LEAKS,
        "local_variables": local_folders(),
        "no_evaluation": [f"{name}={value}" for name, value in NO_EVALUATION.items()],
        "variables_passed": (passes(),),
    }
    lines = [f"{name}={shlex.quote(chr(10).join(values))}" for name, values in tables.items()]
    return "\n".join([*lines, _SHELL_FUNCTIONS.read_text(encoding="utf-8")])


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


def passed(environment: Mapping[str, str]) -> list[str]:
    """Return the names of variables to pass. Names only: a token's value never appears on a command line."""
    prefixes, names = _let_through()
    return sorted(key for key in environment if key in names or key.startswith(prefixes))


# -------------------------------------------------------------------------------------------------------------- folders


def folders_to_bind(argv: Sequence[str], binds: Sequence[Path], environment: Mapping[str, str]) -> list[str]:
    """Return the paths to bind at their own path: this folder, caches, the job's local disk, certificates, ``binds``
    and paths in the arguments.

    Makes the folders of caches. Raises UsageError when one cannot be made, or a folder of ``binds`` is not there.
    """
    here = Path.cwd()
    for name in ("HF_HOME", "EKIBEN_CACHE"):
        if cache_dir := environment.get(name):
            _make(name, Path(cache_dir))
    for folder in binds:
        if not folder.exists():
            raise UsageError(f"--bind {folder}: does not exist")
    cache_dirs = [environment.get(name) for name in (*FOLDERS, *local_folders())]
    named = [*_named(argv, here), *binds]
    paths = [
        here,
        *(Path(folder) for folder in cache_dirs if folder and Path(folder).is_dir()),
        *named,
        *(link for folder in named for link in _links_in(folder)),
    ]
    folders = outermost(str(folder) for path in paths for folder in _with_targets(path))
    # A site's CA bundle replaces the image's.
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
            # The current folder is bound, but not the targets of links in it or in its subfolders.
            if "/" not in value and value != ".." and not path.is_symlink() and not path.is_dir():
                continue
            if not any(path.is_relative_to(folder) for folder in IMAGE_FOLDERS):
                paths.append(path)
    return paths


def _can_be_path(value: str) -> bool:
    """Return whether ``value`` can be a path: a prompt with a slash in it may be too long."""
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


def outermost(paths: Iterable[str]) -> list[str]:
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
    """Return whether other users can neither write into a folder nor replace it."""
    try:
        info = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o022


def protect_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` with a new folder instead of each cache of compiled code that others can write.

    Code that another user compiled would run as this one. Tasks keep theirs in `ekiben-UID` where no variable names a
    folder.
    """
    bases = [Path(base) for name in local_folders() if (base := environment.get(name))]
    defaults = [base / f"ekiben-{os.getuid()}" for base in (*bases, *map(Path, ("/tmp", "/var/tmp", "/dev/shm")))]
    unsafe_default = any(os.path.lexists(folder) and not is_private_folder(folder) for folder in defaults)
    with contextlib.suppress(OSError):  # before a task creates it by its umask
        Path(environment.get("TMPDIR") or "/tmp", f"ekiben-{os.getuid()}").mkdir(mode=0o700)
    changed, fresh = dict(environment), None
    for name in COMPILED_CODE:
        folder = Path(environment[name]) if environment.get(name) else None
        if (os.path.lexists(folder) and not is_private_folder(folder)) if folder else unsafe_default:
            fresh = fresh or Path(tempfile.mkdtemp(prefix="ekiben-cache-", dir=next(filter(Path.is_dir, bases), None)))
            changed[name] = str(fresh / name)
            log_decision(name, changed[name], f"others can write to {folder or 'the default folder'}")
            (fresh / name).mkdir()
        for set_inside in (f"APPTAINERENV_{name}", f"SINGULARITYENV_{name}"):  # which the runtime would use
            value = environment.get(set_inside)
            if value and os.path.lexists(value) and not is_private_folder(Path(value)):
                log_decision(set_inside, "not passed on", f"others can write to {value}")
                del changed[set_inside]
    return changed
