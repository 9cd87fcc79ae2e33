"""The GPUs of this machine: what NVML and nvidia-smi say are read alike."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ekiben.gpu import devices
from ekiben.gpu.devices import NvidiaGpu, nvidia_gpus, parse_smi

MIB = 1 << 20
SMI = "580.95.05, NVIDIA H200, 143771, 9.0\n" * 2 + "580.95.05, NVIDIA L4, 23034, 8.9\n"
LISTED = [*[NvidiaGpu("NVIDIA H200", 143771 * MIB, "9.0")] * 2, NvidiaGpu("NVIDIA L4", 23034 * MIB, "8.9")]


def test_nvidia_smi_lines_are_parsed() -> None:
    assert parse_smi(SMI) == (LISTED, "580.95.05")
    assert parse_smi("No devices were found\n") == ([], None)


def test_an_nvidia_smi_that_does_not_know_compute_capabilities() -> None:
    found = parse_smi("470.57.02, Tesla V100-SXM2-16GB, 16160\n470.57.02, Tesla K20, 4743\n")
    assert found == ([NvidiaGpu("Tesla V100-SXM2-16GB", 16160 * MIB, "7.0")], "470.57.02")


def test_no_devices_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "GPU_DEVICE", "/nonexistent")
    assert nvidia_gpus() == ([], None)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with a driver whose nvidia-smi answers."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<END\n{SMI}END\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(devices, "GPU_DEVICE", str(tmp_path / "nvidia-smi"))


@pytest.mark.usefixtures("node")
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="NVML answers here")
def test_nvidia_smi_is_used_when_nvml_fails() -> None:
    assert nvidia_gpus() == (LISTED, "580.95.05")


@pytest.mark.usefixtures("node")
def test_nvidia_smi_is_used_without_nvidia_ml_py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvidia_gpus() == (LISTED, "580.95.05")


@pytest.mark.usefixtures("node")
def test_nvml_is_used_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    library = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetCudaComputeCapability=lambda handle: (9, 0),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=80 << 30),
        nvmlDeviceGetName=lambda handle: "NVIDIA H100",
        nvmlSystemGetDriverVersion=lambda: "575.1",
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert nvidia_gpus() == ([NvidiaGpu("NVIDIA H100", 80 << 30, "9.0")], "575.1")

    def refuse(handle: int) -> None:
        raise NVMLError

    library.nvmlDeviceGetMemoryInfo = refuse
    assert nvidia_gpus() == (LISTED, "580.95.05")
