"""`notebook`: the command it would start, and its refusals; tests/integration/test_notebook.py starts it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ekiben.formats.layer import Entry, write_entries
from ekiben.formats.squashfs.writer import SquashfsWriter
from support.ports import free_port
from support.programs import write_program
from support.sample_recipe import RunCli
from support.small_sifs import blob, make, small_sif


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    """An environment in which just these programs are there."""
    folder = tmp_path / "bin"
    for name in ("docker", "apptainer"):
        write_program(folder / name, "#!/bin/sh\nexit 1\n")
    return {"PATH": str(folder), **dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"), "")}


def test_server_listens_on_this_machine_only(run_cli: RunCli, tools: dict[str, str], tmp_path: Path) -> None:
    """Apptainer shares the machine's network."""
    port = free_port()
    small_sif(tmp_path / "hello-notebook.sif")
    argv = ["notebook", "hello", "--cpu", "--dry-run", "--port", str(port)]
    server = f"ekiben-notebook --port={port}"
    shown = run_cli(*argv, env=tools).stdout
    assert shown.endswith(f"hello-notebook.sif {server} --ip=127.0.0.1 --address=127.0.0.1\n")
    assert " exec --cleanenv " in shown
    shown = run_cli(*argv, "--ip", "0.0.0.0", env=tools).stdout
    assert shown.endswith(f" --ip=0.0.0.0 --address={socket.gethostname()}\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dry-run"], "hello-notebook.sif is not built yet"),
        (["--sif", "x.sif", "--no-start"], "--no-start is for building the image, and --sif names one"),
        (["--sif", "x.sif", "--gpu-arch", "9.0"], "--gpu-arch is for building the image"),
        (["--sif", "x.sif", "--ip", "192.0.2.1"], "--ip 192.0.2.1: Cannot assign requested address"),
        (["--sif", "x.sif", "--ip", "no.such.host.invalid"], "--ip no.such.host.invalid: "),
        (["--sif", "x.sif", "--port", "0"], "0 is not in the range"),
    ],
)
def test_what_cannot_be_is_refused(
    options: list[str], message: str, run_cli: RunCli, tools: dict[str, str], tmp_path: Path
) -> None:
    small_sif(tmp_path / "x.sif")
    assert message in run_cli("notebook", "hello", *options, env=tools, code=2).stderr


def test_port_in_use_is_named_or_the_next_one_taken(run_cli: RunCli, tools: dict[str, str], tmp_path: Path) -> None:
    small_sif(tmp_path / "x.sif")
    argv = ["notebook", "hello", "--cpu", "--dry-run", "--sif", "x.sif"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert f"--port {port} is in use" in run_cli(*argv, "--port", str(port), env=tools, code=2).stderr
    chosen = int(run_cli(*argv, env=tools).stdout.partition("--port=")[2].split()[0])
    with socket.create_server(("127.0.0.1", chosen)):
        assert f"--port={chosen} " not in run_cli(*argv, env=tools).stdout


def sif_with(path: Path, program: str) -> Path:
    """A SIF file that has one program in usr/local/bin."""
    folders = ["", "usr", "usr/local", "usr/local/bin"]
    with path.with_suffix(".squashfs").open("w+b") as out:
        entries = [*((Entry(name, "dir"), None) for name in folders), (Entry(program, "file", size=4), [b"data"])]
        write_entries(entries, SquashfsWriter(out))
    make(path, blob(path.with_suffix(".squashfs"), path.with_suffix(".squashfs").read_bytes()))
    return path


def test_file_with_jupyterlab_is_started(run_cli: RunCli, tools: dict[str, str], tmp_path: Path) -> None:
    sif = sif_with(tmp_path / "x.sif", "usr/local/bin/ekiben-notebook")
    port = free_port()
    shown = run_cli("notebook", sif, "--cpu", "--dry-run", "--port", str(port), env=tools).stdout
    assert f" {sif} ekiben-notebook --port={port} " in shown
    refused = run_cli("notebook", sif, "--no-verify", "--dry-run", env=tools, code=2).stderr
    assert "--no-verify is for building the image, and this one is built" in refused


def test_file_without_jupyterlab_is_refused(run_cli: RunCli, tools: dict[str, str], tmp_path: Path) -> None:
    sif = sif_with(tmp_path / "x.sif", "usr/local/bin/other")
    refused = run_cli("notebook", sif, "--dry-run", env=tools, code=2).stderr
    assert f"{sif} has no JupyterLab: there is no /usr/local/bin/ekiben-notebook in it" in refused
    assert "build RECIPE --layer notebook" in refused
