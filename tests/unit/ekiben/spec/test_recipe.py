"""recipe.yaml: what is accepted, and the one clear message for each thing that is not."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ekiben.core.errors import DefinitionError, EkibenError, UsageError
from ekiben.core.paths import PROJECT_ROOT
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import LAUNCHER, ShippedRecipe, find_recipe, recipe_folders
from support.sample_recipe import SampleRecipe


def refusal(sample: SampleRecipe) -> str:
    with pytest.raises(DefinitionError) as caught:
        find_recipe(str(sample.path))
    return str(caught.value).replace(str(sample.path / "recipe.yaml"), "recipe.yaml")


def test_the_folder_is_the_registry() -> None:
    found = recipe_folders()
    assert {"hello", "lora-opencalm"} <= set(found)
    for name, folder in found.items():
        recipe = find_recipe(name)
        assert (recipe.name, recipe.folder) == (name, folder)
        assert "recipe.yaml" in recipe.members()


@pytest.mark.parametrize("name", sorted(recipe_folders()))
def test_every_project_module_a_recipe_imports_ships_with_it(name: str) -> None:
    """Also what is only imported on a GPU: no script needs a module of entrypoints/ or recipes/ that is not in the
    image.
    """
    shipped = {inside: file for inside, file in find_recipe(name).members().items() if inside.endswith(".py")}
    ours = {path.stem for folder in ("entrypoints", "recipes") for path in (PROJECT_ROOT / folder).rglob("*.py")}
    missing = []
    for file in shipped.values():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for module in names:
                path = "entrypoints/" + module.replace(".", "/")
                known = f"{path}.py" in shipped or f"{path}/__init__.py" in shipped
                if not known and (
                    module.startswith("ekiben_tasks") or (module in ours and not find_spec_of_library(module))
                ):
                    missing.append(f"{file.name}: {module}")
    assert missing == []


def find_spec_of_library(module: str) -> bool:
    """Whether a package of this name is one of Python's own or of the image's, and not ours."""
    return module.partition(".")[0] in {*sys.stdlib_module_names, "deepspeed"}


@pytest.mark.parametrize("name", sorted(recipe_folders()))
def test_the_task_library_ships_complete(name: str) -> None:
    members = find_recipe(name).members()
    folder = PROJECT_ROOT / "entrypoints"
    library = [path for path in (folder / "ekiben_tasks").rglob("*.py") if "__pycache__" not in path.parts]
    assert len(library) > 20
    for path in [*library, *(folder / name for name in LAUNCHER)]:
        assert members[f"entrypoints/{path.relative_to(folder)}"] == path
    assert not [inside for inside in members if "__pycache__" in inside or inside.endswith(".pyc")]


@pytest.mark.parametrize("how", ["{}", "{}/", "{}/recipe.yaml"])
def test_a_path_names_a_recipe_elsewhere(sample: SampleRecipe, how: str) -> None:
    recipe = find_recipe(how.format(sample.path))
    assert recipe.name == "own"
    assert recipe.image_folders == (sample.path / "images", PROJECT_ROOT / "images")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match=r"no recipe 'helo'\. Did you mean 'hello'\?") as caught:
        find_recipe("helo")
    assert caught.value.hint == "a recipe elsewhere is given as a path"
    with pytest.raises(UsageError, match=r"no recipe 'zzz'\. Known: .*hello"):
        find_recipe("zzz")
    with pytest.raises(UsageError, match=r"\./nowhere: no recipe.yaml there"):
        find_recipe("./nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layr": "x"}, "recipe.yaml: unknown key 'layr'. Did you mean 'layer'?"),
        ({"layer": 3}, "recipe.yaml: layer: should be a string (found: 3)"),
        ({"layer": None}, "recipe.yaml: layer: should be a string (found: None)"),
        ({"data": "x"}, "recipe.yaml: data: should be a list (found: 'x')"),
        ({"environment": {"A": 1}}, "recipe.yaml: environment.A: should be a string (found: 1)"),
        ({"tasks": []}, "recipe.yaml: tasks: should be a mapping (found: [])"),
        (
            {"tasks": {"a": {"entrypoint": "a.py", "help": "x", "cfg": "y"}}},
            "recipe.yaml: unknown key 'tasks.a.cfg'. Did you mean 'config'?",
        ),
        *(
            ({"tasks": {"a": {"help": "x", **task}}}, f"recipe.yaml: tasks.a: {message}")
            for task, message in (
                ({}, "write entrypoint: with a script of entrypoints/, or command: with a program, and not both"),
                (
                    {"entrypoint": "a.py", "command": "python a.py"},
                    "write entrypoint: with a script of entrypoints/, or command: with a program, and not both",
                ),
                (
                    {"command": "python a.py", "config": "a.yaml"},
                    "config: is for an entrypoint; write it into the command, as --config a.yaml",
                ),
                ({"command": "python 'a"}, "command: No closing quotation: python 'a"),
                ({"command": " "}, "command: is empty; write a program and its arguments"),
                ({"command": "a.py"}, "command: write python a.py, for a script of Python needs its Python"),
                ({"command": "a $HOME"}, "command: no shell reads $HOME; write sh -c '…', or a script"),
                ({"command": "a && b"}, "command: no shell reads &&; write sh -c '…', or a script"),
                (
                    {"command": "torchrun a.py", "launch": "per-gpu"},
                    "command: torchrun starts processes, as launch: per-gpu does; write the python command that it"
                    " would start, or launch: single",
                ),
                ({"command": "a", "launch": "once"}, "launch: should be per-gpu, single or cpu (found: 'once')"),
            )
        ),
        ({"code": ["."]}, "recipe.yaml: code: '.' would be all of the folder; name the files and folders in it"),
        ({"name": "Own Recipe"}, "recipe.yaml: name: a recipe's name is lower-case letters, digits, '.', '_' and '-'"),
        (
            {"tasks": {"../sh": {"entrypoint": "a.py", "help": "x"}}},
            "recipe.yaml: tasks.../sh: a task is a command: letters, digits, '.', '_' and '-'",
        ),
        (
            {"tasks": {"a": {"entrypoint": "a.py", "help": "x\nrm -rf /"}}},
            "recipe.yaml: tasks.a.help: should be one line",
        ),
        (
            {"environment": {"A-B": "x"}},
            "recipe.yaml: environment: 'A-B' is not the name of a variable: letters, digits and '_'",
        ),
    ],
)
def test_invalid_recipes_are_refused(sample: SampleRecipe, change: dict[str, Any], message: str) -> None:
    sample.recipe(**change)
    assert refusal(sample) == message


def test_all_problems_are_reported(sample: SampleRecipe) -> None:
    sample.recipe(layr="x", data=3, test=[])
    assert len(refusal(sample).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [\n", "recipe.yaml: is not YAML: "),
        ("\x00", "recipe.yaml: is not YAML: "),
        ("- a\n", "recipe.yaml: the file: should be a mapping (found: ['a'])"),
        ("", "recipe.yaml: key 'name' is missing"),
        ("1: 2\n", "recipe.yaml: the file: keys should be strings (found: 1)"),
    ],
)
def test_file_that_is_no_mapping_is_refused(sample: SampleRecipe, text: str, message: str) -> None:
    sample.write("recipe.yaml", text)
    assert refusal(sample).startswith(message)


def test_unreadable_recipe_is_an_error(sample: SampleRecipe) -> None:
    (sample.path / "recipe.yaml").write_bytes(b"name: \xff\xfe\n")
    assert refusal(sample).startswith("recipe.yaml: is not YAML: ")


class TestMembers:
    def test_files_are_found_in_the_recipe_then_in_the_project(self, sample: SampleRecipe) -> None:
        sample.recipe(
            tasks={
                "greet": {"entrypoint": "greet.py", "config": "configs/greet.yaml", "help": "say hello"},
                "hello": {"entrypoint": "hello.py", "help": "say who"},
            }
        )
        members = find_recipe(str(sample.path)).members()
        library = {inside for inside in members if inside.startswith("entrypoints/ekiben_tasks/")}
        assert {inside: path for inside, path in members.items() if inside not in library} == {
            "recipe.yaml": sample.path / "recipe.yaml",
            "entrypoints/greet.py": sample.path / "entrypoints/greet.py",
            "entrypoints/hello.py": PROJECT_ROOT / "entrypoints/hello.py",
            **{f"entrypoints/{name}": PROJECT_ROOT / "entrypoints" / name for name in LAUNCHER},
            "configs/greet.yaml": sample.path / "configs/greet.yaml",
        }
        assert "entrypoints/ekiben_tasks/task/settings.py" in library

    def test_own_entrypoints_ship_complete_without_bytecode_and_hidden_files(self, sample: SampleRecipe) -> None:
        for name in (
            "helper.py",
            "sub/prompt.txt",
            "__pycache__/greet.cpython-311.pyc",
            ".ipynb_checkpoints/greet.py",
            ".swp",
        ):
            sample.write(f"entrypoints/{name}", "x = 1\n")
        assert {inside for inside in find_recipe(str(sample.path)).members() if inside.startswith("entrypoints/")} == {
            "entrypoints/greet.py",
            "entrypoints/helper.py",
            "entrypoints/sub/prompt.txt",
        }

    def test_a_script_that_imports_the_task_library_gets_it(self, sample: SampleRecipe) -> None:
        sample.write("entrypoints/greet.py", "def main():\n    from ekiben_tasks.task import settings\n")
        members = find_recipe(str(sample.path)).members()
        assert members["entrypoints/ekiben_tasks/__init__.py"] == PROJECT_ROOT / "entrypoints/ekiben_tasks/__init__.py"
        assert members["entrypoints/launch_node.py"] == PROJECT_ROOT / "entrypoints/launch_node.py"

    def test_former_key_modules_is_refused_with_a_hint(self, sample: SampleRecipe) -> None:
        sample.recipe(modules=["settings.py"])
        with pytest.raises(DefinitionError) as caught:
            find_recipe(str(sample.path))
        assert (
            str(caught.value)
            == f"{sample.path}/recipe.yaml: modules: is no longer a key of a recipe; delete it. The library of the"
            " tasks, "
            "ekiben_tasks, and the recipe's own entrypoints/ ship complete"
        )

    def test_every_missing_file_is_named(self, sample: SampleRecipe) -> None:
        sample.recipe(data=["data/a.txt"], tasks={"gone": {"entrypoint": "gone.py", "help": "say hello"}})
        with pytest.raises(DefinitionError) as caught:
            find_recipe(str(sample.path)).members()
        assert str(caught.value).splitlines() == [
            (
                f"{sample.path}/recipe.yaml: entrypoints/gone.py is named but {sample.path}/entrypoints/gone.py is not"
                " a file"
            ),
            f"{sample.path}/recipe.yaml: data/a.txt is named but {sample.path}/data/a.txt is not a file",
        ]

    @pytest.mark.parametrize("path", ["../outside.txt", "/etc/passwd", "data/../../outside.txt", "./x", "a//b"])
    def test_files_outside_are_refused(self, sample: SampleRecipe, path: str) -> None:
        (sample.path.parent / "outside.txt").write_text("x")
        sample.recipe(data=[path])
        with pytest.raises(DefinitionError, match=r"is not a path below .*; keep the file there"):
            find_recipe(str(sample.path)).members()


def test_unknown_task_is_refused(sample: SampleRecipe) -> None:
    with pytest.raises(EkibenError, match=r"recipe 'own' has no task 'great'\. Did you mean 'greet'\?") as caught:
        find_recipe(str(sample.path)).task("great")
    assert caught.value.exit_code == 2


def test_a_link_to_a_file_is_a_file(sample: SampleRecipe) -> None:
    sample.write("real.txt", "x")
    (sample.path / "linked.txt").symlink_to("real.txt")
    sample.recipe(data=["linked.txt"])
    assert find_recipe(str(sample.path)).members()["linked.txt"].read_text() == "x"


@pytest.fixture
def elsewhere(sample: SampleRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of recipes that the user's config.yaml names, with the recipe `chatbot` in it."""
    folder = tmp_path / "lab"
    folder.mkdir()
    sample.path.rename(folder / "chatbot")
    config = tmp_path / "config/ekiben/config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("recipes: [../../lab]\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("EKIBEN_RECIPES")
    return folder


def test_a_folder_of_recipes_elsewhere_is_found_by_name(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recipe_folders()["chatbot"].resolve() == elsewhere / "chatbot"
    assert {"hello", "lora-opencalm"} <= set(recipe_folders())
    assert [layer.name for layer in resolve(find_recipe("chatbot")).layers] == ["ground", "walls", "roof", "own"]
    monkeypatch.setenv("EKIBEN_RECIPES", "")
    assert "chatbot" not in recipe_folders()
    monkeypatch.setenv("EKIBEN_RECIPES", f"/nowhere:{elsewhere}")
    assert find_recipe("chatbot").folder == elsewhere / "chatbot"


def test_two_recipes_of_one_name_are_refused_where_one_is_asked_for(elsewhere: Path) -> None:
    (elsewhere / "chatbot").rename(elsewhere / "hello")
    with pytest.raises(UsageError, match=r"there are several recipes 'hello': .*recipes/hello, .*lab/hello"):
        find_recipe("hello")
    assert find_recipe("lora-opencalm").name == "lora-opencalm"
    assert find_recipe(str(elsewhere / "hello")).name == "own"


def test_a_folder_of_recipes_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EKIBEN_RECIPES", "/nowhere")
    with pytest.raises(UsageError, match="no recipe 'helo'") as caught:
        find_recipe("helo")
    assert "recipes: in config.yaml names /nowhere: there is no such folder" in str(caught.value.hint)


@pytest.mark.parametrize("task", ["x; touch pwned", "../x", "a\nb", "-x", "\x1b[2J", ""])
def test_a_task_of_a_foreign_image_is_a_command(task: str) -> None:
    """People paste lines with it."""
    written = json.dumps({"name": "pilot", "tasks": {task: {"entrypoint": "x.py"}}}).encode()
    with pytest.raises(ValueError, match=r"tasks: .* is not a name of a task"):
        ShippedRecipe.parse(written)
