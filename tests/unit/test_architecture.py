"""The structure of the code, proven from its own imports (tests/support/architecture.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.architecture import (
    ROOT,
    builder_modules,
    calls_by_path,
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
    assert long_files(paths, 600) == []
    assert long_functions(paths, 80) == []


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
        "top/__init__.py": "",
        "top/one/__init__.py": "__all__ = ['a']\n",
        "top/two/__init__.py": "__all__ = []\n",
        "top/one/a.py": "def f():\n    from top.two import b\n" + "    x = 1\n" * 60,
        "top/two/b.py": "import top.one.a\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    from support.architecture import modules_below

    modules = modules_below(tmp_path / "top", "top")
    assert circles(edges(modules)) == [["top.one.a", "top.two.b"]]
    assert passed_faces(modules) == ["top/one/a.py:2: b is not in top.two's __all__"]
    assert long_functions(modules.values(), 60) == ["top/one/a.py:1 f: 62 lines"]


# What works in a folder that other users may write, and the calls by path that are left there: FILE FUNCTION CALL → why
# it is safe.
SHARED_FOLDER = ("ekiben/publish/", "ekiben/store/", "ekiben/core/owner.py")
BY_PATH = {
    "core/owner.py is_abandoned Path('/proc', pid).exists": "a process",
    "publish/catalog/pages.py render (HERE / name).read_text": "the program's own templates",
    "publish/catalog/runs.py import_runs folder.exists": "your folders of results",
    "publish/catalog/runs.py _find folder.is_dir": "your folders of results",
    "publish/catalog/runs.py _find os.walk": "your folders of results",
    "publish/catalog/runs.py _read read_regular": "your results",
    "publish/catalog/write.py _inner os.path.realpath": (
        "whether -o lies in the shared folder, which is then walked without links"
    ),
    "store/_staging.py prepare self.root.is_dir": "your own store, before it is opened",
    "store/_staging.py prepare make_folders": "your own store, before it is opened",
    "store/_staging.py prepare self.root.mkdir": "your own store, before it is opened",
    "store/_staging.py translated_errors self.root.exists": "your own store, for a message",
    "store/gc.py _drop_unfinished (store.cache / 'work').glob": "your own cache",
    "store/gc.py _drop_unfinished folder.stat": "your own cache",
    "store/gc.py _drop_unfinished remove_tree": "your own cache",
    "store/shared.py prepare shared_dir.is_dir": "the folder that you name, before it is opened",
    "store/shared.py prepare shared_dir.is_symlink": "the folder that you name, for a message",
    "store/shared.py prepare os.path.lexists": "the folder that you name, for a message",
    "store/shared.py open_shared shared_dir.exists": "the folder that you name, for a message",
    "store/shared.py open_shared shared_dir.is_dir": "the folder that you name, for a message",
    "store/shared.py _exists version.outermost.path.is_dir": "the folder that you name, for a message",
    "store/sif_check.py note_sif Path(name).is_file": "which notes are kept in your own store",
}


def test_nothing_in_a_shared_folder_is_named_by_its_path() -> None:
    """Only core/folder.py names entries of such a folder to the kernel, each relative to a descriptor."""
    calls = set()
    for path in MODULES["builder"].values():
        file = path.relative_to(ROOT).as_posix()
        if file.startswith(SHARED_FOLDER):
            calls |= {f"{file.removeprefix('ekiben/')} {call}" for call in calls_by_path(path)}
    assert calls == BY_PATH.keys()


def test_each_call_of_the_kernel_in_an_open_folder_is_relative_to_it() -> None:
    assert calls_by_path(ROOT / "ekiben/core/folder.py") == {
        "open os.open",
        "names os.listdir",
        "open_file open",
        "create open",
        "_mount_of open",
    }
    assert calls_by_path(ROOT / "ekiben/core/inner_path.py") == {"folder Folder.open"}
