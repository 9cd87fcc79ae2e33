"""What is missing, full, damaged or out of reach: one clear error, nothing half-made, and the next run continues."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from filecmp import cmp
from pathlib import Path

import pytest

from workspaces import ME, ROOT, USER, Cli, Engine, NewStore, RecipeFolder, Workspace, give

pytestmark = pytest.mark.covers("ekiben/core", "ekiben/builder", "ekiben/store", "ekiben/cli")

NOWHERE = "http://127.0.0.1:9"
AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups"]


def records(store: Path) -> set[str]:
    return {json.loads(path.read_text())["name"] for path in (store / "keys").iterdir()}


@pytest.fixture
def small_disk(workspace: Workspace) -> Iterator[Path]:
    folder = workspace.folder("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=110m,mode=755", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)
    folder.rmdir()


def cache_of(store: Path, engine: Engine) -> Path:
    return store.parent / ("cache-root" if engine.user == ME else "cache")


def copy_store(store: Path, to: Path) -> Path:
    return Path(shutil.copytree(store, to))


# ---------------------------------------------------------------------------------------------------------- the store


@pytest.mark.parametrize("engine", ["docker", "apptainer"])
def test_full_disk_during_a_build(
    engine: str, cli: Cli, workspace: Workspace, small_disk: Path, recipe_folder: RecipeFolder, new_store: NewStore
) -> None:
    """Docker's changes are in the daemon's storage and the layer does not fit; Apptainer's script itself finds no
    space.
    """
    recipe_folder.layer("large", "base", "head -c 55M /dev/urandom >/large")
    recipe_folder.top("large")
    store = copy_store(new_store(ME, "base"), small_disk / "store")
    argv = ("--store", store, "image", recipe_folder.path, "--engine", engine, "--no-verify", "--format", "sif")
    out = workspace.folder("out")
    done = cli.run(*argv, cwd=out, code=6)
    assert re.search(rf"no space left in {store}: [\d.]+ [kMG]?B free", done.stderr)
    assert f"build.py --store {store} prune" in done.stderr
    assert records(store) == {"base"}
    assert not list((store / "staging").iterdir())
    subprocess.run(["mount", "-o", "remount,size=500m", small_disk], check=True)
    cli.run(*argv, cwd=out)
    assert records(store) == {"base", "large", "own"}


def test_full_disk_while_writing_the_sif(cli: Cli, hello: Path, small_disk: Path) -> None:
    old = small_disk / "hello.sif"
    old.write_bytes(b"the image of last week")
    (small_disk / "others").write_bytes(bytes(60 << 20))
    done = cli.run("--store", hello, "image", "hello", "--format", "sif", "-o", old, code=6)
    assert str(old) in done.stderr
    assert old.read_bytes() == b"the image of last week"
    assert {path.name for path in small_disk.iterdir()} == {"hello.sif", "others"}


def test_read_only_store(user_cli: Cli, hello: Path, workspace: Workspace, recipe_folder: RecipeFolder) -> None:
    """A colleague's store: what is in it is used, what is not cannot be added."""
    out = workspace.folder("out", USER)
    argv = ("--format", "sif", "-o", out / "hello.sif")
    made = user_cli.image(hello, "hello", *argv, cwd=out)
    assert made["built"] == []
    assert cmp(out / "hello.sif", workspace.path / "hello.sif", shallow=False)
    recipe_folder.layer("more", "base", "true")
    recipe_folder.top("more")
    done = user_cli.run("--store", hello, "image", recipe_folder.path, "--engine", "apptainer", cwd=out, code=6)
    assert f"the store {hello} cannot be written: Permission denied" in done.stderr
    assert "--store" in done.stderr.split("hint: ")[1]


def damage(store: Path, layer: str) -> None:
    """One byte in the middle is another one; size and name stay."""
    record = next(
        item for path in (store / "keys").iterdir() if (item := json.loads(path.read_text()))["name"] == layer
    )
    blob = store / "blobs/sha256" / record["digest"][7:]
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 0xFF
    blob.unlink()
    blob.write_bytes(data)


@pytest.mark.parametrize("use", ["sif", "flat sif", "docker", "oci", "layer below"])
def test_damaged_blob_is_detected_and_rebuilt(
    use: str, cli: Cli, workspace: Workspace, recipe_folder: RecipeFolder, new_store: NewStore
) -> None:
    store, out = new_store(ME, "base"), workspace.folder("out")
    recipe_folder.layer("below", "base", f"echo {time.time_ns()} >/file; head -c 200K /bin/bash >/part")
    recipe_folder.top("below")
    argv = ["--engine", "apptainer", "--no-verify", "--format", "sif" if "layer" in use else use.split()[-1]]
    argv += ["--squash"] if use == "flat sif" else []
    target = [] if use == "docker" else ["-o", str(out / "first")]
    first = cli.image(
        store, recipe_folder.path, "--engine", "apptainer", "--no-verify", "--format", "sif", "-o", out / "x.sif"
    )
    if use == "layer below":
        recipe_folder.layer("above", "below", "cat /file >/copy")
        recipe_folder.top("above")
    damage(store, "below")
    done = cli.run("--store", store, "image", recipe_folder.path, "--json", *argv, *target)
    assert "is damaged" in done.stderr
    assert "will be rebuilt" in done.stderr
    again = json.loads(done.stdout)
    assert again["layers"][1] == first["layers"][1]
    damaged = cli.run("--store", store, "verify", recipe_folder.path, cwd=out)
    assert "passed" in damaged.stdout
    # What was made holds the right bytes: the same as from a store that was never damaged.
    if use != "docker":
        cli.run("--store", store, "image", recipe_folder.path, *argv, "-o", out / "second")
        assert cmp(out / "first", out / "second", shallow=False)


def test_verify_names_a_bad_blob(
    cli: Cli, workspace: Workspace, recipe_folder: RecipeFolder, new_store: NewStore
) -> None:
    store, out = new_store(ME, "base"), workspace.folder("out")
    recipe_folder.layer("below", "base", "head -c 100K /bin/bash >/part")
    recipe_folder.top("below")
    cli.image(store, recipe_folder.path, "--engine", "apptainer", "--format", "sif", cwd=out)
    damage(store, "below")
    assert "is damaged" in cli.run("--store", store, "verify", recipe_folder.path, cwd=out, code=6).stderr


def test_parallel_builds_of_one(
    cli: Cli, workspace: Workspace, recipe_folder: RecipeFolder, new_store: NewStore
) -> None:
    store = new_store(ME, "base")
    recipe_folder.layer("slow", "base", "sleep 3; head -c 1M /bin/bash >/part")
    recipe_folder.top("slow")
    outs = [workspace.folder("out"), workspace.folder("out")]
    argv = ("--store", store, "image", recipe_folder.path, "--engine", "apptainer", "--format", "sif")
    both = [cli.start(*argv, cwd=out) for out in outs]
    stderrs = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(stderrs)
    assert any("another process is building it" in text for text in stderrs)
    assert cmp(outs[0] / "own.sif", outs[1] / "own.sif", shallow=False)
    blobs = {json.loads(path.read_text())["digest"] for path in (store / "keys").iterdir()}
    ref = json.loads((store / "refs/own.json").read_text())
    wanted = {digest[7:] for digest in blobs | {ref["manifest"], ref["config"]}}
    assert {path.name for path in (store / "blobs/sha256").iterdir()} == wanted


def test_concurrent_builds_of_recipes_with_packages(engine: Engine, workspace: Workspace, new_store: NewStore) -> None:
    """They share the cache of downloaded packages."""
    cli, store = Cli(workspace, engine.user), new_store(engine.user, "base")
    meet = "touch /run/ekiben/cache/{0}; until [ -e /run/ekiben/cache/{1} ]; do sleep 0.05; done"
    both = []
    for name, other in (("one", "two"), ("two", "one")):
        folder = workspace.folder("recipe") / name
        (folder / "images").mkdir(parents=True)
        (cache_of(store, engine) / name).unlink(missing_ok=True)
        recipe = RecipeFolder(folder)
        recipe.layer(
            f"packages-{name}",
            "base",
            f"apt-get update; {meet.format(name, other)}; apt-get install -y --no-install-recommends ed less",
        )
        recipe.top(f"packages-{name}", "ed --version")
        out = workspace.folder("out", engine.user)
        both.append(cli.start("--store", store, "image", folder, "--engine", engine.name, "--format", "sif", cwd=out))
    stderrs = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(stderrs)


# -------------------------------------------------------------------------------------------------------- the network


def one_package(name: str) -> str:
    """A requirement with its hashes, out of the stack's own lock."""
    lock = (ROOT / "images/stacks/cu130/huggingface.lock").read_text()
    found = re.search(rf"^{name}==.*(?:\n    .*)*", lock, re.MULTILINE)
    assert found
    return found[0] + "\n"


@pytest.fixture
def with_lock(recipe_folder: RecipeFolder, new_store: NewStore) -> tuple[RecipeFolder, Path]:
    recipe_folder.layer(
        "locked",
        "python",
        "/opt/venv/bin/python /opt/ekiben/install.py /opt/own.lock",
        "\n%files\n    images/own.lock /opt/own.lock\n",
    )
    recipe_folder.top("locked")
    (recipe_folder.path / "images/own.lock").write_text(one_package("idna"))
    return recipe_folder, new_store(ME, "base", "python")


def test_unreachable_package_index_fails(with_lock: tuple[RecipeFolder, Path], cli: Cli, workspace: Workspace) -> None:
    recipe, store = with_lock
    began = time.monotonic()
    settings = {"UV_DEFAULT_INDEX": f"{NOWHERE}/simple", "UV_CACHE_DIR": None}
    argv = ("--store", store, "image", recipe.path, "--engine", "apptainer", "--format", "sif")
    done = cli.run(*argv, cwd=workspace.folder("out"), env=settings, code=5)
    assert NOWHERE in done.stderr
    assert "own.lock is not installed" in done.stderr
    assert time.monotonic() - began < 60


def test_package_with_wrong_hash_fails(with_lock: tuple[RecipeFolder, Path], cli: Cli, workspace: Workspace) -> None:
    recipe, store = with_lock
    lock = recipe.path / "images/own.lock"
    argv = ("--store", store, "image", recipe.path, "--engine", "apptainer", "--format", "sif", "--no-verify")
    right, out = lock.read_text(), workspace.folder("out")
    lock.write_text(re.sub("sha256:[0-9a-f]{64}", "sha256:" + "0" * 64, right))
    done = cli.run(*argv, cwd=out, code=5)
    assert "Hash mismatch for `idna" in done.stderr
    assert records(store) == {"base", "python"}
    lock.write_text(right)
    cli.run(*argv, cwd=out)


def test_unreachable_mirror_is_an_error(cli: Cli, workspace: Workspace, new_store: NewStore) -> None:
    began, store = time.monotonic(), new_store(ME)
    argv = ("--store", store, "image", "hello", "--build-arg", f"mirror={NOWHERE}/debian")
    done = cli.run(*argv, cwd=workspace.folder("out"), code=7)
    assert NOWHERE in done.stderr
    assert "is the mirror reachable?" in done.stderr
    assert time.monotonic() - began < 60
    assert records(store) == set()
    assert not list((store / "staging").iterdir())


# ------------------------------------------------------------------------------------------------------- the machine


def build_words(store: Path, recipe: RecipeFolder, engine: str) -> list[str | Path]:
    recipe.layer("layer", "base", "echo x >/x")
    recipe.top("layer")
    return ["--store", store, "image", recipe.path, "--engine", engine, "--format", "sif", "--no-verify"]


def test_without_an_engine_each_reason_is_listed(
    cli: Cli, workspace: Workspace, recipe_folder: RecipeFolder, new_store: NewStore
) -> None:
    argv = build_words(new_store(ME, "base"), recipe_folder, "auto")
    settings = {"PATH": "/nowhere", "DOCKER_HOST": "unix:///nowhere.sock"}
    done = cli.run(*argv, cwd=workspace.folder("out"), env=settings, code=4)
    assert "apptainer: neither apptainer nor singularity is on PATH" in done.stderr
    assert "buildah: buildah is not on PATH" in done.stderr
    assert "docker: no Docker daemon answers at unix:///nowhere.sock" in done.stderr
    assert "sh ekiben/bootstrap.sh --engine" in done.stderr


def test_missing_subordinate_ids(workspace: Workspace, recipe_folder: RecipeFolder, new_store: NewStore) -> None:
    store, folder = new_store(ME, "base"), workspace.folder("nobody", "nobody")
    for path in (store, store / "keys", store / "blobs", store / "blobs/sha256"):
        give(path, "nobody")
    argv = build_words(store, recipe_folder, "apptainer")
    done = Cli(workspace, "nobody").run(*argv, cwd=folder, env={"HOME": str(folder)}, code=4)
    assert "no subordinate ids for nobody" in done.stderr
    assert "usermod --add-subuids" in done.stderr


def test_missing_fuse(cli: Cli, workspace: Workspace, recipe_folder: RecipeFolder, new_store: NewStore) -> None:
    out = workspace.folder("out", USER)
    closed = out / "closed"
    closed.touch()
    closed.chmod(0)
    hide = f'mount --bind {closed} /dev/fuse && exec "$@"'
    home = ("env", f"HOME=/home/{USER}", f"USER={USER}", f"LOGNAME={USER}")
    prefix = ["unshare", "--mount", "sh", "-c", hide, "sh", *AS_USER, *home]
    argv = build_words(new_store(USER, "base"), recipe_folder, "apptainer")
    done = cli.run(*argv, cwd=out, prefix=prefix, code=4)
    assert "/dev/fuse cannot be opened" in done.stderr
    argv = build_words(new_store(USER, "base"), recipe_folder, "auto")
    done = cli.run(*argv, cwd=out, prefix=prefix)
    assert "engine buildah: apptainer: /dev/fuse cannot be opened" in done.stderr


def test_no_user_namespaces(cli: Cli, workspace: Workspace, recipe_folder: RecipeFolder, new_store: NewStore) -> None:
    """The limit holds in a user namespace made for it, and below."""
    forbid = 'echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --ambient-caps=-all --inh-caps=-all "$@"'
    prefix = [
        *AS_USER,
        "unshare",
        "--user",
        "--map-current-user",
        "--keep-caps",
        "sh",
        "-c",
        forbid,
        "sh",
        "env",
        f"HOME=/home/{USER}",
        f"USER={USER}",
        f"LOGNAME={USER}",
    ]
    argv = build_words(new_store(USER, "base"), recipe_folder, "apptainer")
    done = cli.run(*argv, cwd=workspace.folder("out", USER), prefix=prefix, code=4)
    assert "user namespaces are switched off" in done.stderr
    assert "sysctl -w user.max_user_namespaces=" in done.stderr


def test_small_tmpdir_suffices(
    engine: Engine, workspace: Workspace, recipe_folder: RecipeFolder, small_disk: Path, new_store: NewStore
) -> None:
    subprocess.run(["mount", "-o", "remount,size=1m", small_disk], check=True)
    small_disk.chmod(0o1777)
    cli, out = Cli(workspace, engine.user), workspace.folder("out", engine.user)
    recipe_folder.layer("layer", "base", "head -c 20M /dev/urandom >/tmp/x; mv /tmp/x /usr/share/x")
    recipe_folder.top("layer")
    argv = ("--engine", engine.name, "--format", "sif", "--format", "oci")
    made = cli.image(
        new_store(engine.user, "base"), recipe_folder.path, *argv, cwd=out, env={"TMPDIR": str(small_disk)}
    )
    assert made["built"] == ["layer", "own"]
    assert made["checks"]
