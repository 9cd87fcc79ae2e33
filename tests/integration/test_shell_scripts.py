"""shellcheck finds nothing in the shell scripts of the repository, and in those that Ekiben writes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ekiben.run import schedulers
from ekiben.run.modulefile import command_files
from support.job_plans import run_of_three_steps, scripts

pytestmark = pytest.mark.covers("ekiben/run", "ekiben/bootstrap.sh", "tests/services.sh", "tests/run.sh", ".ci")

ROOT = Path(__file__).resolve().parents[2]


def shellcheck(*args: str | Path) -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed (tests/services.sh install)")
    done = subprocess.run(["shellcheck", *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def is_shell_script(path: Path) -> bool:
    with path.open("rb") as file:
        return path.suffix == ".sh" or re.match(rb"#!.*\b(ba|da)?sh\b", file.readline()) is not None


def test_scripts_of_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    scripts = [path for path in paths if is_shell_script(path)]
    assert {ROOT / ".ci/run", ROOT / "tests/services.sh", ROOT / "ekiben/bootstrap.sh"} <= set(scripts)
    shellcheck(*scripts)


def test_runner_of_a_module(tmp_path: Path) -> None:
    path = tmp_path / "runner"
    path.write_text(command_files("mine", "mine-1", ["greet"])["ekiben-mine"])
    shellcheck("-S", "warning", "-e", "SC2034,SC2154", path)  # variables are read by eval


def test_commands_of_a_module_are_plain_sh(tmp_path: Path) -> None:
    for name, script in command_files("own", "own-1-0123456789ab", {"greet": "say hello; rm -rf $HOME `x`"}).items():
        (tmp_path / name).write_text(script)
        shellcheck("--shell=sh", "--exclude=SC2013", tmp_path / name)  # SC2013: names of variables have no blanks


@pytest.mark.parametrize("scheduler", schedulers.names())
def test_job_scripts(scheduler: str, tmp_path: Path) -> None:
    for text in scripts(run_of_three_steps(scheduler)):
        path = tmp_path / "1-step.sh"
        path.write_text(text)
        # Files that only a compute node has; what job.sh reads, and calls; how a hook is given.
        shellcheck("-e", "SC1090,SC1091,SC2002,SC2016,SC2034,SC2154,SC2317", path)
