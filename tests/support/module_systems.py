"""Environment Modules and Lmod for tests: the real ones, unpacked side by side by tests/services.sh."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

HOME = Path("/opt/ekiben-modules")
NAMES = ("environment-modules", "lmod")


@dataclass(frozen=True)
class ModuleSystem:
    """A shell in which `module` is the one or the other, as their own set-up of a login shell makes it."""

    name: str
    command: tuple[str, ...]

    def run(
        self,
        modules: Path,
        script: str,
        *,
        home: Path,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """After `module use` of ``modules``, with an environment that holds no more than a login's and ``env``."""
        start = (
            f'module() {{ eval "$({shlex.join(self.command)} sh "$@")"; }}\nmodule use {shlex.quote(str(modules))}\n'
        )
        settings = {"HOME": str(home), "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", **(env or {})}
        return subprocess.run(
            [*prefix, "sh", "-c", start + script],
            env=settings,
            cwd=cwd or home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=120,
            check=False,
        )


def module_system(name: str) -> ModuleSystem:
    if not (HOME / name).is_dir() or not shutil.which("tclsh8.6"):
        pytest.skip(f"{name} is not there (tests/services.sh install modules)")
    if name == "lmod":
        return ModuleSystem(name, (os.fspath(HOME / "lmod/usr/share/lmod/lmod/libexec/lmod"),))
    return ModuleSystem(name, ("tclsh8.6", os.fspath(HOME / "environment-modules/usr/lib/modulecmd.tcl")))
