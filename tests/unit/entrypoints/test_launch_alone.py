"""The launcher of one process behaves as that of several does with one."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).resolve().parents[3] / "entrypoints" / "launch_node.py"
GROUP = ("--patience", "60")  # an option that the launcher of one process does not take
WAIT = "echo ready; while :; do sleep 0.05; done"
CASES: dict[str, tuple[list[str], int]] = {
    "done": (["sh", "-c", "echo out; echo err >&2"], 0),
    "failed": (["sh", "-c", "exit 3"], 0),
    "requeue": (["sh", "-c", "exit 75"], 0),
    "interrupted": (["sh", "-c", "exit 130"], 0),
    "killed": (["sh", "-c", "kill -KILL $$"], 0),
    "reason": (["sh", "-c", 'echo "the disk is full" > "$EKIBEN_FAILURE_DIR/rank-0"; exit 1'], 0),
    "missing": (["no-such-task"], 0),
    "folder": (["/"], 0),
    "session": (["python3", "-c", "import os; print(os.getsid(0) == os.getpid())"], 0),
    "signals": (["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"], 0),
    "term": (["sh", "-c", WAIT], signal.SIGTERM),
    "hangup": (["sh", "-c", WAIT], signal.SIGHUP),
    "int": (["sh", "-c", f"trap 'exit 130' INT; {WAIT}"], signal.SIGINT),
    "saves": (["sh", "-c", f"trap 'echo saved; exit 75' USR1; {WAIT}"], signal.SIGUSR2),
    "finishes": (["sh", "-c", f"trap 'echo saved; exit 0' USR1; {WAIT}"], signal.SIGXCPU),
    "fails while it saves": (["sh", "-c", f"trap 'exit 4' TERM; {WAIT}"], signal.SIGTERM),
    "stopped": (["sh", "-c", f"trap 'exit 75' USR1; echo ready; kill -STOP $$; {WAIT}"], signal.SIGUSR1),
}


def launch(options: tuple[str, ...], command: list[str], number: int) -> tuple[int, str, str]:
    argv = [sys.executable, str(LAUNCHER), "--node", "0", "--nodes", "c1", "--processes", "1", *options, "--", *command]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline() if number else ""
        if number:
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
    return process.returncode, first + out, err


@pytest.mark.parametrize("case", CASES)
def test_one_process_is_launched_as_one_of_several(case: str) -> None:
    command, number = CASES[case]
    alone, group = launch((), command, number), launch(GROUP, command, number)
    assert alone == group
    assert case in ("done", "session", "signals", "requeue", "interrupted", "finishes") or alone[2]


def test_a_file_of_the_job_script_is_a_signal_to_save(tmp_path: Path) -> None:
    stop_file, command = tmp_path / "stop", ["sh", "-c", f"trap 'exit 75' USR1; {WAIT}"]
    argv = [sys.executable, str(LAUNCHER), "--notice", str(stop_file), "--", *command]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stop_file.touch()
        assert "received SIGUSR1" in process.communicate(timeout=60)[1]
    assert process.returncode == 75


def test_the_process_dies_with_its_launcher() -> None:
    argv = [sys.executable, str(LAUNCHER), "--", "sh", "-c", "echo $$; while :; do sleep 0.05; done"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        task = int(process.stdout.readline())
        process.kill()
    waited = os.pidfd_open(task) if Path(f"/proc/{task}").exists() else None
    if waited is not None:
        assert select.select([waited], [], [], 30)[0], "the task outlives its launcher"
        os.close(waited)


def test_little_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-S", str(LAUNCHER), "--", "true"],
        capture_output=True,
        text=True,
        check=True,
    )
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert not imported & {"asyncio", "subprocess", "socket", "pathlib", "argparse", "hashlib", "tempfile", "ssl"}
