"""Options of several commands: empty values, files to write, options without effect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ekiben.cli import root
from ekiben.cli.options import TextType
from ekiben.core.paths import PROJECT_ROOT
from support.compiled import compiled
from support.outputs import TO_FILE, TO_FOLDER, output_arguments
from support.sample_recipe import RunCli, SampleRecipe, seeded

CTX = click.Context(root)


def parameters() -> Iterator[tuple[str, click.Command, click.Parameter]]:
    """Every parameter that is a name or a path."""
    waiting: list[tuple[str, click.Command]] = [("", root)]
    waiting += [(name, found) for name in root.list_commands(CTX) if (found := root.get_command(CTX, name))]
    for name, command in waiting:
        if isinstance(command, click.Group) and command is not root:
            waiting += [(f"{name} {inner}", one) for inner, one in command.commands.items()]
        for param in command.params:
            is_text = isinstance(param.type, click.Path | TextType | click.types.StringParamType)
            if is_text and not (isinstance(param, click.Option) and param.hidden):
                yield f"{name} {param.opts[0]}".strip(), command, param


PARAMETERS = {name: (command, param) for name, command, param in parameters()}


@pytest.mark.parametrize(
    "name", sorted(set(PARAMETERS) - {name for name in PARAMETERS if name.endswith("--build-arg")})
)
def test_every_name_and_path_refuses_to_be_empty(name: str) -> None:
    command, param = PARAMETERS[name]
    ctx = click.Context(command)
    with pytest.raises(click.BadParameter, match="is empty; is a variable of your shell not set"):
        param.type_cast_value(ctx, ("",) if param.multiple or param.nargs == -1 else "")


@pytest.mark.parametrize(
    ("argv", "option"),
    [
        (["--store", "", "plan", "hello"], "--store"),
        (["--shared", "", "plan", "hello"], "--shared"),
        (["publish", "hello", "--to", ""], "--to"),
        (["catalog", ""], "DIR"),
        (["bundle", "hello", "--include", ""], "--include"),
        (["image", "hello", "-o", ""], "'-o' / '--output'"),
        (["image", ""], "RECIPE…"),
        (["push", "hello", "x", "--sign", ""], "--sign"),
        (["plan", "hello", "--stack", ""], "--stack"),
        (["wheels", "export", "x", "-o", ""], "'-o' / '--output'"),
    ],
    ids=" ".join,
)
def test_empty_arguments_are_refused(run_cli: RunCli, argv: list[str], option: str) -> None:
    message = run_cli(*argv, code=2).stderr
    assert "is empty; is a variable of your shell not set?" in message
    assert option in message


def test_an_empty_build_arg_is_refused(run_cli: RunCli) -> None:
    assert "--build-arg : expected NAME=VALUE" in run_cli("plan", "hello", "--build-arg", "", code=2).stderr


# ----------------------------------------------------------------------------------------------------- files to write


@pytest.mark.parametrize("name", TO_FILE)
def test_output_to_folder_or_pipe_fails(run_cli: RunCli, files_only: SampleRecipe, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    argv = output_arguments(files_only)[name]
    assert "-o folder: is a folder; name a file in it" in run_cli(*argv, "-o", "folder", code=2).stderr
    assert "-o pipe: is a pipe" in run_cli(*argv, "-o", "pipe", code=2).stderr
    assert "-o no/x: there is no folder" in run_cli(*argv, "-o", "no/x", code=2).stderr


@pytest.mark.parametrize("name", TO_FOLDER)
def test_output_folder_is_no_file(run_cli: RunCli, files_only: SampleRecipe, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    message = run_cli(*output_arguments(files_only)[name], "-o", "file", code=2).stderr
    assert "-o file: is a file, and a folder is needed" in message
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("is_there", [True, False], ids=["a file", "nothing yet"])
def test_output_link_is_followed(run_cli: RunCli, files_only: SampleRecipe, tmp_path: Path, is_there: bool) -> None:
    store = seeded(files_only, tmp_path / "store", "ground")
    (tmp_path / "disk").mkdir()
    link, file = tmp_path / "link.sif", tmp_path / "disk/real.sif"
    if is_there:
        file.write_text("old")
    link.symlink_to("disk/real.sif")
    run_cli("--store", store.root, *output_arguments(files_only)["image"], "-o", link)
    assert link.is_symlink()
    assert file.read_bytes()[32:42] == b"SIF_MAGIC\0"


def test_the_default_file_is_checked_too(run_cli: RunCli, files_only: SampleRecipe, tmp_path: Path) -> None:
    store = seeded(files_only, tmp_path / "store", "ground")
    (tmp_path / "own.sif").mkdir()
    message = run_cli("--store", store.root, *output_arguments(files_only)["image"], code=2).stderr
    assert "own.sif: is a folder" in message


def test_a_count_is_no_range(run_cli: RunCli) -> None:
    message = run_cli("submit", "--nodes", "x", "hello", "hello", code=2).stderr
    assert "Invalid value for '--nodes': 'x' is not a valid integer." in message


# ---------------------------------------------------------------------------------------------- options without effect


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["image", "hello", "--format", "docker", "-o", "x"], "-o names a file, and --format docker writes none"),
        (["image", "hello", "--format", "docker", "--squash"], "--squash is for a SIF, which --format leaves out"),
        (
            ["run", "hello", "--copy-local", "--runtime", "docker", "--dry-run"],
            "--copy-local copies a SIF, which docker cannot run",
        ),
        (["status", "--runs", "missing"], "--runs: missing is not there"),
        (["logs", "--runs", "missing"], "--runs: missing is not there"),
        (["cancel", "1", "--runs", "missing"], "--runs: missing is not there"),
        (["prune", "--in", ".", "--wheels"], "--wheels is about your own store; leave it out, or leave out --in"),
        (["prune", "--in", ".", "--engines"], "--engines is about your own store"),
        (["publish", "--repair", ".", "hello"], "the argument IMAGE publishes an image, and --repair none"),
        (["submit", "hello"], "Missing argument 'TASK'"),
        (["prune", "--grace", "3"], "--grace is for a shared folder"),
        (["verify", "hello", "--engine", "docker"], "--engine is for --rebuild"),
        (["verify", "hello", "--rebuild", "--sif", "x.sif"], "--sif is not tested by --rebuild"),
        (["verify", "x.sif", "--rebuild"], "--rebuild is for a recipe's image"),
        (["verify", "x.sif", "--stack", "cu124"], "--stack is for a recipe's image"),
        (["doctor", "--record", "hello"], "--record describes this machine; leave out the image, --site and --json"),
        (["doctor", "--record", "--site", "abci-3.0"], "--record describes this machine"),
        (["doctor", "--record", "--json"], "--record describes this machine"),
        (["doctor", "--record", "--stack", "cu124"], "--stack is of no use to --record"),
        (["doctor", "--stack", "cu124"], "--stack is for a recipe's image; name the recipe"),
        (["doctor", "x.sif", "--gpu-arch", "9.0"], "--gpu-arch is for a recipe's image"),
        (["doctor", "hello", "--site", "abci-3.0", "-o", "x"], "-o is about building on this machine"),
        (
            ["lock", "cu130", "--check", "--keep"],
            "--keep is for writing lock files; --check keeps what is locked anyway",
        ),
        (["push", "hello", "127.0.0.1:9/x", "--format", "layers", "--sbom"], "--sbom is for an image"),
        (["push", "hello", "127.0.0.1:9/x", "--format", "layers", "--sign"], "--sign is for an image"),
        (["notebook", "hello", "--no-start", "--port", "9000"], "--port is for starting the image"),
        (["notebook", "hello", "--no-start", "--dry-run"], "--dry-run is for starting the image"),
        (["submit", "--dry-run", "--wait", "hello", "hello"], "--wait is for jobs, and --dry-run submits none"),
        (
            ["image", "hello", "--bundle", "x", "--build-arg", "mirror=http://m/"],
            "--build-arg mirror: --bundle has the packages",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_option_without_effect_is_refused(run_cli: RunCli, tmp_path: Path, argv: list[str], message: str) -> None:
    done = run_cli("--store", tmp_path / "store", *argv, code=2)
    assert f"error: {message}" in done.stderr
    assert done.stdout == "" or json.loads(done.stdout)["error"]["message"] in done.stderr


# -------------------------------------------------------------------------------------------------- errors under --json


def json_commands() -> Iterator[list[str]]:
    """The arguments of every command that has --json."""
    for name in root.list_commands(CTX):
        command = root.get_command(CTX, name)
        inner = command.commands.items() if isinstance(command, click.Group) else ()
        for argv, one in [([name], command), *(([name, key], value) for key, value in inner)]:
            if one is not None and any("--json" in param.opts for param in one.params):
                yield argv


@pytest.mark.parametrize("argv", [*json_commands()], ids=" ".join)
def test_wrong_option_is_reported_as_json(argv: list[str]) -> None:
    done = CliRunner().invoke(root, [*argv, "--json", "--zzz"])
    assert done.exit_code == 2
    assert json.loads(done.stdout) == {"error": {"message": "No such option '--zzz'.", "hint": None, "exit_code": 2}}
    assert "No such option" in done.stderr


@pytest.mark.parametrize("argv", [*json_commands()], ids=" ".join)
def test_file_as_store_is_reported_as_json(argv: list[str], tmp_path: Path) -> None:
    """Every command that works with a store fails, and the others before it, for what they are about is missing."""
    store = tmp_path / "store"
    store.write_text("")
    command = root.get_command(CTX, argv[0])
    inner = command.get_command(CTX, argv[1]) if isinstance(command, click.Group) else command
    assert inner is not None
    required = [param for param in inner.params if param.required]
    values = [
        word for param in required for word in ([param.opts[0]] if isinstance(param, click.Option) else []) + ["hello"]
    ]
    runs = ["--runs", str(store)] if any("--runs" in param.opts for param in inner.params) else []
    done = CliRunner().invoke(root, ["--store", str(store), *argv, *values, *runs, "--json"])
    error = json.loads(done.stdout)["error"]
    assert done.exit_code == error["exit_code"] != 0
    assert error["message"] in done.stderr


@pytest.mark.parametrize(
    "argv",
    [["plan", "--json"], ["nothing", "--json"], ["--store", "", "list", "--json"], ["plan", "x" * 300, "--json"]],
)
def test_errors_before_a_command_runs_are_json(run_cli: RunCli, argv: list[str]) -> None:
    done = run_cli(*argv, code=2)
    assert json.loads(done.stdout)["error"]["message"] in done.stderr


def test_json_for_a_task_is_not_an_option_here(run_cli: RunCli) -> None:
    assert run_cli("run", "hello", "nothing", "--json", code=2).stdout == ""


def test_scripts_of_a_dry_run_as_json(run_cli: RunCli) -> None:
    argv = ("submit", "--scheduler", "slurm", "--dry-run", "--json", "hello", "hello")
    shown = json.loads(run_cli(*argv).stdout)
    assert shown.keys() == {"run", "scripts", "program"}
    (script,) = shown["scripts"].values()
    assert script.startswith("#!/bin/bash\n#SBATCH")


@pytest.mark.parametrize(
    "argv",
    [
        *([name] for name in ("plan", "init", "run", "doctor", "verify", "inspect", "status", "lock")),
        *([name] for name in ("image", "bundle", "notebook", "shell")),
        ["render", "--to", "def"],
        ["publish", "--to", "shared"],
    ],
    ids=" ".join,
)
def test_names_too_long_for_a_file_end_without_traceback(run_cli: RunCli, argv: list[str], tmp_path: Path) -> None:
    name = "x" * 300 + ".sif" * (argv[0] in ("verify", "inspect", "doctor"))
    message = run_cli("--store", tmp_path / "store", *argv, name, code=2).stderr
    assert "has a name of more than 255 bytes" in message


@pytest.mark.timeout(60)
def test_a_pipe_where_a_file_is_read_is_refused(sample: SampleRecipe, tmp_path: Path, run_cli: RunCli) -> None:
    compiled(sample)
    names = ("x.sif", "x.tar", "tiny-1.0-cp311-cp311-linux_x86_64.whl")
    sif, bundle, wheel = (tmp_path / name for name in names)
    for pipe in (sif, bundle, wheel):
        os.mkfifo(pipe)
    for code, arguments in (
        (2, ("inspect", sif)),
        (2, ("diff", sif, sif)),
        (2, ("sbom", sif)),
        (6, ("image", sample.path, "--bundle", bundle)),
        (2, ("wheels", "import", sample.path, wheel)),
    ):
        done = run_cli(*map(str, arguments), code=code, env={"EKIBEN_STORE": str(tmp_path / "store")})
        assert any(text in done.stderr for text in ("it is not a regular file", "is not a regular file"))


def test_python_without_the_requirements_gets_a_hint() -> None:
    done = subprocess.run(
        [sys.executable, "-S", PROJECT_ROOT / "build.py", "--version"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 4
    assert done.stderr.startswith(
        f"error: {sys.executable} has no module 'click'\nhint: run `sh {PROJECT_ROOT}/ekiben/"
    )


@pytest.mark.parametrize(
    ("argv", "environment", "origin"),
    [
        (["--store", "~nobody-here/x", "plan", "hello"], {}, "--store"),
        (["image", "hello", "-o", "~nobody-here/x"], {}, "-o"),
        (["plan", "hello"], {"EKIBEN_STORE": "~nobody-here/x"}, "store (EKIBEN_STORE)"),
        (["plan", "hello"], {"EKIBEN_SHARED": "~nobody-here/x"}, "shared folder (EKIBEN_SHARED)"),
        (["plan", "hello"], {"EKIBEN_RECIPES": "~nobody-here/x"}, "folders of recipes (EKIBEN_RECIPES)"),
    ],
)
def test_a_home_folder_that_nobody_has_is_named(
    run_cli: RunCli, argv: list[str], environment: dict[str, str], origin: str
) -> None:
    done = run_cli(*argv, env=environment, code=2)
    assert done.stderr.startswith(
        f"error: {origin}: ~nobody-here/x begins with a home folder that this machine does not"
    )
    assert done.stderr.endswith("\nhint: write the path without ~, or set HOME\n")
