"""A recipe made of a project that is there: what is detected, what is written, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ekiben.core.errors import DefinitionError, UsageError
from ekiben.project.existing import ProjectRecipe, plan_recipe
from ekiben.project.from_definition import create_from_definition
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from support.sample_recipe import RunCli

MAIN = 'if __name__ == "__main__":\n    pass\n'
TRAIN = f'"""Train a model.\n\nMore."""\nimport torch\nimport torch.distributed as dist\nimport helper\n{MAIN}'


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def recipe_of(planned: ProjectRecipe, folder: Path) -> dict[str, Any]:
    content = yaml.safe_load(planned.texts[folder / "recipe.yaml"])
    assert isinstance(content, dict)
    return content


# files → tasks (name: command, launch), code, the layer below
PROJECTS: dict[str, tuple[dict[str, str], dict[str, tuple[str, str]], list[str], str]] = {
    "a script": (
        {"train.py": TRAIN, "helper.py": "import numpy\n", "test_train.py": MAIN, "setup.py": MAIN},
        {"train": ("python train.py", "per-gpu")},
        ["helper.py", "train.py"],
        "pytorch",
    ),
    "a package": (
        {
            "src/mine/__init__.py": "",
            "src/mine/__main__.py": "import transformers\n",
            "src/mine/train.py": f"import torch\n{MAIN}",
            "src/mine/other.py": MAIN,
            "tests/__init__.py": "",
            "tests/run.py": MAIN,
        },
        {"train": ("python -m mine.train", "single"), "mine": ("python -m mine", "single")},
        ["src/mine"],
        "huggingface",
    ),
    "console scripts": (
        {
            "mine/__init__.py": "",
            "mine/cli.py": "def main() -> None: ...\n",
            "pyproject.toml": '[project]\nname = "mine"\n[project.scripts]\nmine-go = "mine.cli:main"\nbad = "x"\n',
        },
        {"mine-go": ("python -c 'import sys; from mine.cli import main; sys.exit(main())'", "cpu")},
        ["mine"],
        "python",
    ),
    "scripts in folders, and names of programs": (
        {"data/prepare.py": MAIN, "data/other.py": MAIN, "sort.py": MAIN, ".venv/pyvenv.cfg": "", ".venv/run.py": MAIN},
        {"prepare": ("python data/prepare.py", "cpu"), "sort-project": ("python sort.py", "cpu")},
        ["sort.py", "data/prepare.py"],
        "python",
    ),
    "no syntax of this Python": (
        {"main.py": f"print 1\n{MAIN}"},
        {"main": ("python main.py", "cpu")},
        ["main.py"],
        "python",
    ),
}


@pytest.mark.parametrize("name", PROJECTS)
def test_entrypoints_of_a_project(tmp_path: Path, name: str) -> None:
    files, tasks, code, layer = PROJECTS[name]
    folder = write(tmp_path / "My Project", files)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    recipe = recipe_of(plan_recipe(folder), folder)
    assert {name: (task["command"], task["launch"]) for name, task in recipe["tasks"].items()} == tasks
    assert next(iter(recipe["tasks"])) == recipe["default_task"]
    assert (recipe["name"], recipe["code"], recipe["layer"]) == ("my-project", code, layer)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("files", "layer", "notes"),
    [
        ({"requirements.txt": "torch\nnumpy\n"}, "pytorch", []),
        ({"requirements.txt": "torch\ntabulate\n"}, "mine-packages", []),
        ({"requirements.txt": "torch==1.0\n"}, "mine-packages", []),
        ({"pyproject.toml": '[project]\ndependencies = ["tabulate"]\n'}, "mine-packages", []),
        ({"requirements-gpu.txt": "tabulate\n"}, "mine-packages", []),
        (
            {
                "requirements-a.txt": "tabulate\n",
                "requirements-b.txt": "",
                "uv.lock": "",
                "Dockerfile": "",
                "x.def": "",
            },
            "pytorch",
            ["requirements-a.txt, requirements-b.txt: not used", "uv.lock: not used", "Dockerfile: not used", "x.def:"],
        ),
        ({"more.py": "import wandb, PIL.Image\n"}, "pytorch", ["neither required nor in the layers: pillow, wandb;"]),
        ({"data/text.txt": "x"}, "pytorch", ["data/: not in the image"]),
        ({"prepare.py": f"import os\nos.path.dirname(__file__)\n{MAIN}"}, "pytorch", ["prepare.py: uses __file__"]),
    ],
)
def test_requirements_and_notes(tmp_path: Path, files: dict[str, str], layer: str, notes: list[str]) -> None:
    folder = write(tmp_path / "mine", {"train.py": TRAIN, "helper.py": "", "README.md": "theirs\n", **files})
    planned = plan_recipe(folder)
    assert recipe_of(planned, folder)["layer"] == layer
    definition = folder / "images/mine-packages.def"
    assert ("From: pytorch.sif" in planned.texts.get(definition, "")) == (layer == "mine-packages")
    assert (folder / "EKIBEN.md") in planned.texts
    assert len(planned.notes) == len(notes)
    assert all(note in shown for note, shown in zip(notes, planned.notes, strict=True)), planned.notes
    if "requirements-gpu.txt" in files:
        assert planned.texts[folder / "requirements.txt"] == "-r requirements-gpu.txt\n"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"notes.txt": ""}, "exists and is not empty, and nothing in it can be run"),
        ({"train.py": MAIN, "recipe.yaml": ""}, "recipe.yaml exists: the folder is a recipe"),
        ({"train.py": MAIN, "README.md": "", "EKIBEN.md": ""}, "EKIBEN.md exists, and is not overwritten"),
        ({"train.py": MAIN, "pyproject.toml": "a ="}, "pyproject.toml: cannot be read: Invalid value"),
    ],
)
def test_nothing_is_overwritten(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_recipe(write(tmp_path / "mine", files))


def test_init_of_a_project(tmp_path: Path, run_cli: RunCli) -> None:
    """With --dry-run nothing is written; then the recipe can be resolved as it is."""
    folder = write(tmp_path / "mine", {"train.py": TRAIN, "helper.py": "", "configs/a.yaml": "a: 1\n"})
    shown = run_cli("init", str(folder), "--dry-run").stdout
    assert f"{folder}/recipe.yaml:\n    name: mine\n" in shown
    assert not (folder / "recipe.yaml").exists()
    done = run_cli("init", str(folder))
    assert done.stdout.splitlines() == [f"{folder}/recipe.yaml", f"{folder}/README.md"]
    assert done.stderr.endswith(f"run {folder} train\n")
    members = find_recipe(f"{folder}/").members()
    assert {"train.py", "helper.py", "configs/a.yaml", "entrypoints/launch_node.py"} <= members.keys()
    assert [layer.name for layer in resolve(find_recipe(str(folder))).layers][-2:] == ["pytorch", "mine"]


DEFINITION = """\
Bootstrap: docker
From: registry.example.org/lab/base@sha256:{digest}

%files
    tool.sh /opt/tool.sh
    tree /opt/tree

%runscript
    /opt/tool.sh "$@"
"""


def test_recipe_from_a_definition_file(tmp_path: Path) -> None:
    files = {
        "solver.def": DEFINITION.format(digest="0" * 64),
        "tool.sh": "#!/bin/sh\n",
        "tree/a/b.txt": "b",
        "other": "",
    }
    write(tmp_path / "lab", files)
    (tmp_path / "lab/tool.sh").chmod(0o755)
    written = create_from_definition(tmp_path / "mine", tmp_path / "lab/solver.def")
    names = ["images/mine-image.def", "recipe.yaml", "README.md", "tool.sh", "tree/a/b.txt"]
    assert [path.relative_to(tmp_path / "mine").as_posix() for path in written] == names
    assert (tmp_path / "mine/tool.sh").stat().st_mode & 0o111
    assert [layer.name for layer in resolve(find_recipe(f"{tmp_path}/mine")).layers][-2:] == ["mine-image", "mine"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    tree", "    gone", r"solver.def:6: %files: .*/gone is not there, or an empty folder"),
        ("    tree", "    ../x", r"solver.def:6: %files: \.\./x is outside the definition's folder"),
        ("%runscript", "%setup", "%setup is refused"),
        ("Bootstrap: docker\nFrom: registry", "Bootstrap: localimage\nFrom: ./registry", "is a file's path"),
    ],
)
def test_unusable_definition_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = DEFINITION.format(digest="0" * 64).replace(old, new)
    write(tmp_path / "lab", {"solver.def": text, "tool.sh": "", "tree/a": ""})
    with pytest.raises(DefinitionError, match=message):
        create_from_definition(tmp_path / "mine", tmp_path / "lab/solver.def")
    assert not (tmp_path / "mine").exists()
