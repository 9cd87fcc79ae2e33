"""Run build.py in a process forked from one that has imported it: no interpreter starts, no module is compiled or
loaded again.

A server process, one per pytest process, imports the command line and what it imports late. Each request forks it: the
child gets the request's arguments, environment, folder and outputs, and ends as any Python process does. Nothing of the
tests' own state is in it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
LATE_IMPORTS = ("cyclonedx", "deflate", "docker", "jinja2", "requests", "zstandard")
FIXED_AT_START = ("PYTHON", "LC_", "LANG")  # the interpreter reads variables with these prefixes when it starts
STREAMS = (("stdin", 0, "r", "strict"), ("stdout", 1, "w", "strict"), ("stderr", 2, "w", "backslashreplace"))


def serve(requests: socket.socket) -> None:
    """Fork for each request, and send the exit code. A child returns from here and runs the program; see __main__."""
    for line in requests.makefile("r", encoding="utf-8"):
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            requests.close()
            become(request)
            return
        requests.sendall(f"{child}\n".encode())
        requests.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())
    os._exit(0)


def become(request: Mapping[str, Any]) -> None:
    """Take the arguments, environment, folder and outputs of ``request``."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    files = (os.devnull, request["stdout"], request["stderr"])
    for (name, number, mode, errors), file in zip(STREAMS, files, strict=True):
        descriptor = os.open(file, os.O_RDONLY if mode == "r" else os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
        setattr(sys, name, open(number, mode, encoding="utf-8", errors=errors, closefd=False))  # noqa: SIM115
    sys.argv = request["argv"]
    sys.orig_argv = [sys.executable, *request["argv"]]
    sys.path[0] = str(Path(request["argv"][0]).parent)
    tempfile.tempdir = None


class Server:
    """The process that forks, seen from the tests."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.end, other = socket.socketpair()
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "support.forked_cli", str(other.fileno())],
                pass_fds=[other.fileno()],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
                stdin=subprocess.DEVNULL,
            )
        self.answers = self.end.makefile("r", encoding="utf-8")

    def run(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run the Python file ``argv[0]`` with the arguments after it."""
        with self.lock, tempfile.TemporaryDirectory() as folder:
            request: dict[str, Any] = {"argv": [*argv], "env": dict(env), "cwd": str(cwd)}
            for name in ("stdout", "stderr"):
                Path(folder, name).touch()
                request[name] = str(Path(folder, name))
            self.end.sendall(json.dumps(request).encode() + b"\n")
            child = int(self.answers.readline())
            alarm = threading.Timer(timeout, os.kill, (child, signal.SIGKILL))
            alarm.start()
            try:
                code = int(self.answers.readline())
            finally:
                alarm.cancel()
            alarm.join()
            texts = [Path(folder, name).read_bytes().decode(errors="surrogateescape") for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess([sys.executable, *argv], code, *texts)

    def stop(self) -> None:
        self.end.shutdown(socket.SHUT_RDWR)
        self.answers.close()
        self.end.close()
        self.process.wait()


@functools.cache
def server() -> Server:
    """Return the server of this process, started when it is asked for first."""
    return Server()


def stop_server() -> None:
    if server.cache_info().currsize:
        server().stop()
        server.cache_clear()


def can_fork(env: Mapping[str, str]) -> bool:
    """Return whether these changes of the environment take effect in a Python that runs already."""
    return not any(name.startswith(FIXED_AT_START) for name in env)


def import_all() -> None:
    """Import every command, and what commands import when they need it."""
    from ekiben.cli import commands

    for module in pkgutil.walk_packages(commands.__path__, f"{commands.__name__}."):
        importlib.import_module(module.name)
    for name in LATE_IMPORTS:
        importlib.import_module(name)


def end_after(work: Callable[[], object]) -> NoReturn:
    """Do ``work`` and end as Python does, but for the teardown of modules: it would copy the pages of all of them."""
    code = 0
    try:
        work()
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code & 0xFF
        elif end.code is not None:
            print(end.code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    finally:
        atexit._run_exitfuncs()
        gc.collect()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    import_all()
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
    end_after(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))
