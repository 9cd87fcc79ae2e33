"""The `docker run` line that is printed: what a task writes stays, and belongs to whoever pasted the line."""

from __future__ import annotations

import json
import os
import pwd
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from workspaces import ME, ROOT, USER, Cli, NewStore, RecipeFolder, Workspace, home_of, need

pytestmark = pytest.mark.covers("ekiben/cli", "ekiben/artifacts")
SOCKET = Path("/var/run/docker.sock")


@pytest.fixture
def printed(recipe_folder: RecipeFolder, cli: Cli, new_store: NewStore) -> Iterator[str]:
    """The line of an image whose task writes a file into the folder it runs in."""
    need("docker")
    entrypoints = recipe_folder.path / "entrypoints"
    entrypoints.mkdir()
    (entrypoints / "write.py").write_text("import os\nopen('result.txt', 'w').write(f'{os.getcwd()}\\n')\n")
    about = {
        "name": "writes",
        "description": "a test",
        "stack": "cu130",
        "layer": "python",
        "tasks": {"write": {"entrypoint": "write.py", "help": "write result.txt"}},
    }
    (recipe_folder.path / "recipe.yaml").write_text(json.dumps(about))
    store = new_store(ME, "base", "python")
    made = cli.image(store, recipe_folder.path, "--format", "docker", "--no-verify", cwd=recipe_folder.path)
    (line,) = made["run"]
    yield str(line)
    subprocess.run(["docker", "image", "rm", "--force", "ekiben/writes"], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.guard
@pytest.mark.parametrize("user", [ME, USER])
def test_a_task_s_file_stays_and_is_the_caller_s(printed: str, user: str, workspace: Workspace) -> None:
    folder = workspace.folder("a folder", user)
    identity = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": [SOCKET.stat().st_gid]}
    environment = {"PATH": os.environ["PATH"], "HOME": home_of(user)}
    done = subprocess.run(
        ["sh", "-c", printed],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        **({} if user == ME else identity),
    )  # type: ignore[arg-type]
    assert done.returncode == 0, f"{printed}\n{done.stderr}"
    made = folder / "result.txt"
    assert made.read_text() == f"{folder}\n"
    assert (made.owner(), made.stat().st_gid) == (user, pwd.getpwnam(user).pw_gid)


def test_service_of_compose_writes_as_its_user(printed: str, recipe_folder: RecipeFolder, workspace: Workspace) -> None:
    need("docker-compose")
    folder = workspace.folder("composed", ME)
    render = [sys.executable, ROOT / "build.py", "render", recipe_folder.path, "--to", "compose"]
    subprocess.run(render, cwd=folder, check=True)
    file = folder / "compose.yaml"
    services = yaml.safe_load(file.read_text())["services"]
    assert services["write"]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    del services["write"]["deploy"]  # no NVIDIA runtime is needed to see where files go
    services["write"]["user"] = "1234:4321"
    folder.chmod(0o777)
    file.write_text(yaml.safe_dump({"services": services}))
    subprocess.run(["docker-compose", "run", "--rm", "write"], cwd=folder, check=True, capture_output=True)
    written = folder / "result.txt"
    assert written.read_text() == "/work\n"
    assert (written.stat().st_uid, written.stat().st_gid) == (1234, 4321)


def test_a_folder_at_the_image_s_own_working_directory_gets_the_result_too(printed: str, workspace: Workspace) -> None:
    tag = shlex.split(printed)[-2]
    config = json.loads(subprocess.check_output(["docker", "image", "inspect", tag]))[0]["Config"]
    assert config["WorkingDir"] == "/work"
    folder = workspace.folder("mounted", USER)
    owner = f"{pwd.getpwnam(USER).pw_uid}:{pwd.getpwnam(USER).pw_gid}"
    subprocess.run(["docker", "run", "--rm", "-v", f"{folder}:/work", "--user", owner, tag, "write"], check=True)
    assert (folder / "result.txt").read_text() == "/work\n"
    assert (folder / "result.txt").owner() == USER
