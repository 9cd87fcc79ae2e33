"""A base whose programs are all busybox's, as Alpine's are: built by every engine, or refused with the reason, and
run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from ekiben.store import Store
from test_definition_corpus import seed
from test_layer_content import read_image
from workspaces import ME, USER, Cli, Engine, RecipeFolder, Workspace, as_user, give, home_of, path_without

pytestmark = pytest.mark.covers("ekiben/builder/bases", "ekiben/executors", "ekiben/formats")

SCRIPT = r"""
test "$(readlink -f /bin/tar)" = /bin/busybox
printf 'new\n' >/opt/new; printf 'more\n' >>/opt/kept; chmod 4755 /opt/new
ln /opt/new /opt/second; ln -s nowhere /opt/dangling
rm /opt/removed; rm -r /opt/folder; mkdir /opt/folder; printf 'x' >/opt/folder/again; rm -r /opt/gone
printf 'x' >"/opt/a
line"; mkfifo /opt/pipe; mkdir -p /opt/deep/er; printf 'x' >/opt/deep/er/file; chown 12:34 /opt/deep/er/file
echo people:x:1234:somebody >>/etc/group; echo somebody:x:4321:1234::/:/bin/sh >>/etc/passwd
"""
CHANGED = {
    "opt/new": ("file", 0o4755, 0, 0),
    "opt/second": ("file", 0o4755, 0, 0),
    "opt/kept": ("file", 0o644, 0, 0),
    "opt/folder": ("dir", 0o755, 0, 0),
    "opt/dangling": ("symlink", 0o777, 0, 0),
    "opt/folder/again": ("file", 0o644, 0, 0),
    "opt/a\n    line": ("file", 0o644, 0, 0),
    "opt/pipe": ("fifo", 0o644, 0, 0),
    "opt/deep/er": ("dir", 0o755, 0, 0),
    "opt/deep/er/file": ("file", 0o644, 12, 34),
}
GONE = {"opt/removed", "opt/folder/old", "opt/gone", "opt/gone/file"}

diff_ids: dict[str, str] = {}  # engine → of the layer


@pytest.fixture(scope="module")
def busybox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system of Debian's busybox-static alone."""
    folder = tmp_path_factory.mktemp("busybox")
    folder.chmod(0o777)  # apt downloads as a user of its own
    done = subprocess.run(
        ["apt-get", "download", "busybox-static"], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"busybox-static cannot be downloaded: {done.stderr.strip()[-200:]}")
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg", "-x", package, folder / "package"], check=True)
    root = folder / "root"
    mounts = ("tmp", "var/tmp", "dev", "proc", "sys", "run", "root")
    for name in ("bin", "usr/bin", "etc", "opt/folder", "opt/gone", *mounts):
        (root / name).mkdir(parents=True)
    (program,) = folder.glob("package/**/bin/busybox")
    shutil.copy(program, root / "bin/busybox")
    for name in subprocess.check_output([program, "--list"], text=True).split():
        if name != "busybox":
            (root / "bin" / name).symlink_to("busybox")
    (root / "usr/bin/env").symlink_to("../../bin/busybox")
    for name in ("opt/kept", "opt/removed", "opt/folder/old", "opt/gone/file"):
        (root / name).write_text("old\n")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    return root


@pytest.fixture
def store(busybox: Path, recipe_folder: RecipeFolder, workspace: Workspace, engine: Engine) -> Path:
    """A store of the engine's user with this base."""
    (recipe_folder.path / "images/small.def").write_text("Bootstrap: debootstrap\nOSVersion: bookworm\n")
    recipe_folder.layer("changed", "small", SCRIPT, "\n%environment\n    export WORD=spoken\n")
    recipe_folder.top("changed", 'test "$WORD" = spoken; test -p /opt/pipe')
    path = workspace.folder("store", engine.user) / "store"
    seed(Store(path), resolve(find_recipe(str(recipe_folder.path))).layers[0], busybox)
    for inside in (path, *path.rglob("*")):
        give(inside, engine.user)
    return path


def test_busybox_base_is_built_or_refused(
    engine: Engine, store: Path, recipe_folder: RecipeFolder, workspace: Workspace
) -> None:
    cli, out = Cli(workspace, engine.user), workspace.folder("out", engine.user)
    command = ("image", recipe_folder.path, "--engine", engine.name, "--format", "sif")
    # Docker and Apptainer on fuse-overlayfs read what changed with the image's tar and find.
    # Without setpriv rootless Apptainer cannot have the kernel's overlay.
    refused = {
        Engine("docker", ME): {},
        Engine("apptainer", USER): {"PATH": path_without(workspace.folder("bin"), "setpriv")},
    }
    if (env := refused.get(engine)) is not None:
        stderr = cli.run("--store", store, *command, cwd=out, env=env, code=4).stderr
        assert "reads what a script changed with GNU tar and find of the image, where tar is busybox's" in stderr
        assert "build with --engine buildah or podman, which use this machine's; or add tar and findutils" in stderr
        assert "Traceback" not in stderr
    if engine.name == "docker":
        return
    result = cli.image(store, recipe_folder.path, *command[2:], cwd=out)
    seen = read_image(store, result["layers"])
    assert {path: seen[path][:4] for path in CHANGED if path in seen} == CHANGED
    assert not GONE & seen.keys()
    diff_ids[str(engine)] = result["layers"][1]["diff_id"]
    assert len(set(diff_ids.values())) == 1, diff_ids
    (sif,) = out.glob("*.sif")
    sif.chmod(0o644)
    for user in (ME, USER):
        assert (
            run_in(sif, user, "cat /opt/kept; id -u somebody; echo $WORD; find /opt/folder | sort")
            == "old\nmore\n4321\nspoken\n/opt/folder\n/opt/folder/again\n"
        )


def run_in(sif: Path, user: str, script: str) -> str:
    command = ["apptainer", "--silent", "exec", "--cleanenv", "--contain", "--no-home", sif, "sh", "-c", script]
    env = {"PATH": os.environ["PATH"], "HOME": home_of(user)}
    done = subprocess.run(
        command, cwd="/", env=env, capture_output=True, text=True, check=False, timeout=60, **as_user(user)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
