"""This machine as a site profile would describe it, and as a place to build on. Only looks; changes nothing."""

from __future__ import annotations

import contextlib
import gzip
import os
import platform
import pwd
import re
import shutil
import socket
import stat
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from builder.process import run, which
from builder.site import Gpu, Network, Node, Resource, Runtime, Scheduler, SiteFile, Storage

GIB = 1 << 30
GPU_DEVICE = "/dev/nvidiactl"  # is there where NVIDIA's driver is
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le"}
_SHARED = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "ceph", "fuse.sshfs", "panfs", "pvfs2", "wekafs"}
# For drivers whose nvidia-smi does not know compute_cap yet (before 510).
_CAPABILITIES = {
    "P100": "6.0",
    "V100": "7.0",
    "V100S": "7.0",
    "T4": "7.5",
    "A100": "8.0",
    "A30": "8.0",
    "A10": "8.6",
    "A40": "8.6",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
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
        """Whether other nodes see it: slow for small files, and unfit for what root of a user namespace writes."""
        return self.type in _SHARED


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildHost:
    """What decides whether this user can build here. ``engines``: each one's reason why not, or None."""

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
    temporary: Place
    home: Place
    store: Place
    output: Place


# ---------------------------------------------------------------------------------------------------------- a node


def node_here() -> Node:
    gpus, driver = gpus_here()
    return Node(
        gpus=gpus, driver=driver, cores=os.cpu_count(), memory_gib=_memory() // GIB or None,
        architecture=_ARCHITECTURES.get(platform.machine(), platform.machine()), system=_system(),
        kernel=platform.release(), glibc=_glibc(), squashfs_zstd=_kernel_reads_zstd(),
        user_namespaces=has_user_namespaces(),
    )  # fmt: skip


def gpus_here() -> tuple[tuple[Gpu, ...], str | None]:
    """The NVIDIA GPUs and their driver's version; nothing where there is no driver."""
    smi = which("nvidia-smi")
    if not has_gpu() or not smi:
        return (), _driver_of_kernel() if has_gpu() else None
    query = [smi, "--format=csv,noheader,nounits"]
    done = run([*query, "--query-gpu=driver_version,name,memory.total,compute_cap"], check=False)
    if done.returncode:
        done = run([*query, "--query-gpu=driver_version,name,memory.total"], check=False)
    return gpus_listed(done.stdout)


def gpus_listed(said: str) -> tuple[tuple[Gpu, ...], str | None]:
    """From nvidia-smi's lines: driver, name, MiB and, from driver 510 on, compute capability."""
    rows = [[field.strip() for field in line.split(",")] for line in said.splitlines() if line.count(",") >= 2]
    kinds = Counter((name, int(memory) >> 10, rest[0] if rest else _capability(name))
                    for _, name, memory, *rest in rows if memory.isdigit())  # fmt: skip
    gpus = tuple(
        Gpu(model=name, memory_gib=max(1, memory), capability=capability, count=count)
        for (name, memory, capability), count in kinds.items()
        if capability
    )
    return gpus, (rows[0][0] if rows else None)


def has_gpu() -> bool:
    return Path(GPU_DEVICE).exists()


def _capability(model: str) -> str:
    return next((found for word, found in _CAPABILITIES.items() if re.search(rf"\b{word}\b", model)), "")


def _driver_of_kernel() -> str | None:
    with contextlib.suppress(OSError):
        if match := re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)\s", Path("/proc/driver/nvidia/version").read_text()):
            return match[1]
    return None


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
    """From the kernel's own configuration, where it can be read."""
    for path in (Path("/proc/config.gz"), Path(f"/boot/config-{platform.release()}")):
        with contextlib.suppress(OSError):
            data = path.read_bytes()
            text = gzip.decompress(data) if path.suffix == ".gz" else data
            return b"\nCONFIG_SQUASHFS_ZSTD=y" in text
    return None


def has_user_namespaces() -> bool:
    return run(["unshare", "--user", "true"], check=False).returncode == 0


# -------------------------------------------------------------------------------------------------------- runtimes


def runtimes_here() -> tuple[Runtime, ...]:
    found = [runtime_of(program) for program in ("apptainer", "singularity", "docker")]
    kinds = {runtime.kind: runtime for runtime in found if runtime}  # `singularity` may be apptainer's other name
    return tuple(kinds.values())


def runtime_of(program: str) -> Runtime | None:
    """What ``apptainer``, ``singularity`` or ``docker`` is here; None when it is not, or does not answer."""
    place = which(program)
    if place is None:
        return None
    if program == "docker":
        done = run([place, "version", "--format", "{{.Server.Version}}"], check=False)
        version = re.match(r"\d+(\.\d+)+", done.stdout)
        if done.returncode or not version:
            return None
        toolkit = which("nvidia-container-runtime-hook", "nvidia-container-cli", "nvidia-ctk")
        return Runtime(kind="docker", version=version[0], gpus=toolkit is not None)
    said = run([place, "--version"], check=False).stdout.strip()
    match = re.fullmatch(r"(apptainer|singularity(?:-ce|-pro|pro)?) version (\d+(?:\.\d+)*).*", said, re.IGNORECASE)
    if not match:
        return None
    kind = match[1].lower().replace("singularitypro", "singularity-pro")
    return Runtime(kind=kind, version=match[2], setuid=_is_setuid(place))


def _is_setuid(program: str) -> bool | None:
    said = run([program, "buildcfg"], check=False).stdout
    match = re.search(r"^(?:APPTAINER|SINGULARITY)_SUID_INSTALL=([01])$", said, re.MULTILINE)
    return match[1] == "1" if match else None


# ---------------------------------------------------------------------------------------------------------- places


def place_of(path: Path) -> Place:
    """``path``, or what exists of it. Errors: OSError."""
    there = path.expanduser().absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    kind, options = _mount_of(there.resolve())
    space, about = os.statvfs(there), there.stat()
    quota = _quota(there, kind)
    free = space.f_bavail * space.f_frsize
    return Place(
        path=path.expanduser().absolute(), type=kind, free=free if quota is None else min(free, quota),
        noexec="noexec" in options, quota=quota, group=about.st_gid, setgid=bool(about.st_mode & stat.S_ISGID),
        writable=os.access(there, os.W_OK),
    )  # fmt: skip


def _mount_of(path: Path) -> tuple[str, set[str]]:
    """Type and options of the mount that ``path`` is on."""
    best, found = -1, ("", set[str]())
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        where, options = Path(left.split(" ")[4].encode().decode("unicode_escape")), left.split(" ")[5]
        if path.is_relative_to(where) and len(where.parts) >= best:
            best, found = len(where.parts), (right.split(" ")[0], set(options.split(",")))
    return found


def _quota(path: Path, kind: str) -> int | None:
    """What is left of the user's quota there, in bytes; None without one."""
    if kind == "lustre" and (lfs := which("lfs")):
        return left_of_lustre(run([lfs, "quota", "-q", "-u", str(os.getuid()), os.fspath(path)], check=False).stdout)
    if quota := which("quota"):
        return left_of_quota(run([quota, "-w", "-p", "-f", os.fspath(path)], check=False).stdout)
    return None


def left_of_lustre(said: str) -> int | None:
    """From `lfs quota -q`: path, used, soft and hard limit in KiB; an asterisk stands behind what is exceeded."""
    words = said.split()
    return _left(words[1:4])


def left_of_quota(said: str) -> int | None:
    """From `quota -w -p`: file system, used, soft and hard limit in KiB, on the last line."""
    return _left(said.splitlines()[-1].split()[1:4]) if said.strip() else None


def _left(words: list[str]) -> int | None:
    numbers = [word.rstrip("*") for word in words]
    if len(numbers) < 3 or not all(number.isdigit() for number in numbers):
        return None
    used, soft, hard = (int(number) << 10 for number in numbers)
    limit = soft or hard
    return max(0, limit - used) if limit else None


# --------------------------------------------------------------------------------------------------- to build on


def build_host(store: Path, output: Path) -> BuildHost:
    """Errors: OSError."""
    from builder.executors import EXECUTORS, load

    user = _user()
    return BuildHost(
        user=user, uid=os.getuid(), groups=tuple(os.getgroups()), group=os.getegid(),
        engines={name: load(name).unavailable() for name in EXECUTORS},
        user_namespaces=has_user_namespaces(),
        apparmor_restricts=_flag("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1",
        subuid=_subordinate("/etc/subuid", user), subgid=_subordinate("/etc/subgid", user),
        newuidmap=which("newuidmap") is not None and which("newgidmap") is not None,
        fuse=os.access("/dev/fuse", os.R_OK | os.W_OK),
        temporary=place_of(Path(tempfile.gettempdir())), home=place_of(Path("~")), store=place_of(store),
        output=place_of(output),
    )  # fmt: skip


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _flag(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def _subordinate(table: str, user: str) -> int:
    """How many subordinate ids the user has in /etc/subuid or /etc/subgid."""
    with contextlib.suppress(OSError):
        rows = [line.split(":") for line in Path(table).read_text().splitlines()]
        return sum(
            int(row[2]) for row in rows if len(row) == 3 and row[0] in (user, str(os.getuid())) and row[2].isdigit()
        )
    return 0


# -------------------------------------------------------------------------------------------------------- recording


def record_site(name: str, environment: Mapping[str, str]) -> SiteFile:
    """This machine as a profile; inside a batch job with its scheduler, the resource it got and its local folder."""
    return SiteFile(
        name=name, description=f"recorded on {socket.gethostname()}", node=_with_internet(node_here(), environment),
        runtimes=runtimes_here(), storage=_storage(environment), network=_network(), scheduler=_scheduler(environment),
    )  # fmt: skip


def _with_internet(node: Node, environment: Mapping[str, str]) -> Node:
    values = {field.name: getattr(node, field.name) for field in fields(node)}
    return Node(**{**values, "internet": _reaches_the_hub(environment)})


def _reaches_the_hub(environment: Mapping[str, str]) -> bool:
    if environment.get("https_proxy") or environment.get("HTTPS_PROXY"):
        return True
    with contextlib.suppress(OSError), socket.create_connection(("huggingface.co", 443), timeout=3):
        return True
    return False


def _storage(environment: Mapping[str, str]) -> dict[str, Storage]:
    variables = ("PBS_LOCALDIR", "SGE_LOCALDIR", "SLURM_TMPDIR", "TMPDIR")
    local = next((name for name in variables if Path(environment.get(name) or "/nonexistent").is_dir()), None)
    places = {"home": ("~", str(Path.home())), "tmp": ("/tmp", "/tmp")}
    if local:
        places["local"] = (f"${local}", environment[local])
    found = {}
    for name, (said, path) in places.items():
        with contextlib.suppress(OSError):
            place = place_of(Path(path))
            found[name] = Storage(path=said, type=place.type, size_gib=shutil.disk_usage(path).total // GIB or None)
    return found


def _network() -> Network | None:
    """From /sys/class/infiniband: what NCCL would find."""
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    if not ports:
        return None
    if any((port.parent.parent / "device/driver").resolve().name == "efa" for port in ports):
        return Network(kind="efa", ports=len(ports))
    kind = "roce" if _flag(f"{ports[0]}/link_layer") == "Ethernet" else "infiniband"
    rate = re.match(r"\d+", _flag(f"{ports[0]}/rate"))
    return Network(kind=kind, ports=len(ports), gbit=int(rate[0]) if rate else None)


def _scheduler(environment: Mapping[str, str]) -> Scheduler | None:
    gpus, _ = gpus_here()
    got: dict[str, Any] = {"gpus": sum(gpu.count for gpu in gpus), "cores": len(os.sched_getaffinity(0))}
    if partition := environment.get("SLURM_JOB_PARTITION"):
        words = (f"--partition={partition}", "--nodes={nodes}", *(["--gpus-per-node={gpus}"] if gpus else []))
        return Scheduler(kind="slurm", group_option="--account=", resources={partition: Resource(request=words, **got)})
    if "PBS_JOBID" in environment and (queue := environment.get("PBS_QUEUE")):
        words = (f"-q {queue}", "-l select={nodes}")
        return Scheduler(kind="pbs", group_option="-P", resources={queue: Resource(request=words, **got)})
    if "SGE_ROOT" in environment and "JOB_ID" in environment:
        return Scheduler(kind="sge")
    return None


def profile_text(site: SiteFile, said: str) -> str:
    """The profile as YAML that ``find_site`` reads; ``said`` is the comment at its top."""
    import yaml

    body = yaml.safe_dump(_plain(site), sort_keys=False, allow_unicode=True, width=120)
    return "".join(f"# {line}\n" for line in said.splitlines()) + body


def _plain(value: Any) -> Any:
    """Dataclasses as mappings, without what is as it is by default: unknown, mostly."""
    if is_dataclass(value) and not isinstance(value, type):
        kept = {field.name: getattr(value, field.name) for field in fields(value)
                if getattr(value, field.name) not in (field.default, {}, ())}  # fmt: skip
        return {name: _plain(item) for name, item in kept.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value
