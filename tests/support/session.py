"""The rules of every run of tests, a plugin of pytest that pyproject.toml names.

The user's own store is out of reach, a skip is a failure in CI, tests that need a GPU run when asked for, files that
share a thing of the machine run in one process, and --select change leaves tests out (support/selection.py).
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import selection

ROOT = Path(__file__).resolve().parents[2]
RUN_FOLDER = "EKIBEN_TEST_RUN"  # the folder that all processes of a run share
NAMED_RUN_FOLDER = pytest.StashKey[bool]()


@pytest.fixture(scope="session", autouse=True)
def out_of_reach(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """$EKIBEN_STORE lies below a file, so that a test that forgets to name a store fails and leaves the user's
    alone.
    """
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


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ekiben")
    group.addoption("--select", choices=("all", "change"), default="all", help="run all tests, or those for a change")
    group.addoption("--record-durations", action="store_true", help="write tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(selection.Reporter(config))
    if RUN_FOLDER not in os.environ:
        os.environ[RUN_FOLDER] = str(Path(tempfile.gettempdir(), f"ekiben-tests-{os.getpid()}"))
        config.stash[NAMED_RUN_FOLDER] = True
    # A shell lets what it starts in the background ignore Ctrl-C; commands under test are interrupted.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what the processes of this run shared: images, stores.

    Workers, and a pytest that a test starts, leave it.
    """
    if config.stash.get(NAMED_RUN_FOLDER, False):
        shutil.rmtree(os.environ.pop(RUN_FOLDER), ignore_errors=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The folder of GPU tests imports what only a GPU machine has; see below."""
    return True if collection_path == ROOT / "qa" / "gpu" and not config.option.markexpr else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU unless -m gpu asks for it, and what --select change does not select."""
    if not config.option.markexpr:
        asked = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if item not in asked]
        config.hook.pytest_deselected(items=asked)
        selection.deselect(config, items)


# Files of tests/integration and qa that one process runs, in turn. The first: `prune --engines` removes the layers that
# an engine keeps for other builds, and tests count an engine's containers. The second: Slurm's nodes are few.
_SERIAL = (
    {
        "test_awkward_paths",
        "test_build_stages",
        "test_busybox_base",
        "test_crash_recovery",
        "test_engines",
        "test_executor_parity",
        "test_host_limits",
        "test_layer_content",
        "test_left_containers",
        "test_podman",
        "test_random_layers",
        "test_render",
        "test_rootless_overlay",
        "test_user_recipes",
    },
    {"test_lora_opencalm", "test_recorded_site", "test_slurm"},
)

_APART = {"test_tasks_in_image"}  # files whose tests take long and share little: several processes run them


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run files that share a thing of the machine in one process, in turn.

    A marker xdist_group would say the same, and does nothing under pytest 9.2: pytest-xdist 3.8 writes to an attribute
    that is no longer read.
    """
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if Path(file).stem in _APART:
                return nodeid
            return next((str(sorted(files)) for files in _SERIAL if Path(file).stem in files), file)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


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
