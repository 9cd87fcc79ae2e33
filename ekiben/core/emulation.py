"""Programs of another architecture: whether this machine's kernel starts them, by QEMU's emulation of a processor.

The kernel's table of such interpreters: https://docs.kernel.org/admin-guide/binfmt-misc.html
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from ekiben.core.environment import host_arch
from ekiben.core.errors import EngineError

BINFMT = Path("/proc/sys/fs/binfmt_misc")
_ELF64 = bytes.fromhex("7f454c4602")
_MACHINES = {62: "amd64", 183: "arm64"}  # e_machine of elf(5): EM_X86_64, EM_AARCH64
_INSTALL = "on Debian, as root: apt-get install qemu-user-static binfmt-support"
_MOUNT = f"mount -t binfmt_misc none {BINFMT}"


def check_programs(arch: str, folder: Path = BINFMT) -> None:
    """Raise EngineError when no program of ``arch`` can run here; ``folder``: the kernel's table."""
    if problem := emulation_problem(arch, folder):
        raise EngineError(
            f"programs for {arch} do not run on this machine, which is {host_arch()}: {problem[0]}", hint=problem[1]
        )


def emulation_problem(arch: str, folder: Path = BINFMT) -> tuple[str, str] | None:
    """Return why programs of ``arch`` do not run here and what to do, None when they do."""
    if arch == host_arch():
        return None
    if not (folder / "status").exists():
        return (
            "binfmt_misc is not mounted, which starts an emulator for them",
            f"as root: {_MOUNT}; if need be, {_INSTALL}",
        )
    for entry in sorted(folder.iterdir()):
        with contextlib.suppress(OSError, ValueError):
            fields = _read_entry(entry)
            if _arch_of(bytes.fromhex(fields.get("magic", ""))) == arch and "enabled" in fields:
                if "F" in fields.get("flags:", ""):
                    return None
                return (
                    (
                        f"their emulator {fields.get('interpreter')} is registered without the flag F, so containers do"
                        " not see it"
                    ),
                    f"register it with that flag; {_INSTALL}",
                )
    return f"no emulator for {arch} is registered with the kernel", f"{_INSTALL} (or qemu-user-binfmt, for Debian 13)"


def _read_entry(entry: Path) -> dict[str, str]:
    """Return the words of an entry: each line's first → the rest."""
    lines = entry.read_text(encoding="utf-8", errors="replace").splitlines() if entry.is_file() else []
    return {name: rest for name, _, rest in (line.partition(" ") for line in lines)}


def _arch_of(magic: bytes) -> str | None:
    """Return whose programs begin with ``magic``."""
    return _MACHINES.get(int.from_bytes(magic[18:20], "little")) if magic.startswith(_ELF64) else None
