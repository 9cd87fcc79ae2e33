"""Containers and processes that a killed command leaves: the next command of its user removes them, and `prune`
does.
"""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from ekiben.core.process_name import process_name
from ekiben.executors import OWNER, docker, podman
from workspaces import ME, USER, Cli, NewStore, RecipeFolder, Workspace, as_user, need

pytestmark = pytest.mark.covers("ekiben/executors", "ekiben/builder/verify.py", "ekiben/core", "ekiben/store")

SLEEP = "3791"  # seconds of `sleep`, by which its process is known
Killed: TypeAlias = tuple[str, Cli, list[str], Path, str]
WHERE = [("docker", ME), ("podman", ME), ("podman", USER), ("sif", ME), ("sif", USER)]


def listed(kind: str, cli: Cli, owner: str) -> list[str]:
    """The engine's containers that a process made, running or not. Other tests may have containers meanwhile."""
    if kind == "sif":
        return []
    filters = ("--filter", f"label={OWNER}={owner}", "--format", "{{.Names}}")
    program = ["docker", "ps", "--all"] if kind == "docker" else ["podman", "ps", "--all"]
    return subprocess.run(
        [*program, *filters],
        cwd="/",
        env=cli.settings(),
        capture_output=True,
        text=True,
        check=True,
        **as_user(cli.user),
    ).stdout.split()


def untested(kind: str, cli: Cli, owner: str) -> list[str]:
    """The names of images that a process loaded, and whose tests have not passed."""
    if kind == "sif":
        return []
    done = subprocess.run(
        [kind, "images", "--format", "{{.Repository}}:{{.Tag}}"],
        cwd="/",
        env=cli.settings(),
        capture_output=True,
        text=True,
        check=True,
        **as_user(cli.user),
    )
    return [name for name in done.stdout.splitlines() if f":untested-{owner}-" in name]


def name_of(process: subprocess.Popen[str], user: str) -> str:
    """Return the process_name() of a process of ``user`` that runs."""
    *here, _, _, _ = process_name().split(".")
    start = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ".".join([*here, str(pwd.getpwnam(user).pw_uid), str(process.pid), start])


def sleepers() -> list[str]:
    """What the image's test runs."""
    done = subprocess.run(["pgrep", "-f", f"sleep {SLEEP}"], capture_output=True, text=True, check=False)
    return done.stdout.split()


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(params=WHERE, ids=lambda item: f"{item[0]}-{'root' if item[1] == ME else 'rootless'}")
def killed(
    request: pytest.FixtureRequest, workspace: Workspace, recipe_folder: RecipeFolder, new_store: NewStore
) -> Iterator[Killed]:
    """The kind, who gave the command, and its arguments; it was killed while the image was tested, and would succeed
    now.
    """
    kind, user = request.param
    need({"sif": "apptainer"}.get(kind, kind))
    if kind == "docker" and (reason := docker.unavailable()):
        pytest.skip(reason)
    cli, store, out = Cli(workspace, user), new_store(user, "base", "python"), workspace.folder("out", user)
    assert sleepers() == []
    recipe_folder.top("python", test=f"sleep {SLEEP}")
    argv = ["--store", str(store), "image", str(recipe_folder.path), "--format", kind]
    with cli.start(*argv, cwd=out) as process:
        wait_for(lambda: sleepers() or process.poll() is not None, 120)
        owner = name_of(process, user) if process.poll() is None else ""
        process.kill()
        _, stderr = process.communicate() if process.poll() is not None and not sleepers() else (None, "")
        assert not stderr, stderr
    if kind != "sif":
        assert (len(listed(kind, cli, owner)), len(untested(kind, cli, owner))) == (1, 1)
    yield kind, cli, argv, out, owner
    for number in sleepers():
        os.kill(int(number), signal.SIGKILL)


def end_test(recipe: Path) -> None:
    """Make the recipe one whose test ends."""
    yaml = recipe / "recipe.yaml"
    yaml.write_text(yaml.read_text().replace(f"sleep {SLEEP}", "true"))


@pytest.mark.guard
def test_container_of_a_killed_test_goes_with_the_next_command(killed: Killed, recipe_folder: RecipeFolder) -> None:
    kind, cli, argv, out, owner = killed
    end_test(recipe_folder.path)
    cli.run(*argv, cwd=out)
    assert listed(kind, cli, owner) == []
    assert untested(kind, cli, owner) == []
    wait_for(lambda: not sleepers(), 10)


def test_prune_names_and_removes_it(killed: Killed) -> None:
    kind, cli, argv, out, owner = killed
    containers, images = listed(kind, cli, owner), untested(kind, cli, owner)
    left = [f"container {name}" for name in containers] + [f"image {name}" for name in images]
    lines = [f"would remove {name} of {kind}, which a killed command left" for name in left]
    lines_out = cli.run(*argv[:2], "prune", "--dry-run", cwd=out).stdout.splitlines()
    assert lines_out[1:] == lines
    assert (listed(kind, cli, owner), untested(kind, cli, owner)) == (containers, images)
    lines_out = cli.run(*argv[:2], "prune", cwd=out).stdout.splitlines()
    assert lines_out[1:] == [line.replace("would remove", "removed") for line in lines]
    assert (listed(kind, cli, owner), untested(kind, cli, owner)) == ([], [])
    wait_for(lambda: not sleepers(), 10)


@pytest.mark.parametrize("kind", ["docker", "podman"])
def test_foreign_containers_stay(kind: str, cli: Cli, workspace: Workspace, new_store: NewStore) -> None:
    """Of a running process, another user, another machine, another PID namespace; and whatever label somebody gave
    one.
    """
    need(kind)
    if kind == "docker" and (reason := docker.unavailable()):
        pytest.skip(reason)
    machine, boot, namespace, user, _, _ = process_name().split(".")
    owners = {
        "running": process_name(),
        "user": f"{machine}.{boot}.{namespace}.{int(user) + 1}.4194303.1",
        "machine": f"{'0' * 8}.{boot}.{namespace}.{user}.4194303.1",
        "namespace": f"{machine}.{boot}.1.{user}.4194303.1",
        "label": "9" * 9999,
        "dead": f"{machine}.{boot}.{namespace}.{user}.4194303.1",
        "rebooted": f"{machine}.{'0' * 12}.{namespace}.{user}.{os.getpid()}.1",
    }
    image = import_empty(kind, cli, workspace)
    for name, owner in owners.items():
        subprocess.run(
            [kind, "create", "--name", f"ekiben-test-{name}", "--label", f"{OWNER}={owner}", image, "/true"],
            cwd="/",
            env=cli.settings(),
            capture_output=True,
            check=True,
        )
    try:
        module = docker if kind == "docker" else podman
        gone, names = {"dead", "rebooted"}, {f"container ekiben-test-{name}": name for name in owners}
        for dry_run in (True, False):
            removed = module.remove_abandoned(dry_run=dry_run)
            assert {names[name] for name in removed if name in names} == gone
        assert {name for name, owner in owners.items() if listed(kind, cli, owner)} == owners.keys() - gone
    finally:
        for name in owners:
            subprocess.run([kind, "rm", "--force", f"ekiben-test-{name}"], cwd="/", capture_output=True, check=False)
        subprocess.run([kind, "rmi", "--force", image], cwd="/", capture_output=True, check=False)


def import_empty(kind: str, cli: Cli, workspace: Workspace) -> str:
    """Import an image without a file in it."""
    archive = workspace.folder("empty") / "empty.tar"
    subprocess.run(["tar", "-cf", archive, "-T", "/dev/null"], check=True)
    subprocess.run(
        [kind, "import", archive, "localhost/ekiben-test/empty:latest"],
        cwd="/",
        env=cli.settings(),
        capture_output=True,
        check=True,
    )
    return "localhost/ekiben-test/empty:latest"
