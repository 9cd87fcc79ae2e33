"""The command line for unit tests: forked, which takes a tenth of the time that an interpreter takes to start."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ekiben.core.command_name import set_command_options
from support.forked_cli import can_fork, server, stop_server
from support.sample_recipe import Done, RunCli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def no_server_left() -> Iterator[None]:
    yield
    stop_server()


@pytest.fixture(autouse=True)
def no_options_left() -> Iterator[None]:
    """Forget the options of a command line that a test gave in this process."""
    yield
    set_command_options({})


@pytest.fixture
def run_cli(run_process: RunCli, tmp_path: Path) -> RunCli:
    """As ``run_process``, for tests whose subject is not how a process starts."""

    def run(*args: str | Path, code: int = 0, env: Mapping[str, str] | None = None, root: Path = ROOT) -> Done:
        if root != ROOT or not can_fork(env or {}):
            return run_process(*args, code=code, env=env, root=root)
        argv = [str(root / "build.py"), *map(str, args)]
        done = server().run(argv, {**os.environ, **(env or {})}, tmp_path, timeout=120)
        assert done.returncode == code, f"{args}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done

    return run
