"""Runs build.py and reports what it imported, and what it did to the world outside."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from support.forked_cli import server

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
output = int(sys.argv[1]) if sys.argv[1].isdigit() else os.open(sys.argv[1], os.O_WRONLY)
sys.argv = sys.argv[2:]
def report():
    names = {name.partition(".")[0] if not name.startswith("ekiben.") else name for name in sys.modules}
    effects = "\\n".join(done)
    with os.fdopen(output, "w") as out:
        print(effects, "--", "\\n".join(sorted(names)), sep="\\n", file=out)
atexit.register(report)
done.clear()
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
    done = subprocess.run(
        [sys.executable, "-c", _AUDITED, str(write), str(ROOT / "build.py"), *args],
        cwd=folder,
        pass_fds=(write,),
        check=False,
        env=_environment(folder),
        capture_output=True,
    )
    os.close(write)
    with os.fdopen(read) as pipe:
        return _read(folder, done.returncode, pipe.read())


def audit_forked(folder: Path, *args: str) -> Audit:
    """Do the same without a start of Python: the modules are imported already, and say nothing."""
    with tempfile.TemporaryDirectory() as notes:
        script, report = Path(notes, "audit.py"), Path(notes, "report")
        script.write_text(_AUDITED, encoding="utf-8")
        report.touch()
        argv = [str(script), str(report), str(ROOT / "build.py"), *args]
        done = server().run(argv, _environment(folder), folder, timeout=120)
        return _read(folder, done.returncode, report.read_text(encoding="utf-8"))


def _environment(folder: Path) -> dict[str, str]:
    return {"PATH": "", "HOME": str(folder), "EKIBEN_STORE": str(folder / "store")}


def _read(folder: Path, code: int, report: str) -> Audit:
    effects, modules = report.split("--\n")
    assert list(folder.iterdir()) == []
    return Audit(code, effects.split("\n")[:-1] if effects.strip() else [], set(modules.split()))
