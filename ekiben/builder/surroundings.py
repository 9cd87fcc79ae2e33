"""What a test can see beside its image: the machine and the runtime. Where they differ, its result may."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from ekiben.core.errors import EngineError
from ekiben.core.files import digest_of, open_regular
from ekiben.core.process import which

_MOST = 1 << 20  # bytes of a file that is read
# Runtimes show these files of the host in a container.
_SHOWN = ("/etc/hosts", "/etc/resolv.conf", "/etc/localtime", "/etc/hostname", "/etc/machine-id")
_KERNEL = ("/proc/sys/kernel/random/boot_id", "/proc/driver/nvidia/version")
_GPUS = re.compile(r"nvidia|dri$|kfd|dxg")
# Apptainer and SingularityCE pass them to a container, whatever --cleanenv says.
_PASSED = re.compile(r"(all|ftp|http|https|no)_proxy|term", re.IGNORECASE)
_PROCESSOR = re.compile(r"^(model name|flags|Features|CPU part|microcode)\s*:.*$", re.MULTILINE)
_LIMITS = ("AS", "CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "STACK")


def machine() -> dict[str, object]:
    """Return what distinguishes this machine, as it is since it booted, and this user on it."""
    user = os.geteuid()
    account: tuple[object, ...] = ()
    with contextlib.suppress(KeyError):
        account = tuple(pwd.getpwuid(user))
    processor = sorted({match[0] for match in _PROCESSOR.finditer(_kernel_text("/proc/cpuinfo"))})
    return {
        "kernel": list(os.uname()),
        "boot": [_kernel_text(path) for path in _KERNEL],
        "user": [user, os.getegid(), sorted(os.getgroups()), *account],
        "processors": [len(os.sched_getaffinity(0)), digest_of("\n".join(processor).encode())],
        "limits": [resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in _LIMITS],
        "devices": sorted(name for name in _names("/dev") if _GPUS.match(name)),
        "files": [_text(path) for path in _SHOWN],
        "folder": str(Path.cwd()),  # where the test starts, if the image has a folder of this name
        "environment": {name: value for name, value in sorted(os.environ.items()) if _PASSED.fullmatch(name)},
    }


def program(path: str | Path) -> list[object]:
    """Return what distinguishes a program and its configuration from another version of them."""
    real = Path(path).resolve()
    prefixes = dict.fromkeys([Path("/"), Path("/usr/local"), real.parent.parent])
    folders = [prefix / "etc" / name for prefix in prefixes for name in (real.name, "apptainer", "singularity")]
    return [_state(real), *(_state(file) for folder in dict.fromkeys(folders) for file in _files(folder))]


def sif_runtime(path: str) -> dict[str, object]:
    """Return what decides about tests that the SIF runtime ``path`` runs here."""
    return {"machine": machine(), "program": program(path)}


def docker_daemon() -> dict[str, object]:
    """Return what decides about tests that the Docker daemon runs. Raises EngineError."""
    from docker.errors import DockerException

    from ekiben.executors import docker as daemon

    try:
        info = daemon.client().info()
    except (DockerException, OSError) as error:
        raise EngineError(f"the Docker daemon does not say what it is: {error}") from error
    return {"machine": machine(), "daemon": {name: info.get(name) for name in _DAEMON}}


def podman() -> dict[str, object]:
    """Return what decides about tests that podman runs here. Raises EngineError."""
    programs = [name for name in ("podman", "crun", "runc", "conmon") if which(name)]
    files = [
        _state(file)
        for folder in ("/etc/containers", "/usr/share/containers", Path.home() / ".config/containers")
        for file in _files(Path(folder))
    ]
    return {"machine": machine(), "programs": [program(which(name) or name) for name in programs], "files": files}


_DAEMON = (
    *("ID", "Name", "ServerVersion", "Driver", "DriverStatus", "KernelVersion", "OperatingSystem", "Architecture"),
    *("NCPU", "MemTotal", "CgroupDriver", "CgroupVersion", "DefaultRuntime", "Runtimes", "InitBinary"),
    *("SecurityOptions", "RuncCommit", "ContainerdCommit", "HttpProxy", "HttpsProxy", "NoProxy", "CDISpecDirs"),
)


def _kernel_text(path: str) -> str:
    """Return a file of the kernel; of one that cannot be read, why."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        return str(error)


def _text(path: str) -> str:
    """Return the beginning of a file; of one that cannot be read, why."""
    try:
        with open_regular(Path(path)) as stream:
            return stream.read(_MOST).decode("utf-8", "backslashreplace")
    except OSError as error:
        return str(error)


def _state(path: Path) -> list[object]:
    try:
        state = path.stat()
    except OSError as error:
        return [str(path), str(error)]
    return [str(path), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]


def _names(folder: str | Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(path.name for path in Path(folder).iterdir())
    return []


def _files(folder: Path) -> Iterator[Path]:
    return (folder / name for name in _names(folder) if (folder / name).is_file())
