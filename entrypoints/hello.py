"""Print the user, host and resources of this container.

hello
hello --json

Where there is no GPU it imports little, since a cold start reads each module from the image; __future__, of which only
annotations for Python before 3.10 would be used, makes the kernel read 5 MB behind it.
"""

import argparse
import json
import os
import platform
import pwd
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_DEV = Path("/dev")


def main(arguments: "Sequence[str] | None" = None) -> int:
    """Print who runs this container and what it may use, and return 0.

    arguments: the command line without the program's name; None: that of this process.
    """
    parser = argparse.ArgumentParser(prog="hello", description="Print the user, host and resources of this container.")
    parser.add_argument("--json", action="store_true", help="as JSON, for scripts")
    args = parser.parse_args(arguments)
    facts = gather()
    print(json.dumps(facts, ensure_ascii=False, indent=2) if args.json else "\n".join(tell(facts)), flush=True)
    return 0


def gather() -> dict[str, Any]:
    """Return what `hello --json` prints. ``cpus`` may be a fraction, ``memory_bytes`` is in bytes."""
    return {
        "user": user_name(),
        "uid": os.getuid(),
        "host": platform.node(),
        "job": job(),
        "image": image(),
        "runtime": runtime(),
        "os": system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cpus": cpus(),
        "memory_bytes": memory(),
        "gpus": gpus(),
    }


def tell(facts: dict[str, Any]) -> list[str]:
    """Return the lines that `hello` prints. facts: as gather() returns them."""
    image = facts["image"] or {}
    identity = next(
        (image[key] for key in ("digest", "image_id", "id", "recipe", "name") if image.get(key)), "not recorded"
    )
    gpus = [
        f"{gpu['name']}" + (f", {gpu['memory_bytes'] / 2**30:.0f} GiB" if gpu["memory_bytes"] else "")
        for gpu in facts["gpus"]["found"]
    ]
    none = f"none ({facts['gpus']['reason']})"
    job = f", job {facts['job']}" if facts["job"] else ""
    return [
        f"user        {facts['user']} ({facts['uid']})",
        f"host        {facts['host']}{job}",
        f"image       {identity}, run by {facts['runtime']}",
        f"system      {facts['os']}, kernel {facts['kernel']}, Python {facts['python']}",
        f"allowed     {facts['cpus']:g} CPUs, {facts['memory_bytes'] / 2**30:.1f} GiB of memory",
        f"GPUs        {'; '.join(gpus) if gpus else none}",
    ]


def user_name() -> str:
    """Return the user's name: from the passwd entry, else $USER, else "no name"."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # docker run --user 12345
        return os.environ.get("USER", "no name")


def job() -> "str | None":
    """Return the id of the Slurm, PBS or Grid Engine job that this process runs in, None outside one."""
    return next((os.environ[key] for key in ("SLURM_JOB_ID", "PBS_JOBID", "JOB_ID") if os.environ.get(key)), None)


def image() -> "dict[str, Any] | None":
    """Return the metadata that the builder wrote into this image, None outside one."""
    try:
        content: dict[str, Any] = json.loads(Path("/opt/ekiben/image.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content


def runtime() -> str:
    """Return the container runtime's name (apptainer, singularity, docker, podman), or "no container"."""
    if os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER"):
        return "apptainer" if os.environ.get("APPTAINER_CONTAINER") else "singularity"
    if Path("/.dockerenv").exists():
        return "docker"
    return "podman" if Path("/run/.containerenv").exists() else "no container"


def system() -> str:
    """Return the name of the image's operating system, as /etc/os-release has it."""
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return platform.system()


def cpus() -> float:
    """Return how many CPUs this process may use: its affinity, or the cgroup's quota where that is lower."""
    allowed = float(len(os.sched_getaffinity(0)))
    for quota, period in _quotas():
        if quota > 0 and period > 0:
            allowed = min(allowed, quota / period)
    return allowed


def memory() -> int:
    """Return the bytes of memory this process may use: the machine's, or the cgroup's limit where that is lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [_number(folder / "memory.max") for folder in _cgroups("")]
    limits += [_number(folder / "memory.limit_in_bytes") for folder in _cgroups("memory")]
    return min([total, *(limit for limit in limits if limit)])


def gpus() -> dict[str, Any]:
    """Return {"found": [{"name", "memory_bytes"}], "reason": why there is none, else None}."""
    devices = sorted(_DEV.glob("nvidia[0-9]*")) or sorted(_DEV.glob("dxg"))  # dxg: of WSL, which has no nvidia*
    visible: list[dict[str, Any]] = []
    reason = "no /dev/nvidia*: no GPU here, or started without --nv or --gpus all"
    if devices and not (visible := _gpus_by_smi()):
        visible, problem = _gpus_by_driver()
        reason = f"{', '.join(device.name for device in devices)} in /dev, but {problem}"
    return {"found": visible, "reason": None if visible else reason}


def _gpus_by_smi() -> list[dict[str, Any]]:
    import shutil
    import subprocess

    program = shutil.which("nvidia-smi")
    if not program:
        return []
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        return [
            {"name": name.strip(), "memory_bytes": int(mebibytes) << 20 if mebibytes.strip().isdigit() else None}
            for name, mebibytes in (line.rsplit(",", 1) for line in answer.splitlines() if "," in line)
        ]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def _gpus_by_driver() -> tuple[list[dict[str, Any]], str]:
    """Query libcuda, which --nv and --gpus mount even where nvidia-smi is missing. Return (GPUs, why none)."""
    import ctypes

    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return [], "no driver library: start it with --nv or --gpus all"
    count, message = ctypes.c_int(), ctypes.c_char_p()
    status = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if status:
        cuda.cuGetErrorString(status, ctypes.byref(message))
        return [], f"the driver fails with error {status}: {(message.value or b'unknown').decode()}"
    devices = []
    for index in range(count.value):
        device, name, total = ctypes.c_int(), ctypes.create_string_buffer(100), ctypes.c_size_t()
        if cuda.cuDeviceGet(ctypes.byref(device), index) == 0:
            cuda.cuDeviceGetName(name, len(name), device)
            cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
            devices.append({"name": name.value.decode(), "memory_bytes": total.value or None})
    return devices, "the driver shows none of them: is CUDA_VISIBLE_DEVICES empty?"


def _quotas() -> list[tuple[float, float]]:
    pairs = []
    for folder in _cgroups(""):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            pairs.append((float(quota), float(period)))
        except (OSError, ValueError):  # not there, or "max": no limit
            pass
    for folder in _cgroups("cpu"):
        pairs.append((_number(folder / "cpu.cfs_quota_us") or 0.0, _number(folder / "cpu.cfs_period_us") or 0.0))
    return pairs


def _cgroups(controller: str) -> list[Path]:
    """This process's cgroup folder and all above it, of version 2 (``""``) or of a version 1 controller."""
    root = Path("/sys/fs/cgroup") / controller
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return [root]
    paths = [line.split(":", 2)[2] for line in lines if controller in line.split(":", 2)[1].split(",")]
    inside = root / paths[0].lstrip("/") if paths else root
    chain = [inside, *inside.parents]
    return [folder for folder in chain if folder.is_relative_to(root)] or [root]


def _number(file: Path) -> "int | None":
    try:
        return max(int(file.read_text()), 0) or None
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    sys.exit(main())
