"""The lines that the catalogue shows, as somebody would paste them: on the real runtimes and schedulers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from jobs import wait_for
from workspaces import ROOT, USER, Cli, Workspace, as_user, give, home_of, need

pytestmark = pytest.mark.covers("ekiben/publish", "ekiben/run")
SAID = "image       hello, run by "


@pytest.fixture(scope="module")
def ways(cli: Cli, workspace: Workspace, hello: Path) -> dict[str, list[str]]:
    shared_dir = workspace.path / "the-lab"
    shutil.rmtree(shared_dir, ignore_errors=True)
    cli.run("--store", hello, "publish", "hello", "--to", shared_dir, "--no-verify")
    cli.run("--store", hello, "catalog", shared_dir)
    catalog = json.loads((shared_dir / "catalog/catalog.json").read_bytes())
    return {way["title"]: way["lines"] for way in catalog["images"][0]["commands"]}


@pytest.fixture
def desk(workspace: Workspace) -> Path:
    """An ordinary user's folder, with both names of Apptainer first on PATH: Grid Engine stops at a folder of PATH that
    the user may not enter.
    """
    folder = workspace.folder("desk", USER)
    (folder / "bin").mkdir()
    for name in ("apptainer", "singularity"):
        (folder / "bin" / name).symlink_to(shutil.which(name) or str(shutil.which("apptainer")))
    return folder


def paste(line: str, desk: Path, **more: str) -> str:
    environment = {
        **os.environ,
        "HOME": home_of(USER),
        "USER": USER,
        "LOGNAME": USER,
        "PATH": f"{desk}/bin:{os.environ['PATH']}",
        **more,
    }
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=desk,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **as_user(USER),
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_shown_apptainer_commands_run(ways: dict[str, list[str]], desk: Path) -> None:
    for line in ways["Apptainer, SingularityCE"]:
        assert SAID in paste(line, desk)
    assert paste(ways["Check it"][0], desk).endswith(".sif: OK\n")


def test_shown_slurm_command_runs(ways: dict[str, list[str]], desk: Path) -> None:
    need("sbatch")
    paste(ways["Slurm"][0].replace("sbatch ", "sbatch --wait ", 1), desk)
    (log,) = desk.glob("slurm-*.out")
    assert SAID in log.read_text()


def test_shown_grid_engine_command_runs(ways: dict[str, list[str]], desk: Path) -> None:
    need("qsub")
    paste(ways["Grid Engine"][0].replace("qsub ", "qsub -sync y ", 1), desk)
    (log,) = desk.glob("apptainer.o*")
    assert SAID in wait_for(log.read_text, "what the job wrote", 30)


def test_shown_pbs_command_runs(ways: dict[str, list[str]], desk: Path) -> None:
    """On the stand-in (tests/support/pbs_standin.py), whose jobs have a small environment: `apptainer` is named by
    its path.
    """
    shutil.copy(ROOT / "tests/support/pbs_standin.py", desk / "bin")
    (desk / "bin/qsub").write_text(f'#!/bin/sh\nexec python3 "{desk}/bin/pbs_standin.py" qsub "$@"\n')
    (desk / "bin/qsub").chmod(0o755)
    (desk / "state").mkdir()
    give(desk / "state", USER)
    line = ways["PBS"][0].replace("apptainer", str(shutil.which("apptainer")))
    paste(line, desk, PBS_STANDIN=str(desk / "state"))
    job = wait_for(lambda: next(desk.glob("state/*/job.json"), None), "the job")
    wait_for(lambda: json.loads(job.read_text())["state"] == "F", "the end of the job")
    assert SAID in (job.parent / "output").read_text()


def test_shown_docker_commands_run(ways: dict[str, list[str]], cli: Cli, workspace: Workspace, hello: Path) -> None:
    need("docker")
    image, run = ways["Docker"]
    store = workspace.store("root", "of-the-catalogue")
    line = image.replace("ekiben build", " ".join(cli.argv("--store", store, "image")))
    had = (
        subprocess.run(["docker", "image", "inspect", "ekiben/hello"], capture_output=True, check=False).returncode == 0
    )
    try:
        made = subprocess.run(
            ["bash", "-c", line], cwd=workspace.path, env=cli.settings(), capture_output=True, text=True, check=False
        )
        assert made.returncode == 0, made.stderr
        assert SAID + "docker" in subprocess.run(["bash", "-c", run], capture_output=True, text=True, check=True).stdout
        shared = {"EKIBEN_SHARED": str(workspace.path / "the-lab")}
        again = cli.run("--store", store, "verify", "hello", env=shared).stdout  # workspace.path has hello.sif
        assert "passed under apptainer" in again
        assert "passed under docker" in again
    finally:
        if not had:
            subprocess.run(["docker", "rmi", "--force", "ekiben/hello"], capture_output=True, check=False)
        shutil.rmtree(store, ignore_errors=True)


def test_shown_ekiben_commands_run(ways: dict[str, list[str]], cli: Cli, desk: Path) -> None:
    for title, first in (
        ("Slurm", "#SBATCH --time=2:00:00"),
        ("Grid Engine", "#$ -l h_rt=2:00:00"),
        ("PBS", "#PBS -l walltime=2:00:00"),
    ):
        argv = ways[title][1].removeprefix("ekiben ").split()
        assert argv[0] == "submit"
        script = cli.run("submit", "--dry-run", *argv[1:], cwd=desk).stdout
        assert first in script.splitlines()
