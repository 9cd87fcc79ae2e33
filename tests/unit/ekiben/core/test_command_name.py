"""How the program was started, as a command that works when pasted."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from ekiben.core.command_name import command_name, program_name, set_command_options, typed_name
from support.sample_recipe import RunCli


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("build.py", "bin/ekiben", "my tools/build.py", "plain.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch(0o644 if name == "plain.py" else 0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    return tmp_path


@pytest.mark.parametrize(
    ("started", "script", "name"),
    [
        (".venv/bin/python build.py", "build.py", ".venv/bin/python build.py"),
        ("python3 build.py", "build.py", "python3 build.py"),
        ("python3 ./build.py", "./build.py", "./build.py"),
        ("python3 ./plain.py", "./plain.py", "python3 ./plain.py"),
        ("python3 -X dev ./build.py", "./build.py", "python3 -X dev ./build.py"),
        ("python3 'my tools/build.py'", "my tools/build.py", "'my tools/build.py'"),
        ("python3 -m ekiben", "/x/ekiben/__main__.py", "python3 -m ekiben"),
        ("python3 -c 'import x' build.py", "build.py", "build.py"),
        ("/usr/bin/python3 {}/bin/ekiben", "{}/bin/ekiben", "ekiben"),
        ("/usr/bin/python3 bin/ekiben", "bin/ekiben", "ekiben"),
        ("/usr/bin/python3 other/ekiben", "other/ekiben", "other/ekiben"),
    ],
)
@pytest.mark.parametrize("arguments", [[], ["plan", "hello", "-v"]], ids=len)
def test_command_name_is_as_typed(folder: Path, started: str, script: str, name: str, arguments: list[str]) -> None:
    argv = shlex.split(started.format(folder))
    assert typed_name([script.format(folder), *arguments], [*argv, *arguments]) == name


def test_printed_commands_use_the_store_that_the_command_line_named(run_cli: RunCli, tmp_path: Path) -> None:
    refused = run_cli("--store", tmp_path / "my store", "run", "hello", "hello", code=4, env={"PATH": "/nowhere"})
    assert f"--store '{tmp_path}/my store' build hello" in refused.stderr
    set_command_options({"--store": tmp_path, "--shared": None})
    try:
        assert command_name() == f"{program_name()} --store {tmp_path}"
    finally:
        set_command_options({})
    assert command_name() == program_name()
