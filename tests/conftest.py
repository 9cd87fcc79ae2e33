"""What tests share: the command line and a small recipe of one's own. support/session.py has the rules of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ekiben.store import Store
from support.published import Lab
from support.sample_recipe import Done, RunCli, SampleRecipe, full_sample, seeded, without_post

ROOT = Path(__file__).resolve().parent.parent

# -------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def run_process(tmp_path: Path) -> RunCli:
    """build.py as a user starts it, in ``tmp_path``; stdout and stderr apart. ``code`` is the exit code expected."""

    def run(*args: str | Path, code: int = 0, env: Mapping[str, str] | None = None, root: Path = ROOT) -> Done:
        done = subprocess.run(
            [sys.executable, str(root / "build.py"), *map(str, args)],
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, f"{args}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done

    return run


@pytest.fixture
def run_cli(run_process: RunCli) -> RunCli:
    """The same; unit tests have a faster one."""
    return run_process


# ------------------------------------------------------------------------------------------------------- a small recipe


@pytest.fixture
def sample(tmp_path: Path) -> SampleRecipe:
    return full_sample(tmp_path / "own")


@pytest.fixture
def files_only(sample: SampleRecipe) -> SampleRecipe:
    """The same without a %post: what needs no engine. ground ← roof."""
    return without_post(sample)


@pytest.fixture
def store(files_only: SampleRecipe, tmp_path: Path) -> Store:
    """A store in which the base layer of ``files_only`` is."""
    return seeded(files_only, tmp_path / "store", "ground")


@pytest.fixture
def lab(files_only: SampleRecipe, store: Store, tmp_path: Path) -> Lab:
    """A shared folder for versions of ``files_only``: not there yet."""
    return Lab(files_only, store, tmp_path / "lab")
