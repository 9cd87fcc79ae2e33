"""The scripts of the last layer: any text of a recipe is text in them, and never a command."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError
from ekiben.formats.layer import File
from support.sample_recipe import RECIPE, SampleRecipe, chain_of


def top_files(sample: SampleRecipe) -> dict[str, File]:
    return {file.destination: file for file in chain_of(sample).top.files}


def script(sample: SampleRecipe, path: str) -> str:
    return top_files(sample)[path].content.decode()


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


SHOW = """\
import os, sys
import beside, helper.part, inner
print(os.environ.get("RANK", "-"), os.environ.get("WORLD_SIZE", "-"), inner.NAME, *sys.argv[1:], flush=True)
"""


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"EKIBEN_CPU": "1"}, ["- - deep --epochs 3"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["- - deep --epochs 3"]),
        ({"CUDA_VISIBLE_DEVICES": "5,7"}, ["0 2 deep --epochs 3", "1 2 deep --epochs 3"]),
        ({"EKIBEN_PROCESSES": "3"}, [f"{rank} 3 deep --epochs 3" for rank in range(3)]),
        ({"EKIBEN_PROCESSES": "3", "RANK": "4", "WORLD_SIZE": "8"}, ["4 8 deep --epochs 3"]),
        ({"EKIBEN_PROCESSES": "3", "EKIBEN_FAILURE_DIR": "/"}, ["- - deep --epochs 3"]),
    ],
)
def test_command_of_a_task(sample: SampleRecipe, tmp_path: Path, environment: dict[str, str], shown: list[str]) -> None:
    """Its modules are found, its data are there, and it is started once for each GPU of this machine."""
    command = "python -m package.train --epochs 3"
    tasks = {"train": {"command": command, "help": "x", "launch": "per-gpu"}}
    sample.recipe(tasks=tasks, code=["src/package", "src/helper", "lib", "beside.py"], data=["corpus"])
    for name, text in {
        "src/package/__init__.py": "",
        "src/package/train.py": SHOW,
        "src/package/__pycache__/train.pyc": "x",
        "src/helper/part.py": "",
        "lib/inner.py": "NAME = 'deep'\n",
        "beside.py": "",
        "corpus/a/one.txt": "1",
        "corpus/two.txt": "2",
    }.items():
        sample.write(name, text)
    assert outputs_of(sample, tmp_path, environment, "train") == shown
    shipped = {str(path.relative_to(tmp_path)) for path in (tmp_path / "opt/ekiben/recipe").rglob("*.*")}
    assert {f"opt/ekiben/recipe/corpus/{name}" for name in ("a/one.txt", "two.txt")} <= shipped
    assert not [name for name in shipped if "__pycache__" in name]


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("./tool.sh 'a b' $", "tool a b $ last"),
        ("python tools/show.py tools", "show tools last"),
        ("sh -c 'echo $0 $1'", "last"),
        ("sh tool.sh `", "tool ` last"),
    ],
)
def test_paths_of_code_in_a_command(sample: SampleRecipe, tmp_path: Path, command: str, shown: str) -> None:
    sample.recipe(tasks={"try": {"command": command, "help": "x"}}, code=["tool.sh", "tools"])
    sample.write("tool.sh", '#!/bin/sh\necho tool "$@"\n', 0o755)
    sample.write("tools/show.py", "import sys\nprint('show', *sys.argv[1:])\n")
    assert outputs_of(sample, tmp_path, {}, "try", "last") == [shown]


def outputs_of(sample: SampleRecipe, root: Path, environment: dict[str, str], task: str, *args: str) -> list[str]:
    """Write the last layer below ``root``, run a task's command of it, and return its lines, sorted."""
    for file in top_files(sample).values():
        path = root / file.destination.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        with file.open() as content:
            path.write_bytes(content.read().replace(b"/opt/ekiben", f"{root}/opt/ekiben".encode()))
        path.chmod(file.mode)
    argv = ["/bin/sh", str(root / f"usr/local/bin/{task}"), *args]
    env = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", **environment}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"code": ["gone"]}, "gone is named but .*/gone is not a file"),
        ({"data": ["empty"]}, "empty is named but .*/empty is a folder without files"),
        ({"code": ["../x"]}, r"\.\./x is not a path below"),
    ],
)
def test_missing_code_and_data_are_named(sample: SampleRecipe, changes: dict[str, list[str]], message: str) -> None:
    (sample.path / "empty").mkdir()
    sample.recipe(**changes)
    with pytest.raises(DefinitionError, match=message):
        top_files(sample)
