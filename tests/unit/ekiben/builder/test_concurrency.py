"""How many jobs: the least of all that limits them; and what a compiler's output says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ekiben.builder._concurrency import GIB, Allowance, Compilation, allowance, jobs_for, minutes, oom_kills

CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """proc and cgroups of a machine with 64 GiB free; the process is in a cgroup without limits."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {64 << 20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    (tmp_path / "cgroups/job/step").mkdir(parents=True)
    (tmp_path / "cgroups/job/step/cpu.max").write_text("max 100000\n")
    (tmp_path / "cgroups/job/step/memory.max").write_text("max\n")
    return tmp_path


def allowed(machine: Path, **environment: str) -> Allowance:
    return allowance(environment, proc=machine / "proc", cgroups=machine / "cgroups")


def test_allowance_without_limits_is_the_machine(machine: Path) -> None:
    assert allowed(machine) == Allowance(CORES, 64 * GIB, "processors", "free memory")


def test_cgroup_limit_of_any_ancestor_applies(machine: Path) -> None:
    job = machine / "cgroups/job"
    (job / "memory.max").write_text(f"{8 * GIB}\n")
    (job / "memory.current").write_text(f"{3 * GIB}\n")
    (job / "memory.stat").write_text(f"anon 5\ninactive_file {2 * GIB}\n")
    (job / "cpu.max").write_text("50000 100000\n")
    found = allowed(machine)
    assert (found.memory, found.memory_by) == (7 * GIB, "cgroup job")
    assert (found.cores, found.cores_by) == (1, "cgroup job")


def test_cgroup_v1_limits_apply(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("4:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/\n")
    for name in ("memory/job", "cpu,cpuacct/job"):
        (machine / "cgroups" / name).mkdir(parents=True)
    (machine / "cgroups/memory/job/memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (machine / "cgroups/memory/job/memory.usage_in_bytes").write_text(f"{GIB}\n")
    (machine / "cgroups/memory/job/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (machine / "cgroups/cpu,cpuacct/job/cpu.cfs_quota_us").write_text("100000\n")
    (machine / "cgroups/cpu,cpuacct/job/cpu.cfs_period_us").write_text("100000\n")
    found = allowed(machine)
    assert (found.memory, found.cores) == (3 * GIB, 1)
    assert oom_kills(proc=machine / "proc", cgroups=machine / "cgroups") == 3


@pytest.mark.parametrize(
    ("environment", "memory", "by"),
    [
        ({"SLURM_MEM_PER_NODE": "16384"}, 16 * GIB, "SLURM_MEM_PER_NODE"),
        ({"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_PER_TASK": "1"}, 2 * GIB, "SLURM_MEM_PER_CPU"),
        ({"PBS_RESC_MEM": "12gb"}, 12 * GIB, "PBS_RESC_MEM"),
        ({"PBS_RESC_MEM": "12gb", "SLURM_MEM_PER_NODE": "4096"}, 4 * GIB, "SLURM_MEM_PER_NODE"),
        ({"SLURM_MEM_PER_NODE": "0"}, 64 * GIB, "free memory"),
        ({"PBS_RESC_MEM": "much"}, 64 * GIB, "free memory"),
    ],
)
def test_scheduler_allocation_limits_memory(machine: Path, environment: dict[str, str], memory: int, by: str) -> None:
    found = allowed(machine, **environment)
    assert (found.memory, found.memory_by) == (memory, by)


@pytest.mark.parametrize("name", ["SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "NSLOTS", "NCPUS"])
def test_scheduler_allocation_limits_cores(machine: Path, name: str) -> None:
    assert allowed(machine, **{name: "1"}).cores == 1
    assert allowed(machine, **{name: "4096"}).cores == CORES


def test_allowance_of_this_machine() -> None:
    found = allowance()
    assert 1 <= found.cores <= CORES
    assert found.memory > 0
    assert oom_kills() >= 0


@pytest.mark.parametrize(
    ("cores", "memory", "each", "units", "capabilities", "expected"),
    [
        (64, 256, 4, None, 1, (63, 1)),
        (64, 1000, 4, None, 6, (64, 1)),
        (64, 256, 7, None, 6, (36, 1)),
        (64, 1000, 4, 16, 6, (16, 4)),
        (64, 40, 4, 4, 6, (4, 2)),
        (2, 24, None, None, 1, (2, 1)),
        (8, 3, None, None, 1, (1, 1)),
        (8, 0.5, 7, None, 6, (1, 1)),
    ],
)
def test_jobs_for_cores_memory_and_units(
    cores: int, memory: float, each: int | None, units: int | None, capabilities: int, expected: tuple[int, int]
) -> None:
    able = Allowance(cores, int(memory * GIB), "a", "b")
    jobs = jobs_for(able, each * GIB if each else None, units=units, capabilities=capabilities)
    assert (jobs.count, jobs.threads) == expected
    assert jobs.environment == {"MAX_JOBS": str(expected[0]), "NVCC_THREADS": str(expected[1])}
    half = jobs.halved()
    assert (half.count, half.threads) == (max(1, expected[0] // 2), expected[1])


def test_progress_counts_units_and_estimates_time_left() -> None:
    now = [0.0]
    seen = Compilation(10, clock=lambda: now[0])
    now[0] = 30.0
    assert seen.line("  [1/4] nvcc …") == "1 of 10 units compiled, about 270 s left".replace("270 s", "4 min")
    assert seen.line("warning: [2/4] is not at the start") is None
    now[0] = 60.0
    assert seen.line("[4/4] c++ …") == "4 of 10 units compiled, about 90 s left".replace("90 s", "2 min")
    seen.line("[1/3] nvcc …")
    assert seen.line("[3/3] nvcc …") == "7 of 10 units compiled, about 26 s left"
    assert (seen.done, seen.was_killed, seen.is_disk_full) == (7, False, False)
    assert Compilation().line("[1/2] x") == "1 of 2 or more units compiled, about 0 s left"


@pytest.mark.parametrize(
    "line",
    [
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        "c++: fatal error: Killed signal terminated program cc1plus",
        "Killed",
    ],
)
def test_out_of_memory_kill_is_recognised(line: str) -> None:
    seen = Compilation()
    seen.line(line)
    assert seen.was_killed


def test_a_full_disk_is_recognised() -> None:
    seen = Compilation()
    seen.line("/usr/bin/ld: final link failed: No space left on device")
    assert (seen.is_disk_full, seen.was_killed) == (True, False)


def test_durations_are_rounded_for_people() -> None:
    assert [minutes(value) for value in (5, 89, 600, 7200)] == ["5 s", "89 s", "10 min", "2.0 h"]
