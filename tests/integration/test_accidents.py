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

from rooms import ME, USER, Cli, Engine, NewStore, RecipeFolder, Room, home_of

pytestmark = pytest.mark.slow


def staged(store: Path) -> list[str]:
    return sorted(path.name for path in (store / "staging").iterdir())


def records(store: Path) -> set[str]:
    return {json.loads(path.read_text())["name"] for path in (store / "keys").iterdir()}


def containers(layer: str, user: str) -> set[str]:
    """The engines' containers of builds of ``layer``; there may be some of a test that was killed itself."""
    docker = subprocess.run(
        ["curl", "-sf", "--unix-socket", "/var/run/docker.sock", "http://docker/containers/json?all=1&filters="
         + json.dumps({"label": [f"org.ekiben.build={layer}"]}).replace('"', "%22").replace("{", "%7B").replace("}", "%7D")
         .replace("[", "%5B").replace("]", "%5D").replace(" ", "")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    listed = subprocess.run(
        ["runuser", "-u", user, "--", "env", "STORAGE_DRIVER=overlay", f"HOME={home_of(user)}",
         "buildah", "containers", "--format", "{{.ContainerName}}"],
        capture_output=True, text=True, check=True, cwd="/",
    ).stdout  # fmt: skip
    return {f"docker {item['Id']}" for item in json.loads(docker)} | {
        f"buildah {name}" for name in listed.split() if name.endswith(f"-{layer}")
    }


def processes_in(store: Path) -> list[str]:
    """Processes other than ours that have the store's staging mounted or on their command line."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit() and int(place.name) != os.getpid():
            try:
                text = (place / "cmdline").read_text() + (place / "mountinfo").read_text(errors="replace")
            except OSError:
                continue
            if f"/{store.name}/staging/" in text:
                found.append((place / "cmdline").read_text().replace("\0", " "))
    return found


# ------------------------------------------------------------------------------------------------ a script that fails


def test_a_script_that_fails(engine: Engine, room: Room, own_recipe: RecipeFolder, new_store: NewStore) -> None:
    left = containers("bad", engine.user)
    own_recipe.layer("good", "base", "echo good >/good")
    own_recipe.layer(
        "bad", "good", "echo first line; seq 100; echo it broke >&2; mkdir /half; exit 43; echo not reached"
    )
    own_recipe.top("bad")
    store, out = new_store(engine.user, "base"), room.folder("out", engine.user)
    done = Cli(room, engine.user).run(
        "--store", store, "image", own_recipe.path, "--engine", engine.name, cwd=out, code=5
    )
    assert "%post of bad (bad.def) failed with exit code 43" in done.stderr
    assert "it broke\n" in done.stderr
    assert "first line" not in done.stderr  # the last lines only
    assert "not reached" not in done.stderr
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
    """A build whose %post has begun and now sleeps; the file that makes it sleep is gone afterwards."""
    cache = store.parent / ("cache-root" if engine.user == ME else "cache")
    cache.mkdir(exist_ok=True)
    shutil.chown(cache, engine.user, engine.user)
    (cache / "sleep").touch()
    words = ("--store", store, "image", recipe, "--engine", engine.name, "--format", "sif", "--no-verify")
    with cli.start(*words, cwd=out) as process:
        try:
            deadline = time.monotonic() + 120
            while not any("begun" in log.read_text() for log in (store / "logs").glob("*-slow-*.log")):
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            (cache / "sleep").unlink()
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("how", ["Ctrl-C", "kill -9"])
def test_an_interrupted_build_goes_on(
    how: str, engine: Engine, room: Room, own_recipe: RecipeFolder, new_store: NewStore
) -> None:
    cli, store, out = Cli(room, engine.user), new_store(engine.user, "base"), room.folder("out", engine.user)
    left = containers("slow", engine.user)
    own_recipe.layer("below", "base", "echo below >/below")
    own_recipe.top("below")
    before = cli.image(store, own_recipe.path, "--engine", engine.name, "--format", "sif", "--no-verify", cwd=out)
    sif = (out / "own.sif").read_bytes()
    # Without root, files of other owners belong to ids that only a user namespace can remove.
    script = "mkdir -m 700 /made; echo x >/made/x; chown -R 33:33 /made; echo begun\n[ ! -e /run/ekiben/cache/sleep ] || sleep 600"
    own_recipe.layer("slow", "below", script)
    own_recipe.top("slow")
    with started(cli, store, own_recipe.path, engine, out) as process:
        if how == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
            _, said = process.communicate(timeout=60)
            assert process.returncode == 130
            assert "interrupted" in said
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

    after = cli.image(store, own_recipe.path, "--engine", engine.name, "--format", "sif", "--no-verify", cwd=out)
    assert after["built"] == ["slow", "own"]
    assert staged(store) == []
    assert processes_in(store) == []
    assert containers("slow", engine.user) <= left
    assert (out / "own.sif").read_bytes() != sif


def test_a_terminated_build_leaves_nothing_running(room: Room, own_recipe: RecipeFolder, new_store: NewStore) -> None:
    """SIGTERM to us alone, as kill, timeout and batch systems send it."""
    engine = Engine("apptainer", USER)
    cli, store, out = Cli(room, USER), new_store(USER, "base"), room.folder("out", USER)
    own_recipe.layer("slow", "base", "echo begun\n[ ! -e /run/ekiben/cache/sleep ] || sleep 600")
    own_recipe.top("slow")
    with started(cli, store, own_recipe.path, engine, out) as process:
        process.terminate()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "interrupted" in said
    assert staged(store) == []
    assert processes_in(store) == []


def bases_in_the_making() -> list[str]:
    found = subprocess.run(["pgrep", "-af", "perl.*mmdebstrap"], capture_output=True, text=True, check=False)
    return found.stdout.splitlines()


@pytest.mark.parametrize("user", [ME, USER], ids=["root", "rootless"])
def test_a_base_whose_making_was_killed_is_made_again(
    user: str, room: Room, own_recipe: RecipeFolder, new_store: NewStore
) -> None:
    own_recipe.top("base")
    cli, store, out = Cli(room, user), new_store(user), room.folder("out", user)
    words = ("--store", store, "image", own_recipe.path, "--format", "sif", "--no-verify")
    with cli.start(*words, cwd=out) as process:
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
    again = cli.image(store, own_recipe.path, "--format", "sif", "--no-verify", cwd=out)
    assert again["built"] == ["base", "own"]
    assert staged(store) == []
    assert processes_in(store) == []
    deadline = time.monotonic() + 60
    while left := bases_in_the_making():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
