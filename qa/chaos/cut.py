"""A cut of `make chaos`, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.architecture import ROOT


def campaign(kinds: list[str], folder: Path, **options: int) -> dict[str, dict[str, int]]:
    """Run a cut of some minutes, in processes of its own, which may fork: no thread of another test is in them.

    Return its counts.
    """
    argv: list[str | Path] = [sys.executable, "-m", "chaos", "--seed", "16", "--json", folder / "counts.json", *kinds]
    argv += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'qa'}", "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    counts: dict[str, dict[str, int]] = json.loads((folder / "counts.json").read_text())["kinds"]
    assert list(counts) == kinds
    return counts
