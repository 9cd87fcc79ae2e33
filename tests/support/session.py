"""What all tests share, those of qa/ too: the user's own store is out of reach, a skip is a failure in CI, GPUs are asked for."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def out_of_reach(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """$EKIBEN_STORE lies below a file, so that a test that forgets to name a store fails and leaves the user's alone."""
    wall = tmp_path_factory.mktemp("no-store") / "file"
    wall.write_text("a test must name its store\n")
    settings = {"EKIBEN_STORE": str(wall / "store"), "EKIBEN_SHARED": "", "EKIBEN_REGISTRY": "", "EKIBEN_RECIPES": ""}
    before = {name: os.environ.get(name) for name in settings}
    os.environ |= settings
    yield wall / "store"
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


def pytest_configure() -> None:
    """Let commands under test be interrupted: a shell lets what it starts in the background ignore Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The folder of GPU tests imports what only a GPU machine has; see below."""
    return True if collection_path == ROOT / "qa" / "gpu" and not config.option.markexpr else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What needs a GPU runs when asked for: -m gpu."""
    if not config.option.markexpr:
        asked = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if item not in asked]
        config.hook.pytest_deselected(items=asked)


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """In CI everything must be there: what would be skipped at home fails with the reason."""
    if os.environ.get("CI") == "true" and report.outcome == "skipped" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        reason = report.longrepr
        report.longrepr = f"skipped, which CI does not allow: {reason[2] if isinstance(reason, tuple) else reason}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    outcome = yield
    if not item.get_closest_marker("gpu"):
        _refuse_skip(outcome.get_result())


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, None]:
    outcome = yield
    if "gpu" not in collector.path.parts:
        _refuse_skip(outcome.get_result())
