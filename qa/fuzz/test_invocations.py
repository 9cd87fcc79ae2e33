"""Wrong command lines of every command and option: one sentence each, an exit code that is not 0, and no hang."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from fuzz.invocations import invocations
from support.architecture import ROOT
from support.forked_cli import server, stop_server

pytestmark = pytest.mark.covers("ekiben/cli", "ekiben/core")

EXAMPLES = int(os.environ.get("EKIBEN_FUZZ_EXAMPLES", "200"))
MOST_SECONDS = 30
UNEXPECTED = (0, 1)  # 1 is the exit code of what nothing in the code expects


def test_wrong_invocations_end_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    env = {
        **os.environ,
        "HOME": str(tmp_path / "home"),
        "EKIBEN_STORE": str(tmp_path / "store"),
        "EKIBEN_SHARED": "",
        "NO_COLOR": "1",
    }
    lines = [*invocations(tmp_path, "hello")]
    assert len(lines) > 400
    problems = []
    for argv in random.Random(EXAMPLES).sample(lines, min(EXAMPLES, len(lines))):
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        done = server().run([str(ROOT / "build.py"), *argv], env, work, timeout=MOST_SECONDS)
        errors = [line for line in done.stderr.splitlines() if line.lower().startswith("error: ")]
        if done.returncode in UNEXPECTED or "Traceback" in done.stderr or len(errors) != 1:
            problems.append((done.returncode, [word[:60] for word in argv], done.stderr[-300:] or done.stdout[-300:]))
    stop_server()
    assert problems == []
