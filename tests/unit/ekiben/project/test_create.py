"""A new recipe's folder: what is in it, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError, UsageError
from ekiben.project.create import create_recipe
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from support.sample_recipe import RunCli


def test_the_folder_has_a_recipe_a_layer_a_task_and_instructions(tmp_path: Path) -> None:
    written = create_recipe(tmp_path / "mine")
    assert {str(path.relative_to(tmp_path / "mine")) for path in written} == {
        "README.md",
        "entrypoints/train.py",
        "images/mine-packages.def",
        "recipe.schema.json",
        "recipe.yaml",
        "requirements.txt",
    }
    assert [path for path in written if "@" in path.read_text()] == []


@pytest.mark.parametrize("layer", ["python", "huggingface"])
def test_recipe_uses_the_requested_layer(tmp_path: Path, layer: str) -> None:
    create_recipe(tmp_path / "mine", layer=layer)
    (tmp_path / "mine/images/mine-packages.lock").write_text("tabulate==0.10.0\n")
    names = [item.name for item in resolve(find_recipe(f"{tmp_path}/mine")).layers]
    assert names[-3:] == [layer, "mine-packages", "mine"]


def test_template_task_fits_its_data(tmp_path: Path) -> None:
    create_recipe(tmp_path / "mine")
    (tmp_path / "tabulate.py").write_text("def tabulate(rows, headers):\n    return f'{len(rows)} rows'\n")
    argv = [sys.executable, tmp_path / "mine/entrypoints/train.py", "--steps", "100", "--output", tmp_path / "out"]
    done = subprocess.run(argv, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    model = json.loads((tmp_path / "out/model.json").read_text())
    assert abs(model["slope"] - 3) < 0.05 > abs(model["offset"] + 1)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 100
    assert losses[-1] < 0.02 < 1 < losses[0]
    assert "6 rows" in done.stdout


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Mine", {}, "lower-case"),
        ("hello", {}, "Ekiben has a recipe 'hello'"),
        ("mine", {"layer": "pytorhc"}, "Did you mean 'pytorch'"),
        ("mine", {"layer": "base"}, "it has no Python"),
    ],
)
def test_invalid_recipe_name_is_refused_and_nothing_is_written(
    tmp_path: Path, name: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        create_recipe(tmp_path / name, **options)
    assert [*tmp_path.iterdir()] == []


def test_an_unknown_stack_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DefinitionError, match="no stack 'cu13'"):
        create_recipe(tmp_path / "mine", stack="cu13")


def test_a_folder_with_files_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").write_text("mine\n")
    with pytest.raises(UsageError, match="not empty"):
        create_recipe(tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]


def test_the_command_writes_the_files_and_names_what_is_next(tmp_path: Path, run_cli: RunCli) -> None:
    done = run_cli("init", "mine", "--from", "pytorch")
    assert done.stdout.splitlines()[0] == "mine/README.md"
    assert " lock mine" in done.stderr
    assert "From: pytorch.sif" in (tmp_path / "mine/images/mine-packages.def").read_text()


def test_a_recipe_folder_here_is_found_by_its_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_recipe(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert find_recipe("mine").folder == tmp_path / "mine"
    (tmp_path / "hello").mkdir()
    (tmp_path / "hello/recipe.yaml").write_text("name: other\n")
    assert find_recipe("hello").name == "hello"  # ours: what a command did before the folder was there
