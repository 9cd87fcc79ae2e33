"""Hundreds of run folders of somebody else, through each command that reads one: a result, or one error, soon."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from ekiben.cli import root
from ekiben.spec.recipe import find_recipe
from support.hostile_runs import COMMANDS, SECRET, Put, hostile_runs, make_lab

pytestmark = pytest.mark.covers("ekiben/run/jobs", "ekiben/cli")

CASES = dict(hostile_runs(find_recipe("hello").folder))
SECONDS, BYTES = 20, 1 << 30


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_lab(tmp_path, monkeypatch)


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Fail when a command hangs, or takes too much memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handler = signal.signal(signal.SIGALRM, _end)
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, before[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, handler)


def _end(number: int, frame: object) -> None:
    raise AssertionError(f"the command took more than {SECONDS} s")


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_run_gives_a_result_or_one_error(name: str, lab: Path) -> None:
    put: Put = CASES[name]
    put(lab / "ekiben-runs/r", lab / "secret")
    for argv in COMMANDS:
        with limited():
            done = CliRunner().invoke(root, argv, env={"EKIBEN_STORE": "/nowhere/store"})
        assert isinstance(done.exception, SystemExit | None), f"{argv}: {done.exception!r}"
        assert not {"\x1b", "\0"} & set(done.output), argv
        assert SECRET not in done.output, argv
        if argv[0] == "status" and "r" not in argv:  # the others are shown
            assert [job["state"] for job in json.loads(done.stdout) if job["run"] == "sound"] == ["done"]
    assert (lab / "secret").read_text() == SECRET
    called = set((lab / "called").read_text().splitlines())
    assert not called & {"--user=builder", "-u builder", "1,2,3", "*", "a b", "$(id)", "-1", "--help", "gone"}, called


def test_cases_are_many() -> None:
    assert len(CASES) * len(COMMANDS) >= 2000
