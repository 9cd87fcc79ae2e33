"""Commands that are killed while an engine works for them; afterwards containers, mounts and processes are counted."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from chaos.kills import kill_command, measured
from chaos.lab import Case, Lab
from ekiben import executors
from ekiben.core.errors import EkibenError
from support.sample_recipe import GROUND, SampleRecipe, seeded

# A shell that does what each script of it takes: some time.
SHELL = "#include <time.h>\nint main(void) { struct timespec t = {0, 300000000}; nanosleep(&t, 0); return 0; }\n"
WALLS = "Bootstrap: localimage\nFrom: ground.sif\n\n%post\n    sleep\n"
_PATIENCE = 20  # seconds, in which another program's containers end and their mounts go
KILLS = 4  # of one case: a container takes seconds
OPTIONS = {
    "docker": [
        "--format",
        "docker",
    ],  # killed while it is loaded and tested: to build in, a daemon takes an image with GNU tar
    "podman": ["--engine", "podman", "--format", "podman"],
    "buildah": ["--engine", "buildah", "--format", "sif", "--no-verify"],
}
_prepared: dict[tuple[int, str], tuple[SampleRecipe, Path]] = {}


def unavailable(kind: str) -> str | None:
    """Return why cases of this kind cannot be tried here, or None."""
    engine = kind.removeprefix("kill ")
    if engine not in OPTIONS:
        return None
    return executors.load(engine).unavailable() or (None if shutil.which("cc") else "cc is not installed")


def _recipe(lab: Lab, engine: str) -> tuple[SampleRecipe, Path]:
    """Return a recipe whose image is tested, or made by a script, for some time, and a store with its base."""
    if (key := (id(lab), engine)) not in _prepared:
        sample = SampleRecipe(lab.path(f"engines/{engine}/recipe"))
        sample.recipe(name=_name(engine), tasks={}, test="true", layer="ground" if engine == "docker" else "walls")
        sample.stack(arguments={})
        sample.write("images/ground.def", GROUND)
        if engine != "docker":
            sample.write("images/walls.def", WALLS)
        source, program = lab.path(f"engines/{engine}/sh.c"), lab.path(f"engines/{engine}/sh")
        source.write_text(SHELL)
        subprocess.run(["cc", "-static", "-Os", "-o", program, source], check=True)
        programs = {"sh": program.read_bytes()}
        _prepared[key] = sample, seeded(sample, lab.path(f"engines/{engine}/store"), "ground", programs=programs).root
    return _prepared[key]


def _name(engine: str) -> str:
    return f"chaos-{engine}-{os.getpid()}"  # several campaigns may have one engine


def kill_engine(lab: Lab, engine: str) -> list[str]:
    """After the next command, or after a prune, nothing is left of what was killed."""
    sample, seed = _recipe(lab, engine)

    def prepare(case: Case) -> list[str]:
        lab.copy(seed, str(case.store.relative_to(lab.folder)))
        output = ["-o", str(case.folder / "engine.sif")] if "sif" in OPTIONS[engine] else []
        return ["--store", str(case.store), "image", str(sample.path), *OPTIONS[engine], *output]

    measured(lab, engine, prepare)
    with lab.case() as case:
        mounts = _mounts()
        argv = kill_command(case, engine, lambda: prepare(case), is_quiet=False, times=KILLS)
        case.run(argv if lab.dice.random() < 0.5 else ["--store", str(case.store), "prune"])
        if left := [*executors.load(engine).remove_abandoned(), *_containers(engine)]:
            case.problem(f"containers are left: {left}")
        case.check_quiet()
        end = time.monotonic() + _PATIENCE
        while _mounts() - mounts and time.monotonic() < end:
            time.sleep(0.2)
        if more := _mounts() - mounts:
            case.problem(f"mounts are left: {sorted(more)}")
        case.check_tidy()
        return case.problems


def _containers(engine: str) -> list[str]:
    """The containers of this campaign's image, with a label or without."""
    if engine == "buildah":
        return []
    argv = [engine, "ps", "--all", "--quiet", "--filter", f"ancestor=ekiben/{_name(engine)}"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.split()


def _mounts() -> set[str]:
    """The folders where something is mounted that a build or a container needs."""
    lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    return {line.split(" ")[4] for line in lines if re.search("ekiben|containers|docker", line)}


def remove_images(engine: str) -> None:
    """Remove the images of these cases, and the layers that the engine keeps."""
    with contextlib.suppress(EkibenError):
        executors.load(engine).remove_cached_images()
    program = "docker" if engine == "docker" else "buildah"
    listed = subprocess.run(
        [program, "images", "--format", "{{.Repository}}:{{.Tag}}" if engine == "docker" else "{{.Name}}:{{.Tag}}"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    for name in re.findall(rf"\S*ekiben/chaos-{engine}-\d+:\S+", listed):
        subprocess.run([program, "rmi", name], capture_output=True, check=False)


KINDS: dict[str, Callable[[Lab], list[str]]] = {
    f"kill {engine}": partial(kill_engine, engine=engine) for engine in OPTIONS
}
