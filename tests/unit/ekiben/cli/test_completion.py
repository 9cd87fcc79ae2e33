"""`completion`: the script a shell reads, and what it offers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli_audit import ROOT
from support.forked_cli import server
from support.sample_recipe import RunCli


@pytest.mark.parametrize(
    ("shell", "marker"),
    [
        ("bash", "complete -o nosort -F _buildpy_completion build.py"),
        ("zsh", "#compdef build.py"),
        ("fish", "--command build.py"),
    ],
)
def test_completion_prints_the_script_of_a_shell(run_cli: RunCli, shell: str, marker: str) -> None:
    script = run_cli("completion", shell).stdout
    assert marker in script
    assert "_EKIBEN_COMPLETE=" in script


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> str:
    argv = [str(ROOT / "build.py"), "completion", "bash"]
    return server().run(argv, os.environ, tmp_path_factory.mktemp("bash"), timeout=120).stdout


def test_completion_of_an_unknown_shell(run_cli: RunCli) -> None:
    assert "Did you mean 'bash'?" in run_cli("completion", "bsh", code=2).stderr


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("build.py ver", ["verify"]),
        ("build.py build hel", ["hello"]),
        ("build.py build --form", ["--format"]),
        ("build.py build hello --format s", ["sif"]),
        ("build.py build hello --engine a", ["auto", "apptainer"]),
        ("build.py plan hello --arg", []),
        ("build.py plan hello --layer flash", ["flash-attn", "flash-attn-4"]),
    ],
)
def test_bash_completes(bash_script: str, tmp_path: Path, typed: str, offered: list[str]) -> None:
    (tmp_path / "complete.sh").write_text(bash_script)
    argv = typed.split()
    script = f"""source {tmp_path}/complete.sh
COMP_WORDS=({" ".join(argv)}); COMP_CWORD={len(argv) - 1}
_buildpy_completion {ROOT}/build.py; printf '%s\\n' "${{COMPREPLY[@]}}" """
    bash = shutil.which("bash")
    assert bash
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([bash, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == offered, done.stderr
