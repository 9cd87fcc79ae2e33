"""A rendered file gives the same image in plain Docker, plain buildah and plain Apptainer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from workspaces import CA_BUNDLE, USER, Cli, Workspace, give

pytestmark = pytest.mark.covers("ekiben/resolve", "ekiben/spec")

# Path, mode and content of what the recipe's layers put there; a folder's own mode is each tool's affair.
LISTING = r"""
cd /; find opt usr/local \( -type f -o -type l \) -printf '%p %m %l ' \
    \( -type f -exec sha256sum -b {} \; -o -printf '\n' \) | sed 's/ \*.*//' | LC_ALL=C sort
"""


def listing(*command: str | Path) -> set[str]:
    done = subprocess.run([*command, "/bin/sh", "-c", LISTING], capture_output=True, text=True, check=True)
    lines = set(done.stdout.splitlines())
    assert len(lines) > 900
    return lines


@pytest.fixture(scope="module")
def ours(workspace: Workspace, hello: Path) -> set[str]:
    return listing("apptainer", "--silent", "exec", "--cleanenv", "--contain", workspace.path / "hello.sif")


@pytest.fixture(scope="module")
def context(workspace: Workspace, cli: Cli) -> Path:
    """The rendered folder, with the root.tar that the first lines of the Dockerfile say how to make."""
    folder = workspace.folder("dockerfile")
    done = cli.run("render", "hello", "--to", "dockerfile", "-o", folder)
    file = Path(done.stdout.strip())
    make_root = next(line for line in file.read_text().splitlines() if "mmdebstrap" in line).removeprefix("#").strip()
    subprocess.run(make_root, shell=True, cwd=folder, check=True, capture_output=True)
    return folder


def docker_build(context: Path, name: str) -> str:
    """Build ``context`` with BuildKit, and return what it printed of its steps."""
    build = ("/usr/bin/docker", "build", "--progress", "plain", "--network", "host")
    argv = [*build, "--secret", f"id=ca,src={CA_BUNDLE}", "-t", name, "."]
    return subprocess.run(
        argv, cwd=context, check=True, env={**os.environ, "DOCKER_BUILDKIT": "1"}, capture_output=True, text=True
    ).stderr


def test_docker_builds_the_rendered_dockerfile(context: Path, ours: set[str]) -> None:
    if not Path("/usr/bin/docker").exists():
        pytest.skip("docker is not installed (tests/services.sh install docker)")
    name = "ekiben-test/rendered"
    docker_build(context, name)
    try:
        assert listing("/usr/bin/docker", "run", "--rm", name) == ours
        hello = subprocess.run(
            ["/usr/bin/docker", "run", "--rm", name, "hello", "--json"], capture_output=True, check=True
        )
        assert b'"cpus"' in hello.stdout
    finally:
        subprocess.run(["/usr/bin/docker", "rmi", "--force", name], check=False, capture_output=True)


def test_an_edited_entrypoint_runs_no_step_again(context: Path) -> None:
    """BuildKit runs a step again when anything that it mounts has changed."""
    if not Path("/usr/bin/docker").exists():
        pytest.skip("docker is not installed (tests/services.sh install docker)")
    name = "ekiben-test/rendered"
    (script,) = (context / "files").rglob("hello.py")
    original = script.read_bytes()
    try:
        docker_build(context, name)
        script.write_bytes(original + b"# edited\n")
        output = docker_build(context, name)
    finally:
        script.write_bytes(original)
        subprocess.run(["/usr/bin/docker", "rmi", "--force", name], check=False, capture_output=True)
    steps = set(re.findall(r"^#(\d+) \[[^]]+\] RUN ", output, re.MULTILINE))
    assert steps and steps <= set(re.findall(r"^#(\d+) CACHED$", output, re.MULTILINE)), output


def test_buildah_builds_the_rendered_dockerfile(context: Path, ours: set[str]) -> None:
    name = "localhost/ekiben-test/rendered"
    secret = ("--secret", f"id=ca,src={CA_BUNDLE}")
    build = ["buildah", "bud", "--quiet", "--isolation", "chroot", *secret, "-t", name, "."]
    subprocess.run(build, cwd=context, check=True, capture_output=True)
    container = subprocess.run(["buildah", "from", name], check=True, capture_output=True, text=True).stdout.strip()
    try:
        assert listing("buildah", "run", "--isolation", "chroot", container, "--") == ours
    finally:
        subprocess.run(["buildah", "rm", container], check=False, capture_output=True)
        subprocess.run(["buildah", "rmi", "--force", name], check=False, capture_output=True)


def mirror() -> str:
    """Where the host's own apt takes Debian 12 from."""
    form = "$(ORIGIN) $(CODENAME) $(COMPONENT) $(REPO_URI)"
    command = ["apt-get", "indextargets", "--format", form, "Created-By: Packages"]
    lines = subprocess.check_output(command, text=True).splitlines()
    return next(line.split()[3] for line in lines if line.startswith("Debian bookworm main "))


def test_apptainer_builds_the_rendered_definition(workspace: Workspace, cli: Cli, ours: set[str]) -> None:
    """As an ordinary user. Apptainer's own debootstrap module needs debootstrap on the machine."""
    if not shutil.which("debootstrap", path="/usr/sbin:" + os.environ["PATH"]):
        pytest.skip("debootstrap is not installed")
    folder = workspace.folder("def")
    file = Path(cli.run("render", "hello", "--to", "def", "-o", folder).stdout.strip())
    give(folder, USER)
    build = (
        f"cd {folder} && apptainer build --fakeroot --bind {CA_BUNDLE} --build-arg mirror={mirror()} x.sif {file.name}"
    )
    done = subprocess.run(["su", USER, "-c", build], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert listing("apptainer", "--silent", "exec", "--cleanenv", "--contain", folder / "x.sif") == ours
