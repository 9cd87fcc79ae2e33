"""A short cut of `make chaos-training`: one fault of each kind, in two processes, each in another task."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
from support import forkserver

ROOT = Path(__file__).resolve().parents[4]


def test_each_fault_ends_with_one_sentence_and_loses_nothing(tmp_path: Path) -> None:
    """In a process of its own, which may fork: no thread of another test is in it."""
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "qa"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TMPDIR": str(tmp_path)}
    options = ["--cut", "--processes", "2", "--seed", "7713", "--minutes", "8", "--json", str(tmp_path / "counts.json")]
    argv = [forkserver.python(), "-m", "chaos.training", *options]
    done = subprocess.run(argv, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads((tmp_path / "counts.json").read_text())["cases"]
    assert sum(tally["cases"] for tally in counts.values()) == len(counts) == 10
    assert {name.split(": ")[1] for name in counts} == {
        "kill",
        "stop",
        "hang",
        "pause",
        "signal",
        "clock",
        "disk",
        "gradient",
        "memory",
        "out of memory",
    }
    assert sum(tally["late"] for tally in counts.values()) == 0
    print(done.stdout)
