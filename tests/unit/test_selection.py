"""Which slow tests a change must pass: tests/support/selection.py."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.selection import COMMITS, SLICES, Durations, Unit, begin_with_image, cut, select

ROOT = Path(__file__).resolve().parents[2]
# Those of GPUs run when asked for, and that of the two commands with all tests only.
SLOW = [
    *(ROOT / "tests/integration").glob("test_*.py"),
    *(ROOT / "qa").glob("*/test_*.py"),
    ROOT / "qa/test_carry_image.py",
]
SLOW = [path for path in SLOW if "gpu" not in path.parts]
FILES = {f"tests/integration/test_{letter}.py": 10.0 * number for number, letter in enumerate("abcdefgh", 1)}


def test_slices_hold_each_file_once_and_take_similar_times() -> None:
    slices = cut(FILES, Durations(FILES), 4)
    assert sorted(name for names in slices for name in names) == sorted(FILES)
    assert [sum(FILES[name] for name in names) for names in slices] == [90.0] * 4


def test_every_file_is_in_the_slice_of_some_commit() -> None:
    units = [Unit(name) for name in FILES]
    heads = [f"{number:040x}" for number in range(40)]
    selections = [select(units, Durations(FILES), head, [], limit=0) for head in heads]
    assert {selection.slice_number for selection in selections} == {*range(SLICES)}
    assert {name for selection in selections for name in selection.slice} == {*FILES}
    assert selections[0] == select(units, Durations(FILES), heads[0], [], limit=0)


def test_files_that_cover_a_changed_path_run_within_the_time_limit() -> None:
    units = [Unit(name, covers=("ekiben/registry" if "h.py" in name else "ekiben/run", name)) for name in FILES]
    changed = ["README.md", "ekiben/registry/client.py", "ekiben/running.py", "ekiben/run/jobs.py"]
    everything = select(units, Durations(FILES), "head", changed, limit=1000)
    assert set(everything.slice) | set(everything.changed) == {*FILES}
    assert everything.left_out == [] and everything.no_time == {}
    some = select(units, Durations(FILES), "head", changed, limit=200)
    runs = {*some.slice, *some.changed}
    assert "tests/integration/test_h.py" in runs  # the newest change comes first
    assert sum(FILES[name] for name in runs) <= 200
    assert runs | some.no_time.keys() == {*FILES}
    assert {some.no_time[name] for name in some.no_time} <= {"ekiben/run/jobs.py"}


def test_a_test_of_a_file_can_be_selected_alone_and_pays_for_the_fixtures_of_the_file() -> None:
    file = "tests/integration/test_big.py"
    seconds = {file: 500.0, f"{file}::test[a]": 100.0, f"{file}::test[b]": 50.0, **FILES}
    units = [Unit(f"{file}::test[{letter}]", covers=(f"entrypoints/{letter}",)) for letter in "ab"]
    durations = Durations(seconds)
    assert durations.of(units[:1]) == 450
    assert durations.of(units) == 500
    heads = (f"{number}" for number in range(100))
    head = next(head for head in heads if file not in select(units, durations, head, [], limit=0).slice)
    selection = select(units, durations, head, ["entrypoints/b/x.py", "entrypoints/a/x.py"], limit=400)
    assert list(selection.changed) == [f"{file}::test[b]"]
    assert list(selection.no_time) == [f"{file}::test[a]"]


def test_the_large_image_is_built_beside_tests_that_need_none() -> None:
    names = {"a": ["lora_opencalm"], "b": [], "c": ["sif", "lora_opencalm"], "d": ["workspace"]}
    items: list[Any] = [SimpleNamespace(name=name, fixturenames=fixtures) for name, fixtures in names.items()]
    assert [item.name for item in begin_with_image(items)] == ["a", "b", "d", "c"]


def test_the_report_names_the_files_left_out() -> None:
    selection = select([Unit(name) for name in FILES], Durations(FILES), "head", [], limit=0)
    lines = selection.lines(guards=3)
    assert lines[0] == "3 guards"
    assert f"of {SLICES}, by the hash of HEAD" in lines[1]
    assert f"the last {COMMITS} commits: none" in lines[2]
    assert len(re.findall(r"test_[a-h]\b", lines[1])) + len(re.findall(r"test_[a-h]\b", lines[4])) == len(FILES)


def marker_calls(path: Path) -> list[ast.Call]:
    """Return the calls of pytest.mark.covers in a file."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) == "pytest.mark.covers"]


@pytest.mark.parametrize("path", SLOW, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_slow_file_names_what_it_covers(path: Path) -> None:
    covered = [
        ast.literal_eval(arg) for call in marker_calls(path) for arg in call.args if isinstance(arg, ast.Constant)
    ]
    assert covered, 'write pytestmark = pytest.mark.covers("ekiben/PACKAGE", …)'
    assert [name for name in covered if not (ROOT / name).exists()] == []


def test_every_package_is_covered_by_slow_tests() -> None:
    """Of those that talk to other programs, each; pure ones have their unit tests."""
    covered = {
        ast.literal_eval(arg)
        for path in SLOW
        for call in marker_calls(path)
        for arg in call.args
        if isinstance(arg, ast.Constant)
    }
    pure = {"ekiben/spec"}
    packages = {f"ekiben/{path.parent.name}" for path in (ROOT / "ekiben").glob("*/__init__.py")} - pure
    tasks = {
        f"entrypoints/ekiben_tasks/{path.parent.name}"
        for path in (ROOT / "entrypoints/ekiben_tasks").glob("*/__init__.py")
    }
    recipes = {f"recipes/{path.parent.name}" for path in (ROOT / "recipes").glob("*/recipe.yaml")}
    assert (
        sorted(
            name
            for name in packages | tasks | recipes | {"images"}
            if not any(name == item or name.startswith(f"{item}/") or item.startswith(f"{name}/") for item in covered)
        )
        == []
    )
