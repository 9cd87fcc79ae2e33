"""`build.py notebook` with the real JupyterLab: its token, its kernel, what it listens on, what is left when it
ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from workspaces import ME, USER, Cli, Workspace

pytestmark = pytest.mark.covers("ekiben/run", "images/notebook")

# In the image, which has the client of websockets: run a cell as a browser does, and print what it prints.
RUN_CELL = """\
import json, sys, uuid, websocket
url, token, kernel, code = sys.argv[1:]
channel = websocket.create_connection(f"{url.replace('http', 'ws')}/api/kernels/{kernel}/channels", timeout=60,
                                      header=[f"Authorization: token {token}"])
header = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "username": "", "session": uuid.uuid4().hex,
          "version": "5.3"}
content = {"code": code, "silent": False, "store_history": False, "user_expressions": {}, "allow_stdin": False}
message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
channel.send(json.dumps(message))
while True:
    message = json.loads(channel.recv())
    if message["parent_header"].get("msg_id") != header["msg_id"]:
        continue
    if message["msg_type"] == "stream":
        sys.stdout.write(message["content"]["text"])
    if message["msg_type"] == "error":
        sys.exit("\\n".join(message["content"]["traceback"]))
    if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
        break
"""
CELL = """\
import os, sys, hello
from ipykernel.connect import get_connection_info
packages = [path for path in sys.path if "notebook" in path]
print(sys.prefix, os.getcwd(), hello.__file__, *packages, get_connection_info(unpack=True)["transport"])
"""


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]
    errors: IO[str]
    url: str
    token: str

    def get(self, path: str, *, token: str | None = None, post: object = None) -> object:
        body = None if post is None else json.dumps(post).encode()
        request = urllib.request.Request(self.url + path, data=body, headers={"Authorization": f"token {token}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def folder(workspace: Workspace, hello: Path, cli: Cli) -> Iterator[Path]:
    """A folder with hello-notebook.sif; the layers are in the store of `hello`."""
    folder = workspace.folder("notebook")
    done = cli.run("--store", hello, "notebook", "hello", "--no-start", "--runtime", "apptainer", cwd=folder)
    assert done.stdout == ""
    assert "2 of 4 layers to build" in done.stderr  # those of `hello` are taken as they are
    assert "tested  under apptainer" in done.stderr
    yield folder
    subprocess.run(["docker", "rmi", "--force", "ekiben/hello-notebook:latest"], capture_output=True, check=True)


@contextmanager
def started(cli: Cli, *args: str | Path, cwd: Path) -> Iterator[Server]:
    process = cli.start(*args, cwd=cwd)
    try:
        assert process.stdout
        assert process.stderr
        lines = {}
        for line in process.stdout:
            name, _, value = line.strip().partition(" ")
            lines[name] = value.strip()
            if name == "url":
                break
        else:
            pytest.fail(process.communicate()[1])
        assert lines["url"].endswith(f"/lab?token={lines['token']}")
        yield Server(process, process.stderr, lines["url"].partition("/lab")[0], lines["token"])
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def listening() -> set[str]:
    """ADDRESS:PORT of every listening TCP socket of this machine."""
    lines = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[3] for line in lines}


def processes() -> str:
    return subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("user", "runtime"), [(USER, "apptainer"), (ME, "docker")])
def test_notebook_runs_cells_in_the_images_python_and_leaves_nothing(
    user: str, runtime: str, folder: Path, hello: Path, workspace: Workspace
) -> None:
    here = workspace.folder("here", user)
    sif = folder / "hello-notebook.sif"
    argv = ["--sif", sif] if runtime == "apptainer" else ["--runtime", "docker"]
    folders = set(Path("/tmp").glob("ekiben-notebook-*"))
    with started(Cli(workspace, user), "--store", hello, "notebook", "hello", *argv, cwd=here) as server:
        assert server.url.startswith("http://127.0.0.1:")
        port = server.url.rpartition(":")[2]
        assert server.get("/api/status", token=server.token)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            server.get("/api/status", token="0" * 48)
        kernel = server.get("/api/kernels", token=server.token, post={"name": "python3"})
        assert isinstance(kernel, dict)
        done = subprocess.run(
            [
                "apptainer",
                "exec",
                "--cleanenv",
                sif,
                "/opt/notebook/bin/python",
                "-c",
                RUN_CELL,
                server.url,
                server.token,
                kernel["id"],
                CELL,
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        # Kernels have sockets of files: what they print is nobody else's to read.
        expected = (
            f"/opt/venv {here} /opt/ekiben/recipe/entrypoints/hello.py /opt/notebook/lib/python3.11/site-packages ipc\n"
        )
        assert (done.returncode, done.stdout) == (0, expected), done.stderr
        assert [item for item in listening() if item.endswith(f":{port}")] == [f"127.0.0.1:{port}"]
        assert server.token not in processes()
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(timeout=60) == 0
        assert "Parent appears to have exited" not in server.errors.read()  # that is: the kernel was shut down, too
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", int(port)), timeout=5):
        pass
    assert kernel["id"] not in processes()
    assert "/opt/ekiben/notebook/server.py" not in processes()
    assert set(Path("/tmp").glob("ekiben-notebook-*")) == folders
    assert list(here.iterdir()) == []


def test_second_start_builds_nothing_and_ports_in_use_are_named(folder: Path, hello: Path, cli: Cli) -> None:
    again = cli.run("--store", hello, "notebook", "hello", "--no-start", "--runtime", "apptainer", cwd=folder)
    assert "all 4 layers are stored" in again.stderr
    assert "(existing)" in again.stderr
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        argv = ("--store", hello, "notebook", "hello", "--sif", "hello-notebook.sif", "--port", str(port))
        done = cli.run(*argv, cwd=folder, code=2)
    assert f"--port {port} is in use" in done.stderr
