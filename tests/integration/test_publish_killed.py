"""A publish that is killed: no process of it is left, no traceback is printed, and the next one works."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ekiben.core.inner_path import InnerPath
from ekiben.images.published import read_records
from support.sample_recipe import SampleRecipe

pytestmark = pytest.mark.covers("ekiben/publish", "ekiben/core")

ROOT = Path(__file__).resolve().parents[2]
MOMENTS = (r"write the SIF .* …", r"write the SIF .*: [\d.]+ s")  # the last: when that step has ended


def session_members(session: int) -> list[str]:
    """Return the command lines of live processes of a session, zombies excepted."""
    found = []
    for process_dir in Path("/proc").iterdir():
        try:
            state, _, _, of = (process_dir / "stat").read_text().rpartition(")")[2].split()[:4]
            if process_dir.name.isdigit() and int(of) == session and state != "Z":
                found.append((process_dir / "cmdline").read_text().replace("\0", " "))
        except (OSError, ValueError):
            continue
    return found


def session_members_at_last(session: int) -> list[str]:
    """Return the processes that are left after 10 s, or as soon as there are none: those of a killed one end by
    themselves.
    """
    deadline = time.monotonic() + 10
    while (left := session_members(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def start(files_only: SampleRecipe, store_root: Path, shared_dir: Path) -> subprocess.Popen[str]:
    command = ("publish", files_only.path, "--to", shared_dir, "--no-verify")
    argv = [sys.executable, ROOT / "build.py", "--store", store_root, *command]
    return subprocess.Popen(
        argv,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "EKIBEN_SHARED": ""},
    )


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("moment", range(len(MOMENTS)))
def test_a_killed_publish_leaves_no_process_and_no_traceback(
    files_only: SampleRecipe, store: object, tmp_path: Path, moment: int, sign: signal.Signals
) -> None:
    root, shared_dir = tmp_path / "store", tmp_path / "lab"
    for attempt in range(3):
        (files_only.path / "files/data.txt").write_text(f"{attempt} {time.time_ns()}\n")
        with start(files_only, root, shared_dir) as publishing:
            assert publishing.stderr is not None
            lines = []
            for line in publishing.stderr:
                lines.append(line)
                if re.match(MOMENTS[moment], line):
                    break
            else:
                pytest.fail("".join(lines))
            time.sleep(0.01 * attempt)
            publishing.send_signal(sign)
            code = publishing.wait(30)
            left = session_members_at_last(publishing.pid)
            if left:
                os.killpg(publishing.pid, signal.SIGKILL)
            lines += publishing.stderr.readlines()
        assert left == []
        assert "Traceback" not in "".join(lines)
        assert code in ({-sign, 143, 0} if sign == signal.SIGTERM else {-sign, 0})
    with start(files_only, root, shared_dir) as again:
        assert again.wait(60) == 0
    assert len(read_records(InnerPath.below(shared_dir / "images/own"))[0]) >= 1
