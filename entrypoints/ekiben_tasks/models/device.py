"""Choose the device of a task, or raise an error with the reason why there is none."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from ekiben_tasks.models.memory import gpu_memory
from ekiben_tasks.task.errors import TaskError

GIB = 1 << 30
_DEV = Path("/dev")
_OLDER_THAN_HOPPER = re.compile(r"\b(V100S?|T4|[AL]\d+[GS]?|RTX 6000 Ada|RTX [2-4]0\d\d)\b", re.IGNORECASE)
_HOPPER = re.compile(r"\b(G?H[12]00|H800|H20)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Device:
    """Describe a device to compute on: its name, dtype, and free memory in bytes."""

    torch_device: torch.device
    name: str
    dtype: torch.dtype
    memory: int  # bytes free when the task started

    @property
    def is_gpu(self) -> bool:
        """Return whether it is a GPU."""
        return bool(self.torch_device.type == "cuda")

    @property
    def has_bf16(self) -> bool:
        """Return whether it computes in bf16: Ampere and later, which have the variable-length flash kernel, too."""
        return bool(self.is_gpu and self.dtype == torch.bfloat16)

    def is_older_than_hopper(self, *, is_here: bool) -> bool:
        """Return whether it is a GPU of a compute capability below 9.0; by its name where it is not this machine's."""
        if is_here:
            return self.is_gpu and torch.cuda.get_device_capability(self.torch_device) < (9, 0)
        return self.is_gpu and _OLDER_THAN_HOPPER.search(self.name) is not None

    def is_hopper(self, *, is_here: bool) -> bool:
        """Return whether it is a GPU of compute capability 9.0; by its name where it is not this machine's."""
        if is_here:
            return self.is_gpu and torch.cuda.get_device_capability(self.torch_device) == (9, 0)
        return self.is_gpu and _HOPPER.search(self.name) is not None


def choose_device(requested: str, index: int = 0) -> Device:
    """Return the GPU of this ``index`` unless ``cpu`` is wanted; its dtype is bf16 where it has that, else fp16.

    The CPU's dtype is fp32.

    Raises:
        TaskError: no GPU can be used, with the reason.
    """
    if requested == "cpu":
        if "OMP_NUM_THREADS" not in os.environ:
            # By default torch counts the machine's cores, not those of this job.
            torch.set_num_threads(len(os.sched_getaffinity(0)))
        return Device(torch.device("cpu"), "CPU", torch.float32, free_ram())
    if not torch.cuda.is_available():
        raise TaskError(_no_gpu())
    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    _check_architecture(properties.name, (properties.major, properties.minor))
    torch.cuda.set_device(device)
    # The few fp32 GEMMs left do not need full precision.
    torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16 if properties.major >= 8 else torch.float16
    return Device(device, properties.name, dtype, torch.cuda.mem_get_info(device)[0])


def dry_run_device() -> Device:
    """Return the assumptions of a dry run without a GPU: bf16, and no memory limit."""
    return Device(torch.device("cpu"), "none", torch.bfloat16, 1 << 50)


def named_device(name: str) -> Device:
    """Return the GPU of this name, which a dry run plans for without having it.

    Raises:
        SettingError: the name is unknown.
    """
    has_bf16 = not re.search(r"\b(V100S?|T4)\b", name, re.IGNORECASE)
    return Device(torch.device("cuda"), name, torch.bfloat16 if has_bf16 else torch.float16, gpu_memory(name))


def free_ram() -> int:
    """Return the bytes available without swapping, the reclaimable file cache included."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def compiler_missing() -> str | None:
    """Return why torch.compile cannot work here, or None.

    Triton needs a C compiler and Python's headers for its launcher.
    """
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "no C compiler"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "no Python.h"
    return None


def _check_architecture(name: str, capability: tuple[int, int]) -> None:
    built = [arch.removeprefix("sm_").rstrip("af") for arch in torch.cuda.get_arch_list() if arch.startswith("sm_")]
    pairs = [(int(arch[:-1]), int(arch[-1])) for arch in built]
    if any(major == capability[0] and minor <= capability[1] for major, minor in pairs):
        return
    if any(arch.startswith("compute_") for arch in torch.cuda.get_arch_list()) and capability > max(
        pairs, default=(0, 0)
    ):
        return
    raise TaskError(
        f"{name} is sm_{capability[0]}{capability[1]}, and this image's torch {torch.__version__} is built for "
        f"{', '.join(torch.cuda.get_arch_list())}; use an image of another stack (CUDA 13 ended V100 and older)"
    )


def _no_gpu() -> str:
    start = "start with --nv under Apptainer or SingularityCE, --gpus all under Docker"
    advice = "; without one, slowly: --set device=cpu"
    if not any(_DEV.glob("nvidia[0-9]*")):
        return f"no GPU is visible here; {start}{advice}"
    version = Path("/proc/driver/nvidia/version")
    words = version.read_text().split() if version.is_file() else []
    driver = next((word for word in words if word.count(".") in (1, 2) and word[0].isdigit()), "unknown")
    if not _has_driver_library():  # Apptainer binds the node's /dev even without --nv
        return (
            f"a GPU is there (driver {driver}), and its driver's libraries are not in this container; {start}{advice}"
        )
    return (
        f"a GPU is there, but torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use it: driver {driver}, "
        f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}; CUDA 13 needs driver 580 or later, "
        f"CUDA 12 needs 525{advice}"
    )


def _has_driver_library() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
