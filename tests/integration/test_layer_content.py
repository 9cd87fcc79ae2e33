"""What engines cannot do with a file of a layer below goes to another engine; what Apptainer builds of a definition
file, we build.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from ekiben.formats.layer import decode_name
from ekiben.formats.squashfs.reader import SquashfsReader, merged_layer
from ekiben.formats.xattrs import CAPABILITY, content_xattrs
from test_executor_parity import ATTRIBUTE
from test_executor_parity import CAPABILITY as VALUE
from workspaces import ME, USER, Cli, NewStore, RecipeFolder, Workspace, as_user, path_without

pytestmark = pytest.mark.covers("ekiben/formats", "ekiben/executors", "ekiben/builder")

Seen = dict[str, tuple[object, ...]]


def read_image(store: Path, layers: list[dict[str, Any]]) -> Seen:
    """The stacked layers: of each path its kind, mode, owner, and content or target; and what attributes it has."""
    entries: Seen = {}
    with ExitStack() as stack:
        blobs = [store / "blobs/sha256" / layer["digest"][7:] for layer in layers]
        for entry, chunks in merged_layer([SquashfsReader(stack.enter_context(blob.open("rb"))) for blob in blobs]):
            kind, shown = entry.kind, entry.target
            if entry.kind == "file":
                shown = hashlib.sha256(b"".join(chunks or ())).hexdigest()
            if entry.kind == "hardlink":
                kind, shown = entries[entry.target][0], entries[entry.target][-2]  # type: ignore[assignment]
            entries[entry.path] = (kind, entry.mode, entry.uid, entry.gid, shown, entry.xattrs)
    return entries


# ----------------------------------------------------------------------------------- what an engine's overlay cannot do

LOWER = (
    ATTRIBUTE
    + f"""
mkdir -p /opt/n/group; cd /opt/n; chgrp 42 group; chmod 2755 group; printf x >first; ln first second; printf x >capable
attribute /opt/n/capable {CAPABILITY} {VALUE}
"""
)


@pytest.mark.parametrize(
    ("script", "message", "path", "expected"),
    [
        (
            "cat /opt/n/first; printf y >>/opt/n/second",
            "is one of several names of a file in a layer below",
            "second",
            "xy",
        ),
        ("chmod 700 /opt/n/capable", "cannot change a file of a layer below that has capabilities", "capable", "x"),
        (
            "cd /opt/n/group; mkdir sub; printf x >sub/file",
            "was made in a folder that is setgid, and has not its group",
            "group/sub/file",
            "x",
        ),
    ],
    ids=["names", "capabilities", "setgid"],
)
def test_what_fuse_overlayfs_and_squashfuse_mix_up_is_built_right_or_refused(
    script: str,
    message: str,
    path: str,
    expected: str,
    recipe_folder: RecipeFolder,
    workspace: Workspace,
    new_store: NewStore,
) -> None:
    """Without setpriv rootless Apptainer cannot have the kernel's overlay."""
    recipe_folder.layer("lower", "base", LOWER)
    recipe_folder.layer("changed", "lower", script)
    recipe_folder.top("changed")
    fuse = {"PATH": path_without(workspace.folder("bin"), "setpriv")}
    images: list[Seen] = []
    for user, engine, env in (
        (ME, "apptainer", {}),
        (USER, "auto", {}),
        (USER, "auto", fuse),
        (USER, "apptainer", fuse),
    ):
        store, cli, out = new_store(user, "base"), Cli(workspace, user), workspace.folder("out", user)
        command = ["image", recipe_folder.path, "--json", "--format", "sif", "--no-verify", "--engine", engine]
        is_refused = (engine, env) == ("apptainer", fuse)
        done = cli.run("--store", store, *command, cwd=out, env=env, code=5 if is_refused else 0)
        assert (
            "fuse-overlayfs, for the kernel's overlay cannot be used: setpriv is not on PATH" in done.stderr
        ) == bool(env)
        assert ("engine buildah: apptainer: it uses fuse-overlayfs" in done.stderr) == (engine == "auto" and bool(env))
        assert ("builds this layer again" in done.stderr) == (user == USER and not env and path == "capable"), (
            done.stderr
        )
        assert (message in done.stderr) == (is_refused or "builds this layer again" in done.stderr)
        if not is_refused:
            images.append(read_image(store, json.loads(done.stdout)["layers"]))
    assert images[0] == images[1] == images[2]
    assert images[0][f"opt/n/{path}"][4] == hashlib.sha256(expected.encode()).hexdigest()
    if path == "group/sub/file":
        assert images[0]["opt/n/group/sub"][:4] == ("dir", 0o2755, 0, 42)
        assert images[0]["opt/n/group/sub/file"][:4] == ("file", 0o644, 0, 42)
    if path == "capable":
        assert images[0]["opt/n/capable"][1:] == (
            0o700,
            0,
            0,
            images[0]["opt/n/capable"][4],
            ((CAPABILITY, bytes.fromhex(VALUE)),),
        )


# --------------------------------------------------------------------------- definition files that Apptainer reads, too

# The cases of Apptainer's manual ("Definition Files"), in words of our user_id. Both build on the same base.sif.
CORPUS = {
    "sections": (
        """Bootstrap: localimage
From: base.sif

%arguments
    greeting=hello
    unit=station

%files
    files/timetable.txt
    files/timetable.txt /opt/copied
    files/timetable.txt /opt/into/
    files/lines /opt/lines
    files/lines/*.txt /srv
    "files/a name" "/opt/a name"

%environment
    export LISTEN_PORT=12345
    export LC_ALL=C

%post
    printf '%s {{ unit }}\\n' {{ greeting }} >/etc/{{ unit }}
    mkdir -p /opt/work/deep; ln -s ../work /opt/work/link; ln /opt/copied /opt/hard
    mkfifo /opt/work/pipe; chmod 2750 /opt/work/deep; chmod 4755 /opt/into/timetable.txt
    printf x >/opt/owned; chown 12:34 /opt/owned; rm -r /usr/share/doc; rm /etc/issue; mkdir /usr/share/doc
    groupadd --gid 444 lines; useradd --no-create-home --uid 444 --gid 444 porter
    cat >/opt/heredoc <<'END'
a line	with a tab and $nothing expanded
END

%labels
    Author someone@example.org
    Version v0.0.1

%runscript
    echo "departed at $LISTEN_PORT with $*"
    exec echo "$@"

%test
    grep -q station /etc/station

%help
    A container that shows what each section does.
"""
    ),
    "stages": (
        """Bootstrap: localimage
From: base.sif
Stage: devel

%post
    mkdir /opt/expected_path; printf '#!/bin/sh\\necho expected_path\\n' >/opt/expected_path/tool
    chmod 755 /opt/expected_path/tool; printf x >/opt/expected_path/junk

Bootstrap: localimage
From: base.sif
Stage: final

%files from devel
    /opt/expected_path/tool /usr/local/bin/tool

%post
    /usr/local/bin/tool >/opt/said
"""
    ),
}
# Why a path may differ between our image and Apptainer's.
DIFFERENCES = {
    ".singularity.d": "each writes its user_id metadata: scripts, labels, the definition file",
    ".singularity.d/*": "each writes its user_id metadata: scripts, labels, the definition file",
    "environment": "Apptainer's link for images of older versions",
    "singularity": "Apptainer's link for images of older versions",
    ".*": "Apptainer's links for images of older versions",
    "etc/.pwd.lock": "a lock of useradd: no layer keeps it",
    "etc/shadow": "useradd writes the day: ours is the stack's epoch",
}


@pytest.mark.parametrize("name", sorted(CORPUS))
def test_apptainer_builds_the_same_tree_of_a_definition_file(
    name: str, recipe_folder: RecipeFolder, workspace: Workspace, new_store: NewStore, cli: Cli
) -> None:
    folder, store = recipe_folder.path, new_store(ME, "base")
    (folder / "files/lines").mkdir(parents=True)
    for path in ("timetable.txt", "a name", "lines/one.txt", "lines/two.txt", "lines/three.md"):
        (folder / "files" / path).write_text(f"{path}\n")
        (folder / "files" / path).chmod(0o644)
    (folder / "images" / f"{name}.def").write_text(CORPUS[name])
    (folder / f"{name}.def").write_text(CORPUS[name])
    recipe_folder.top(name)
    layers = cli.image(
        store,
        folder,
        "--engine",
        "apptainer",
        "--no-verify",
        "--format",
        "sif",
        "--squash",
        cwd=workspace.folder("out"),
    )["layers"]
    bottom = next(layer for layer in layers if layer["name"] == "base")
    shutil.copy(store / "blobs/sha256" / bottom["digest"][7:], folder / "base.sif")
    sandbox = (
        workspace.folder("sandbox", USER) / "tree"
    )  # without root: where a machine withholds capabilities root's build fails
    argv = ["apptainer", "build", "--fakeroot", "--sandbox", sandbox, f"{name}.def"]
    built = subprocess.run(
        argv, cwd=folder, env=Cli(workspace, USER).settings(), capture_output=True, text=True, **as_user(USER)
    )
    assert built.returncode == 0, built.stderr
    ours = read_image(store, [layer for layer in layers if layer["name"] != recipe_folder.path.name])
    theirs = dict(read_folder(sandbox))
    differing = {
        path: (ours.get(path), theirs.get(path))
        for path in ours.keys() | theirs.keys()
        if not is_known(path) and not is_same(ours.get(path), theirs.get(path))
    }
    assert not differing
    assert (
        not [pattern for pattern in DIFFERENCES if not any(fnmatchcase(path, pattern) for path in theirs)]
        or name == "stages"
    )
    expected_path = {"sections": "opt/heredoc", "stages": "usr/local/bin/tool"}[name]
    assert expected_path in ours, "nothing was compared"


def is_known(path: str) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in DIFFERENCES)


GROUP_WRITES = 0o020  # Apptainer's %post runs with umask 002; ours with 022, as in Docker's


def is_same(ours: tuple[object, ...] | None, theirs: tuple[object, ...] | None) -> bool:
    if ours is None or theirs is None or not isinstance(ours[1], int) or not isinstance(theirs[1], int):
        return ours == theirs
    return ours == theirs or ours == (theirs[0], theirs[1] & ~GROUP_WRITES, *theirs[2:])


def read_folder(
    root: Path, uids: Mapping[int, int] | None = None, gids: Mapping[int, int] | None = None
) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Yield what is in a folder of the ordinary user's, as his namespace shows it; else with these ids of files →
    ids.
    """
    account = pwd.getpwnam(USER)
    uids = subordinate_ids("/etc/subuid", account.pw_uid) if uids is None else uids
    gids = subordinate_ids("/etc/subgid", account.pw_gid) if gids is None else gids
    kinds: Mapping[int, str] = {
        stat.S_IFDIR: "dir",
        stat.S_IFREG: "file",
        stat.S_IFLNK: "symlink",
        stat.S_IFIFO: "fifo",
    }
    for location in (root, *root.rglob("*")):
        seen, path = location.lstat(), str(location.relative_to(root))
        kind, shown = kinds.get(stat.S_IFMT(seen.st_mode), "other"), ""
        if kind == "file":
            shown = hashlib.sha256(location.read_bytes()).hexdigest()
        elif kind == "symlink":
            shown = os.readlink(location)  # noqa: PTH115  a Path would tidy it up
        xattrs = (
            content_xattrs((name, os.getxattr(location, name)) for name in os.listxattr(location))
            if kind in ("dir", "file")
            else ()
        )
        owner, group = uids.get(seen.st_uid, seen.st_uid), gids.get(seen.st_gid, seen.st_gid)
        yield (
            "" if path == "." else decode_name(os.fsencode(path)),
            (kind, stat.S_IMODE(seen.st_mode), owner, group, shown, xattrs),
        )


def subordinate_ids(table: str, user_id: int) -> dict[int, int]:
    """Ids outside of the user's namespace → inside."""
    start, count = next(
        line.split(":")[1:] for line in Path(table).read_text().splitlines() if line.startswith(f"{USER}:")
    )
    return {user_id: 0, **{int(start) + number: number + 1 for number in range(int(count))}}
