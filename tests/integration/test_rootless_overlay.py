"""Without root, too, layers come from the kernel's overlay; where only fuse-overlayfs can be had, another engine is
taken, or it is said.
"""

from __future__ import annotations

import json
import shutil
import stat

import pytest

from test_layer_content import read_image
from workspaces import ME, USER, Cli, NewStore, RecipeFolder, Workspace

pytestmark = pytest.mark.covers("ekiben/executors")

LOWER = r"""
for name in renamed edited linked again twice; do mkdir -p /opt/$name; printf old >/opt/$name/file; done
mkdir -m 6755 /opt/bits; mkfifo /opt/pipe /opt/left; printf x >/opt/first; ln /opt/first /opt/second
mkdir /opt/group; chgrp 42 /opt/group; chmod 2755 /opt/group
"""
# What fuse-overlayfs does otherwise: see test_fuse_overlayfs.py.
CHANGES = r"""
cd /opt/renamed; printf new >new; mv new file; rm file
cd /opt/edited; sed -i s/old/new/ file; rm file
cd /opt/linked; ln -sf nowhere t; mv -T t file; rm file
cd /opt/again; printf new >new; rm file; mv new file; rm file
cd /opt/twice; printf new >new; mv new file; mv file /opt/renamed/file2
cd /opt; touch bits/x; chown 5 pipe; mv left bits; cat first; printf y >>second; mkdir group/sub
su nobody -s /bin/sh -c 'cat /opt/first' >seen
"""
GONE = [f"opt/{name}/file" for name in ("renamed", "edited", "linked", "again", "twice")]


def test_user_gets_the_layers_of_root(recipe_folder: RecipeFolder, workspace: Workspace, new_store: NewStore) -> None:
    recipe_folder.layer("lower", "base", LOWER)
    recipe_folder.layer("changed", "lower", CHANGES)
    recipe_folder.top("changed")
    diff_ids = []
    for user in (ME, USER):
        store, cli, out = new_store(user, "base"), Cli(workspace, user), workspace.folder("out", user)
        argv = ["--store", store, "image", recipe_folder.path, "--json", "--format", "sif", "--no-verify"]
        done = cli.run(*argv, "--engine", "auto" if user == USER else "apptainer", cwd=out)
        assert user == ME or "engine apptainer: usable here" in done.stderr
        assert "fuse-overlayfs" not in done.stderr
        layers = json.loads(done.stdout)["layers"]
        diff_ids.append([layer["diff_id"] for layer in layers])
        assert not list((store / "staging").iterdir())
    assert diff_ids[0] == diff_ids[1]
    seen = read_image(store, layers)
    assert [path for path in GONE if path in seen] == []
    assert (seen["opt/pipe"][0], seen["opt/bits/left"][0], seen["opt/bits"][1]) == ("fifo", "fifo", 0o6755)
    assert seen["opt/group/sub"][:4] == ("dir", 0o2755, 0, 42)
    assert seen["opt/seen"][4] == seen["opt/first"][4] != seen["opt/second"][4]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("mkdir /opt/group/sub", "was made in a folder that is setgid, and has not its group"),
        ("mv /opt/pipe /opt/other", "was a FIFO in a layer below"),
        ("printf y >>/opt/second", "is one of several names of a file in a layer below"),
    ],
    ids=["setgid", "fifo", "names"],
)
def test_buildah_with_fuse_overlayfs_refuses_what_that_mixes_up(
    script: str, message: str, recipe_folder: RecipeFolder, workspace: Workspace, new_store: NewStore
) -> None:
    program = shutil.which("fuse-overlayfs")
    if program is None:
        pytest.skip("fuse-overlayfs is not installed (tests/services.sh install)")
    recipe_folder.layer("lower", "base", LOWER)
    recipe_folder.layer("changed", "lower", script)
    recipe_folder.top("changed")
    out = workspace.folder("out", USER)
    (out / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\nrunroot = "{out}/run"\ngraphroot = "{out}/root"\nrootless_storage_path ='
        f' "{out}/images"\n[storage.options.overlay]\nmount_program = "{program}"\n'
    )
    store = new_store(USER, "base")
    done = Cli(workspace, USER).run(
        "--store",
        store,
        "image",
        recipe_folder.path,
        "--engine",
        "buildah",
        "--no-verify",
        cwd=out,
        env={"CONTAINERS_STORAGE_CONF": str(out / "storage.conf")},
        code=5,
    )
    assert "engine buildah: asked for; it uses fuse-overlayfs" in done.stderr
    assert message in done.stderr
    assert stat.S_ISDIR((out / "images").stat().st_mode)  # and not the user's own storage
