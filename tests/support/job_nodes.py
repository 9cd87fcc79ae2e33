"""A machine with stand-ins of the runtime and of Slurm's programs, where a job is run."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ekiben.run.jobs.plan import JobPlan
from ekiben.run.jobs.request import JobRequest
from ekiben.run.jobs.runs import _new_run
from ekiben.spec.recipe import Recipe, RecipeFile, TaskFile
from support.job_plans import image_of_recipe, plan_run
from support.programs import write_program
from support.small_sifs import small_sif

TASKS = {
    "prepare": TaskFile(entrypoint="a.py", help="", launch="cpu"),
    "train": TaskFile(entrypoint="a.py", help="", launch="per-gpu"),
}
RECIPE = Recipe(Path(), RecipeFile(name="mine", description="", stack="cu130", layer="x", tasks=TASKS))
# What the runtime was called with: every word, NUL-separated.
RUNTIME = """#!/bin/bash
printf '%s\\0' "$@" >"$NOTES/argv"
env -0 >"$NOTES/environment"
"""
SRUN = '#!/bin/bash\nwhile [[ $1 = --* ]]; do shift; done\nexec "$@"\n'
SCONTROL = '#!/bin/bash\n[ "$1 $2" = "show hostnames" ] && echo c1\n'


def write_run(job: JobPlan) -> None:
    """Write a run's folder and submit nothing."""
    with _new_run(job):
        pass


@dataclass
class Node:
    """A machine with fake programs on PATH, where a job is run."""

    folder: Path
    work: Path
    sif: Path

    def plan(self, *args: str, **request: Any) -> JobPlan:
        return plan_run(
            image_of_recipe(RECIPE, self.sif),
            args,
            JobRequest(**request),
            scheduler="slurm",
            site=None,
            runs=self.work / "ekiben-runs",
        )

    def write(self, job: JobPlan) -> JobPlan:
        shutil.rmtree(job.folder, ignore_errors=True)
        write_run(job)
        return job

    def run(self, job: JobPlan, *, code: int = 0, **environment: str) -> str:
        """Run the first step as Slurm would, and return what it wrote. A run that has ended is submitted again."""
        if not (job.folder / "environment").exists():
            self.write(job)
        known = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "NOTES": str(self.folder),
            "HOME": str(self.folder),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "c1",
            "SLURM_NODEID": "0",
            "TMPDIR": str(self.folder / "local"),
        }
        done = subprocess.run(
            ["bash", job.folder / f"{job.steps[0].name}.sh"],
            cwd="/",
            env={**known, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        stdout = done.stdout.decode(errors="replace")
        assert done.returncode == code, stdout
        return stdout

    @property
    def argv(self) -> list[bytes]:
        """What the runtime was called with."""
        return (self.folder / "argv").read_bytes().split(b"\0")[:-1]

    @property
    def task(self) -> list[bytes]:
        return self.argv[self.argv.index(b"--") + 1 :]

    @property
    def binds(self) -> list[str]:
        return [self.argv[at + 1].decode() for at, word in enumerate(self.argv) if word in (b"--bind", b"--mount")]

    @property
    def environment(self) -> dict[str, str]:
        pairs = (self.folder / "environment").read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
        return dict(pair.split("=", 1) for pair in pairs)


def make_node(folder: Path) -> Node:
    for name, text in {"apptainer": RUNTIME, "srun": SRUN, "scontrol": SCONTROL}.items():
        write_program(folder / "bin" / name, text)
    (folder / "local").mkdir(mode=0o755)
    (folder / "work").mkdir()
    small_sif(folder / "mine.sif")
    return Node(folder, folder / "work", folder / "mine.sif")


def assert_local_folder_is_unused(node: Node, folder: Path) -> None:
    """Run a job that would copy its image to ``folder``."""
    job = node.write(node.plan("train", copy_local=True))
    output = node.run(job)
    assert "the image is read from" in output
    assert str(node.sif).encode() in node.argv
    assert list(folder.iterdir()) == []
    # Compiled code of others is not loaded either.
    caches = {
        node.environment[f"APPTAINERENV_{name}"]
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
    }
    assert len(caches) == 3
    assert all(path.startswith(f"{node.folder}/local/ekiben-cache-") for path in caches)
    assert any(bind.startswith(f"{node.folder}/local/ekiben-cache-") for bind in node.binds)
    assert list((node.folder / "local").glob("ekiben-cache-*")) == []  # removed with the job
