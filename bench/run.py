"""Ekiben beside its peers, on the same content, in one run: make bench, or .venv/bin/python bench/run.py --help

Writes results.json (every single timing and command), results.svg (the picture) and results.md (the table) beside this
file. Needs root, a Docker daemon, Apptainer and buildah: tests/services.sh install docker apptainer buildah.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

# Started as a file, Python has bench/ itself on its path, not the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import cases, share
from bench.clock import Failed
from bench.peers import docker_client, has, versions
from bench.picture import draw
from bench.report import Goal, Load, Machine, Result, goals, table
from bench.session import HERE, NAME, PROJECT_ROOT, SECOND, Bench

NEEDED_BYTES, NEEDED_BYTES_HELLO = 60e9, 8e9  # of disk
CASES: dict[str, Callable[[Bench], None]] = {
    "scratch": cases.scratch,
    "nothing": cases.nothing,
    "sif": cases.sif,
    "tested": cases.tested,
    "docker": cases.docker,
    "middle": cases.middle,
    "second": cases.second,
    "help": cases.help_,
    "publish": share.publish,
    "registry": share.registry,
    "gzip": cases.gzip,
    "buildah": cases.buildah,
}


def machine() -> Machine:
    models = [
        line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    memory = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return {
        "system": release.get("PRETTY_NAME", "").strip('"'),
        "kernel": platform.release(),
        "processor": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory bytes": memory,
        "python": platform.python_version(),
    }


def merge(kept: Result, new: Result) -> Result:
    """Return ``new`` with what ``kept`` has that did not run again."""
    again = {(timing.case, timing.who) for timing in new.timings}
    earlier = [timing for timing in kept.timings if (timing.case, timing.who) not in again]
    still_failed = {name: text for name, text in kept.failed.items() if tuple(name.split(": ", 1)) not in again}
    return replace(
        new, timings=[*earlier, *new.timings], facts={**kept.facts, **new.facts}, failed={**still_failed, **new.failed}
    )


def write(bench: Bench, kept: Result | None, began: str, load: Load, out: Path) -> list[Goal]:
    """Write results.json, results.md and results.svg into ``out``. kept: an earlier run's, of which what did not run
    now stays.
    """
    result = Result(
        date=began,
        recipe=bench.original,
        machine=machine(),
        load_before=load,
        load_after=os.getloadavg(),
        versions=versions(),
        facts=bench.facts,
        goals=[],
        failed=bench.failed,
        timings=bench.timings,
    )
    result = merge(kept, result) if kept else result
    result = replace(result, goals=goals(result.timings, result.facts))
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(result.as_json(), indent=1) + "\n")
    (out / "results.md").write_text(table(result))
    (out / "results.svg").write_text(draw(result))
    return result.goals


def read_kept(out: Path, recipe: str) -> Result:
    """Return the results in ``out``.

    Raises: SystemExit when there are none, or of another machine, recipe or version of a peer.
    """
    path = out / "results.json"
    try:
        content = json.loads(path.read_text())
        here = {"recipe": recipe, "machine": machine(), "versions": versions()}
        other = [name for name, value in here.items() if content[name] != value]
        kept = Result.from_json(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"--keep: {path} has no results to keep ({error!r}); run without --keep")
    if other:
        sys.exit(f"--keep: {path} is of another {', '.join(other)}; run without --keep")
    return kept


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="lora-opencalm", help="what to build (hello for a quick try)")
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {','.join(CASES)}")
    parser.add_argument("--runs", type=int, default=3, help="runs of what is quick; the median counts")
    parser.add_argument("--skip-slow", action="store_true", help="without the gzip builds, minutes each")
    parser.add_argument("--scratch", type=Path, default=HERE / "scratch", help="a folder that is made and removed")
    parser.add_argument("--keep", action="store_true", help="keep the last results of the cases that do not run now")
    parser.add_argument("--out", type=Path, default=HERE, help="where the results go")
    return parser.parse_args()


def refuse_unusable(options: argparse.Namespace, cases: list[str]) -> None:
    """Raises: SystemExit with a message when an option has no meaning here, or a program or disk space is missing."""
    if unknown := set(cases) - set(CASES):
        sys.exit(f"no case {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    if options.runs < 1:
        sys.exit(f"--runs {options.runs}: at least 1 is needed")
    if not (PROJECT_ROOT / "recipes" / options.recipe / "recipe.yaml").is_file():
        known = ", ".join(sorted(path.parent.name for path in (PROJECT_ROOT / "recipes").glob("*/recipe.yaml")))
        sys.exit(f"no recipe {options.recipe}; known: {known}")
    if not has("apptainer", "buildah", "mmdebstrap", docker_client()) or os.geteuid():
        sys.exit("bench/run.py needs root and its peers: bash tests/services.sh install docker apptainer buildah peers")
    needed = NEEDED_BYTES_HELLO if options.recipe == "hello" else NEEDED_BYTES
    if shutil.disk_usage(options.scratch.parent).free < needed:
        sys.exit(f"{options.scratch.parent} has too little room: {needed / 1e9:.0f} GB are needed")
    if options.scratch.exists():
        sys.exit(f"{options.scratch} is there already; remove it, or give another folder with --scratch")


def main() -> int:
    options = arguments()
    wanted = options.cases.split(",")
    refuse_unusable(options, wanted)
    kept = read_kept(options.out, options.recipe) if options.keep else None
    bench = Bench(options.scratch.resolve(), options.recipe, options.runs, not options.skip_slow)
    began, load = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), os.getloadavg()
    try:
        print(f"preparing {bench.scratch} (nothing of this counts but the base)", flush=True)
        bench.prepare()
        slow = () if bench.slow else ("gzip",)
        for case in (name for name in CASES if name in wanted and name not in slow):
            print(f"{case}: {(CASES[case].__doc__ or '').strip()}", flush=True)
            CASES[case](bench)
            write(bench, kept, began, load, options.out)
        reached = write(bench, kept, began, load, options.out)
    except Failed as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        remove_tree(bench.scratch)
        print("interrupted; what was measured is in results.json, and images of it may be in Docker", file=sys.stderr)
        return 130
    remove(bench)
    print((options.out / "results.md").read_text())
    return 0 if all(goal.reached for goal in reached) and not bench.failed else 1


def remove(bench: Bench) -> None:
    bench.docker.remove()
    subprocess.run(
        [docker_client(), "rmi", "--force", f"ekiben/{NAME}:latest", f"ekiben/{SECOND}:latest"],
        capture_output=True,
        check=False,
    )
    remove_tree(bench.scratch)


def remove_tree(folder: Path) -> None:
    """Unmount what is mounted below ``folder``, then remove it. Raises: SystemExit when something stays mounted."""
    mount_points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    inside = [path for path in mount_points if path.startswith(f"{folder}/")]
    for path in sorted(inside, reverse=True):
        if subprocess.run(["umount", path], check=False).returncode:
            sys.exit(f"{path} is still mounted; {folder} is left as it is")
    shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
