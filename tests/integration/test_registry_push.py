"""What is pushed is what Docker and Apptainer pull: plain, with a password, over TLS with a CA of one's own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from filecmp import cmp
from pathlib import Path

import pytest

from support.registries import PASSWORD, USER, real_registry
from workspaces import USER as BUILDER
from workspaces import Cli, NewStore, Workspace, need

pytestmark = pytest.mark.covers("ekiben/registry", "ekiben/artifacts")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_registry(tmp_path_factory.mktemp("registry")) as host:
        yield host


def docker(*args: str) -> str:
    return subprocess.run(["docker", *args], check=True, capture_output=True, text=True).stdout


@pytest.mark.guard
def test_docker_pulls_and_runs_the_pushed_image(cli: Cli, hello: Path, plain: str, workspace: Workspace) -> None:
    need("docker")
    made = json.loads(cli.run("--store", hello, "push", "hello", f"{plain}/lab/hello:1", "--json").stdout)
    size = made["sent"]
    assert size > 100e6
    assert json.loads(cli.run("--store", hello, "push", "hello", f"{plain}/lab/hello:1", "--json").stdout)["sent"] == 0
    moved = json.loads(cli.run("--store", hello, "push", "hello", f"{plain}/lab/other:1", "--json").stdout)
    assert (moved["sent"], moved["mounted"]) == (0, 4)
    try:
        docker("pull", "--quiet", f"{plain}/lab/hello:1")
        image = json.loads(docker("image", "inspect", f"{plain}/lab/hello:1"))[0]
        built = json.loads(cli.run("--store", hello, "inspect", "hello", "--json").stdout)
        assert image["Id"] == built["image"]
        assert "Debian" in docker("run", "--rm", "--network=none", image["Id"], "cat", "/etc/os-release")
    finally:
        subprocess.run(["docker", "image", "rm", "--force", f"{plain}/lab/hello:1"], capture_output=True, check=False)
    # Apptainer unpacks and packs it: the same content in a SIF of its own.
    out = workspace.folder("out")
    command = [
        "apptainer",
        "build",
        "--no-https",
        "--mksquashfs-args",
        "-comp zstd -Xcompression-level 1",
        out / "own.sif",
        f"docker://{plain}/lab/hello:1",
    ]
    subprocess.run(command, check=True, capture_output=True)
    subprocess.run(["apptainer", "exec", out / "own.sif", "hello"], check=True, capture_output=True)


def test_pulled_sif_equals_built_one(user_cli: Cli, cli: Cli, hello: Path, plain: str, workspace: Workspace) -> None:
    cli.run("--store", hello, "push", "hello", f"{plain}/lab/hello:2")
    out = workspace.folder("out", BUILDER)
    user_cli.run("--store", out / "store", "pull", f"{plain}/lab/hello:2", "-o", out / "x.sif", cwd=out)
    assert cmp(out / "x.sif", workspace.path / "hello.sif", shallow=False)


def apptainer_pull(ref: str, out: Path, **env: str) -> None:
    command = ["env", *(f"{name}={value}" for name, value in env.items()), "apptainer", "pull", "--force", out, ref]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.guard
def test_apptainer_pulls_the_sif(cli: Cli, hello: Path, plain: str, workspace: Workspace) -> None:
    cli.run("--store", hello, "push", "hello", f"{plain}/lab/hello:sif", "--format", "sif")
    out = workspace.folder("out")
    apptainer_pull(f"oras://{plain}/lab/hello:sif", out / "a.sif")
    assert cmp(out / "a.sif", workspace.path / "hello.sif", shallow=False)
    # And the other way: what Apptainer pushed.
    subprocess.run(
        ["apptainer", "push", out / "a.sif", f"oras://{plain}/lab/theirs:1"], check=True, capture_output=True
    )
    cli.run("pull", f"oras://{plain}/lab/theirs:1", "-o", out / "b.sif", cwd=out)
    assert cmp(out / "b.sif", out / "a.sif", shallow=False)


def test_password_and_custom_ca(user_cli: Cli, new_store: NewStore, workspace: Workspace) -> None:
    """As an ordinary user, with the login that Apptainer keeps and the site's CA."""
    store, folder, home = (
        new_store(BUILDER, "base", "python", "hello"),
        workspace.folder("tls"),
        workspace.folder("home", BUILDER),
    )
    with real_registry(folder, password=True, tls=True) as host:
        env = {"HOME": str(home)}
        argv = ("--store", store, "push", "hello", f"{host}/lab/hello:1", "--format", "sif")
        assert f"the certificate of {host} is not trusted" in user_cli.run(*argv, env=env, code=7, cwd=home).stderr
        env["SSL_CERT_FILE"] = str(folder / "cert.pem")
        refused = user_cli.run(*argv, env=env, code=7, cwd=home).stderr
        assert "401" in refused and f"apptainer registry login oras://{host}" in refused
        variables = [f"{name}={value}" for name, value in env.items()]
        as_user = ["runuser", "-u", BUILDER, "--", "env", *variables, "apptainer"]
        login = [*as_user, "registry", "login", "--username", USER, "--password-stdin", f"oras://{host}"]
        subprocess.run(login, input=PASSWORD, text=True, check=True, capture_output=True, cwd=home)
        user_cli.run(*argv, env=env, cwd=home)
        subprocess.run(
            [*as_user, "pull", home / "a.sif", f"oras://{host}/lab/hello:1"], check=True, capture_output=True, cwd=home
        )
        user_cli.run("--store", store, "pull", f"{host}/lab/hello:1", "-o", home / "b.sif", env=env, cwd=home)
    assert cmp(home / "a.sif", home / "b.sif", shallow=False)
    assert cmp(home / "a.sif", workspace.path / "hello.sif", shallow=False)
