"""Runs build.py and reports what it imported, and what it did to the world outside."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_AUDITED = """
import atexit, os, runpy, sys
done = []
def watch(event, arguments):
    if event in ("socket.connect", "subprocess.Popen", "os.posix_spawn", "os.exec", "os.system", "os.mkdir",
                 "os.rename", "os.remove"):
        done.append(event)
    elif event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        done.append(f"open {arguments[0]}")
sys.dont_write_bytecode = True
sys.addaudithook(watch)
def report():
    names = {name.partition(".")[0] if not name.startswith("ekiben.") else name for name in sys.modules}
    effects = "\\n".join(done)
    with os.fdopen(3, "w") as out:
        print(effects, "--", "\\n".join(sorted(names)), sep="\\n", file=out)
atexit.register(report)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Audit:
    """``effects``: writes, programs, connections; ``modules``: names, only the top package of those that are not
    ours.
    """

    code: int
    effects: list[str]
    modules: set[str]


def audit(folder: Path, *args: str) -> Audit:
    """Start build.py in ``folder`` without a PATH or a home to use."""
    read, write = os.pipe()
    script = f"import os; os.dup2({write}, 3)\n{_AUDITED}"
    done = subprocess.run(
        [sys.executable, "-c", script, str(ROOT / "build.py"), *args],
        cwd=folder,
        pass_fds=(write,),
        check=False,
        env={"PATH": "", "HOME": str(folder), "EKIBEN_STORE": str(folder / "store")},
        capture_output=True,
    )
    os.close(write)
    with os.fdopen(read) as pipe:
        effects, modules = pipe.read().split("--\n")
    assert list(folder.iterdir()) == []
    return Audit(done.returncode, effects.split("\n")[:-1] if effects.strip() else [], set(modules.split()))
