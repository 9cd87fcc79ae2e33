"""This machine as a site profile, and as a machine to build on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from ekiben import executors
from ekiben.doctor.machine import GIB, build_host, filesystem_of, left_of_lustre, left_of_quota, node_here, runtime_of
from ekiben.doctor.record import profile_text, record_site
from ekiben.run.site import Runtime, find_site


def test_node_here() -> None:
    node = node_here()
    assert node.cores == os.cpu_count()
    assert node.kernel == platform.release()
    assert node.memory_gib == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // GIB
    assert node.glibc is not None
    assert bool(node.gpus) <= Path("/dev/nvidiactl").exists()


def test_recorded_site_file_is_read_back(tmp_path: Path) -> None:
    """Also from inside a job of each scheduler, by its variables."""
    (tmp_path / "local").mkdir()
    slurm = {"SLURM_JOB_PARTITION": "gpu", "SLURM_TMPDIR": str(tmp_path / "local"), "https_proxy": "http://p:1"}
    path = tmp_path / "here.yaml"
    path.write_text(profile_text(record_site("here", slurm), "seen on\nthat day"))
    assert path.read_text().startswith("# seen on\n# that day\nname: here\n")
    site = find_site(str(path)).file
    assert site == record_site("here", slurm)
    assert "exclusive" not in path.read_text()  # as by default
    assert site.node.internet is True
    assert site.storage["local"].path == "$SLURM_TMPDIR"
    assert site.scheduler is not None
    assert site.scheduler.resources["gpu"].request[:2] == ("--partition=gpu", "--nodes={nodes}")
    assert site.scheduler.resources["gpu"].cores == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("variables", "kind"),
    [
        ({"PBS_JOBID": "1.pbs1", "PBS_QUEUE": "rt_HF"}, "pbs"),
        ({"SGE_ROOT": "/opt/sge", "JOB_ID": "7"}, "sge"),
        ({}, None),
        ({"PBS_JOBID": "1.pbs1"}, None),
    ],
)
def test_the_scheduler_of_the_job(variables: dict[str, str], kind: str | None) -> None:
    scheduler = record_site("x", {**variables, "https_proxy": "x"}).scheduler
    assert (scheduler.kind if scheduler else None) == kind
    if kind == "pbs":
        assert scheduler is not None
        assert scheduler.resources["rt_HF"].request == ("-q rt_HF", "-l select={nodes}")


def test_nothing_can_be_written_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert filesystem_of(tmp_path / "file").writable
    assert not filesystem_of(tmp_path / "file/x").writable


def test_filesystem_of_a_path_that_does_not_exist_yet(tmp_path: Path) -> None:
    filesystem = filesystem_of(tmp_path / "a/b/c")
    assert filesystem.path == tmp_path / "a/b/c"
    assert filesystem.free > 0
    assert filesystem.writable
    assert filesystem.type == filesystem_of(tmp_path).type != ""
    assert filesystem_of(Path("/proc")).type == "proc"
    assert not filesystem_of(Path("/proc")).shared


@pytest.mark.parametrize(
    ("message", "left"),
    [
        ("/home 1048576 0 209715200 - 12 0 0 -\n", (200 - 1) * GIB),
        ("/home 209715201* 0 209715200 - 12 0 0 -\n", 0),
        ("/home 5 1048576 2097152 - 1 0 0 -\n", GIB - 5 * 1024),
        ("/home 5 0 0 - 1 0 0 -\n", None),
        ("Unexpected quotactl error: Operation not supported\n", None),
        ("", None),
    ],
)
def test_lustre_quota_output_is_parsed(message: str, left: int | None) -> None:
    assert left_of_lustre(message) == left


QUOTA = """Disk quotas for user me (uid 1001):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
      /dev/vdb1{0}
"""


@pytest.mark.parametrize(
    ("numbers", "left"),
    [
        ("   1048576  2097152 4194304       0      5       0       0       0", GIB),
        ("   1048576        0 2097152       0      5       0       0       0", GIB),
        ("   3145728* 2097152 4194304       6      5       0       0       0", 0),
        ("   1048576        0       0       0      5       0       0       0", None),
    ],
)
def test_quota_output_is_parsed(numbers: str, left: int | None) -> None:
    assert left_of_quota(QUOTA.format(numbers)) == left
    assert left_of_quota("Disk quotas for user me (uid 1001): none\n") is None


@pytest.mark.parametrize(
    ("message", "kind", "version"),
    [
        ("apptainer version 1.4.5", "apptainer", "1.4.5"),
        ("singularity-ce version 4.3.3-noble", "singularity-ce", "4.3.3"),
        ("singularity-pro version 3.11-5.el8", "singularity-pro", "3.11"),
        ("SingularityPRO version 4.1-12", "singularity-pro", "4.1"),
        ("singularity version 3.8.7-1.el8", "singularity", "3.8.7"),
    ],
)
def test_runtime_kind_behind_the_name_singularity(
    message: str, kind: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says who it is; how it is installed is in its buildcfg."""
    (tmp_path / "singularity").write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "{message}" || echo "SINGULARITY_SUID_INSTALL=1"\n'
    )
    (tmp_path / "singularity").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runtime_of("singularity") == Runtime(kind=kind, version=version, setuid=True)


def test_other_programs_are_no_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version_line in {"singularity": "singularity is somewhere else", "docker": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{version_line}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runtime_of("singularity") is None
    assert runtime_of("docker") is None


def test_build_host_here(tmp_path: Path) -> None:
    host = build_host(tmp_path / "store", tmp_path)
    assert host.uid == os.getuid()
    assert set(host.engines) == set(executors.names())
    assert host.store.path == tmp_path / "store"
    assert host.output.writable
    assert host.output.group == tmp_path.stat().st_gid
