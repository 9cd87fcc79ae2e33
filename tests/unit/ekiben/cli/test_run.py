"""`run` shows its command, or what is missing."""

from __future__ import annotations

from pathlib import Path

from support.programs import write_program
from support.sample_recipe import RunCli


def test_run_names_the_nearest_task(run_cli: RunCli) -> None:
    message = run_cli("run", "--dry-run", "hello", "helo", code=2).stderr
    assert "recipe 'hello' has no task 'helo'. Did you mean 'hello'?" in message


IMAGE_ID = "0123456789abcdef" * 4
PODMAN = f"""\
#!/bin/sh
echo "$@" >>asked
case "$*" in *"image inspect"*"ekiben/hello:latest"*) echo {IMAGE_ID} ;; *"image inspect"*) exit 125 ;; esac
"""


def test_an_engine_gets_the_id_of_an_image_that_is_here(run_cli: RunCli, tmp_path: Path) -> None:
    """A name is what a registry would be asked for."""
    write_program(tmp_path / "bin/podman", PODMAN)
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    argv = ["run", "--runtime", "podman", "--cpu", "--dry-run"]
    shown = run_cli(*argv, "hello", "hello", "--", "--json", env=env).stdout
    assert shown.endswith(f" sha256:{IMAGE_ID} hello --json\n")
    assert " --pull never " in shown
    for name, options in (("hello-cu124", ("--stack", "cu124")), ("lora-opencalm", ())):
        recipe = name.removesuffix("-cu124")
        done = run_cli(*argv, *options, recipe, env=env, code=4)
        assert f"{name} cannot be run here: podman has no image ekiben/{name}:latest" in done.stderr
        assert f"image {recipe}" in done.stderr.splitlines()[-1]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line for line in asked if "pull" in line.split() or " run " in line] == []


def test_run_prints_its_command_or_an_error(run_cli: RunCli, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    env = {"PATH": str(tools), **dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"), "")}
    write_program(tools / "docker", "#!/bin/sh\necho \"$@\" >>asked\necho 'no daemon answers' >&2\nexit 1\n")
    refused = run_cli("run", "--cpu", "hello", "hello", env=env, code=4).stderr
    assert "hello cannot be run here: neither apptainer nor singularity is on PATH; hello.sif is not there; " in refused
    assert "docker: no daemon answers" in refused
    write_program(tools / "docker", "#!/bin/sh\necho \"$@\" >>asked\necho 'Error: No such image: x' >&2\nexit 1\n")
    assert "docker has no image ekiben/hello:latest" in run_cli("run", "--cpu", "hello", env=env, code=4).stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert {" ".join(line.split()[:2]) for line in asked} == {"image inspect"}
    (tmp_path / "x.sif").touch()
    write_program(tools / "apptainer", "#!/bin/sh\n")
    shown = run_cli("run", "--cpu", "--dry-run", "--sif", "x.sif", "hello", "hello", env=env).stdout
    assert shown == f"+ {tools}/apptainer run --cleanenv --pwd {tmp_path} --bind {tmp_path} x.sif hello\n"
