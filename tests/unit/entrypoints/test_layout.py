"""The tasks' code as a whole: who imports whom, and what an import costs."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
ENTRYPOINTS = Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"
sys.path[:0] = [str(ENTRYPOINTS), str(ROOT / "entrypoints")]
LIBRARY = ROOT / "entrypoints" / "ekiben_tasks"
FOLDERS = [ROOT / "entrypoints", *sorted((ROOT / "recipes").glob("*/entrypoints"))]
# A package may import those of lower floors.
FLOORS = {"task": 1, "data": 2, "models": 3, "distributed": 4, "generation": 5, "evaluation": 6, "training": 7}


def modules_of(folder: Path) -> dict[str, Path]:
    names = {path.relative_to(folder).with_suffix(""): path for path in folder.rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in names.items()}


def imports_of(path: Path) -> set[str]:
    """All names imported, also inside functions; not what is only there for the type checker."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    hidden = {id(inner) for node in guarded for part in node.body for inner in ast.walk(part)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """The names of a circle, or of none. Takes away again and again what imports nothing that is left."""
    left = dict(graph)
    while free := [name for name, targets in left.items() if not targets & (left.keys() - {name})]:
        for name in free:
            del left[name]
    return sorted(left)


def test_checker_finds_a_circle() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).parts[-2:][0])
def test_modules_import_each_other_without_circles(folder: Path) -> None:
    modules = modules_of(ROOT / "entrypoints") | modules_of(folder)
    assert circle_in({name: imports_of(path) & modules.keys() for name, path in modules.items()}) == []


def test_packages_import_those_of_lower_floors_alone() -> None:
    assert {path.name for path in LIBRARY.iterdir() if path.is_dir() and path.name != "__pycache__"} == FLOORS.keys()
    wrong = []
    for package, floor in FLOORS.items():
        for path in (LIBRARY / package).rglob("*.py"):
            others = {name.split(".")[1] for name in imports_of(path) if name.startswith("ekiben_tasks.")} - {package}
            wrong += [f"{path.relative_to(LIBRARY)} imports {other}" for other in others if FLOORS[other] >= floor]
    assert wrong == []


def test_tasks_never_import_what_builds_images() -> None:
    """What runs inside an image imports nothing of what builds it."""
    paths = [path for folder in FOLDERS for path in folder.rglob("*.py")]
    assert len(paths) > 70
    assert {name.split(".")[0] for path in paths for name in imports_of(path)}.isdisjoint(
        {"ekiben", "builder", "build"}
    )


def test_the_library_imports_no_command() -> None:
    commands = {path.stem for path in (ROOT / "entrypoints").glob("*.py")}
    for path in LIBRARY.rglob("*.py"):
        assert commands.isdisjoint(imports_of(path)), path


@pytest.mark.parametrize("package", ["", *sorted(FLOORS), "distributed/strategies", "models/architectures"])
def test_every_package_names_what_it_holds(package: str) -> None:
    module = importlib.import_module(".".join(["ekiben_tasks", *filter(None, package.split("/"))]))
    assert module.__doc__
    inside = {path.stem for path in (LIBRARY / package).glob("*.py")} | {
        path.name for path in (LIBRARY / package).iterdir() if path.is_dir()
    }
    plugins = package in ("distributed/strategies", "models/architectures")  # the folder says what there is
    assert set(module.__all__) == (set() if plugins else inside - {"__init__", "__pycache__"})


@pytest.mark.parametrize("command", sorted(path.stem for path in ENTRYPOINTS.glob("*.py")))
def test_importing_a_command_imports_no_heavy_library(command: str) -> None:
    """--help and a wrong setting are answered at once; torch alone takes seconds."""
    program = (
        f"import sys, {command}; print([name for name in ('torch', 'transformers', 'peft', 'numpy') if name in"
        " sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ENTRYPOINTS)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_scores_need_nothing_of_the_harness_and_find_their_samples() -> None:
    """The tasks that several recipes have: each ships the sample that the task reads, and finetune has no lm-eval."""
    samples = {"jsquad.py": "data/sample-squad.json", "perplexity.py": "data/sample-texts.jsonl"}
    recipes = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in ROOT.glob("recipes/*/recipe.yaml")]
    owners = {name: [one for one in recipes if name in str(one["tasks"])] for name in samples}
    assert all({"evaluate", "finetune"} <= {one["name"] for one in named} for named in owners.values())
    assert [one["name"] for name, named in owners.items() for one in named if samples[name] not in one["data"]] == []
    paths = [*LIBRARY.rglob("*.py"), *(ROOT / "entrypoints" / name for name in samples)]
    assert "lm_eval" not in {name.partition(".")[0] for path in paths for name in imports_of(path)}
