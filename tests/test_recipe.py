"""recipe.yaml: what is accepted, and the one clear message for each thing that is not."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from builder.errors import DefinitionError, EkibenError, UsageError
from builder.recipe import HOUSE, find_recipe, recipe_folders
from own_recipe import Own


def refusal(own: Own) -> str:
    with pytest.raises(DefinitionError) as caught:
        find_recipe(str(own.path))
    return str(caught.value).replace(str(own.path / "recipe.yaml"), "recipe.yaml")


def test_the_folder_is_the_registry() -> None:
    found = recipe_folders()
    assert {"hello", "lora-opencalm"} <= set(found)
    for name, folder in found.items():
        recipe = find_recipe(name)
        assert (recipe.name, recipe.folder) == (name, folder)
        assert "recipe.yaml" in recipe.members()


@pytest.mark.parametrize("name", sorted(recipe_folders()))
def test_what_a_recipes_scripts_import_is_in_its_image(name: str) -> None:
    """All of it, also what is only imported on a GPU; and nothing that none of them imports."""
    files = {Path(inside).stem: file for inside, file in find_recipe(name).members().items() if inside.endswith(".py")}
    ours = {file.stem for file in (*(HOUSE / "entrypoints").glob("*.py"), *files.values())}
    tasks = {Path(task.entrypoint).stem for task in find_recipe(name).file.tasks.values()}
    imported = set()
    for file in files.values():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
    # DeepSpeed's ways are refused without it, and some recipes' proofs are their own.
    assert (imported & ours) - set(files) <= {"zero", "smoke"}
    assert set(files) - imported - tasks <= {"launch_node"}  # started by the scheduler's job


@pytest.mark.parametrize("how", ["{}", "{}/", "{}/recipe.yaml"])
def test_a_path_names_a_recipe_elsewhere(own: Own, how: str) -> None:
    recipe = find_recipe(how.format(own.path))
    assert recipe.name == "own"
    assert recipe.image_folders == (own.path / "images", HOUSE / "images")


def test_unknown_names() -> None:
    with pytest.raises(UsageError, match=r"no recipe 'helo'\. Did you mean 'hello'\?") as caught:
        find_recipe("helo")
    assert caught.value.hint == "a recipe elsewhere is given as a path"
    with pytest.raises(UsageError, match=r"no recipe 'zzz'\. Known: .*hello"):
        find_recipe("zzz")
    with pytest.raises(UsageError, match=r"\./nowhere: no recipe.yaml there"):
        find_recipe("./nowhere")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layr": "x"}, "recipe.yaml: unknown key 'layr'. Did you mean 'layer'?"),
        ({"layer": 3}, "recipe.yaml: layer: should be a string (found: 3)"),
        ({"layer": None}, "recipe.yaml: layer: should be a string (found: None)"),
        ({"data": "x"}, "recipe.yaml: data: should be a list (found: 'x')"),
        ({"environment": {"A": 1}}, "recipe.yaml: environment.A: should be a string (found: 1)"),
        ({"tasks": []}, "recipe.yaml: tasks: should be a mapping (found: [])"),
        ({"tasks": {"a": {"entrypoint": "a.py", "help": "x", "cfg": "y"}}}, "recipe.yaml: unknown key 'tasks.a.cfg'. Did you mean 'config'?"),
        ({"tasks": {"a": {"help": "x"}}}, "recipe.yaml: key 'tasks.a.entrypoint' is missing"),
        ({"name": "Own Recipe"}, "recipe.yaml: name: a recipe's name is lower-case letters, digits, '.', '_' and '-'"),
        ({"tasks": {"../sh": {"entrypoint": "a.py", "help": "x"}}}, "recipe.yaml: tasks.../sh: a task is a command: letters, digits, '.', '_' and '-'"),
        ({"tasks": {"a": {"entrypoint": "a.py", "help": "x\nrm -rf /"}}}, "recipe.yaml: tasks.a.help: one line is wanted"),
        ({"environment": {"A-B": "x"}}, "recipe.yaml: environment: 'A-B' is no name for a variable: letters, digits and '_'"),
    ],
)  # fmt: skip
def test_what_is_refused(own: Own, change: dict[str, Any], said: str) -> None:
    own.recipe(**change)
    assert refusal(own) == said


def test_all_problems_together(own: Own) -> None:
    own.recipe(layr="x", data=3, test=[])
    assert len(refusal(own).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [\n", "recipe.yaml: is not YAML: "),
        ("\x00", "recipe.yaml: is not YAML: "),
        ("- a\n", "recipe.yaml: the file: should be a mapping (found: ['a'])"),
        ("", "recipe.yaml: key 'name' is missing"),
        ("1: 2\n", "recipe.yaml: the file: keys should be strings (found: 1)"),
    ],
)
def test_what_is_no_recipe_at_all(own: Own, text: str, said: str) -> None:
    own.write("recipe.yaml", text)
    assert refusal(own).startswith(said)


def test_a_recipe_that_cannot_be_read(own: Own) -> None:
    (own.path / "recipe.yaml").write_bytes(b"name: \xff\xfe\n")
    assert refusal(own).startswith("recipe.yaml: is not YAML: ")


class TestMembers:
    def test_files_are_found_in_the_recipe_then_in_the_house(self, own: Own) -> None:
        own.recipe(modules=["settings.py", "greet.py"])
        assert find_recipe(str(own.path)).members() == {
            "recipe.yaml": own.path / "recipe.yaml",
            "entrypoints/greet.py": own.path / "entrypoints/greet.py",
            "entrypoints/settings.py": HOUSE / "entrypoints/settings.py",
            "configs/greet.yaml": own.path / "configs/greet.yaml",
        }

    def test_every_missing_file_is_named(self, own: Own) -> None:
        own.recipe(data=["data/a.txt"], modules=["gone.py"])
        with pytest.raises(DefinitionError) as caught:
            find_recipe(str(own.path)).members()
        assert str(caught.value).splitlines() == [
            f"{own.path}/recipe.yaml: entrypoints/gone.py is named but {own.path}/entrypoints/gone.py is not a file",
            f"{own.path}/recipe.yaml: data/a.txt is named but {own.path}/data/a.txt is not a file",
        ]

    @pytest.mark.parametrize("path", ["../outside.txt", "/etc/passwd", "data/../../outside.txt", "./x", "a//b"])
    def test_files_outside_are_refused(self, own: Own, path: str) -> None:
        (own.path.parent / "outside.txt").write_text("x")
        own.recipe(data=[path])
        with pytest.raises(DefinitionError, match=r"is no path below .*; keep the file there"):
            find_recipe(str(own.path)).members()


def test_an_unknown_task(own: Own) -> None:
    with pytest.raises(EkibenError, match=r"recipe 'own' has no task 'great'\. Did you mean 'greet'\?") as caught:
        find_recipe(str(own.path)).task("great")
    assert caught.value.exit_code == 2


def test_a_link_to_a_file_is_a_file(own: Own, tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("x")
    (own.path / "linked.txt").symlink_to(tmp_path / "real.txt")
    own.recipe(data=["linked.txt"])
    assert find_recipe(str(own.path)).members()["linked.txt"].read_text() == "x"
