"""One task started in every way: it sees the same folders, variables and arguments."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jobs import wait_for
from workspaces import USER, Cli, Workspace, give, need

pytestmark = pytest.mark.covers("ekiben/run", "ekiben/images", "ekiben/cli/commands/_start.py")

PROBE = """\
import json, os, sys
from pathlib import Path
names = ("WANDB_NAME", "HF_TOKEN", "HF_HOME", "NCCL_DEBUG")
print(json.dumps({
    "values": {name: os.environ.get(name) for name in names},
    "leaks": [name for name in ("PYTHONPATH", "CUDA_HOME", "MY_SETTING") if name in os.environ],
    "cwd": os.getcwd(),
    "data": Path(sys.argv[1].partition("=")[2]).read_text(),
    "argv": sys.argv[2:],
    "writes": [os.access(folder, os.W_OK) for folder in (".", os.environ["HF_HOME"])],
}))
"""
VALUE = '$(touch pwned) `touch pwned` ${HOME} $$ it\'s "said" \\ \\n あ ü\nsecond line\\'
ARGUMENTS = ["--data=../data/rows.jsonl", "$(touch pwned)", 'a "b" \\', "x\ny", "あ"]


@dataclass(frozen=True)
class Desk:
    """A user's folders, the recipe, its SIF, and what is published of it."""

    store: Path
    recipe: Path
    sif: Path
    shared: Path
    work: Path

    def environment(self) -> dict[str, str | None]:
        return {
            "WANDB_NAME": VALUE,
            "HF_TOKEN": "hf_$abc",
            "HF_HOME": str(self.work.parent / "models"),
            "NCCL_DEBUG": "INFO",
            "PYTHONPATH": "/nowhere",
            "CUDA_HOME": "/apps/cuda",
            "MY_SETTING": "1",
        }


@pytest.fixture(scope="module")
def desk(workspace: Workspace, cli: Cli, hello: Path) -> Iterator[Desk]:
    top = workspace.folder("doors")
    recipe, shared = top / "probe", top / "lab"
    (recipe / "entrypoints").mkdir(parents=True)
    (recipe / "entrypoints/probe.py").write_text(PROBE)
    task = {"entrypoint": "probe.py", "help": "say what is seen"}
    recipe_yaml = {
        "name": "probe",
        "description": "a test",
        "stack": "cu130",
        "layer": "python",
        "tasks": {"look": task},
    }
    (recipe / "recipe.yaml").write_text(json.dumps({**recipe_yaml, "tasks": {"look": task}}))
    formats = [word for kind in ("sif", "docker", "podman") for word in ("--format", kind)]
    cli.image(hello, recipe, *formats, "--no-verify", "-o", top / "probe.sif")
    shared.mkdir(mode=0o755)
    cli.run("--store", hello, "publish", recipe, "--to", shared, "--version", "1", "--modulefile", "--no-verify")
    for name in ("my work", "data", "models"):
        (top / name).mkdir()
        give(top / name, USER)
        (top / name).chmod(0o777)
    (top / "data/rows.jsonl").write_text("a row\n")
    top.chmod(0o755)
    yield Desk(hello, recipe, top / "probe.sif", shared, top / "my work")
    for engine in ("docker", "podman"):
        subprocess.run([engine, "rmi", "--force", "ekiben/probe:latest"], capture_output=True, check=False)
    shutil.rmtree(top)


def ekiben(desk: Desk, cli: Cli, *args: str | Path) -> str:
    return cli.run("--store", desk.store, *args, cwd=desk.work, env=desk.environment()).stdout


def by_module(desk: Desk, cli: Cli) -> str:
    (command,) = (desk.shared / "images/probe").glob("*.bin/look")
    environment = {**os.environ, **{name: str(value) for name, value in desk.environment().items()}}
    return subprocess.run(
        [command, *ARGUMENTS], cwd=desk.work, env=environment, capture_output=True, text=True, check=True
    ).stdout


PYTHON = """\
import sys
import ekiben
print(ekiben.open(sys.argv[1]).execute(["look", *sys.argv[2:]], check=True).stdout)
"""


def by_python(desk: Desk, cli: Cli) -> str:
    environment = {**os.environ, **{name: str(value) for name, value in desk.environment().items()}}
    environment["PYTHONPATH"] = str(cli.workspace.checkout)  # of the interface, outside
    python = cli.argv()[0]
    return subprocess.run(
        [python, "-c", PYTHON, desk.sif, *ARGUMENTS],
        cwd=desk.work,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


IN_PYTHON = ["python", "-c", PROBE, *ARGUMENTS]  # the probe without the task's name
DOORS: dict[str, Callable[[Desk, Cli], str]] = {
    "run FILE.sif": lambda desk, cli: ekiben(desk, cli, "run", desk.sif, "look", *ARGUMENTS),
    "run --live": lambda desk, cli: ekiben(desk, cli, "run", "--live", desk.recipe, "look", *ARGUMENTS),
    "run RECIPE --sif": lambda desk, cli: ekiben(
        desk, cli, "run", desk.recipe, "--sif", desk.sif, "look", "--", *ARGUMENTS
    ),
    "run NAME:VERSION": lambda desk, cli: ekiben(
        desk, cli, "--shared", desk.shared, "run", "probe:1", "look", "--", *ARGUMENTS
    ),
    "exec FILE.sif": lambda desk, cli: ekiben(desk, cli, "exec", desk.sif, *IN_PYTHON),
    "exec NAME:VERSION": lambda desk, cli: ekiben(
        desk, cli, "--shared", desk.shared, "exec", "probe:1", "--", *IN_PYTHON
    ),
    "exec, docker": lambda desk, cli: ekiben(desk, cli, "exec", "--runtime", "docker", desk.recipe, *IN_PYTHON),
    "exec, podman": lambda desk, cli: ekiben(desk, cli, "exec", "--runtime", "podman", desk.recipe, *IN_PYTHON),
    "shell": lambda desk, cli: ekiben(desk, cli, "shell", desk.sif, "--", "look", *ARGUMENTS),
    "docker": lambda desk, cli: ekiben(desk, cli, "run", desk.recipe, "--runtime", "docker", "look", "--", *ARGUMENTS),
    "podman": lambda desk, cli: ekiben(desk, cli, "run", desk.recipe, "--runtime", "podman", "look", "--", *ARGUMENTS),
    "module": by_module,
    "python": by_python,
}


def seen(output: str) -> dict[str, Any]:
    (line,) = [line for line in output.splitlines() if line.startswith('{"values"')]
    probe: dict[str, Any] = json.loads(line)
    return probe


def expected(desk: Desk) -> dict[str, Any]:
    environment = desk.environment()
    return {
        "values": {name: environment[name] for name in ("WANDB_NAME", "HF_TOKEN", "HF_HOME", "NCCL_DEBUG")},
        "leaks": [],
        "cwd": str(desk.work),
        "data": "a row\n",
        "argv": ARGUMENTS[1:],
        "writes": [True, True],
    }


@pytest.mark.guard
@pytest.mark.parametrize("door", DOORS)
def test_task_sees_the_same(door: str, desk: Desk, cli: Cli) -> None:
    assert seen(DOORS[door](desk, cli)) == expected(desk)
    assert not list(desk.work.glob("pwned"))


def test_job_sees_the_same(desk: Desk, user_cli: Cli) -> None:
    need("sbatch")
    options = ["--scheduler", "slurm", "--json"]
    done = user_cli.run(
        "--shared",
        desk.shared,
        "submit",
        "probe:1",
        "look",
        *options,
        "--",
        *ARGUMENTS,
        cwd=desk.work,
        env=desk.environment(),
    )
    run = Path(json.loads(done.stdout)["run"])
    wait_for(lambda: (run / "1-look.exit").exists(), "the end of the job")
    log = (run / "1-look.log").read_text()
    assert (run / "1-look.exit").read_text() == "0\n", log
    assert seen(log) == expected(desk)
    assert not list(desk.work.glob("pwned"))
