"""hello needs nothing but Python, and tells the truth."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
ENTRYPOINTS = Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"
if not (ENTRYPOINTS / "hello.py").is_file():
    pytest.skip("this image ships no hello", allow_module_level=True)
sys.path.insert(0, str(ENTRYPOINTS))

import hello


def run(*arguments: str) -> str:
    # -S -I: no site-packages, no environment, as in the image that has Python alone.
    command = [sys.executable, "-I", "-S", str(ENTRYPOINTS / "hello.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_json_matches_the_system() -> None:
    facts = json.loads(run("--json"))
    assert facts["uid"] == os.getuid()
    assert facts["cpus"] <= len(os.sched_getaffinity(0))
    assert 0 < facts["memory_bytes"] <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        assert facts["gpus"]["found"] == []
        assert "--nv" in facts["gpus"]["reason"]


def test_text_has_a_line_for_each_fact() -> None:
    starts = [line.split()[0] for line in run().splitlines()]
    assert starts == ["user", "host", "image", "system", "allowed", "GPUs"]


def test_affinity_is_respected() -> None:
    command = [sys.executable, str(ENTRYPOINTS / "hello.py"), "--json"]
    only = {min(os.sched_getaffinity(0))}
    answer = subprocess.run(
        command, capture_output=True, text=True, check=True, preexec_fn=lambda: os.sched_setaffinity(0, only)
    )
    assert json.loads(answer.stdout)["cpus"] <= 1


def test_cgroup_limits_are_read(tmp_path: Path) -> None:
    (tmp_path / "limit").write_text("1048576\n")
    (tmp_path / "none").write_text("max\n")
    assert hello._number(tmp_path / "limit") == 1048576
    assert hello._number(tmp_path / "none") is None
    assert hello._number(tmp_path / "missing") is None


def test_gpus_that_cannot_be_used_are_none_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some runtimes give a container the device files without the driver."""
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(hello, "_DEV", tmp_path)
    monkeypatch.setattr(hello, "_gpus_by_smi", list)
    monkeypatch.setattr(hello, "_gpus_by_driver", lambda: ([], "no driver library: start it with --nv"))
    gpus = hello.gpus()
    assert list(gpus.values()) == [[], "nvidia0, nvidia1 in /dev, but no driver library: start it with --nv"]
    line = hello.tell({**hello.gather(), "gpus": gpus})[-1]
    assert line == "GPUs        none (nvidia0, nvidia1 in /dev, but no driver library: start it with --nv)"


def test_the_error_of_the_driver_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """As libcuda answers where the kernel's module has another version."""

    class Library:
        def __init__(self, _: str) -> None:
            pass

        def cuInit(self, _: int) -> int:
            return 803

        def cuGetErrorString(self, _: int, message: Any) -> int:
            message._obj.value = b"system has unsupported display driver / cuda driver combination"
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert hello._gpus_by_driver() == (
        [],
        "the driver fails with error 803: system has unsupported display driver / cuda driver combination",
    )
