"""A %post that fails: the line of the definition file under each engine, and the shell of --debug on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import time
from pathlib import Path

import pytest

from test_crash_recovery import processes_in
from workspaces import Cli, Engine, NewStore, RecipeFolder, Workspace, as_user

pytestmark = pytest.mark.covers("ekiben/executors", "ekiben/builder")

POST = """\
Bootstrap: localimage
From: base.sif

%post
    true {engine}
    mkdir /half
    # the next command is of three lines
    cat <<END |
a b
END
    sh -c 'cat >/half/file; echo "$0 said this"; exit 9' "$0"
    echo not reached
"""
FAILED = ":8) failed with exit code 9. The command:\n      cat <<END |\n  a b\n  END\n      sh -c 'cat >/half/file;"


def failing(recipe_folder: RecipeFolder, engine: Engine) -> Path:
    path = recipe_folder.path / "images/half.def"
    path.write_text(POST.format(engine=engine.name))
    recipe_folder.top("half")
    return path


def test_line_that_failed(
    engine: Engine, workspace: Workspace, recipe_folder: RecipeFolder, new_store: NewStore
) -> None:
    path = failing(recipe_folder, engine)
    store, out = new_store(engine.user, "base"), workspace.folder("out", engine.user)
    argv = ("--store", store, "build", recipe_folder.path, "--engine", engine.name)
    done = Cli(workspace, engine.user).run(*argv, cwd=out, code=5)
    assert f"%post of half ({path}{FAILED}" in done.stderr
    assert done.stderr.split("Its last lines:\n")[1].startswith("  /run/ekiben/post.sh said this\n")


def test_debug_opens_a_shell_in_the_layer(
    engine: Engine, workspace: Workspace, recipe_folder: RecipeFolder, new_store: NewStore
) -> None:
    failing(recipe_folder, engine)
    store, out = new_store(engine.user, "base"), workspace.folder("out", engine.user)
    cli = Cli(workspace, engine.user)
    argv = ("--store", store, "build", recipe_folder.path, "--engine", engine.name, "--debug")
    refused = cli.run(*argv, cwd=out, code=2)
    assert "--debug opens a shell on a terminal, and this command has none" in refused.stderr
    # The echo of what is typed has the words apart.
    typed = (
        'cat /half/file; echo id-$(id -u)-; echo "$SOURCE_DATE_EPOCH"-epoch; ls /run/ekiben; touch /half/more; exit 3\n'
    )
    shown, code = on_terminal(cli, argv, out, typed)
    assert code == 5, shown
    after = shown.split("a shell in the half-built layer")[1]
    assert "id-0-" in after
    assert "a b" in after
    assert "post.sh" in after
    assert not (store / "staging").exists() or not list((store / "staging").iterdir())
    assert not processes_in(store)


def on_terminal(cli: Cli, argv: tuple[str | Path, ...], cwd: Path, typed: str) -> tuple[str, int]:
    """Run a command on a terminal of its own, and type when the shell is there."""
    ours, theirs = pty.openpty()
    env = {**cli.settings(), "TERM": "xterm"}
    child = subprocess.Popen(
        cli.argv(*argv),
        cwd=cwd,
        env=env,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        **as_user(cli.user),
    )
    os.close(theirs)
    shown, is_typed, end = "", False, time.monotonic() + 120
    while time.monotonic() < end:
        if not select.select([ours], [], [], 0.2)[0]:
            if child.poll() is not None:
                break
            continue
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(ours, 1 << 16)
        if not data:
            break
        shown += data.decode("utf-8", "replace")
        if not is_typed and "# " in shown.partition("a shell in the half-built layer")[2][-40:]:
            os.write(ours, typed.encode())
            is_typed = True
    os.close(ours)
    return shown, child.wait(60)
