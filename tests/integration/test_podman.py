"""podman as an executor that also keeps images and runs tasks, as root and as an ordinary user.

Builds: test_executor_parity.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben import executors
from ekiben.executors import podman
from ekiben.gpu import container_gpus
from workspaces import ME, USER, Cli, NewStore, RecipeFolder, Workspace, as_user, need

pytestmark = pytest.mark.covers("ekiben/executors", "ekiben/artifacts", "ekiben/run")

FAKE_GPU = """\
cdiVersion: "0.5.0"
kind: nvidia.com/gpu
devices:
  - name: all
    containerEdits:
      env: [SEEN_BY_CDI=yes]
"""


def asked(cli: Cli, *args: str) -> list[str]:
    done = subprocess.run(
        ["podman", *args], cwd="/", env=cli.settings(), capture_output=True, text=True, check=True, **as_user(cli.user)
    )
    return done.stdout.split()


def containers(cli: Cli) -> list[str]:
    return asked(cli, "ps", "--all", "--quiet", "--filter", f"label={executors.OWNER}")


@pytest.fixture(params=[ME, USER], ids=["root", "rootless"])
def someone(request: pytest.FixtureRequest, workspace: Workspace) -> Iterator[Cli]:
    need("podman")
    cli = Cli(workspace, request.param)
    yield cli
    assert containers(cli) == []
    for image in asked(cli, "images", "--quiet", "--filter", "reference=localhost/ekiben/*"):
        subprocess.run(
            ["podman", "rmi", "--force", image],
            cwd="/",
            env=cli.settings(),
            capture_output=True,
            check=False,
            **as_user(cli.user),
        )


@pytest.mark.guard
def test_image_is_loaded_tested_and_run(someone: Cli, new_store: NewStore, workspace: Workspace) -> None:
    store, here = new_store(someone.user, "base", "python", "hello"), workspace.folder("here", someone.user)
    made = someone.image(store, "hello", "--format", "podman", cwd=here)
    [product] = made["artifacts"]
    assert (product["kind"], product["ref"], product["created"]) == ("podman", "ekiben/hello:latest", True)
    assert [check["runtime"] for check in made["checks"]] == ["podman"]
    assert asked(someone, "image", "inspect", "--format", "{{.Id}}", "ekiben/hello") == [
        made["image"].removeprefix("sha256:")
    ]
    again = someone.image(store, "hello", "--format", "podman", cwd=here)
    assert [item["created"] for item in again["artifacts"]] == [False]
    done = someone.run("--store", store, "run", "hello", "--runtime", "podman", "--cpu", "hello", "--json", cwd=here)
    assert isinstance(json.loads(done.stdout), dict)
    assert "/podman" in done.stderr or "+ podman" in done.stderr
    assert list(here.iterdir()) == []
    # The printed line, pasted: it starts the task, and what that writes into this folder stays and is this user's.
    [line] = again["run"]
    pasting = {"cwd": workspace.folder("a folder", someone.user), "env": someone.settings(), **as_user(someone.user)}
    for text in (line, line.removesuffix("hello") + "touch result.txt"):
        pasted = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=False, **pasting)
        assert pasted.returncode == 0, f"{text}\n{pasted.stderr}"
    assert (pasting["cwd"] / "result.txt").owner() == someone.user
    assert asked(someone, "images", "--quiet", "--filter", "reference=localhost/layers") == []


def test_task_writes_as_this_user_and_gpus_come_by_cdi(someone: Cli, new_store: NewStore, workspace: Workspace) -> None:
    store, here = new_store(someone.user, "base", "python", "hello"), workspace.folder("here", someone.user)
    someone.image(store, "hello", "--format", "podman", "--no-verify", cwd=here)
    spec = Path("/etc/cdi/ekiben-test.yaml")
    spec.parent.mkdir(exist_ok=True)
    spec.write_text(FAKE_GPU)
    try:
        script = (
            "import os, sys; sys.path.insert(0, sys.argv[1]); from ekiben.executors import podman;"
            "words = [*podman.run_argv(True), '--volume', sys.argv[2] + ':' + sys.argv[2], 'ekiben/hello', 'sh', '-c',"
            " 'echo gpu $SEEN_BY_CDI; touch ' + sys.argv[2] + '/made']; os.execvp(words[0], words)"
        )
        python = someone.argv()[0]
        done = subprocess.run(
            [python, "-c", script, str(workspace.checkout), str(here)],
            cwd=here,
            env=someone.settings(),
            capture_output=True,
            text=True,
            check=False,
            **as_user(someone.user),
        )
    finally:
        spec.unlink()
    assert (done.returncode, done.stdout) == (0, "gpu yes\n"), done.stderr
    assert (here / "made").stat().st_uid == here.stat().st_uid


def test_missing_cdi_description_is_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(container_gpus, "_FOLDERS", (tmp_path,))
    with pytest.raises(podman.EngineError) as error:
        podman.run_argv(True)
    assert "nvidia-ctk cdi generate" in str(error.value.hint)


def test_failed_script_leaves_no_container(someone: Cli, recipe_folder: RecipeFolder, new_store: NewStore) -> None:
    recipe_folder.layer("broken", "base", "echo here\nexit 7")
    recipe_folder.top("broken")
    store = new_store(someone.user, "base")
    done = someone.run(
        "--store",
        store,
        "image",
        recipe_folder.path,
        "--engine",
        "podman",
        "--format",
        "oci",
        "--no-verify",
        code=5,
        cwd=Path("/tmp"),
    )
    assert "exit code 7" in done.stderr
    assert containers(someone) == []
    assert not list((store / "staging").iterdir())


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda sign: sign.name)
def test_terminated_build_leaves_no_container(
    sign: signal.Signals, someone: Cli, recipe_folder: RecipeFolder, new_store: NewStore, workspace: Workspace
) -> None:
    recipe_folder.layer("slow", "base", "echo started\nsleep 300")
    recipe_folder.top("slow")
    store, here = new_store(someone.user, "base"), workspace.folder("here", someone.user)
    argv = ("--store", store, "image", recipe_folder.path, "--engine", "podman", "--format", "oci", "--no-verify")
    with someone.start(*argv, cwd=here) as build:
        end = time.monotonic() + 120
        while not asked(someone, "ps", "--quiet", "--filter", f"label={executors.OWNER}") and build.poll() is None:
            assert time.monotonic() < end, "the container did not start"
            time.sleep(0.2)
        os.kill(build.pid, sign)
        outputs = build.communicate(timeout=60)
    assert build.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[sign], outputs
    if sign == signal.SIGKILL:  # the next build removes what a killed one left
        recipe_folder.layer("slow", "base", "echo started")
        someone.run(*argv, cwd=here)
    assert containers(someone) == []


def test_layers_are_removed(
    someone: Cli, recipe_folder: RecipeFolder, new_store: NewStore, workspace: Workspace
) -> None:
    recipe_folder.layer("small", "base", "touch /opt/small")
    recipe_folder.top("small")
    store, here = new_store(someone.user, "base"), workspace.folder("here", someone.user)
    build = ("--store", store, "image", recipe_folder.path, "--engine", "podman", "--format", "oci", "--no-verify")
    someone.run(*build, cwd=here)
    someone.run("--store", store, "prune", "--engines", cwd=here)  # of other builds on this machine, too
    recipe_folder.layer("small", "base", "touch /opt/another")
    someone.run(*build, cwd=here)
    kept = ("images", "--quiet", "--filter", f"reference={podman.LAYER_IMAGES}")
    assert len(asked(someone, *kept)) == 1
    someone.run("--store", store, "prune", "--engines", cwd=here)
    assert asked(someone, *kept) == []


@pytest.mark.guard
@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_image_gets_its_name_when_its_tests_have_passed(
    engine: str, cli: Cli, recipe_folder: RecipeFolder, new_store: NewStore, workspace: Workspace
) -> None:
    need(engine)
    store, here, name = new_store(ME, "base", "python"), workspace.folder("here"), f"ekiben/{recipe_folder.path.name}"

    def known() -> list[str]:
        form = "{{.Tag}} {{.ID}}"
        done = subprocess.run(
            [engine, "images", "--no-trunc", "--format", form, name], capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    def build(test: str) -> subprocess.CompletedProcess[str]:
        recipe_folder.top("python", test)
        argv = ("--store", store, "image", recipe_folder.path, "--format", engine, "--json")
        return cli.run(*argv, cwd=here, code=None)

    subprocess.run([engine, "rmi", f"{name}:latest"], capture_output=True, check=False)  # of another test
    refused = build("exit 3")
    assert refused.returncode, refused.stdout
    assert f"{name}:latest is not made" in refused.stderr
    assert known() == []
    made = json.loads(build("true").stdout)
    assert known() == [f"latest {made['image']}"]
    refused = build("exit 4")
    assert "exit code 4" in refused.stderr
    assert f"{name}:latest is left as it was" in refused.stderr
    assert known() == [f"latest {made['image']}"]
    subprocess.run([engine, "rmi", f"{name}:latest"], capture_output=True, check=True)
