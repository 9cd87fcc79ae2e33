"""`run` shows its command, or what is missing."""

from __future__ import annotations

from pathlib import Path

from support.programs import write_program
from support.sample_recipe import RunCli


def test_run_names_the_nearest_task(run_cli: RunCli) -> None:
    message = run_cli("run", "hello", "helo", "--dry-run", code=2).stderr
    assert "recipe 'hello' has no task 'helo'. Did you mean 'hello'?" in message


def test_run_prints_its_command_or_an_error(run_cli: RunCli, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    env = {"PATH": str(tools), **dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"), "")}
    write_program(tools / "docker", "#!/bin/sh\nexit 1\n")
    shown = run_cli("run", "hello", "hello", "--cpu", "--dry-run", "--", "--json", env=env).stdout
    assert shown.startswith("+ docker run --rm ")
    assert shown.endswith("ekiben/hello:latest hello --json\n")
    other = run_cli("run", "hello", "--cpu", "--dry-run", "--stack", "cu124", "hello", env=env).stdout
    assert other.endswith("ekiben/hello-cu124:latest hello\n")
    (tmp_path / "x.sif").touch()
    write_program(tools / "apptainer", "#!/bin/sh\n")
    shown = run_cli("run", "hello", "hello", "--cpu", "--dry-run", "--sif", "x.sif", env=env).stdout
    assert shown == f"+ {tools}/apptainer run --cleanenv --pwd {tmp_path} --bind {tmp_path} x.sif hello\n"
