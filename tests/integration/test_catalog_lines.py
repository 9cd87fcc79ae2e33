"""The lines that the catalogue shows, as somebody would paste them: on the real runtimes and schedulers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from jobs import wait_for
from rooms import ROOT, USER, Cli, Room, as_user, give, home_of, need

pytestmark = pytest.mark.slow
SAID = "image       hello, run by "


@pytest.fixture(scope="module")
def ways(cli: Cli, room: Room, hello: Path) -> dict[str, list[str]]:
    place = room.path / "the-lab"
    shutil.rmtree(place, ignore_errors=True)
    cli.run("--store", hello, "publish", "hello", "--to", place, "--no-verify")
    cli.run("--store", hello, "catalog", place)
    catalog = json.loads((place / "catalog/catalog.json").read_bytes())
    return {way["title"]: way["lines"] for way in catalog["images"][0]["commands"]}


@pytest.fixture
def desk(room: Room) -> Path:
    """An ordinary user's folder, with a `singularity` on PATH where there is none."""
    folder = room.folder("desk", USER)
    (folder / "bin").mkdir()
    if not shutil.which("singularity"):
        (folder / "bin/singularity").symlink_to(str(shutil.which("apptainer")))
    return folder


def paste(line: str, desk: Path, **more: str) -> str:
    environment = {**os.environ, "HOME": home_of(USER), "USER": USER, "LOGNAME": USER, "PATH": f"{desk}/bin:{os.environ['PATH']}", **more}  # fmt: skip
    done = subprocess.run(["bash", "-c", line], cwd=desk, env=environment, capture_output=True, text=True, timeout=120, check=False,
                          **as_user(USER))  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_singularity_and_apptainer(ways: dict[str, list[str]], desk: Path) -> None:
    for line in ways["Singularity, Apptainer"]:
        assert SAID in paste(line, desk)
    assert paste(ways["Check it"][0], desk).endswith(".sif: OK\n")


def test_slurm(ways: dict[str, list[str]], desk: Path) -> None:
    need("sbatch")
    paste(ways["Slurm"][0].replace("sbatch ", "sbatch --wait ", 1), desk)
    (log,) = desk.glob("slurm-*.out")
    assert SAID in log.read_text()


def test_grid_engine(ways: dict[str, list[str]], desk: Path) -> None:
    need("qsub")
    paste(ways["Grid Engine"][0].replace("qsub ", "qsub -sync y ", 1), desk)
    (log,) = desk.glob("singularity.o*")
    assert SAID in wait_for(log.read_text, "what the job wrote", 30)


def test_pbs(ways: dict[str, list[str]], desk: Path) -> None:
    """On the stand-in (tests/pbs_standin.py), whose jobs have a small environment: `singularity` is where all find it."""
    shutil.copy(ROOT / "tests/pbs_standin.py", desk / "bin")
    (desk / "bin/qsub").write_text(f'#!/bin/sh\nexec python3 "{desk}/bin/pbs_standin.py" qsub "$@"\n')
    (desk / "bin/qsub").chmod(0o755)
    (desk / "state").mkdir()
    give(desk / "state", USER)
    line = ways["PBS"][0].replace("singularity", str(shutil.which("apptainer")))
    paste(line, desk, PBS_STANDIN=str(desk / "state"))
    job = wait_for(lambda: next(desk.glob("state/*/job.json"), None), "the job")
    wait_for(lambda: json.loads(job.read_text())["state"] == "F", "the end of the job")
    assert SAID in (job.parent / "output").read_text()


def test_docker(ways: dict[str, list[str]], cli: Cli, room: Room, hello: Path) -> None:
    need("docker")
    image, run = ways["Docker"]
    store = room.store("root", "of-the-catalogue")
    line = image.replace("build.py", " ".join(cli.argv("--store", store)))
    had = (
        subprocess.run(["docker", "image", "inspect", "ekiben/hello"], capture_output=True, check=False).returncode == 0
    )
    try:
        made = subprocess.run(
            ["bash", "-c", line], cwd=room.path, env=cli.settings(), capture_output=True, text=True, check=False
        )
        assert made.returncode == 0, made.stderr
        assert SAID + "docker" in subprocess.run(["bash", "-c", run], capture_output=True, text=True, check=True).stdout
        shared = {"EKIBEN_SHARED": str(room.path / "the-lab")}
        again = cli.run("--store", store, "verify", "hello", env=shared).stdout  # room.path has hello.sif
        assert "passed under apptainer" in again
        assert "passed under docker" in again
    finally:
        if not had:
            subprocess.run(["docker", "rmi", "--force", "ekiben/hello"], capture_output=True, check=False)
        shutil.rmtree(store, ignore_errors=True)


def test_with_ekiben(ways: dict[str, list[str]], cli: Cli, desk: Path) -> None:
    for title, first in (
        ("Slurm", "#SBATCH --time=2:00:00"),
        ("Grid Engine", "#$ -l h_rt=2:00:00"),
        ("PBS", "#PBS -l walltime=2:00:00"),
    ):
        words = ways[title][1].removeprefix("build.py ").split()
        script = cli.run(*words, "--dry-run", cwd=desk).stdout
        assert first in script.splitlines()
