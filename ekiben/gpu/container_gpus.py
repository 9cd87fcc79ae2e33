"""GPUs in Docker and podman: by NVIDIA's container toolkit, or by a CDI file that describes them.

Container Device Interface: https://github.com/cncf-tags/container-device-interface. podman reads such files since 4.1,
Docker since 25.
"""

from __future__ import annotations

from pathlib import Path

from ekiben.core.checked import read_regular
from ekiben.core.process import which

ALL_GPUS = "nvidia.com/gpu=all"
DOCKER_WITH_CDI = (25,)  # its first version that reads CDI files
_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
_TOOLKIT = ("nvidia-container-runtime-hook", "nvidia-container-cli", "nvidia-ctk")


def has_toolkit() -> bool:
    """Return whether NVIDIA's container toolkit is installed, without which Docker refuses ``--gpus``."""
    return which(*_TOOLKIT) is not None


def has_cdi_file() -> bool:
    """Return whether a CDI file describes NVIDIA's GPUs.

    A file that cannot be read counts as none: the engine cannot use it.
    """
    return any(_names_gpus(path) for folder in _FOLDERS for path in sorted(folder.glob("*.*")))


def _names_gpus(path: Path) -> bool:
    try:
        return ALL_GPUS.partition("=")[0].encode() in read_regular(path, follow=True)
    except (OSError, ValueError):
        return False


def docker_args() -> list[str]:
    """Return the options of ``docker run`` for all GPUs: ``--gpus``, unless only a CDI file can give them."""
    return ["--device", ALL_GPUS] if has_cdi_file() and not has_toolkit() else ["--gpus", "all"]
