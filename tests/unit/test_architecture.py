"""The structure of the code, proven from its own imports (tests/support/architecture.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.architecture import (
    ROOT,
    builder_modules,
    circles,
    edges,
    floors,
    imports_of,
    long_files,
    long_functions,
    package_graph,
    passed_faces,
    task_modules,
)

MODULES = {"builder": builder_modules(), "tasks": task_modules()}
MOST_FLOORS = {"builder": 7, "tasks": 7}
HEAVY = ("deflate", "zstandard", "requests", "docker", "cyclonedx", "jinja2")


@pytest.mark.parametrize("part", MODULES)
def test_no_circles(part: str) -> None:
    graph = edges(MODULES[part])
    assert len(graph) > 20
    assert circles(graph) == []
    assert circles(package_graph(graph)) == []


@pytest.mark.parametrize("part", MODULES)
def test_few_floors(part: str) -> None:
    assert max(floors(package_graph(edges(MODULES[part]))).values()) <= MOST_FLOORS[part]


@pytest.mark.parametrize("part", MODULES)
def test_packages_are_imported_by_their_faces(part: str) -> None:
    assert passed_faces(MODULES[part]) == []


@pytest.mark.parametrize("part", MODULES)
def test_files_and_functions_are_short(part: str) -> None:
    paths = [*MODULES[part].values()]
    assert long_files(paths, 550) == []
    assert long_functions(paths, 60) == []


def test_entrypoints_never_import_the_builder() -> None:
    paths = [*(ROOT / "entrypoints").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]
    assert len(paths) > 20
    for path in paths:
        assert [item for item in imports_of(path.stem, path) if item.target.split(".")[0] == "ekiben"] == [], path


IMPORT_EACH = f"""
import importlib, os, sys
for face in sys.argv[1:]:
    if os.fork() == 0:  # each in a process of its own, which has imported no other
        importlib.import_module(face)
        print(*(f"{{face}}: {{name}}" for name in {HEAVY!r} if name in sys.modules), sep="\\n", end="", flush=True)
        os._exit(0)
    if os.wait()[1]:
        sys.exit(f"{{face}} cannot be imported")
"""


def test_faces_are_cheap_to_import() -> None:
    faces = [name for name, path in builder_modules().items() if path.name == "__init__.py"]
    assert len(faces) > 10
    argv = [sys.executable, "-c", IMPORT_EACH, *faces]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_circle_private_import_and_long_function_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.architecture.ROOT", tmp_path)
    texts = {
        "top/__init__.py": "", "top/one/__init__.py": "__all__ = ['a']\n", "top/two/__init__.py": "__all__ = []\n",
        "top/one/a.py": "def f():\n    from top.two import b\n" + "    x = 1\n" * 60, "top/two/b.py": "import top.one.a\n",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    from support.architecture import modules_below

    modules = modules_below(tmp_path / "top", "top")
    assert circles(edges(modules)) == [["top.one.a", "top.two.b"]]
    assert passed_faces(modules) == ["top/one/a.py:2: b is not in top.two's __all__"]
    assert long_functions(modules.values(), 60) == ["top/one/a.py:1 f: 62 lines"]
