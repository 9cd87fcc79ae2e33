"""GPU architectures: the compute capabilities that a CUDA version supports, and those that a build selects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from packaging.version import InvalidVersion, Version

from ekiben.core.errors import DefinitionError, UsageError
from ekiben.core.files import read_source
from ekiben.gpu.device_code import runs_on
from ekiben.gpu.devices import nvidia_gpus
from ekiben.spec.stack import Stack, lock_for, stacks

# `nvcc --list-gpu-code` of each release that changed it, and NVIDIA's table of toolkits and architectures:
# https://docs.nvidia.com/datacenter/tesla/drivers/cuda-toolkit-driver-and-architecture-matrix.html
_MAXWELL_TO_TURING = ("5.0", "5.2", "5.3", "6.0", "6.1", "6.2", "7.0", "7.2", "7.5")
_AMPERE_TO_HOPPER = ("8.0", "8.6", "8.7", "8.9", "9.0")
KNOWN = {
    (11, 8): ("3.5", "3.7", *_MAXWELL_TO_TURING, *_AMPERE_TO_HOPPER),
    (12, 0): (*_MAXWELL_TO_TURING, *_AMPERE_TO_HOPPER),
    (12, 8): (*_MAXWELL_TO_TURING, *_AMPERE_TO_HOPPER, "10.0", "10.1", "12.0"),
    (12, 9): (*_MAXWELL_TO_TURING, *_AMPERE_TO_HOPPER, "10.0", "10.1", "10.3", "12.0", "12.1"),
    (13, 0): ("7.5", "8.0", "8.6", "8.7", "8.8", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1"),
}
_CAPABILITY = re.compile(r"[1-9]\d?\.\d")
_PIN = re.compile(r"^(torch|nvidia-cuda-runtime(?:-cu\d+)?|nvidia-cuda-nvcc(?:-cu\d+)?)==([^\s;]+)", re.MULTILINE)


def release(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, or of a compute capability."""
    return Version(text).release


def known_capabilities(cuda: str) -> tuple[str, ...]:
    """Return the GPUs that a CUDA compiler supports. Raises DefinitionError when it is older than 11.8."""
    fitting = [known for known in KNOWN if known <= release(cuda)[:2]]
    if not fitting:
        raise DefinitionError(f"CUDA {cuda}: nothing is known of a CUDA before {min(KNOWN)[0]}.{min(KNOWN)[1]}")
    return KNOWN[max(fitting)]


def filter_archs(stack: Stack, gpu_arch: str, folders: Sequence[Path]) -> Stack:
    """Return the stack for fewer or other GPUs: ``gpu_arch`` is "8.0,9.0", or "native" for the GPUs of this machine.

    Raises UsageError when the stack's CUDA does not know one of them, and names the stacks whose CUDA does.
    """
    asked = native() if gpu_arch == "native" else tuple(dict.fromkeys(re.split(r"[,; ]+", gpu_arch.strip())))
    odd = [item for item in asked if not _CAPABILITY.fullmatch(item)]
    if odd:
        raise UsageError(
            f"--gpu-arch {gpu_arch}: '{odd[0]}' is not a compute capability", hint="write it as 8.0,9.0 or native"
        )
    if not stack.file.cuda:
        raise UsageError(f"--gpu-arch {gpu_arch}: the images of stack {stack.name} have no CUDA")
    known = known_capabilities(stack.file.cuda)
    for item in asked:
        if item not in known:
            usable = [other for other in stacks(folders) if other.file.cuda]
            stack_names = [other.name for other in usable if item in known_capabilities(other.file.cuda)]
            raise UsageError(
                f"--gpu-arch {item}: CUDA {stack.file.cuda} of stack {stack.name} does not know it; it knows"
                f" {', '.join(known)}",
                hint=f"a stack that does: {', '.join(stack_names)}" if stack_names else "no stack here does",
            )
    return replace(stack, file=replace(stack.file, compute_capabilities=tuple(sorted(asked, key=release))))


def native() -> tuple[str, ...]:
    """Return the capabilities of the GPUs here. Raises UsageError when there is none."""
    capabilities = {gpu.capability for gpu in nvidia_gpus()[0]}
    if not capabilities:
        raise UsageError(
            "--gpu-arch native: no NVIDIA GPU is found on this machine",
            hint="write the capabilities: --gpu-arch 8.0,9.0",
        )
    return tuple(sorted(capabilities, key=release))


def supported_archs(capabilities: Iterable[str], minimum: str | None, where: Path) -> list[str]:
    """Return those of a stack's capabilities that a package is written for. Raises UsageError when there is none."""
    try:
        supported = [item for item in capabilities if minimum is None or release(item) >= release(minimum)]
    except InvalidVersion as error:
        raise DefinitionError(f"{where}: {minimum} is not a compute capability") from error
    if not supported:
        raise UsageError(
            f"{where}: what it compiles needs compute capability {minimum} or later; "
            f"the build selects only {', '.join(capabilities)}"
        )
    return supported


def coverage_problem(capabilities: Sequence[str], code: Iterable[str]) -> str | None:
    """Return the problem of device code (``code``: sm_80 …, see ekiben.gpu.device_code) for GPUs of
    ``capabilities``.

    All of them run it as it is, and none of it is for other GPUs only. sm_80 is all that an 8.6 needs, too.
    """
    binaries = sorted(name for name in code if name.startswith("sm_"))
    missing = [item for item in capabilities if runs_on(binaries, item) != "sass"]
    extra = [name for name in binaries if not any(runs_on([name], item) for item in capabilities)]
    if missing:
        return f"no device code for compute capability {', '.join(missing)} (there is: {', '.join(binaries) or 'none'})"
    return f"device code that is not wanted: {', '.join(extra)} (wanted: {', '.join(capabilities)})" if extra else None


def has_cxx11_abi(torch: str, cuda: str) -> bool:
    """Return whether torch's wheels use libstdc++'s new ABI: all since 2.7, and those of 2.6 from CUDA 12.6 on."""
    return release(torch)[:2] >= (2, 7) or (release(torch)[:2] == (2, 6) and release(cuda)[:2] >= (12, 6))


def check_torch(stack: Stack) -> None:
    """Raise DefinitionError when the locked torch, its CUDA or the locked compiler is not what stack.yaml says."""
    stack_file = stack.file
    for lock in ("pytorch.lock", "toolkit.lock"):
        path = lock_for(stack.folder / lock, stack.arch)
        for name, locked in _PIN.findall(read_source(path, default="")):
            if name == "torch":
                if Version(locked).public != Version(stack_file.torch).public:
                    raise DefinitionError(
                        f"{stack.folder / 'stack.yaml'}: torch {stack_file.torch}, but {path} has torch {locked}"
                    )
            elif release(locked)[:2] != release(stack_file.cuda)[:2]:
                what = "the compiler" if "nvcc" in name else f"torch {stack_file.torch}"
                raise DefinitionError(
                    f"{stack.folder / 'stack.yaml'}: cuda {stack_file.cuda}, but in {path} {what} is of CUDA "
                    f"{'.'.join(locked.split('.')[:2])} ({name}=={locked}); an extension compiled "
                    "against another CUDA than torch's does not load"
                )
