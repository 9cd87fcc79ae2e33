"""The last, small layer of an image: the recipe's files, a command per task, and what runtimes read
(/.singularity.d).
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from typing import Any, Literal

from ekiben.core.paths import RECIPE_HOME, TESTS
from ekiben.formats.base_config import BASE_RUNSCRIPT, BASE_STARTSCRIPT
from ekiben.formats.layer import File
from ekiben.formats.runtime_files import Scripts, runtime_files
from ekiben.resolve.apps import START, START_FILE
from ekiben.resolve.graph import BuildStage, Layer, ResolvedRecipe, parent_of, stages_of
from ekiben.resolve.keys import KEY_FORMAT, mode_of
from ekiben.spec.bases_lock import bound_base
from ekiben.spec.definition_scripts import is_plain, with_shebang
from ekiben.spec.recipe import LAUNCHER, Recipe, TaskFile
from ekiben.spec.source_folders import follow
from ekiben.spec.stack import read_pins
from ekiben.spec.task_command import PYTHON, parse_command

_BASE_START = f'[ ! -x {BASE_STARTSCRIPT} ] || exec {BASE_STARTSCRIPT} "$@"\n'
_HOME_VARIABLE = "EKIBEN_RECIPE"
_RUNSCRIPT = "/opt/ekiben/runscript"  # the %runscript of a definition for another shell


def add_recipe_layer(resolved: ResolvedRecipe) -> ResolvedRecipe:
    """Add the last, small layer: the recipe's files, a command per task, and runtimes' files (/.singularity.d)."""
    recipe, epoch = resolved.recipe, resolved.stack.file.epoch
    files = shipped_files(recipe)
    python = resolved.stack.file.interpreter
    commands = {name: _command(recipe, name, python) for name in recipe.file.tasks}
    files += [File(f"/usr/local/bin/{name}", 0o755, content=content) for name, content in commands.items()]
    runscript = _last(resolved, "runscript")
    if not is_plain(runscript):
        files.append(File(_RUNSCRIPT, 0o755, content=runscript.encode()))
    scripts = Scripts(
        run=_runscript(recipe, resolved),
        test=_TEST_SCRIPT,
        start=_last(resolved, "startscript") or (_BASE_START if resolved.has_sif_base else ""),
        help=_help(recipe, resolved),
    )
    texts = [script.text for script in resolved.scripts if script.text]
    runtime = runtime_files(resolved.environment, resolved.labels, resolved.deffile, scripts, texts)
    if any(item.final.apps for item in resolved.definitions):
        runtime[START_FILE] = 0o755, START.encode()
    files += [File("/" + path.lstrip("/"), mode, content=content) for path, (mode, content) in runtime.items()]
    metadata: dict[str, Any] = {
        "recipe": recipe.name,
        "stack": resolved.stack.name,
        "layers": [{"name": layer.name, "cache_key": layer.cache_key} for layer in resolved.layers],
    }
    if base := bound_base(resolved.definitions[0].final):
        metadata["base"] = base
    origins = [_origin(layer, stage) for layer in resolved.layers for stage in stages_of(layer.copies)]
    if compiled := [item for item in origins if item["package"]]:
        metadata["compiled"] = compiled
    if resolved.deciding_arguments:  # names only: a value may be a URL with a password
        metadata["arguments"] = list(resolved.deciding_arguments)
    if resolved.scripts:  # their values are in the file EVALUATED
        metadata["environment"] = "evaluated"
    files += _test_files(resolved)
    files.append(File("/opt/ekiben/image.json", 0o644, content=json.dumps(metadata, indent=1).encode() + b"\n"))
    inputs = {
        "format": KEY_FORMAT,
        "parent": parent_of(resolved.layers),
        "kind": "files",
        "files": [[file.destination, file.mode, file.sha256()] for file in files],
        "epoch": epoch,
        "platform": resolved.stack.platform,
    }
    top = Layer(
        name=recipe.name,
        kind="files",
        stage=None,
        files=tuple(files),
        environment=resolved.environment,
        epoch=epoch,
        inputs=inputs,
        scripts=resolved.scripts,
    )
    return replace(resolved, layers=(*resolved.layers, top))


def shipped_files(recipe: Recipe) -> list[File]:
    """Return the recipe's own files, as an image has them. Raises DefinitionError."""
    return [
        File(f"{RECIPE_HOME}/{inside}", mode_of(path), path, real=follow(path))
        for inside, path in recipe.members().items()
    ]


def _origin(layer: Layer, stage: BuildStage) -> dict[str, Any]:
    """Return the provenance of a package: the image contains neither the build stage nor its compilers."""
    inputs, arguments = stage.inputs, stage.stage.arguments
    pins = [pin for file in stage.files for pin in _pins(file)]
    source: dict[str, Any] = {"name": pins[0][0], "version": pins[0][1], "sha256": pins[0][2]} if len(pins) == 1 else {}
    for name, commit in arguments.items():
        if name.endswith("_commit") and commit and commit in stage.stage.post:
            repository = arguments.get(name.removesuffix("_commit") + "_repository", "")
            # Do not publish a folder of this machine, or a URL with a password.
            source = {
                "repository": repository if re.fullmatch(r"(https?|git|ssh)://[^@]+", repository) else "",
                "commit": commit,
            }
    origin = {
        "package": stage.wheel or source.get("name"),
        "layer": layer.name,
        "cache_key": stage.cache_key,
        "source": source,
    }
    if stage.wheel is None:  # it has no code compiled for a GPU
        return origin
    compilers: dict[str, str] = {}
    for below in stage.layers:
        locked = below.inputs.get("packages", {})
        compilers |= {name: version for name, version in locked.items() if re.fullmatch(r"g(?:cc|\+\+)-\d+", name)}
        nvcc = {pin[0]: pin[1] for file in below.files for pin in _pins(file)}.get("nvidia-cuda-nvcc")
        if version := nvcc or (below.stage.arguments.get("nvcc") if below.stage else None):
            compilers["nvcc"] = version
    return {
        **origin,
        "compilers": compilers,
        **{name: inputs[name] for name in ("torch", "cuda", "python", "cxx11_abi", "capabilities")},
    }


def _pins(file: File) -> list[tuple[str, str, list[str]]]:
    """Return name, version and hashes of the pins of a lock file of Python packages."""
    if file.source is None or file.source.suffix != ".lock":
        return []
    return read_pins(file.text())


def _command(recipe: Recipe, name: str, interpreter: str) -> bytes:
    task = recipe.task(name)
    if task.command:
        return _program(recipe, task)
    config = f" --config {_quoted(f'{RECIPE_HOME}/{task.config}')}" if task.config else ""
    python = 'python="/opt/venv/bin/python"; [ -x "$python" ] || python=python3'
    if interpreter:
        python = f'python="{interpreter}"'
    script = _quoted(f"{RECIPE_HOME}/entrypoints/{task.entrypoint}")
    return f'#!/bin/sh\n# {task.help}\n{python}\nexec "$python" {script}{config} "$@"\n'.encode()


def _program(recipe: Recipe, task: TaskFile) -> bytes:
    """Return what starts a task's ``command``: alone, or as the processes of this machine's GPUs, where no launcher of
    a job has started it."""
    members = recipe.members()
    argv = parse_command(task.command, task.launch)
    path = (word.removeprefix("./") for word in argv)
    shown = [
        _quoted(f"{RECIPE_HOME}/{inside}") if inside in members else shlex.quote(word)
        for word, inside in zip(argv, path, strict=True)
    ]
    if argv[0] in PYTHON:
        shown[0] = '"$python"'
    folders = ":".join(f"{RECIPE_HOME}/{folder}".rstrip("/") for folder in recipe.search_folders)
    lines = ["#!/bin/sh", f"# {task.help}"]
    lines += ['python="/opt/venv/bin/python"; [ -x "$python" ] || python=python3']
    if folders:
        lines += [f'export PYTHONPATH={_quoted(folders)}"${{PYTHONPATH:+:$PYTHONPATH}}"']
    lines += [f'set -- {" ".join(shown)} "$@"']
    if task.launch == "per-gpu":
        launcher = f"{RECIPE_HOME}/entrypoints/{LAUNCHER[0]}"
        lines += [_PROCESSES.format(launcher=launcher)]
    return "\n".join([*lines, 'exec "$@"', ""]).encode()


# EKIBEN_FAILURE_DIR is set by the launcher of a job, WORLD_SIZE by it and by torchrun.
_PROCESSES = """\
if [ -z "${{EKIBEN_FAILURE_DIR-}}${{WORLD_SIZE-}}" ]; then
    count=${{EKIBEN_PROCESSES-}}
    existing() {{ [ -e "$1" ] || shift; echo $#; }}
    if [ -n "$count" ]; then :
    elif [ -n "${{EKIBEN_CPU-}}" ]; then count=1
    elif [ -n "${{CUDA_VISIBLE_DEVICES+set}}" ]; then count=$(set -f; IFS=,; set -- $CUDA_VISIBLE_DEVICES; echo $#)
    else count=$(existing /dev/nvidia[0-9]*)
    fi
    case $count in
    0 | 1) ;;
    *[!0-9]*) echo "error: EKIBEN_PROCESSES=$count is not a number of processes" >&2; exit 2 ;;
    *) exec "$python" {launcher} --processes "$count" -- "$@" ;;
    esac
fi"""


def _quoted(path: str) -> str:
    """Return text in double quotes where the shell expands nothing in them."""
    return shlex.quote(path) if re.search(r'[$`"\\!]', path) else f'"{path}"'


def _runscript(recipe: Recipe, resolved: ResolvedRecipe) -> str:
    """Return the %runscript: it runs a task by name. Without arguments it runs the recipe's default task, else the
    %runscript of the highest layer that has one, else it runs the arguments or lists the tasks; without tasks it is the
    program of a base that has one.
    """
    execute = 'if [ $# -gt 0 ]; then exec "$@"; fi\n'
    if recipe.file.default_task:
        return f"{execute}exec {recipe.file.default_task}\n"
    if script := _last(resolved, "runscript"):
        if not is_plain(script):  # tasks are defined for /bin/sh only
            script = f'exec {_RUNSCRIPT} "$@"\n'
        tasks = "|".join(recipe.file.tasks)
        return f'case "${{1-}}" in\n{tasks}) exec "$@" ;;\nesac\n{script}' if tasks else script
    if resolved.has_base_config and not recipe.file.tasks:
        return f'exec {BASE_RUNSCRIPT} "$@"\n'
    text = _tasks(recipe)
    show = f"cat <<'EKIBEN'\n{text}\nEKIBEN"
    if "EKIBEN" in text.split("\n"):  # which would end it
        show = f"printf '%s\\n' {shlex.quote(text)}"
    return f"{execute}{show}\n"


def _tasks(recipe: Recipe) -> str:
    lines = [f"{recipe.name}: {recipe.file.description}"]
    lines += ["", "Tasks (each takes --help):"] if recipe.file.tasks else []
    width = max((len(name) for name in recipe.file.tasks), default=0)
    return "\n".join([*lines, *(f"  {name:<{width}}  {task.help}" for name, task in recipe.file.tasks.items())])


def _last(resolved: ResolvedRecipe, section: Literal["runscript", "startscript"]) -> str:
    """Return the section of the highest layer that has one, as Apptainer does for images on images; else ""."""
    return next((text for item in reversed(resolved.definitions) if (text := getattr(item.final, section))), "")


def _help(recipe: Recipe, resolved: ResolvedRecipe) -> str:
    """Return the text of `apptainer run-help`: the recipe's tasks, and the %help of its layers, the highest first."""
    layers = [
        f"Layer {item.name}:\n{item.final.help.rstrip()}" for item in reversed(resolved.definitions) if item.final.help
    ]
    return "\n\n".join([_tasks(recipe), *layers]) + "\n"


def _test_files(resolved: ResolvedRecipe) -> list[File]:
    """Return every %test of the image as a program, run bottom first: a child passes its parents' tests."""
    return [
        File(f"{TESTS}/{_test_name(number, name)}", 0o755, content=with_shebang(script).encode())
        for number, (name, script) in enumerate(resolved.tests, 1)
    ]


def _test_name(number: int, name: str) -> str:
    return f"{number:02}-{name}.sh"


def separate_test(resolved: ResolvedRecipe) -> str | None:
    """Return the file name of the recipe's own test, "" where it has none.

    None where a test of a layer, or the environment, names the recipe's folder or one of its tasks: the tests of the
    layers may then depend on the recipe's files.
    """
    has_test = bool(resolved.recipe.file.test)
    layer_tests = resolved.tests[: len(resolved.tests) - has_test]
    values = [value for name, value in resolved.environment.items() if (name, value) != (_HOME_VARIABLE, RECIPE_HOME)]
    texts = [*(text for _, text in layer_tests), *(script.text for script in resolved.scripts), *values]
    tasks = "|".join(re.escape(name) for name in resolved.recipe.file.tasks)
    named = rf"{RECIPE_HOME}|{_HOME_VARIABLE}" + (rf"|(?<![\w.-])(?:{tasks})(?![\w.-])" if tasks else "")
    if any(re.search(named, text) for text in texts):
        return None
    return _test_name(len(resolved.tests), resolved.tests[-1][0]) if has_test else ""


_TEST_SCRIPT = f"""\
for script in {TESTS}/*.sh; do
    [ -e "$script" ] || continue
    echo "test: ${{script##*/}}"
    "$script" </dev/null || {{ code=$?; echo "test: ${{script##*/}} FAILED"; exit $code; }}
done
echo "test: all passed"
"""
