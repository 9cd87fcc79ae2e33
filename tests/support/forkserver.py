"""A fork server: a process that has imported torch, transformers and peft once and forks to run a script.

``python()`` returns the path of a program to use instead of ``sys.executable``. Run as a script, this file is the
server: ``forkserver.py FOLDER [MODULE…]`` imports the modules, writes FOLDER/python, listens at FOLDER/socket, prints
"ready", and ends with its standard input. Several runs of pytest can share a server: start each of them with
FOLDER/python and $EKIBEN_TEST_FORKSERVER.

A script starts as in a new interpreter: arguments, environment, folder, streams, sys.path, filters of warnings, a
process group of its own. Two things differ. The preloaded libraries have read the environment at their import; only
huggingface_hub reads it again. At the end, the preloaded modules are not torn down, which would copy all their pages;
atexit and threads run as usual. Start a real interpreter where such a thing is what you test. The server refuses
requests whose variables of GUARDED differ from its own, or whose options need an interpreter of their own; they get a
real interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

FOLDER = "EKIBEN_TEST_FORKSERVER"  # the folder of a server that runs already
# Not for the scripts: sys.executable is the stand-in in those that do not have the variable.
_shared = os.environ.pop(FOLDER, "") if __name__ != "__main__" else ""
PRELOADED = (
    "torch",
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "safetensors.torch",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.llama.modeling_llama",
    "peft",
    "sentencepiece",
)
GUARDED = (
    "HF_ENDPOINT",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTHONHOME",
    "TRITON_INTERPRET",
)
_PR_SET_PDEATHSIG = 1
_servers: dict[int, str] = {}  # process that started it → folder


def python() -> str:
    """Return the path of the stand-in for ``sys.executable``, and start the server of this process if there is none."""
    folder = _shared or _servers.get(os.getpid()) or start_server(PRELOADED)
    return str(Path(folder, "python"))


def start_server(preloaded: Sequence[str]) -> str:
    """Start a server that ends with this process, and return its folder."""
    folder = tempfile.mkdtemp(prefix="forks-", dir="/tmp")  # short: the path of a socket has at most 107 bytes
    ready, writer = os.pipe()
    with (Path(folder) / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, __file__, folder, *preloaded],
            stdin=subprocess.PIPE,
            stdout=writer,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    os.close(writer)
    with os.fdopen(ready, "rb") as stream:
        assert stream.readline() == b"ready\n", (Path(folder) / "log").read_text()
    pid = os.getpid()
    _servers[pid] = folder

    def stop() -> None:
        if os.getpid() == pid:  # not in forks
            server.communicate()
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)
    return folder


def prepare(folder: Path) -> None:
    """Write the stand-in program into a server's folder."""
    program = folder / "python"
    source = Path(__file__).with_name("forked_python.py").read_text(encoding="utf-8")
    # Isolated and without site: it starts in a few milliseconds.
    program.write_text(f"#!{sys.executable} -IS\n{source}", encoding="utf-8")
    program.chmod(0o755)


class Child:
    """A script that the server runs; ``pid`` is the script's own process and process group.

    The server kills the group if this process ends first.
    """

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], streams: Sequence[int]) -> None:
        """arguments: those of an interpreter. streams: the descriptors for its input, output and errors."""
        from support.forked_python import connect, send_request

        connection = connect(str(Path(python()).parent))
        assert connection is not None, "the fork server is gone"
        self._connection = connection
        pid = send_request(connection, arguments, env, str(Path.cwd()), streams)
        assert pid is not None, "the fork server refuses this environment or these options"
        self.pid: int = pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; a signal's number is negative.

        Raises subprocess.TimeoutExpired.
        """
        from support.forked_python import receive

        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                status = receive(self._connection)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0) from None
            self.returncode = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code, or None while the script runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None


# ---------------------------------------------------------------------- the server


@dataclass(frozen=True)
class Options:
    """What an interpreter's command line says."""

    kind: str  # c, m or a script
    code: str  # the source, the module, the path
    arguments: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    unbuffered: bool = False

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Options | None:
        """Read ``arguments``; None for options that need an interpreter of their own."""
        filters: list[str] = []
        unbuffered, rest = False, list(arguments)
        while rest:
            word = rest.pop(0)
            if word in ("-c", "-m") and rest:
                return cls(word[1], rest[0], tuple(rest[1:]), tuple(filters), unbuffered)
            if word == "-W" and rest:
                filters.append(rest.pop(0))
            elif word.startswith("-W"):
                filters.append(word[2:])
            elif word == "-u":
                unbuffered = True
            elif word.startswith("-"):
                return None
            else:
                return cls("script", word, tuple(rest), tuple(filters), unbuffered)
        return None


@dataclass(frozen=True)
class Request:
    """A script to run, and where."""

    options: Options
    env: Mapping[str, str]
    cwd: str
    umask: int
    streams: Sequence[int]


class Server:
    """Listen at a socket and fork for each request."""

    def __init__(self, folder: Path) -> None:
        self.env = dict(os.environ)
        self.selector = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / "socket"))
        self.listener.listen(64)
        self.selector.register(self.listener, selectors.EVENT_READ, "listener")
        self.selector.register(0, selectors.EVENT_READ, "owner")
        self.children: dict[int, tuple[int, socket.socket]] = {}  # number → descriptor of the process, its client

    def serve(self) -> Request | None:
        """Serve until the owner is gone, and return None; in a forked child, return its request at once."""
        while True:
            for key, _ in self.selector.select():
                if key.data == "owner":
                    if not os.read(0, 64):
                        for pid in self.children:
                            _kill_group(pid)
                        return None
                elif key.data == "listener":
                    if (request := self._accept()) is not None:
                        return request
                elif key.data in self.children:
                    self._end(key.data, is_client=key.fd != self.children[key.data][0])

    def _accept(self) -> Request | None:
        """Read a request and fork. Returns it in the child, None in the server."""
        client, _ = self.listener.accept()
        client.settimeout(10)
        streams: list[int] = []
        try:
            head, streams, _, _ = socket.recv_fds(client, 4, 3)
            size, data = int.from_bytes(head, "big"), b""
            while len(data) < size:
                more = client.recv(size - len(data))
                if not more:
                    raise ConnectionError
                data += more
        except OSError:  # the client was killed
            client.close()
            for stream in streams:
                os.close(stream)
            return None
        fields = json.loads(data)
        options = Options.parse(fields["arguments"])
        pid = 0
        if options and all(fields["env"].get(name) == self.env.get(name) for name in GUARDED):
            request = Request(options, fields["env"], fields["cwd"], fields["umask"], streams)
            pid = os.fork()
            if not pid:
                self._close(client)
                return request
            with contextlib.suppress(OSError):  # the child does so, too; here for a client that signals it at once
                os.setpgid(pid, pid)
            process = os.pidfd_open(pid)
            self.children[pid] = process, client
            for descriptor in (process, client):
                self.selector.register(descriptor, selectors.EVENT_READ, pid)
        for stream in streams:
            os.close(stream)
        self._send(client, pid)
        if not pid:
            client.close()
        return None

    def _end(self, pid: int, *, is_client: bool) -> None:
        """Report the end of a child to its client, or kill the child whose client is gone."""
        process, client = self.children.pop(pid)
        if is_client:
            _kill_group(pid)
        _, status = os.waitpid(pid, 0)
        self._send(client, status)
        for descriptor in (process, client):
            self.selector.unregister(descriptor)
        os.close(process)
        client.close()

    @staticmethod
    def _send(client: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):
            client.sendall(number.to_bytes(4, "big"))

    def _close(self, client: socket.socket) -> None:
        """Close in a child what is the server's."""
        self.selector.close()
        self.listener.close()
        client.close()
        for process, other in self.children.values():
            os.close(process)
            other.close()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


# ---------------------------------------------------------------------- a child


class Interpreter:
    """What of a new interpreter the imports of the preloaded modules change."""

    def __init__(self) -> None:
        variable = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        self.path = [entry for entry in sys.path[1:] if entry not in variable]
        self.filters = list(warnings.filters)

    def run(self, request: Request) -> None:
        """Become the interpreter that the request describes, and run its script."""
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number, stream in enumerate(request.streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(request.cwd)
        os.umask(request.umask)
        os.environ.clear()
        os.environ.update(request.env)
        options = request.options
        # Libraries may have kept these objects: they write to the new streams through the same numbers.
        unbuffered = options.unbuffered or bool(request.env.get("PYTHONUNBUFFERED"))
        sys.stdout.reconfigure(line_buffering=sys.stdout.isatty(), write_through=unbuffered)  # type: ignore[union-attr]
        sys.stderr.reconfigure(line_buffering=True, write_through=unbuffered)  # type: ignore[union-attr]
        if FOLDER not in request.env:
            sys.executable = str(Path(sys.argv[1], "python"))
        sys.dont_write_bytecode = bool(request.env.get("PYTHONDONTWRITEBYTECODE"))
        self._set_warnings(options.warnings, request.env.get("PYTHONWARNINGS", ""))
        tempfile.tempdir = None
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        if "huggingface_hub.constants" in sys.modules:
            importlib.reload(sys.modules["huggingface_hub.constants"])
        self._set_path(options, request.env.get("PYTHONPATH", ""))
        run_main(options)

    def _set_warnings(self, options: Sequence[str], variable: str) -> None:
        """Put the user's filters below those of the preloaded modules, where a new interpreter has them."""
        added: list[Any] = list(warnings.filters)[: len(warnings.filters) - len(self.filters)]
        sys.warnoptions[:] = [*filter(None, variable.split(",")), *options]
        warnings.filters[:] = self.filters  # type: ignore[index]
        warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
        warnings.filters[:0] = added  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]

    def _set_path(self, options: Options, variable: str) -> None:
        first = {"c": "", "m": str(Path.cwd())}.get(options.kind) if options.kind != "script" else None
        if first is None:
            first = str(Path(options.code).resolve().parent)
        entries = [str(Path.cwd() / entry) for entry in variable.split(os.pathsep) if variable]
        sys.path[:] = [first, *dict.fromkeys(entries), *self.path]
        importlib.invalidate_caches()


def run_main(options: Options) -> None:
    """Run the script as ``__main__``. Raises what the script raises."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    name = {"c": "-c", "m": "-m"}.get(options.kind, options.code)
    sys.argv[:] = [name, *options.arguments]
    if options.kind == "m":
        import runpy

        runpy._run_module_as_main(options.code)  # type: ignore[attr-defined]
    elif options.kind == "c":
        exec(compile(options.code, "<string>", "exec"), main.__dict__)
    else:
        path = str(Path(options.code).absolute())
        main.__file__ = path
        exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)


def end_after(work: Callable[[], None]) -> NoReturn:
    """Do ``work`` and end this process as an interpreter does, but for the teardown of modules."""
    code, interrupted = 0, False
    try:
        work()
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code & 0xFF
        elif end.code is not None:
            print(end.code, file=sys.stderr)
            code = 1
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    finally:
        atexit._run_exitfuncs()
        sys.modules["__main__"].__dict__.clear()
        gc.collect()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)


def main() -> None:
    """Be the server, or, in its children, the interpreter of a script."""
    folder, preloaded = Path(sys.argv[1]), sys.argv[2:] or PRELOADED
    interpreter = Interpreter()
    sys.path[:] = sys.path[1:]  # the modules beside this file are not the libraries'
    output = os.dup(1)
    os.dup2(2, 1)
    for name in preloaded:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads: a fork would have one of them"
    prepare(folder)
    server = Server(folder)
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages of all these objects
    os.write(output, b"ready\n")
    os.close(output)
    if (request := server.serve()) is not None:
        end_after(lambda: interpreter.run(request))
    os._exit(0)


if __name__ == "__main__":
    main()
