"""The number of parallel compiler jobs: by the cores and the memory this process may really use, and by what one job
of the package was seen to need. Never part of a key.

A container or a batch job is often allowed a fraction of the machine; what asks the machine (nproc, free) is then
killed for lack of memory after an hour.
"""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

GIB = 1 << 30
UNKNOWN_JOB = 4 * GIB  # default of a package never compiled here: nvcc's jobs took 1 to 7 GiB
SPARE = GIB  # reserved for the build itself and the linker
_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
_REPORT_SECONDS = 60.0  # between two lines of a plain log


@dataclass(frozen=True, slots=True)
class Allowance:
    """``cores`` and ``memory`` (bytes) that may be used, each with what says so."""

    cores: int
    memory: int
    cores_by: str
    memory_by: str


def allowance(
    environment: Mapping[str, str] | None = None, *, proc: Path = Path("/proc"), cgroups: Path = _CGROUPS
) -> Allowance:
    """Return the minimum of what the processor set, cgroups, the batch system and process limits allow."""
    env = os.environ if environment is None else environment
    cores = {"processors": float(len(os.sched_getaffinity(0)))}
    memory = {"free memory": _available(proc)}
    for folder in _cgroups_of_process(proc, cgroups):
        name = f"cgroup {folder.relative_to(cgroups)}"
        cores[name], memory[name] = _cgroup_cores(folder), _cgroup_memory(folder)
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "NSLOTS", "NCPUS", "PBS_NCPUS"):
        if env.get(name, "").isdigit():
            cores[name] = float(env[name])
            if name == "SLURM_CPUS_PER_TASK":
                break  # CPUS_ON_NODE counts all tasks
    memory |= _allocated(env, int(min(cores.values())))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        memory["ulimit -v"] = limit
    cores_by, memory_by = min(cores, key=lambda name: cores[name]), min(memory, key=lambda name: memory[name])
    return Allowance(max(1, int(cores[cores_by])), max(0, memory[memory_by]), cores_by, memory_by)


def _allocated(env: Mapping[str, str], cores: int) -> dict[str, int]:
    """Memory a batch system granted: Slurm in MiB, PBS as text such as 16gb."""
    memory = {}
    if env.get("SLURM_MEM_PER_NODE", "0").isdigit() and (granted := int(env.get("SLURM_MEM_PER_NODE", "0"))):
        memory["SLURM_MEM_PER_NODE"] = granted << 20
    elif env.get("SLURM_MEM_PER_CPU", "0").isdigit() and (granted := int(env.get("SLURM_MEM_PER_CPU", "0"))):
        memory["SLURM_MEM_PER_CPU"] = (granted * cores) << 20
    for name in ("PBS_RESC_MEM", "PBS_MEM"):
        if match := re.fullmatch(r"(\d+)([kmgt]?)b?", env.get(name, "").lower()):
            memory[name] = int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}[match[2]]
    return memory


def _available(proc: Path) -> int:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(encoding="utf-8"), re.MULTILINE)
    return int(match[1]) << 10 if match else _UNLIMITED


def _cgroups_of_process(proc: Path, cgroups: Path) -> list[Path]:
    """This process' cgroups and all above them: the least of their limits counts. Version 1 and 2."""
    folders: list[Path] = []
    for line in (proc / "self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        roots = [
            cgroups / name
            for name in ("memory", "cpu", "cpu,cpuacct")
            if name in (controllers, *controllers.split(","))
        ]
        for root in [cgroups] if not controllers else roots:
            folder = root / path.lstrip("/")
            folders += [path for path in (folder, *folder.parents) if path.is_relative_to(root) and path.is_dir()]
    return list(dict.fromkeys(folders))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").split()[0]
    except (OSError, IndexError):
        return None
    return int(text) if text.lstrip("-").isdigit() else None


def _cgroup_cores(folder: Path) -> float:
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        return float(quota) / float(period) if quota != "max" else float(_UNLIMITED)
    except (OSError, ValueError):
        v1, length = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        return v1 / length if v1 and length and v1 > 0 else float(_UNLIMITED)


def _cgroup_memory(folder: Path) -> int:
    """Return the bytes below the limit. Cached pages do not count as used, for the kernel drops them."""
    for limit, used, inactive in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        top = _number(folder / limit)
        if top is not None and top < _UNLIMITED:
            stat = folder / "memory.stat"
            pages = (
                re.search(rf"^{inactive} (\d+)$", stat.read_text(encoding="utf-8"), re.MULTILINE)
                if stat.exists()
                else None
            )
            return top - (_number(folder / used) or 0) + (int(pages[1]) if pages else 0)
    return _UNLIMITED


def oom_kills(*, proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> int:
    """Return how many processes of our cgroups the kernel has killed for lack of memory so far."""
    counts = []
    for folder in _cgroups_of_process(proc, cgroups):
        for name in ("memory.events", "memory.oom_control"):
            events = folder / name
            if events.exists() and (
                match := re.search(r"^oom_kill (\d+)$", events.read_text(encoding="utf-8"), re.MULTILINE)
            ):
                counts.append(int(match[1]))
    return max(counts, default=0)


@dataclass(frozen=True, slots=True)
class Jobs:
    """``count`` parallel compilers, each with ``threads`` of nvcc; ``reason`` is for the log."""

    count: int
    threads: int
    reason: str

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that compilers read: MAX_JOBS and NVCC_THREADS."""
        return {"MAX_JOBS": str(self.count), "NVCC_THREADS": str(self.threads)}

    def halved(self) -> Jobs:
        """Return half as many jobs with as many threads: a changed nvcc command line would compile all again."""
        return replace(self, count=max(1, self.count // 2), reason="half of it, after a kill for lack of memory")


def jobs_for(allowed: Allowance, job_memory: int | None, *, units: int | None = None, capabilities: int = 1) -> Jobs:
    """Return the number of parallel compiler jobs.

    ``job_memory``: bytes measured for one; ``units``: files to compile, or None.
    """
    each = job_memory or UNKNOWN_JOB
    by_memory = max(1, (allowed.memory - SPARE) // each)
    count = int(max(1, min(allowed.cores, by_memory, units or allowed.cores)))
    threads = int(max(1, min(capabilities, allowed.cores // count, by_memory // count)))
    seen = "as seen before" if job_memory else "a guess"
    reason = (
        f"{allowed.cores} cores ({allowed.cores_by}), {allowed.memory / GIB:.1f} GiB ({allowed.memory_by}), "
        f"{each / GIB:.1f} GiB a job ({seen})"
    )
    return Jobs(count, threads, reason)


_UNIT = re.compile(r"\s*\[(\d+)/(\d+)\] ")
_KILLED = re.compile(
    r"\bKilled\b|signal 9\b|Kill signal|virtual memory exhausted|out of memory|Cannot allocate memory|std::bad_alloc"
)
_FULL = re.compile(r"No space left on device|Disk quota exceeded")


class Compilation:
    """Follows a compiler's output: units done and to do, time left, and what it died of."""

    def __init__(self, units: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.expected, self._clock, self._began = units, clock, clock()
        self.done, self._batch_done, self._batch = 0, 0, 0
        self.was_killed = self.is_disk_full = False
        self._last_report = self._began

    def line(self, line: str) -> str | None:
        """Takes one line; answers with the state when a unit is done."""
        self.was_killed |= bool(_KILLED.search(line))
        self.is_disk_full |= bool(_FULL.search(line))
        if (match := _UNIT.match(line)) is None:
            return None
        number, batch = int(match[1]), int(match[2])
        if number <= self._batch_done or batch != self._batch:  # the next extension of the package
            self._batch_done = 0
        self.done += number - self._batch_done
        self._batch_done, self._batch = number, batch
        return self.state()

    def state(self) -> str:
        """Return the progress as text: units compiled, and the time left."""
        total = max(self.expected or 0, self.done + self._batch - self._batch_done)
        spent = self._clock() - self._began
        left = spent / self.done * (total - self.done) if self.done else 0.0
        of = f"{total}" if self.expected else f"{total} or more"
        return f"{self.done} of {of} units compiled, about {minutes(left)} left"

    def is_due(self) -> bool:
        """Return whether a plain log needs its next line."""
        if (now := self._clock()) - self._last_report < _REPORT_SECONDS:
            return False
        self._last_report = now
        return True


def minutes(seconds: float) -> str:
    """Format seconds as a rounded duration."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
