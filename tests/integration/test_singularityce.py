"""Whole images under Apptainer and SingularityCE, setuid: users, run, start and help scripts, the default task,
attributes.
"""

from __future__ import annotations

import json
import os
import pwd
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from test_executor_parity import ATTRIBUTE, CAPABILITY
from workspaces import ME, USER, Cli, Workspace

pytestmark = pytest.mark.covers("ekiben/run", "ekiben/artifacts", "ekiben/formats")

SINGULARITY = Path(
    "/opt/singularity-ce/bin"
)  # where tests/services.sh unpacks it: off PATH, for a machine has one runtime
DEFINITION = f"""Bootstrap: localimage
From: python.sif

%post
{ATTRIBUTE}
groupadd --gid 4321 lab; useradd --no-create-home --uid 4242 --gid lab ann
printf x >/opt/noted; printf x >/opt/capable; mkdir /opt/marked
attribute /opt/noted user.note 00ff0a3d; attribute /opt/marked user.note 31
attribute /opt/capable security.capability {CAPABILITY}
rm -r /usr/share/doc; mkdir /usr/share/doc; printf 'x' >'/usr/share/doc/a name'

%startscript
    echo "started $GREETING $@" >"$1"
    exec sleep 60

%help
    What it is for.

%environment
    export GREETING="it's"
"""
RUNSCRIPT = """
%runscript
    echo "ran $GREETING $# $1"
"""
SHOW = r"""
import grp, json, os, pwd
print(json.dumps({
    "ann": pwd.getpwnam("ann")[2:4], "lab": grp.getgrnam("lab")[2], "me": pwd.getpwuid(os.getuid())[0],
    "doc": os.listdir("/usr/share/doc"),
    "attributes": {path: {name: os.getxattr(path, name).hex() for name in os.listxattr(path)}
                   for path in ("/opt/noted", "/opt/marked")},
}))
"""
CAPABLE = "import os; print(os.getxattr('/opt/capable', 'security.capability').hex())"
Call = Callable[..., str]


@pytest.fixture(scope="module")
def images(workspace: Workspace, hello: Path, cli: Cli) -> Iterator[dict[str, Path]]:
    """One whose definition says what `run` does, and one whose recipe does."""
    folder = workspace.path / "runtimes"
    shutil.rmtree(folder, ignore_errors=True)
    for name, more, task in (("script", RUNSCRIPT, {}), ("task", "", {"default_task": "greet"})):
        recipe = folder / name
        for below in ("images", "entrypoints"):
            (recipe / below).mkdir(parents=True)
        (recipe / "images/users.def").write_text(DEFINITION + more)
        (recipe / "entrypoints/greet.py").write_text(
            "import os, sys\nprint('task', os.environ['GREETING'], sys.argv[1:])\n"
        )
        recipe_file = {
            "name": name,
            "description": "a test",
            "stack": "cu130",
            "layer": "users",
            "tasks": {"greet": {"entrypoint": "greet.py", "help": "greet"}},
            "test": "test -f /opt/noted",
            **task,
        }
        (recipe / "recipe.yaml").write_text(json.dumps(recipe_file))
        cli.image(
            hello, recipe, "--engine", "apptainer", "--no-verify", "--format", "sif", "-o", folder / f"{name}.sif"
        )
    yield {path.stem: path for path in folder.glob("*.sif")}
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=[ME, USER])
def who(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["apptainer", "singularity"])
def runtime(request: pytest.FixtureRequest) -> str:
    if request.param == "singularity" and not (SINGULARITY / "singularity").exists():
        pytest.skip("SingularityCE is not installed (tests/services.sh install singularity)")
    return str(request.param)


@pytest.fixture
def call(runtime: str, who: str, workspace: Workspace) -> Call:
    """call(*args): the runtime's stdout, started by root or by the ordinary user."""

    def run(*args: str | Path, code: int = 0) -> str:
        command = shlex.join([runtime, "--silent", *map(str, args)])
        prefix = ["sh", "-c", command] if who == ME else ["su", who, "-c", command]
        # It starts itself again as /usr/bin/singularity: so for these processes alone it is there.
        seen = f'mount -t overlay overlay -o lowerdir={SINGULARITY}:/usr/bin /usr/bin && exec "$@"'
        argv = ["unshare", "--mount", "sh", "-c", seen, "sh", *prefix] if runtime == "singularity" else prefix
        environment = {"PATH": os.environ["PATH"], "HOME": pwd.getpwnam(who).pw_dir}
        done = subprocess.run(
            argv, capture_output=True, text=True, env=environment, cwd="/tmp", stdin=subprocess.DEVNULL, timeout=120
        )
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.mark.parametrize("options", [[], ["--contain", "--cleanenv"], ["--writable-tmpfs"]], ids=" ".join)
def test_users_attributes_and_deletions_of_upper_layers(
    call: Call, runtime: str, who: str, images: dict[str, Path], options: list[str]
) -> None:
    seen = json.loads(call("exec", *options, images["script"], "python3", "-c", SHOW))
    assert (seen["ann"], seen["lab"], seen["me"]) == ([4242, 4321], 4321, who)
    assert seen["doc"] == ["a name"]
    assert seen["attributes"] == {"/opt/noted": {"user.note": "00ff0a3d"}, "/opt/marked": {"user.note": "31"}}
    if runtime == "singularity" or who == ME:  # squashfuse in a user namespace shows none, nor would one hold there
        assert call("exec", *options, images["script"], "python3", "-c", CAPABLE).strip() == CAPABILITY


@pytest.mark.guard
def test_run_and_help(call: Call, images: dict[str, Path]) -> None:
    assert call("run", images["script"], "a b") == "ran it's 1 a b\n"
    assert call("run", images["task"]) == "task it's []\n"
    assert call("run", images["task"], "greet", "a b") == "task it's ['a b']\n"
    assert call("exec", images["task"], "greet", "--x") == "task it's ['--x']\n"
    call("run", images["task"], "sh", "-c", "exit 7", code=7)
    assert "What it is for." in call("run-help", images["script"])
    assert "org.ekiben.stack: cu130" in call("inspect", images["script"])
    call("test", images["script"])


def test_instance_start(call: Call, who: str, images: dict[str, Path], workspace: Workspace) -> None:
    name = f"ekiben-started-{who}"
    answer = workspace.folder("started", who) / "answer"
    try:
        call("instance", "start", "--bind", answer.parent, images["script"], name, answer, "a b")
        for _ in range(100):
            if answer.exists() and answer.read_text():
                break
            time.sleep(0.1)
        assert answer.read_text() == f"started it's {answer} a b\n"
        assert call("exec", f"instance://{name}", "cat", "/opt/noted") == "x"
    finally:
        call("instance", "stop", name)
