"""The scripts of the last layer: any text of a recipe is text in them, and never a command."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError
from support.sample_recipe import RECIPE, SampleRecipe, chain_of


def script(sample: SampleRecipe, path: str) -> str:
    return {file.destination: file for file in chain_of(sample).top.files}[path].content.decode()


def runscript_output(text: str, *args: str) -> str:
    return subprocess.run(["/bin/sh", "-c", text, "sh", *args], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("text", ["one\nEKIBEN\necho made a command", 'it\'s $HOME `id` \\ "x"', "EKIBEN"])
def test_description_is_printed_verbatim(sample: SampleRecipe, text: str) -> None:
    sample.recipe(description=text)
    assert runscript_output(script(sample, "/.singularity.d/runscript")).startswith(f"own: {text}\n\nTasks")


@pytest.mark.parametrize("name", ["greet$HOME.py", 'gr"eet.py', "gr`id`eet.py", "gr eet.py", "gr\\eet.py", "gr'eet.py"])
def test_entrypoint_names_are_quoted(sample: SampleRecipe, name: str, tmp_path: Path) -> None:
    sample.write(f"entrypoints/{name}", "print('hello')\n")
    sample.recipe(tasks={"greet": {"entrypoint": name, "config": f"configs/{name}", "help": "say hello"}})
    sample.write(f"configs/{name}", "{}\n")
    shown = script(sample, "/usr/local/bin/greet").replace('exec "$python"', "printf '%s\\n'")
    assert (
        runscript_output(shown, "a b")
        == f"/opt/ekiben/recipe/entrypoints/{name}\n--config\n/opt/ekiben/recipe/configs/{name}\na b\n"
    )


def test_an_instance_without_a_startscript_gets_no_signal_that_would_end_it(sample: SampleRecipe) -> None:
    assert "kill" not in script(sample, "/.singularity.d/actions/start")


def test_startscript_and_help_of_definitions(sample: SampleRecipe) -> None:
    for layer in ("walls", "roof"):
        with (sample.path / f"images/{layer}.def").open("a") as text:
            text.write(f"\n%startscript\n    echo {layer}\n\n%help\n    The {layer}.\n")
    assert script(sample, "/.singularity.d/startscript") == "#!/bin/sh\n    echo roof\n"
    start = script(sample, "/.singularity.d/actions/start")
    assert start.endswith('exec /.singularity.d/startscript "$@"\n')
    help = script(sample, "/.singularity.d/runscript.help")
    tasks = "\n\nTasks (each takes --help):\n  greet  say hello\n"
    assert help.startswith(f"{RECIPE['name']}: {RECIPE['description']}{tasks}")
    assert help.endswith("\n\nLayer roof:\n    The roof.\n\nLayer walls:\n    The walls.\n")


def test_default_task_runs_without_arguments(sample: SampleRecipe) -> None:
    with (sample.path / "images/roof.def").open("a") as text:
        text.write("\n%runscript\n    echo layer\n")
    sample.recipe(default_task="greet")
    program = "greet() { echo task; exit; }; " + script(sample, "/.singularity.d/runscript").replace("exec ", "")
    assert runscript_output(program) == "task\n"
    assert runscript_output(program, "echo", "a b").startswith("a b\n")
    sample.recipe(default_task="gret")
    with pytest.raises(DefinitionError, match=r"default_task: there is no task 'gret'\. Did you mean 'greet'"):
        script(sample, "")


def test_runscript_of_the_definition_is_used(sample: SampleRecipe) -> None:
    sample.write("images/roof.def", (sample.path / "images/roof.def").read_text() + '\n%runscript\n    echo own "$@"\n')
    text = script(sample, "/.singularity.d/runscript")
    assert runscript_output(text, "a", "b") == "own a b\n"
    assert runscript_output(text) == "own \n" or runscript_output(text) == "own\n"
    assert runscript_output("greet() { echo task; }; " + text.replace("exec ", ""), "greet").startswith("task\n")
    assert RECIPE["tasks"].keys() == {"greet"}


@pytest.mark.parametrize("shebang", ["#!/bin/sh", "  #!/bin/bash", "#!/usr/bin/env python3"])
def test_a_task_comes_before_the_runscript_and_not_before_its_shebang(sample: SampleRecipe, shebang: str) -> None:
    line = "print('hello')" if "python" in shebang else "echo hello"
    roof = (sample.path / "images/roof.def").read_text()
    sample.write("images/roof.def", f"{roof}\n%runscript\n{shebang}\n{line}\n")
    text = script(sample, "/.singularity.d/runscript")
    assert text.startswith("#!/bin/sh\n")
    assert runscript_output("greet() { echo task; exit; }; " + text.replace("exec ", ""), "greet") == "task\n"
    if shebang != "#!/bin/sh":
        program = sample.write("program.sh", script(sample, "/opt/ekiben/runscript"), 0o755)
        text = text.replace("/opt/ekiben/runscript", str(program))
    assert runscript_output(text) == "hello\n"


def test_tests_are_programs_with_a_shebang(sample: SampleRecipe) -> None:
    sample.replace("images/walls.def", "%test\n", "%test -e\n")
    assert script(sample, "/opt/ekiben/tests/01-walls.sh").startswith("#!/bin/sh -e\n")
    assert script(sample, "/opt/ekiben/tests/02-own.sh") == "#!/bin/sh -e\ngreet\n"
    assert '\n    "$script" </dev/null' in script(sample, "/.singularity.d/test")
