"""A folder that a group publishes to, with the users, groups, full disks and kills of a real one."""

from __future__ import annotations

import grp
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from filecmp import cmp
from pathlib import Path

import pytest

from ekiben.core.inner_path import InnerPath
from ekiben.images.published import read_records
from workspaces import ME, ROOT, USER, Cli, Workspace, home_of

pytestmark = pytest.mark.covers("ekiben/publish", "ekiben/store")

COLLEAGUE, LAB = "colleague", "ekiben-lab"  # tests/services.sh makes them


def login(user: str) -> list[str]:
    """As after a new login: with all groups of the user's."""
    return [
        "setpriv",
        f"--reuid={user}",
        f"--regid={user}",
        "--init-groups",
        "env",
        f"HOME={home_of(user)}",
        f"USER={user}",
        f"LOGNAME={user}",
    ]


@pytest.fixture
def lab(workspace: Workspace) -> Path:
    """A folder of the group's, to which its members publish."""
    shared_dir = workspace.folder("lab")
    os.chown(shared_dir, -1, grp.getgrnam(LAB).gr_gid)
    shared_dir.chmod(0o2775)
    return shared_dir


def publish(
    cli: Cli,
    store: Path,
    shared_dir: Path,
    *args: str | Path,
    code: int = 0,
    prefix: list[str] | None = None,
    recipe: str | Path = "hello",
) -> subprocess.CompletedProcess[str]:
    return cli.run("--store", store, "publish", recipe, "--to", shared_dir, *args, code=code, prefix=prefix or [])


@pytest.mark.guard
def test_colleague_runs_the_published_image_without_a_build(
    cli: Cli, user_cli: Cli, workspace: Workspace, hello: Path, lab: Path
) -> None:
    done = publish(cli, hello, lab, "--version", "1", prefix=["sh", "-c", 'umask 077; exec "$@"', "sh"])
    assert f"apptainer exec --nv {lab}/images/hello/current hello" in done.stdout
    (record,) = read_records(InnerPath.below(lab / "images/hello"))[0]
    assert [check.runtime for check in record.checks] == ["apptainer"]
    assert cmp(lab / "images/hello" / record.file, workspace.path / "hello.sif", shallow=False)

    out, mine = workspace.folder("out", USER), workspace.store(USER, "of-a-colleague")
    current = lab / "images/hello/current"
    ran = subprocess.run(
        [*login(COLLEAGUE), "apptainer", "exec", "--nv", current, "hello"],
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    made = user_cli.image(
        mine, "hello", "--format", "sif", "-o", out / "hello.sif", cwd=out, env={"EKIBEN_SHARED": str(lab)}
    )
    assert made["built"] == []
    assert cmp(out / "hello.sif", current, shallow=False)
    assert sum(path.stat().st_size for path in (mine / "blobs/sha256").iterdir()) < 10_000
    shutil.rmtree(mine)


def test_user_builds_on_published_layers(user_cli: Cli, cli: Cli, workspace: Workspace, hello: Path, lab: Path) -> None:
    """A layer of one's own on layers that lie in the other store."""
    publish(cli, hello, lab)
    recipe = workspace.folder("recipe", USER) / "own"
    (recipe / "images").mkdir(parents=True)
    (recipe / "images/more.def").write_text(
        "Bootstrap: localimage\nFrom: python.sif\n\n%post\n    python3 --version >/more\n"
    )
    about = {
        "name": "own",
        "description": "x",
        "stack": "cu130",
        "layer": "more",
        "tasks": {},
        "test": "grep Python /more",
    }
    (recipe / "recipe.yaml").write_text(json.dumps(about))
    mine = workspace.store(USER, "on-top")
    made = user_cli.image(
        mine, recipe, "--engine", "apptainer", "--format", "sif", cwd=recipe.parent, env={"EKIBEN_SHARED": str(lab)}
    )
    assert made["built"] == ["more", "own"]
    # And it is published beside what it stands on, by another member of the group, bringing only its own bytes.
    argv = ("--store", mine, "--shared", lab, "publish", recipe, "--to", lab, "--json")
    record = json.loads(cli.run(*argv, prefix=login(USER)).stdout)
    assert record["by"] == USER
    assert record["bytes_copied"] < 0.01 * record["size"]
    group = grp.getgrnam(LAB).gr_gid
    assert {path.lstat().st_gid for path in lab.rglob("*")} == {group}
    shutil.rmtree(mine)


def test_missing_permission_gives_a_hint(user_cli: Cli, cli: Cli, workspace: Workspace, hello: Path, lab: Path) -> None:
    alone = workspace.folder("alone")
    done = publish(user_cli, hello, alone, code=6)
    assert f"you may not publish in {alone}: it is {ME}'s" in done.stderr
    assert f"ask {ME}: chmod 2775" in done.stderr
    # A login that began before the user came into the group (workspaces.as_user gives no groups but the first).
    done = publish(user_cli, hello, lab, code=6)
    assert f"you may not publish in {lab}" in done.stderr
    assert f"run `newgrp {LAB}`, then repeat the command" in done.stderr
    assert list(lab.iterdir()) == []
    publish(cli, hello, lab, "--no-verify", prefix=login(COLLEAGUE))
    lab.chmod(0o750)
    shut = user_cli.run("--store", hello, "plan", "hello", env={"EKIBEN_SHARED": str(lab)}, code=6).stderr
    assert f"the shared store {lab} cannot be read: Permission denied" in shut


def test_a_folder_of_a_group_that_this_login_is_not_in(user_cli: Cli, workspace: Workspace, hello: Path) -> None:
    """One's own folder, without setgid: what is written there would be of another group."""
    shared_dir = workspace.folder("mine", USER)
    os.chown(shared_dir, -1, grp.getgrnam(LAB).gr_gid)
    shared_dir.chmod(0o755)
    done = publish(user_cli, hello, shared_dir, code=6)
    assert f"{shared_dir} belongs to the group {LAB}, and this login may not give files to it" in done.stderr
    assert f"`newgrp {LAB}`" in done.stderr


@pytest.fixture
def small_disk(workspace: Workspace) -> Iterator[Path]:
    folder = workspace.folder("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60m,mode=755", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)
    folder.rmdir()


def test_full_disk_while_publishing(cli: Cli, hello: Path, small_disk: Path) -> None:
    shared_dir = small_disk / "lab"
    done = publish(cli, hello, shared_dir, code=6)
    assert re.search(rf"no space left in {shared_dir}: No space left on device; [\d.]+ [kMG]?B", done.stderr)
    assert f"prune --in {shared_dir}" in done.stderr
    assert [
        path
        for path in shared_dir.rglob("*")
        if path.suffix in (".sif", ".json") or path.parent.name == "sha256"
        if path.name != "index.json"
    ] == []
    subprocess.run(["mount", "-o", "remount,size=400m", small_disk], check=True)
    publish(cli, hello, shared_dir)
    assert len(read_records(InnerPath.below(shared_dir / "images/hello"))[0]) == 1


def test_publish_killed_at_any_moment_is_resumed(cli: Cli, workspace: Workspace, hello: Path, lab: Path) -> None:
    argv = ("--store", hello, "publish", "hello", "--to", lab, "--no-verify")
    began = time.monotonic()
    cli.run(*argv)
    whole = time.monotonic() - began
    shutil.rmtree(lab / "images")
    shutil.rmtree(lab / "store")
    killed = 0
    while killed < 6:
        with cli.start(*argv, cwd=workspace.path) as process:
            time.sleep(random.uniform(0.1, 1) * whole)
            process.send_signal(signal.SIGKILL)
        killed += 1
        for record in read_records(InnerPath.below(lab / "images/hello"))[0]:
            subprocess.run(
                ["sha256sum", "-c", "--quiet", record.file + ".sha256"], cwd=lab / "images/hello", check=True
            )
    cli.run(*argv)
    (record,) = read_records(InnerPath.below(lab / "images/hello"))[0]
    subprocess.run(["sha256sum", "-c", "--quiet", record.file + ".sha256"], cwd=lab / "images/hello", check=True)
    assert list((lab / "store/staging").iterdir()) == []


def test_load_of_16_writers_and_64_readers(workspace: Workspace) -> None:
    """Killed at random all the while: nothing lost, nothing damaged, nothing half ever seen."""
    folder = workspace.folder("load")
    done = subprocess.run(
        [sys.executable, ROOT / "tests/integration/share_load.py", folder, "15"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["failed"] == []
    assert (result["lost"], result["damaged"], result["without layers"]) == ([], [], [])
    assert result["current"]
    assert result["modes"] == ["0o444", "0o555"]
    for what, least in (("kills", 5), ("published", 5), ("pinned", 1), ("read", 50), ("looked", 20)):
        assert result[what] >= least, result
