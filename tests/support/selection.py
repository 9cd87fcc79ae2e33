"""Select the slow tests that a change must pass: ``pytest --select change``. CONTRIBUTING.md has the rule in prose.

A selected test has one of three reasons: it is a guard; it is in the slice of this commit, one of SLICES that the hash
of HEAD names; or it covers a path that one of the last COMMITS commits changed, the newest first, as long as there is
time left. The seconds expected of each file are in tests/durations.json; ``make test-all options=--record-durations``
writes what it measures.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DURATIONS = ROOT / "tests/durations.json"
SLICES = 8
COMMITS = 20
MINUTES = 12.0  # of the 25 that .ci/run may take: the rest is for installation, lint and unit tests
WORKERS = 2
UNKNOWN_SECONDS = 60.0  # of a file that has no entry in tests/durations.json yet
_LARGE_IMAGE = "lora_opencalm"  # the fixture that builds an image with torch, once a run


@dataclass(frozen=True)
class Unit:
    """Tests that a changed path selects together: a file, or one test of a file that says ``covers(…, each=True)``."""

    name: str
    covers: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]

    def covers_path(self, path: str) -> bool:
        return any(path == prefix or path.startswith(prefix.rstrip("/") + "/") for prefix in (*self.covers, self.file))


@dataclass(frozen=True)
class Durations:
    """Seconds by file, all of its fixtures included; of tests that can be selected alone, without them."""

    seconds: Mapping[str, float]

    def of_file(self, file: str) -> float:
        return self.seconds.get(file, UNKNOWN_SECONDS)

    def of(self, units: Iterable[Unit]) -> float:
        """Return the seconds that ``units`` take: the fixtures of a file count once."""
        total = 0.0
        for file, group in itertools.groupby(sorted(units, key=lambda unit: unit.name), lambda unit: unit.file):
            alone = [unit.name for unit in group if unit.name != file]
            tests = {name: seconds for name, seconds in self.seconds.items() if name.startswith(f"{file}::")}
            fixtures = self.of_file(file) - sum(tests.values())
            total += fixtures + sum(tests.get(name, UNKNOWN_SECONDS) for name in alone) if alone else self.of_file(file)
        return total


@dataclass
class Selection:
    """Which units run, and why."""

    slice_number: int
    slice: list[str]  # files
    changed: dict[str, str] = field(default_factory=dict)  # unit → the changed path that it covers
    no_time: dict[str, str] = field(default_factory=dict)  # the same of those that would take too long
    left_out: list[str] = field(default_factory=list)

    def has(self, unit: Unit) -> bool:
        return unit.file in self.slice or unit.name in self.changed

    def lines(self, guards: int) -> list[str]:
        """Return what ran and what did not, for the report."""
        return [
            f"{guards} guards",
            f"slice {self.slice_number + 1} of {SLICES}, by the hash of HEAD: {_names(self.slice)}",
            f"changed by the last {COMMITS} commits: {_names(self.changed)}",
            f"changed as well, but no time is left: {_names(self.no_time)}",
            f"left out except for guards (make test-all runs them): {_names(self.left_out)}",
        ]


def _names(names: Iterable[str]) -> str:
    short = [name.removeprefix("tests/integration/").replace(".py", "", 1) for name in names]
    return ", ".join(short) or "none"


def cut(files: Iterable[str], durations: Durations, count: int) -> list[list[str]]:
    """Return ``files`` in ``count`` slices that take about as long as each other."""
    slices: list[list[str]] = [[] for _ in range(count)]
    seconds = [0.0] * count
    for file in sorted(files, key=lambda file: (-durations.of_file(file), file)):
        shortest = seconds.index(min(seconds))
        slices[shortest].append(file)
        seconds[shortest] += durations.of_file(file)
    return slices


def select(units: Sequence[Unit], durations: Durations, head: str, changed: Sequence[str], limit: float) -> Selection:
    """Return the units that run for the commit ``head``, which take about ``limit`` seconds of one process.

    changed: paths, those of the newest commit first. A slice that takes longer than ``limit`` runs nevertheless.
    """
    number = int(hashlib.sha256(head.encode()).hexdigest(), 16) % SLICES
    selection = Selection(number, cut({unit.file for unit in units}, durations, SLICES)[number])
    for path in changed:
        for unit in sorted((unit for unit in units if unit.covers_path(path)), key=lambda unit: durations.of([unit])):
            if selection.has(unit) or unit.name in selection.no_time:
                continue
            fits = durations.of([unit, *(other for other in units if selection.has(other))]) <= limit
            (selection.changed if fits else selection.no_time)[unit.name] = path
    decided = {unit.name for unit in units if selection.has(unit)} | selection.no_time.keys()
    selection.left_out = sorted({unit.name for unit in units} - decided)
    return selection


def git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def changed_paths() -> list[str]:
    """Return the paths that the working tree and the last commits change, the newest first."""
    texts = [git("diff", "--name-only", "HEAD"), git("ls-files", "--others", "--exclude-standard")]
    texts.append(git("log", f"-{COMMITS}", "--name-only", "--format=", "HEAD"))
    return [*dict.fromkeys(path for text in texts for path in text.splitlines() if path)]


# ------------------------------------------------------------------------------------------------------ pytest's side

REPORT = pytest.StashKey[list[str]]()


def unit_of(item: pytest.Item) -> str:
    """Return the name of the unit that ``item`` belongs to."""
    marker = item.get_closest_marker("covers")
    return item.nodeid if marker and marker.kwargs.get("each") else item.nodeid.partition("::")[0]


def units_of(items: Sequence[pytest.Item]) -> list[Unit]:
    """Return the units of ``items``. What has no marker ``covers`` is in none: it runs with --select all only."""
    covers: dict[str, tuple[str, ...]] = {}
    for item in items:
        if marker := item.get_closest_marker("covers"):
            covers.setdefault(unit_of(item), marker.args)
    return [Unit(name, paths) for name, paths in covers.items()]


def read_durations() -> Durations:
    return Durations(json.loads(DURATIONS.read_text(encoding="utf-8")) if DURATIONS.exists() else {})


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what --select says, the files that take longest first, but for begin_with_image()."""
    durations = read_durations()
    items.sort(key=lambda item: -durations.of_file(item.nodeid.partition("::")[0]))
    select_items(config, items, durations)
    items[:] = begin_with_image(items)


def begin_with_image(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return ``items``, with the first that needs the large image in front and the others that need it at the end.

    So one process builds it for minutes while the others run what does not need it, instead of waiting.
    """
    with_image = [item for item in items if _LARGE_IMAGE in getattr(item, "fixturenames", ())]
    rest = [item for item in items if item not in with_image]
    return [*with_image[:1], *rest, *with_image[1:]]


def select_items(config: pytest.Config, items: list[pytest.Item], durations: Durations) -> None:
    """Keep what ``--select change`` selects."""
    if config.getoption("--select") != "change":
        return
    guards = [item for item in items if item.get_closest_marker("guard")]
    units = {unit.name: unit for unit in units_of(items)}
    limit = MINUTES * 60 * WORKERS
    selection = select([*units.values()], durations, git("rev-parse", "HEAD").strip(), changed_paths(), limit)
    chosen = {name for name, unit in units.items() if selection.has(unit)}
    kept = {item.nodeid for item in items if item in guards or unit_of(item) in chosen}
    unselected = [item for item in items if item.nodeid not in kept]
    items[:] = [item for item in items if item.nodeid in kept]
    config.hook.pytest_deselected(items=unselected)
    config.stash[REPORT] = selection.lines(len(guards))


class Reporter:
    """Print the selection at the end, and write how long each unit took; with pytest-xdist, what its workers say."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.lines: list[str] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.units: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.units = {item.nodeid: unit_of(item) for item in session.items}
        self.lines = self.config.stash.get(REPORT, [])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self.units:  # of a worker, which counts it
            return
        file, unit = report.nodeid.partition("::")[0], self.units[report.nodeid]
        self.seconds[file] += report.duration
        if unit != file and report.when == "call":
            self.seconds[unit] += report.duration

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput |= {"selection": self.lines, "seconds": dict(self.seconds)}
        elif self.config.getoption("--record-durations"):
            former = dict(read_durations().seconds)
            rounded = {
                name: round(seconds, 1)
                for name, seconds in self.seconds.items()
                if not name.startswith("tests/unit/")  # all of them always run
            }
            DURATIONS.write_text(json.dumps(former | rounded, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {})
        self.lines = output.get("selection") or self.lines
        for name, seconds in output.get("seconds", {}).items():  # several workers may have run tests of one file
            self.seconds[name] += seconds

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.lines:
            terminalreporter.section("selected tests")
            for line in self.lines:
                terminalreporter.write_line(line)
