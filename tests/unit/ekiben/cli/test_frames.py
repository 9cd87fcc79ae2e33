"""EKIBEN_TRACEBACK and --traceback: the frames of an expected error above its message, with the same exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli_audit import ROOT
from support.forked_cli import server

START = "Traceback (most recent call last):\n"


def run_here(folder: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run build.py in ``folder``; the fixture run_cli refuses frames."""
    env = {**os.environ, "EKIBEN_STORE": str(folder / "none"), **environment}
    return server().run([str(ROOT / "build.py"), *args], env, folder, timeout=120)


def test_frames_of_a_real_process(tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "build.py"), "--traceback", "plan", "helo"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    forked = run_here(tmp_path, *argv[2:])
    assert (done.returncode, done.stdout) == (forked.returncode, forked.stdout)
    assert done.stderr.startswith(START) and done.stderr.splitlines()[-2:] == forked.stderr.splitlines()[-2:]


@pytest.mark.parametrize(
    ("argv", "function", "code"),
    [
        (["plan", "helo"], "find_recipe", 2),
        (["plan", "hello", "--stack", "no"], "find_stack", 3),
        (["imgae"], "resolve_command", 2),
        (["plan", "hello", "--bad"], "parse_args", 2),
        (["--bad", "plan", "hello"], "parse_args", 2),
        (["--store", "", "plan", "hello"], "_refuse_empty", 2),
        (["push", "hello", "x", "--format", "dokcer"], "convert", 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_frames_stand_above_the_message(tmp_path: Path, argv: list[str], function: str, code: int) -> None:
    plain = run_here(tmp_path, *argv)
    assert (plain.returncode, START in plain.stderr) == (code, False)
    for done in (run_here(tmp_path, "--traceback", *argv), run_here(tmp_path, *argv, EKIBEN_TRACEBACK="1")):
        assert (done.returncode, done.stdout) == (code, plain.stdout)
        assert done.stderr.startswith(START)
        assert done.stderr.endswith(plain.stderr)
        assert f", in {function}\n" in done.stderr


@pytest.mark.parametrize("value", ["", "0"])
def test_a_variable_that_is_empty_or_0_requests_nothing(tmp_path: Path, value: str) -> None:
    assert START not in run_here(tmp_path, "plan", "helo", EKIBEN_TRACEBACK=value).stderr


def test_the_option_counts_before_the_command_only(tmp_path: Path) -> None:
    after = run_here(tmp_path, "plan", "helo", "--traceback")
    assert (after.returncode, START in after.stderr) == (2, False)
    assert "'--traceback' comes before the command: " in after.stderr
    value = run_here(tmp_path, "--shared", "--traceback", "plan", "helo")  # a folder of this name
    assert (value.returncode, START in value.stderr) == (2, False)
    assert START in run_here(tmp_path, "--shared", "x", "--traceback", "plan", "helo").stderr


def test_json_stays_json(tmp_path: Path) -> None:
    plain, framed = (run_here(tmp_path, *more, "plan", "helo", "--json") for more in ([], ["--traceback"]))
    assert framed.stdout == plain.stdout != ""
    assert framed.stderr == framed.stderr[: -len(plain.stderr)] + plain.stderr


def test_an_error_of_the_system_has_its_cause(tmp_path: Path) -> None:
    done = run_here(tmp_path, "--traceback", "plan", "/x" * 3000)
    assert done.returncode == 1
    assert "OSError: [Errno 36] File name too long" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: /x/x")


def test_control_characters_of_a_name_stay_visible(tmp_path: Path) -> None:
    done = run_here(tmp_path, "--traceback", "plan", "a\x1b[31m")
    assert "\x1b" not in done.stderr
    assert r"no recipe 'a\x1b[31m'" in done.stderr.splitlines()[-2]


def test_a_removed_folder_has_frames(tmp_path: Path) -> None:
    line = f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} {ROOT / 'build.py'} --traceback --version"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(START)
    assert "\nerror: this folder cannot be used: " in done.stderr


def test_a_task_that_is_run_gets_the_variable(tmp_path: Path) -> None:
    """As the runtime sees it: with --traceback, EKIBEN_TRACEBACK goes into the container."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/docker"
    program.write_text('#!/bin/sh\necho "$EKIBEN_TRACEBACK" "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    argv = ("run", "--runtime", "docker", "--cpu", "--force", "hello", "hello")
    assert "EKIBEN_TRACEBACK" not in run_here(tmp_path, *argv, PATH=path).stdout
    shown = run_here(tmp_path, "--traceback", *argv, PATH=path).stdout
    assert shown.startswith("1 run ")
    assert "--env EKIBEN_TRACEBACK " in shown


def test_an_interrupt_has_frames_where_they_are_requested(tmp_path: Path) -> None:
    script = (
        "import signal, sys\n"
        "from ekiben.cli import root\n"
        "from ekiben.cli.commands import plan\n"
        "plan.command.callback = lambda *args, **rest: signal.raise_signal(signal.SIGTERM)\n"
        "sys.exit(root.main(['--traceback', 'plan', 'hello'], standalone_mode=False))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr.startswith(START)
    assert done.stderr.splitlines()[-1].startswith("interrupted; ")
