"""Compile an unpacked source into a wheel, and measure what one job of the compiler needs: compile.py SOURCE WHEELS

How many jobs run side by side is the caller's matter (MAX_JOBS). Nothing is fetched: what the source needs for its
build is in this environment. Where EKIBEN_MEASURED names a file, the largest job's memory is written there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

EVERY = 0.5  # seconds between two looks at the processes
PAGE = os.sysconf("SC_PAGE_SIZE")
RUNNERS = ("ninja", "make")  # their children are jobs; without one of them, the build's own children are


def compile_wheel(source: Path, wheels: Path) -> int:
    """The peak of one job's resident memory, in bytes."""
    wheels.mkdir(parents=True, exist_ok=True)
    exactly = ["--no-deps", "--no-index", "--no-build-isolation", "--no-cache-dir", "--progress-bar", "off"]
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", *exactly, "--wheel-dir", str(wheels), str(source)]
    done, peak = threading.Event(), [0]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as child:
        watch = threading.Thread(target=_watch, args=(child.pid, done, peak))
        watch.start()
        code = child.wait()
        done.set()
        watch.join()
    if code:
        raise subprocess.CalledProcessError(code, command)
    return peak[0]


def _watch(root: int, done: threading.Event, peak: list[int]) -> None:
    while not done.wait(EVERY):
        peak[0] = max(peak[0], largest_job(root))


def largest_job(root: int) -> int:
    """Resident bytes of the largest job that runs now below ``root``: a compiler's driver with all it started."""
    names, children, memory = _processes()
    below = _below(root, children)
    runners = [process for process in below if names[process] in RUNNERS]
    jobs = [child for runner in runners for child in children.get(runner, [])]
    return max((sum(memory[process] for process in [job, *_below(job, children)]) for job in jobs), default=0)


def _processes() -> tuple[dict[int, str], dict[int, list[int]], dict[int, int]]:
    """Names, children and resident bytes by process id."""
    names: dict[int, str] = {}
    children: dict[int, list[int]] = {}
    memory: dict[int, int] = {}
    for place in Path("/proc").iterdir():
        if not place.name.isdigit():
            continue
        try:
            name, rest = (place / "stat").read_text().split("(", 1)[1].rsplit(") ", 1)
            pages = int((place / "statm").read_text().split()[1])
        except (OSError, IndexError):
            continue  # it has ended meanwhile
        process = int(place.name)
        names[process], memory[process] = name, pages * PAGE
        children.setdefault(int(rest.split()[1]), []).append(process)
    return names, children, memory


def _below(root: int, children: dict[int, list[int]]) -> list[int]:
    found = list(children.get(root, []))
    for process in found:
        found += children.get(process, [])
    return found


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or not (source := Path(arguments[0])).is_dir():
        print("usage: compile.py SOURCE WHEELS   (an unpacked source; the folder the wheel goes to)", file=sys.stderr)
        return 2
    try:
        peak = compile_wheel(source, Path(arguments[1]))
    except subprocess.CalledProcessError as error:
        print(f"compile.py: {source} did not compile: pip ended with {error.returncode}", file=sys.stderr)
        return 1
    if place := os.environ.get("EKIBEN_MEASURED"):
        Path(place).write_text(json.dumps({"job_memory": peak}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
