"""Plans of jobs, and the scripts that a scheduler gets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ekiben.run.image import NamedImage
from ekiben.run.jobs.images import read_tasks
from ekiben.run.jobs.plan import JobPlan, plan
from ekiben.run.jobs.request import JobRequest
from ekiben.run.jobs.script import script
from ekiben.run.site import Site, find_site
from ekiben.spec.recipe import Recipe, RecipeFile, TaskFile

TASKS = {
    "prepare": TaskFile(entrypoint="a.py", help="", launch="cpu"),
    "train": TaskFile(entrypoint="a.py", help="", launch="per-gpu"),
    "merge": TaskFile(entrypoint="a.py", help=""),
}
RECIPE = Recipe(Path(), RecipeFile(name="mine", description="", stack="cu130", layer="x", tasks=TASKS))


def image_of_recipe(recipe: Recipe, sif: Path) -> NamedImage:
    tasks = {task: file.launch for task, file in recipe.file.tasks.items()}
    return NamedImage(name=recipe.name, sif=sif, tasks=tasks, recipe=recipe, build_args=recipe.name)


def plan_run(
    image: NamedImage,
    argv: Sequence[str],
    request: JobRequest,
    *,
    runs: Path,
    scheduler: str = "slurm",
    site: Site | None = None,
) -> JobPlan:
    """Plan the tasks of a command line, all of them in one image."""
    return plan(image, read_tasks(image, argv), request, scheduler=scheduler, site=site, runs=runs)


def made(*args: str, scheduler: str = "slurm", site: str | None = None, **wanted: Any) -> JobPlan:
    return plan_run(
        image_of_recipe(RECIPE, Path("/images/mine.sif")),
        args,
        JobRequest(**wanted),
        scheduler=scheduler,
        site=find_site(site) if site else None,
        runs=Path("/shared/runs"),
    )


def scripts(run: JobPlan) -> list[str]:
    return [script(run, step) for step in run.steps]


SITES = {
    "slurm": ("slurm-a100", {"nodes": 2, "account": "lab"}),
    "sge": ("abci-2.0", {"nodes": 2, "account": "gaa", "partition": "rt_F"}),
    "pbs": ("abci-3.0", {"nodes": 2, "account": "gaa", "partition": "rt_HF"}),
}


def run_of_three_steps(scheduler: str) -> JobPlan:
    site, asked = SITES.get(scheduler, (None, {"nodes": 2}))
    argv = ["prepare", "--input", "it's a file", "+", "train", "--output", "out-{seed}", "+", "merge"]
    return made(*argv, scheduler=scheduler, site=site, time_seconds=7200, seeds=("1", "2"), copy_local=True, **asked)
