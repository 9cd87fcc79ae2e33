"""Name a process so that a later one of the same user on the same machine can say whether it has ended.

A process id alone is taken again after a while, and means another process in each PID namespace and after each boot.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path

_NAME = re.compile(r"[0-9a-f]{8}\.[0-9a-f]{0,12}\.[0-9]{0,20}\.[0-9]{1,10}\.[0-9]{1,10}\.[0-9]{1,20}")
_ENDED = ("Z", "X")  # a zombie does not run any more


def process_name() -> str:
    """Return MACHINE.BOOT.NAMESPACE.USER.PID.START of this process: letters, digits and dots."""
    return f"{_here()}.{os.getpid()}.{_start(os.getpid()) or 0}"


def has_ended(name: str) -> bool:
    """Return whether the process of a process_name() has ended.

    False where nothing here says so: for a process of another user, of another machine, and of another PID namespace.
    """
    if not _NAME.fullmatch(name) or _start(os.getpid()) is None:
        return False
    machine, boot, namespace, user, process, start = name.split(".")
    here = _here().split(".")
    if (machine, user) != (here[0], here[3]):
        return False
    if boot != here[1]:
        return True
    return namespace == here[2] and _start(int(process)) != int(start)


def is_of_this_boot(name: str) -> bool:
    """Return whether the process of a process_name() was started since the machine's last boot."""
    return _NAME.fullmatch(name) is not None and name.split(".")[1] == _here().split(".")[1]


def _here() -> str:
    """Return MACHINE.BOOT.NAMESPACE.USER."""
    node = f"{os.uname().nodename} {_read('/etc/machine-id')}"
    machine = hashlib.sha256(node.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    boot = re.sub("[^0-9a-f]", "", _read("/proc/sys/kernel/random/boot_id"))[:12]
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = re.sub("[^0-9]", "", str(Path("/proc/self/ns/pid").readlink()))
    return f"{machine}.{boot}.{namespace}.{os.getuid()}"


def _start(process: int) -> int | None:
    """Return when a process was started, in ticks since the boot; None when it has ended."""
    state, *fields = _read(f"/proc/{process}/stat").rpartition(")")[2].split() or ["X"]
    return None if state in _ENDED or len(fields) < 19 else int(fields[18])


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_bytes().decode("utf-8", "replace").strip()
    return ""
