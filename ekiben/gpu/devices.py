"""The NVIDIA GPUs of this machine and their driver: from NVML, else from nvidia-smi."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from ekiben.core.process import run, which

GPU_DEVICE = "/dev/nvidiactl"  # exists where NVIDIA's driver is loaded
# For drivers that do not report it (nvidia-smi before 510).
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


@dataclass(frozen=True, slots=True)
class NvidiaGpu:
    """One GPU. ``memory``: bytes; ``capability``: as "9.0"."""

    name: str
    memory: int
    capability: str


def has_gpu() -> bool:
    """Return whether NVIDIA's driver is loaded here."""
    return Path(GPU_DEVICE).exists()


def nvidia_gpus() -> tuple[list[NvidiaGpu], str | None]:
    """Return the GPUs here and the version of their driver; nothing where there is no driver."""
    if not has_gpu():
        return [], None
    gpus, driver = _from_nvml() or _from_smi()
    return gpus, driver or _driver_of_kernel()


def _from_nvml() -> tuple[list[NvidiaGpu], str | None] | None:
    """Return the GPUs that NVML reports; None where its library is missing or does not answer."""
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        gpus = []
        for handle in handles:
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
            gpus.append(NvidiaGpu(str(pynvml.nvmlDeviceGetName(handle)), int(memory), f"{major}.{minor}"))
        return gpus, str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:  # a GPU that fell off the bus, or a partition of one
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _from_smi() -> tuple[list[NvidiaGpu], str | None]:
    smi = which("nvidia-smi")
    if not smi:
        return [], None
    query = [smi, "--format=csv,noheader,nounits"]
    done = run([*query, "--query-gpu=driver_version,name,memory.total,compute_cap"], check=False)
    if done.returncode:
        done = run([*query, "--query-gpu=driver_version,name,memory.total"], check=False)
    return parse_smi(done.stdout)


def parse_smi(stdout: str) -> tuple[list[NvidiaGpu], str | None]:
    """Parse nvidia-smi's lines: driver, name, MiB and, from driver 510 on, compute capability."""
    records = [[field.strip() for field in line.split(",")] for line in stdout.splitlines() if line.count(",") >= 2]
    gpus = [
        NvidiaGpu(name, int(memory) << 20, capability)
        for _, name, memory, *rest in records
        if memory.isdigit() and (capability := rest[0] if rest else _capability(name))
    ]
    return gpus, records[0][0] if records else None


def _capability(model: str) -> str:
    return next((capability for word, capability in _CAPABILITIES.items() if re.search(rf"\b{word}\b", model)), "")


def _driver_of_kernel() -> str | None:
    with contextlib.suppress(OSError):
        if match := re.search(
            r"Kernel Module.*?\s(\d+\.\d[\d.]*)\s", Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        ):
            return match[1]
    return None
