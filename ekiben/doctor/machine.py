"""This machine as a node that runs images, and as one that builds them. Nothing is changed."""

from __future__ import annotations

import contextlib
import gzip
import os
import platform
import pwd
import re
import stat
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ekiben.core.process import run, which
from ekiben.gpu import container_gpus
from ekiben.gpu.devices import nvidia_gpus
from ekiben.run.site import Gpu, Node, Runtime, version_of

GIB = 1 << 30
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le"}
_SHARED = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "ceph", "fuse.sshfs", "panfs", "pvfs2", "wekafs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filesystem:
    """A folder: which file system it is on, how much is free (bytes; of the quota, where there is one)."""

    path: Path
    type: str
    free: int
    noexec: bool = False
    quota: int | None = None
    group: int = 0
    setgid: bool = False
    writable: bool = True

    @property
    def shared(self) -> bool:
        """Return whether other nodes see the folder: slow for small files, and not usable for user namespaces."""
        return self.type in _SHARED


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildHost:
    """Facts that decide whether this user can build here. ``engines``: why each cannot be used, or None."""

    user: str
    uid: int
    groups: tuple[int, ...]
    group: int
    engines: dict[str, str | None]
    user_namespaces: bool
    apparmor_restricts: bool
    subuid: int
    subgid: int
    newuidmap: bool
    fuse: bool
    temporary: Filesystem
    home: Filesystem
    store: Filesystem
    output: Filesystem


# ---------------------------------------------------------------------------------------------------------- a node


def node_here() -> Node:
    """Return this node as a site profile describes one."""
    gpus, driver = gpus_here()
    return Node(
        gpus=gpus,
        driver=driver,
        cores=os.cpu_count(),
        memory_gib=_memory() // GIB or None,
        architecture=_ARCHITECTURES.get(platform.machine(), platform.machine()),
        system=_system(),
        kernel=platform.release(),
        glibc=_glibc(),
        squashfs_zstd=_kernel_reads_zstd(),
        user_namespaces=has_user_namespaces(),
    )


def gpus_here() -> tuple[tuple[Gpu, ...], str | None]:
    """Return the NVIDIA GPUs by kind, and their driver's version; nothing where there is no driver."""
    gpus, driver = nvidia_gpus()
    kinds = Counter((gpu.name, max(1, gpu.memory // GIB), gpu.capability) for gpu in gpus)
    return (
        tuple(
            Gpu(model=name, memory_gib=memory, capability=capability, count=count)
            for (name, memory, capability), count in kinds.items()
        ),
        driver,
    )


def _glibc() -> str | None:
    with contextlib.suppress(OSError, ValueError):
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ") or None
    return None


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _system() -> str | None:
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    return None


def _kernel_reads_zstd() -> bool | None:
    """Return whether the kernel reads zstd, by its configuration where that can be read."""
    for path in (Path("/proc/config.gz"), Path(f"/boot/config-{platform.release()}")):
        with contextlib.suppress(OSError):
            data = path.read_bytes()
            text = gzip.decompress(data) if path.suffix == ".gz" else data
            return b"\nCONFIG_SQUASHFS_ZSTD=y" in text
    return None


def has_user_namespaces() -> bool:
    """Return whether this user can make user namespaces."""
    return run(["unshare", "--user", "true"], check=False).returncode == 0


# -------------------------------------------------------------------------------------------------------- runtimes


def runtimes_here() -> tuple[Runtime, ...]:
    """Return the runtimes that are installed here."""
    installed = [runtime_of(program) for program in ("apptainer", "singularity", "docker")]
    kinds = {runtime.kind: runtime for runtime in installed if runtime}  # `singularity` may be a link to apptainer
    return tuple(kinds.values())


def runtime_of(program: str) -> Runtime | None:
    """Return kind and version of ``apptainer``, ``singularity`` or ``docker``; None when it does not answer."""
    executable = which(program)
    if executable is None:
        return None
    if program == "docker":
        done = run([executable, "version", "--format", "{{.Server.Version}}"], check=False)
        version = re.match(r"\d+(\.\d+)+", done.stdout)
        if done.returncode or not version:
            return None
        by_cdi = container_gpus.has_cdi_file() and version_of(version[0]) >= container_gpus.DOCKER_WITH_CDI
        return Runtime(kind="docker", version=version[0], gpus=by_cdi or container_gpus.has_toolkit())
    stdout = run([executable, "--version"], check=False).stdout.strip()
    match = re.fullmatch(r"(apptainer|singularity(?:-ce|-pro|pro)?) version (\d+(?:\.\d+)*).*", stdout, re.IGNORECASE)
    if not match:
        return None
    kind = match[1].lower().replace("singularitypro", "singularity-pro")
    return Runtime(kind=kind, version=match[2], setuid=_is_setuid(executable))


def _is_setuid(program: str) -> bool | None:
    stdout = run([program, "buildcfg"], check=False).stdout
    match = re.search(r"^(?:APPTAINER|SINGULARITY)_SUID_INSTALL=([01])$", stdout, re.MULTILINE)
    return match[1] == "1" if match else None


# --------------------------------------------------------------------------------------------------------- folders


def filesystem_of(path: Path) -> Filesystem:
    """Return the file system of ``path``, or of the first parent that exists. Raises OSError."""
    existing = path.expanduser().absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    kind, options = _mount_of(existing.resolve())
    space, status = os.statvfs(existing), existing.stat()
    quota = _quota(existing, kind)
    free = space.f_bavail * space.f_frsize
    return Filesystem(
        path=path.expanduser().absolute(),
        type=kind,
        free=free if quota is None else min(free, quota),
        noexec="noexec" in options,
        quota=quota,
        group=status.st_gid,
        setgid=bool(status.st_mode & stat.S_ISGID),
        writable=os.access(existing, os.W_OK) and (existing.is_dir() or existing == path.expanduser().absolute()),
    )


def _mount_of(path: Path) -> tuple[str, set[str]]:
    """Type and options of the mount that ``path`` is on."""
    best, mount = -1, ("", set[str]())
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        where, options = Path(left.split(" ")[4].encode().decode("unicode_escape")), left.split(" ")[5]
        if path.is_relative_to(where) and len(where.parts) >= best:
            best, mount = len(where.parts), (right.split(" ")[0], set(options.split(",")))
    return mount


def _quota(path: Path, kind: str) -> int | None:
    """Return the bytes left of the user's quota in a folder; None without a quota."""
    if kind == "lustre" and (lfs := which("lfs")):
        return left_of_lustre(run([lfs, "quota", "-q", "-u", str(os.getuid()), os.fspath(path)], check=False).stdout)
    if quota := which("quota"):
        return left_of_quota(run([quota, "-w", "-p", "-f", os.fspath(path)], check=False).stdout)
    return None


def left_of_lustre(stdout: str) -> int | None:
    """Parse `lfs quota -q`: path, used, soft and hard limit in KiB; an asterisk marks what is exceeded."""
    columns = stdout.split()
    return _left(columns[1:4])


def left_of_quota(stdout: str) -> int | None:
    """Parse `quota -w -p`: file system, used, soft and hard limit in KiB, on the last line."""
    return _left(stdout.splitlines()[-1].split()[1:4]) if stdout.strip() else None


def _left(columns: list[str]) -> int | None:
    numbers = [word.rstrip("*") for word in columns]
    if len(numbers) < 3 or not all(number.isdigit() for number in numbers):
        return None
    used, soft, hard = (int(number) << 10 for number in numbers)
    limit = soft or hard
    return max(0, limit - used) if limit else None


# --------------------------------------------------------------------------------------------------- to build on


def build_host(store: Path, output: Path) -> BuildHost:
    """Return the facts that decide whether this user can build here. Raises OSError."""
    from ekiben import executors

    user = _user()
    return BuildHost(
        user=user,
        uid=os.getuid(),
        groups=tuple(os.getgroups()),
        group=os.getegid(),
        engines={name: executor.unavailable() for name, executor in executors.by_preference()},
        user_namespaces=has_user_namespaces(),
        apparmor_restricts=read_flag("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1",
        subuid=_subordinate("/etc/subuid", user),
        subgid=_subordinate("/etc/subgid", user),
        newuidmap=which("newuidmap") is not None and which("newgidmap") is not None,
        fuse=os.access("/dev/fuse", os.R_OK | os.W_OK),
        temporary=filesystem_of(Path(tempfile.gettempdir())),
        home=filesystem_of(Path("~")),
        store=filesystem_of(store),
        output=filesystem_of(output),
    )


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def read_flag(path: str) -> str:
    """Return the text of a small file of the kernel, or nothing where there is none."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8").strip()
    return ""


def _subordinate(table: str, user: str) -> int:
    """Return the number of subordinate ids of the user in /etc/subuid or /etc/subgid."""
    with contextlib.suppress(OSError):
        ranges = [line.split(":") for line in Path(table).read_text(encoding="utf-8").splitlines()]
        return sum(
            int(fields[2])
            for fields in ranges
            if len(fields) == 3 and fields[0] in (user, str(os.getuid())) and fields[2].isdigit()
        )
    return 0
