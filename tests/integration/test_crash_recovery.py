"""What a build meets on real machines: interruptions, full disks, damaged files, things that are missing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from workspaces import ME, USER, Cli, Engine, NewStore, RecipeFolder, Workspace, home_of

pytestmark = pytest.mark.covers("ekiben/builder", "ekiben/store", "ekiben/executors")


def staged(store: Path) -> list[str]:
    return sorted(path.name for path in (store / "staging").iterdir())


def records(store: Path) -> set[str]:
    return {json.loads(path.read_text())["name"] for path in (store / "keys").iterdir()}


def containers(layer: str, user: str) -> set[str]:
    """The engines' containers of builds of ``layer``; there may be some of a test that was killed itself."""
    docker = subprocess.run(
        [
            "curl",
            "-sf",
            "--unix-socket",
            "/var/run/docker.sock",
            "http://docker/containers/json?all=1&filters="
            + json.dumps({"label": [f"org.ekiben.build={layer}"]})
            .replace('"', "%22")
            .replace("{", "%7B")
            .replace("}", "%7D")
            .replace("[", "%5B")
            .replace("]", "%5D")
            .replace(" ", ""),
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    listed = subprocess.run(
        [
            "runuser",
            "-u",
            user,
            "--",
            "env",
            "STORAGE_DRIVER=overlay",
            f"HOME={home_of(user)}",
            "buildah",
            "containers",
            "--format",
            "{{.ContainerName}}",
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    ).stdout
    return {f"docker {item['Id']}" for item in json.loads(docker)} | {
        f"buildah {name}" for name in listed.split() if name.endswith(f"-{layer}")
    }


def processes_in(store: Path) -> list[str]:
    """Processes other than ours that have the store's staging mounted or on their command line."""
    found = []
    for process_dir in Path("/proc").iterdir():
        if process_dir.name.isdigit() and int(process_dir.name) != os.getpid():
            try:
                text = (process_dir / "cmdline").read_text() + (process_dir / "mountinfo").read_text(errors="replace")
            except OSError:
                continue
            if f"/{store.name}/staging/" in text:
                found.append((process_dir / "cmdline").read_text().replace("\0", " "))
    return found


# ------------------------------------------------------------------------------------------------ a script that fails


def test_failed_script_keeps_the_layers_below(
    engine: Engine, workspace: Workspace, recipe_folder: RecipeFolder, new_store: NewStore
) -> None:
    left = containers("bad", engine.user)
    recipe_folder.layer("good", "base", "echo good >/good")
    recipe_folder.layer(
        "bad", "good", "echo first line; seq 100; echo it broke >&2; mkdir /half; exit 43; echo not reached"
    )
    recipe_folder.top("bad")
    store, out = new_store(engine.user, "base"), workspace.folder("out", engine.user)
    done = Cli(workspace, engine.user).run(
        "--store", store, "image", recipe_folder.path, "--engine", engine.name, cwd=out, code=5
    )
    assert f"%post of bad ({recipe_folder.path}/images/bad.def:5) failed with exit code 43. The command:" in done.stderr
    last_lines = done.stderr.split("Its last lines:\n")[1]
    assert "it broke\n" in last_lines
    assert "first line" not in last_lines
    assert "not reached" not in last_lines
    log = Path(done.stderr.split("the whole log: ")[1].split("\n")[0])
    lines = log.read_text().splitlines()
    assert lines[0] == "first line"
    assert "it broke" in lines
    assert records(store) == {"base", "good"}
    assert staged(store) == []
    assert not list(out.iterdir())
    assert containers("bad", engine.user) <= left


# ------------------------------------------------------------------------------------------------------ interruptions


@contextmanager
def started(cli: Cli, store: Path, recipe: Path, engine: Engine, out: Path) -> Iterator[subprocess.Popen[str]]:
    """A build whose %post has started and now sleeps; the file that makes it sleep is gone afterwards."""
    cache = store.parent / ("cache-root" if engine.user == ME else "cache")
    cache.mkdir(exist_ok=True)
    shutil.chown(cache, engine.user, engine.user)
    (cache / "sleep").touch()
    argv = ("--store", store, "image", recipe, "--engine", engine.name, "--format", "sif", "--no-verify")
    with cli.start(*argv, cwd=out) as process:
        try:
            deadline = time.monotonic() + 120
            while not any("started" in log.read_text() for log in (store / "logs").glob("*-slow-*.log")):
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            (cache / "sleep").unlink()
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("how", ["Ctrl-C", "kill -9"])
def test_interrupted_build_is_resumed(
    how: str, engine: Engine, workspace: Workspace, recipe_folder: RecipeFolder, new_store: NewStore
) -> None:
    cli, store, out = Cli(workspace, engine.user), new_store(engine.user, "base"), workspace.folder("out", engine.user)
    left = containers("slow", engine.user)
    recipe_folder.layer("below", "base", "echo below >/below")
    recipe_folder.top("below")
    before = cli.image(store, recipe_folder.path, "--engine", engine.name, "--format", "sif", "--no-verify", cwd=out)
    sif = (out / "own.sif").read_bytes()
    # Without root, files of other owners belong to ids that only a user namespace can remove.
    script = (
        "mkdir -m 700 /made; echo x >/made/x; chown -R 33:33 /made; echo started\n[ ! -e /run/ekiben/cache/sleep ] ||"
        " sleep 600"
    )
    recipe_folder.layer("slow", "below", script)
    recipe_folder.top("slow")
    with started(cli, store, recipe_folder.path, engine, out) as process:
        if how == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
            assert process.returncode == 130
            assert "interrupted" in stderr
            assert staged(store) == []
            assert processes_in(store) == []
            assert containers("slow", engine.user) <= left
        else:
            process.kill()
            process.wait()
    assert records(store) >= {"base", "below"}
    assert "slow" not in records(store)
    assert (out / "own.sif").read_bytes() == sif
    about = json.loads(cli.run("--store", store, "inspect", "own", "--json", cwd=out).stdout)
    assert about["image"] == before["image"]

    after = cli.image(store, recipe_folder.path, "--engine", engine.name, "--format", "sif", "--no-verify", cwd=out)
    assert after["built"] == ["slow", "own"]
    assert staged(store) == []
    assert processes_in(store) == []
    assert containers("slow", engine.user) <= left
    assert (out / "own.sif").read_bytes() != sif


def test_terminated_build_leaves_no_process(
    workspace: Workspace, recipe_folder: RecipeFolder, new_store: NewStore
) -> None:
    """SIGTERM to us alone, as kill, timeout and batch systems send it."""
    engine = Engine("apptainer", USER)
    cli, store, out = Cli(workspace, USER), new_store(USER, "base"), workspace.folder("out", USER)
    recipe_folder.layer("slow", "base", "echo started\n[ ! -e /run/ekiben/cache/sleep ] || sleep 600")
    recipe_folder.top("slow")
    with started(cli, store, recipe_folder.path, engine, out) as process:
        process.terminate()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "interrupted" in stderr
    assert staged(store) == []
    assert processes_in(store) == []


def bases_in_the_making(store: Path) -> list[str]:
    found = subprocess.run(["pgrep", "-af", "perl.*mmdebstrap"], capture_output=True, text=True, check=False)
    return [line for line in found.stdout.splitlines() if f"{store}/" in line]


@pytest.mark.parametrize("user", [ME, USER], ids=["root", "rootless"])
def test_killed_base_build_is_restarted(
    user: str, workspace: Workspace, recipe_folder: RecipeFolder, new_store: NewStore
) -> None:
    recipe_folder.top("base")
    cli, store, out = Cli(workspace, user), new_store(user), workspace.folder("out", user)
    argv = ("--store", store, "image", recipe_folder.path, "--format", "sif", "--no-verify")
    with cli.start(*argv, cwd=out) as process:
        deadline = time.monotonic() + 120
        while not list((store / "staging").glob("*/root.tar")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe
            pipe.close()
    assert staged(store)
    again = cli.image(store, recipe_folder.path, "--format", "sif", "--no-verify", cwd=out)
    assert again["built"] == ["base", "own"]
    assert staged(store) == []
    assert processes_in(store) == []
    deadline = time.monotonic() + 60
    while left := bases_in_the_making(store):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
