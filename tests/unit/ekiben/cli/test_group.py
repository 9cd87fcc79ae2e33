"""The group of all commands: help, sections, names, errors, exit codes, what is imported."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import ekiben
from ekiben.artifacts.exporters.sif import make_sif
from ekiben.cli import commands, root
from ekiben.cli.group import ALIASES, SECTIONS
from ekiben.core.errors import EkibenError
from ekiben.store import Store
from support.cli_audit import ROOT, audit, audit_forked
from support.sample_recipe import RunCli, SampleRecipe, image_of, seeded
from support.small_sifs import small_sif

CTX = click.Context(root)
NAMES = root.list_commands(CTX)
LIBRARIES = {"pydantic", "docker", "rich", "zstandard", "requests", "ssl"}
HEAVY = {
    *LIBRARIES,
    "yaml",
    "multiprocessing",
    "ekiben.resolve.resolve",
    "ekiben.store.store",
    "ekiben.formats.squashfs",
}


def command_named(name: str) -> click.Command:
    found = root.get_command(CTX, name)
    assert found is not None
    return found


def all_commands() -> Iterator[tuple[str, click.Command]]:
    for name in NAMES:
        command = command_named(name)
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {inner}", one) for inner, one in command.commands.items())


COMMANDS = dict(all_commands())


# ---------------------------------------------------------------------------------------------------- loaded on demand


def test_help_imports_no_command_and_touches_nothing(tmp_path: Path) -> None:
    found = audit(tmp_path, "--help")
    assert "click" in found.modules
    assert found.modules & HEAVY == set()
    assert [name for name in found.modules if name.startswith("ekiben.cli.commands.")] == []
    assert (found.code, found.effects) == (0, [])


@pytest.mark.parametrize(
    "argv", [[], ["plan", "--help"], ["image", "-h"], ["prune", "--help"], ["--version"]], ids=" ".join
)
def test_help_of_a_command_touches_nothing(tmp_path: Path, argv: list[str]) -> None:
    found = audit(tmp_path, *argv)
    assert (found.code, found.effects) == (0, [])
    assert found.modules & LIBRARIES == set()


def test_plan_touches_nothing_and_imports_one_command(tmp_path: Path) -> None:
    found = audit(tmp_path, "plan", "hello")
    assert (found.code, found.effects) == (0, [])
    assert {"ekiben.resolve.resolve", "ekiben.store.store"} <= found.modules
    assert [name for name in found.modules if name.startswith("ekiben.cli.commands.")] == ["ekiben.cli.commands.plan"]
    assert found.modules & {"docker", "rich", "pydantic"} == set()


@pytest.mark.parametrize(
    "argv",
    [
        ["imgae"],
        ["image"],
        ["image", "hello", "--frmat", "sif"],
        ["image", "hello", "--format", "sfi"],
        ["plan", "hello", "--build-arg", "x"],
        ["plan", "helo"],
        ["image", "hello", "--engine", "dokcer"],
        ["image", "hello", "-o", "no/x.sif"],
        ["image", "hello", "lora-opencalm", "-o", "x"],
        ["run", "hello", "helo"],
        ["image", "hello", "helo"],
    ],
    ids=" ".join,
)
def test_unknown_command_exits_with_2_and_touches_nothing(tmp_path: Path, argv: list[str]) -> None:
    found = audit_forked(tmp_path, *argv)
    assert (found.code, found.effects) == (2, [])


def test_command_is_added_by_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "greet.py").write_text(
        '"""Greet somebody.\n\nMore of it.\n"""\n\nimport click\n\n'
        '@click.command("greet", help=__doc__)\ndef command():\n    click.echo("hello")\n'
    )
    (tmp_path / "_helper.py").write_text("raise AssertionError\n")
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    shown = root.get_help(CTX).splitlines()
    manage = shown[shown.index("Manage:") :]
    assert any(line.split() == ["greet", "Greet", "somebody"] for line in manage)
    assert "helper" not in "\n".join(shown)
    assert command_named("greet").callback is not None


# ---------------------------------------------------------------------------------------------------------------- help


def test_help_lists_every_command_in_a_section_uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = [name for section in SECTIONS.values() for name in section]
    assert sorted(listed) == NAMES
    shown = root.get_help(click.Context(root, info_name="ekiben", max_content_width=80)).splitlines()
    assert [line for line in shown if len(line) > 80 or ("..." in line and "[ARGS]" not in line)] == []
    for title, names in SECTIONS.items():
        rows = shown[shown.index(f"{title}:") + 1 :][: len(names)]
        assert [row.split()[0] for row in rows] == list(names)
        assert all(len(row.split(None, 1)[1]) <= 50 for row in rows)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_that_parses(name: str) -> None:
    command = COMMANDS[name]
    text = command.get_help(click.Context(command, info_name=name))
    summary = (command.help or "").splitlines()[0]
    assert len(summary.rstrip(".")) <= 50
    assert "\n  Examples:\n" in text or "\n  Example:\n" in text
    examples = [
        line.split("ekiben ")[1]
        for line in re.sub(r" \\\n +", " ", text).splitlines()
        if line.startswith("    ekiben ")
    ]
    assert examples, f"{name} --help shows no example"
    for example in examples:
        argv = example.split("   ")[0].split()
        assert argv[: len(name.split())] == name.split()
        if name != "completion":
            command.make_context(name, argv[len(name.split()) :])
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.help, f"{name} {parameter.opts}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_metavar_or_choices(name: str) -> None:
    command = COMMANDS[name]
    for param in command.params:
        if isinstance(param, click.Option) and not param.is_flag and not param.hidden:
            shown = param.make_metavar(click.Context(command))
            assert shown not in {"TEXT", "PATH", "INTEGER", "FLOAT", "PLUGIN", "RECIPE", "KEY"}, f"{name} {param.opts}"


def test_help_names_the_program_as_it_was_started(tmp_path: Path) -> None:
    def shown(*args: str, cwd: Path = ROOT, pythonpath: Path | None = None) -> str:
        env = {**os.environ, "PYTHONPATH": str(pythonpath or "")}
        return subprocess.run(args, cwd=cwd, env=env, capture_output=True, text=True, check=True).stdout

    python = sys.executable
    assert f"Usage: {python} build.py plan" in shown(python, "build.py", "plan", "--help")
    assert f"Usage: {python} -P -X utf8 {ROOT}/build.py plan" in shown(
        python, "-P", "-X", "utf8", f"{ROOT}/build.py", "plan", "-h", cwd=tmp_path, pythonpath=ROOT
    )
    module = shown(python, "-m", "ekiben", "plan", "--help")
    assert f"Usage: {python} -m ekiben plan" in module
    assert f"\n    {python} -m ekiben plan lora-opencalm\n" in module


def test_an_installed_program_is_called_ekiben(tmp_path: Path) -> None:
    script = tmp_path / "bin" / "ekiben"
    script.parent.mkdir()
    script.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom ekiben.cli import main\nmain()\n"
    )
    script.chmod(0o755)
    env = {**os.environ, "PATH": f"{script.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["ekiben", "build"], env=env, capture_output=True, text=True, check=False)
    assert done.stderr.startswith("Usage: ekiben build [OPTIONS] RECIPE…\nTry 'ekiben build --help' for help.")
    away = subprocess.run([script, "build"], capture_output=True, text=True, check=False)
    assert away.stderr.startswith(f"Usage: {script} build")


def test_version_is_that_of_the_distribution(run_cli: RunCli) -> None:
    written = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert written.get("version", ekiben.__version__) == ekiben.__version__
    assert run_cli("--version").stdout == f"ekiben {ekiben.__version__}\n"


def test_no_command_shows_recipes_and_next_commands(run_cli: RunCli, sample: SampleRecipe) -> None:
    shown = run_cli().stdout
    assert "Recipes in this folder: ./own\n" in shown
    assert "hello" in shown.splitlines()[1]
    assert "build.py plan ./own " in shown
    assert "build.py build ./own " in shown
    assert len(shown.splitlines()) <= 8
    (line,) = (line for line in shown.splitlines() if " plan " in line)
    argv = line.split("   ")[0].split()
    assert subprocess.run(argv, cwd=sample.path.parent, capture_output=True, check=False).returncode == 0


def test_no_command_lists_images_and_commands_for_them(
    run_cli: RunCli, files_only: SampleRecipe, store: Store, tmp_path: Path
) -> None:
    make_sif(image_of(files_only, store), store, tmp_path / "own.sif", squash=False)
    files_only.write("requirements.txt", "six\n")
    shown = run_cli().stdout
    assert "Images in this folder:  ./own.sif\n" in shown
    for arguments in ("run ./own greet", "shell ./own", "lock ./own", "build ./own"):
        assert f"build.py {arguments} " in shown
    shutil.rmtree(files_only.path)
    shown = run_cli().stdout
    assert "build.py run ./own.sif greet " in shown
    assert " build ./own.sif" not in shown


def test_hostile_file_names_are_in_no_command(run_cli: RunCli, tmp_path: Path) -> None:
    """Files of others may have any name: it is shown, and no command is made of it."""
    small_sif(tmp_path / "evil\x1b[2J; rm -rf ~\nx.sif")
    (tmp_path / "a\nb").mkdir()
    (tmp_path / "a\nb/recipe.yaml").touch()
    shown = run_cli().stdout
    assert "./evil\\x1b[2J; rm -rf ~\\nx.sif\n" in shown
    assert "./a\\nb\n" in shown
    assert "\x1b" not in shown
    assert [line for line in shown.splitlines() if "build.py" in line and ("evil" in line or "a\\nb" in line)] == []
    assert "build.py build hello " in shown


def test_a_folder_here_with_the_name_of_a_known_recipe_is_named(run_cli: RunCli, tmp_path: Path) -> None:
    known = tmp_path / "hello"
    known.mkdir()
    (known / "recipe.yaml").write_text("name: hello\n")
    for command in (("plan",), ("run", "--dry-run", "--runtime", "apptainer")):
        shown = run_cli(*command, "hello", code=0 if command == ("plan",) else 4).stderr
        assert f"hello is the recipe in {ROOT}/recipes/hello; the one in this folder is ./hello" in shown


# ------------------------------------------------------------------------------------------------------- names, errors


def test_image_is_another_name_of_build(run_cli: RunCli) -> None:
    assert ALIASES == {"image": "build"}
    assert "image [OPTIONS] RECIPE…" in " ".join(run_cli("image", "--help").stdout.split())
    assert "image" not in NAMES


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["imgae", "hello"], "no command 'imgae'. Did you mean 'image'?"),
        (["biuld", "hello"], "no command 'biuld'. Did you mean 'build'?"),
        (["wheels", "lst"], "Did you mean 'list'?"),
        (["image", "hello", "--enigne", "docker"], "Did you mean '--engine'?"),
        (["image"], "Missing argument 'RECIPE…'"),
        (["image", "hello", "--store", "x"], "build.py --store … image"),
        (["image", "hello", "--store", "x"], "'--store' comes before the command: "),
        (
            ["push", "hello", "x", "--format", "dokcer"],
            "'dokcer' is not one of 'docker', 'sif', 'layers'. Did you mean 'docker'?",
        ),
        (
            ["render", "hello", "--to", "docker"],
            "'docker' is not one of 'dockerfile', 'def', 'compose', 'devcontainer'. Did you mean 'dockerfile'?",
        ),
        (
            ["submit", "--scheduler", "slrum", "hello", "hello"],
            "--scheduler: no scheduler 'slrum'. Did you mean 'slurm'?",
        ),
        (["inspect", "nothing"], "no image 'nothing' in"),
    ],
)
def test_unknown_commands_name_the_nearest(run_cli: RunCli, tmp_path: Path, argv: list[str], message: str) -> None:
    done = run_cli("--store", tmp_path / "store", *argv, code=2)
    assert message in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "store").exists()


def test_every_exit_code_is_of_one_kind() -> None:
    kinds: list[type[EkibenError]] = [EkibenError, *EkibenError.__subclasses__()]
    codes = {kind.exit_code for kind in kinds if kind.__module__ == "ekiben.core.errors"}
    assert codes == set(range(1, 12))


def test_store_from_the_environment(run_cli: RunCli, files_only: SampleRecipe, tmp_path: Path) -> None:
    store = seeded(files_only, tmp_path / "store", "ground", "roof")
    shown = run_cli("plan", files_only.path, env={"EKIBEN_STORE": str(store.root)}).stdout
    assert [line.split()[0] for line in shown.splitlines()] == ["CACHED", "CACHED", "BUILD"]
    cache = tmp_path / "cache/ekiben"
    cache.mkdir(parents=True)
    store.root.rename(cache / "store")
    shown = run_cli("plan", files_only.path, env={"EKIBEN_STORE": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}).stdout
    assert [line.split()[0] for line in shown.splitlines()] == ["CACHED", "CACHED", "BUILD"]


def test_a_broken_config_stops_only_what_reads_it(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "config/ekiben").mkdir(parents=True)
    (tmp_path / "config/ekiben/config.yaml").write_text("sharde: /x\n")
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    assert "unknown key 'sharde'. Did you mean 'shared'?" in run_cli("plan", "hello", env=env, code=3).stderr
    assert run_cli("status", "--json", env=env).stdout == "[]\n"


def test_store_of_another_version_is_an_error(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "version").write_text("99\n")
    message = run_cli("--store", tmp_path, "plan", "hello", code=6).stderr
    assert f"error: {tmp_path} is a store of version 99; this Ekiben reads version 2" in message
    assert "hint: remove it (its content is built or fetched again), or give another folder with --store" in message


def test_verbose_prints_commands_to_paste(sample: SampleRecipe, tmp_path: Path) -> None:
    store = seeded(sample, tmp_path / "store", "ground")
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "build.py"),
            "-v",
            "--store",
            str(store.root),
            "image",
            str(sample.path),
            "--engine",
            "buildah",
        ],
        env={**os.environ, "PATH": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode in (4, 5)
    assert "Traceback" not in done.stderr


# -------------------------------------------------------------------------------------------------- broken surroundings


def run_in_shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in which $EKIBEN starts the program."""
    env = {**os.environ, "EKIBEN": f"{sys.executable} {ROOT / 'build.py'}"}
    return subprocess.run(["sh", "-c", command], cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("stream", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_closed_stream_is_no_error(tmp_path: Path, stream: str) -> None:
    done = run_in_shell(f"$EKIBEN --version {stream}", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_removed_folder_is_named(tmp_path: Path) -> None:
    done = run_in_shell("mkdir gone; cd gone; rmdir ../gone; $EKIBEN --version", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: this folder cannot be used: No such file or directory\nhint: it was removed")


@pytest.mark.parametrize("argv", ["--help", "plan hello"])
def test_output_on_a_full_disk_is_an_error(tmp_path: Path, argv: str) -> None:
    done = run_in_shell(f"EKIBEN_STORE=$PWD/none $EKIBEN {argv} >/dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: No space left on device\n")


# ------------------------------------------------------------------------------------------------------------- Ctrl-C


def test_ctrl_c_at_exit_ends_without_traceback() -> None:
    script = (
        "import atexit, os, signal, sys\n"
        "from ekiben.cli import main\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "sys.argv = ['ekiben', '--version']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
    assert done.stdout == f"ekiben {ekiben.__version__}\n"


@pytest.mark.parametrize("machine", ["idle", "busy"])
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_in_a_destructor_ends_the_command(name: str, code: int, machine: str) -> None:
    """Python prints the exception of a destructor, and continues. On a busy machine a thread is slow to start."""
    slow_start = (
        "start, threading.Thread.start = threading.Thread.start, None\n"
        "def slow(thread):\n"
        "    start(thread)\n"
        "    time.sleep(0.1)\n"
        "threading.Thread.start = slow\n"
    )
    script = (
        "import signal, sys, threading, time\n"
        + (slow_start if machine == "busy" else "")
        + "from ekiben.cli.group import main, root\n"
        "class Closing:\n"
        f"    def __del__(self): signal.raise_signal(signal.{name})\n"
        "def work(*_, **__):\n"
        "    Closing()\n"
        "    time.sleep(60)\n"
        "root.get_command(None, 'list').callback = work\n"
        "sys.argv = ['ekiben', 'list']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False, timeout=50
    )
    assert (done.returncode, done.stderr) == (
        code,
        "interrupted; what was finished is kept, run the same command to resume\n",
    )


def test_ctrl_c_while_arguments_are_read_has_the_code_of_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(click.Group, "parse_args", interrupt)
    result = CliRunner().invoke(root, ["list"])
    assert result.exit_code == 130
    assert result.stderr == "interrupted; what was finished is kept, run the same command to resume\n"


def test_interrupted_command_names_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        error = KeyboardInterrupt()
        error.add_note("the jobs stay in the queue")
        raise error

    monkeypatch.setattr(click.Group, "parse_args", interrupt)
    assert CliRunner().invoke(root, ["list"]).stderr == "interrupted; the jobs stay in the queue\n"


def test_ctrl_c_while_an_error_is_printed_has_the_code_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(click, "secho", interrupt)
    result = CliRunner().invoke(root, ["--store", str(tmp_path), "plan", "no-such-recipe"])
    assert result.exit_code == 130
    assert result.stderr == "interrupted; what was finished is kept, run the same command to resume\n"


def test_ctrl_c_after_a_command_has_ended_has_the_code_of_an_interrupt(tmp_path: Path) -> None:
    """While click closes the command's context."""
    script = (
        "import sys, click; from ekiben.cli.group import main\n"
        "def interrupt(*_): raise KeyboardInterrupt\n"
        "click.Context.__exit__ = interrupt; sys.argv = ['ekiben', '--store', sys.argv[1], 'list']; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "interrupted; what was finished is kept, run the same command to resume"
    assert "Aborted" not in done.stderr


@pytest.mark.parametrize("name", ["", *root.list_commands(click.Context(root))])
def test_help_fits_80_columns_and_its_examples_can_be_pasted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ekiben.cli.options.program_name", lambda: "/home/someone/checkout/.venv/bin/python build.py")
    command = root.get_command(click.Context(root), name) if name else root
    assert command
    shown = command.get_help(click.Context(command, info_name=name, terminal_width=80))
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    joined = re.sub(r" \\\n +", " ", shown)
    written = [line for line in (command.help or "").splitlines() if line.startswith("  ekiben ")]
    for line in written:
        argv = line.strip().removeprefix("ekiben ").split("  ")[0].split()
        assert " ".join(argv) in " ".join(joined.split())


@pytest.mark.parametrize("no_color", [False, True])
def test_headings_of_help_are_bold_on_a_terminal_but_with_no_color(no_color: bool) -> None:
    reader, writer = os.openpty()
    env = {**{name: value for name, value in os.environ.items() if name != "NO_COLOR"}, "TERM": "xterm"}
    argv = [sys.executable, str(ROOT / "build.py"), "exec", "--help"]
    with subprocess.Popen(argv, stdout=writer, env={**env, **({"NO_COLOR": "1"} if no_color else {})}) as process:
        os.close(writer)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while data := os.read(reader, 1 << 16):
                shown += data
        os.close(reader)
    assert process.returncode == 0
    assert (b"\x1b[1mOptions:\x1b[0m" in shown) == (not no_color)
    assert b"Options:" in shown
