"""Registries for tests: the real one, a proxy that breaks connections, and one that misbehaves as it is told to."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ekiben.core.environment import ca_bundle
from ekiben.core.files import digest_of
from ekiben.registry.client import Blob, Registry
from ekiben.registry.reference import Reference
from support.ports import free_port

USER, PASSWORD = "alice", "s3cret"
MB = 1 << 20


@contextlib.contextmanager
def real_registry(folder: Path, *, password: bool = False, tls: bool = False) -> Iterator[str]:
    """docker-registry with its data in ``folder``: host and port.

    ``folder``/cert.pem is its certificate, and the CA's.
    """
    for program in ("docker-registry", "htpasswd", "openssl"):
        if not shutil.which(program):
            pytest.skip(f"{program} is not installed (tests/services.sh install registry)")
    port = free_port()
    lines = ["version: 0.1", "log: {level: error}", f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}"]
    secure = ""
    if tls:
        command: list[str | Path] = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=registry.test",
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout",
            folder / "key.pem",
            "-out",
            folder / "cert.pem",
        ]
        subprocess.run(command, check=True, capture_output=True)
        secure = f", tls: {{certificate: {folder}/cert.pem, key: {folder}/key.pem}}"
    lines.append(f'http: {{addr: "127.0.0.1:{port}", secret: test{secure}}}')
    if password:
        subprocess.run(["htpasswd", "-Bbc", folder / "htpasswd", USER, PASSWORD], check=True, capture_output=True)
        lines.append(f"auth: {{htpasswd: {{realm: test, path: {folder}/htpasswd}}}}")
    (folder / "config.yml").write_text("\n".join(lines) + "\n")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", folder / "config.yml"], stdout=log, stderr=log)
        try:
            _wait_for(port, process, folder / "log")
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "the registry does not answer"
            time.sleep(0.05)


class Cutter:
    """A proxy to ``target`` that ends a connection when so many bytes went up or down through it, ``times`` times."""

    def __init__(self, target: str, *, up: int | None = None, down: int | None = None, times: int = 1) -> None:
        self.target, self.limits, self.left = target, {"up": up, "down": down}, times
        self.cuts = self.passed_up = self.passed_down = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._serve)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def __enter__(self) -> Cutter:
        return self

    def __exit__(self, *failure: object) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes accept()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._server, *self._ends):
            end.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            host, _, port = self.target.partition(":")
            server = socket.create_connection((host, int(port)))
            self._ends += [client, server]
            for way, source, sink in (("up", client, server), ("down", server, client)):
                self._start(self._pass, way, source, sink)

    def _pass(self, way: str, source: socket.socket, sink: socket.socket) -> None:
        passed, limit = 0, self.limits[way]
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                passed += len(data)
                setattr(self, f"passed_{way}", getattr(self, f"passed_{way}") + len(data))
                if limit is not None and passed > limit and self.left > 0:
                    self.left -= 1
                    self.cuts += 1
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def trust_one_certificate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let clients trust one certificate of this machine's: to read all of them takes 100 ms."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    if (bundle := ca_bundle()) is not None:
        first, end, _ = bundle.read_text(encoding="utf-8").partition("-----END CERTIFICATE-----\n")
        (folder / "one-certificate.pem").write_text(first + end, encoding="utf-8")
        monkeypatch.setenv("SSL_CERT_FILE", str(folder / "one-certificate.pem"))


@dataclass
class Answer:
    code: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


Script = Callable[[str, str, dict[str, str]], Answer]


@contextlib.contextmanager
def bad_registry(script: Script) -> Iterator[tuple[str, list[tuple[str, str, dict[str, str]]]]]:
    """A server that answers what ``script(method, path, headers)`` says: its host, and what it was asked.

    A body stands among the headers, as ``:body``.
    """
    asked: list[tuple[str, str, dict[str, str]]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # it makes a client wait 40 ms for each body

        def _answer(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            if body := self.rfile.read(int(headers.get("content-length", 0))):
                headers[":body"] = body.decode("latin-1")
            if self.path == "/v2/":  # which of http and https it is
                answer = Answer()
            else:
                asked.append((self.command, self.path, headers))
                answer = script(self.command, self.path, headers)
            self.send_response(answer.code)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            if "Content-Length" not in answer.headers:
                self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

        do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *args: None  # type: ignore[method-assign]  # a client that goes is not an error here
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def at(host: str, repository: str = "lab/x", tag: str = "", digest: str = "") -> Registry:
    return Registry(Reference(host, repository, digest, tag))


def blob(size: int, seed: int = 0) -> tuple[Blob, bytes]:
    data = random.Random(seed or size).randbytes(size)

    def read(offset: int) -> Iterator[bytes]:
        for start in range(offset, size, 100_000):
            yield data[start : start + 100_000]

    return Blob(digest_of(data), size, read), data


def nothing(size: int) -> None:
    pass


def login(home: Path, host: str, password: str = PASSWORD, *, identity_token: str = "") -> None:
    (home / ".docker").mkdir(parents=True, exist_ok=True)
    entry = {"auth": base64.b64encode(f"{USER}:{password}".encode()).decode()}
    known = {"auths": {host: {"identitytoken": identity_token} if identity_token else entry}}
    (home / ".docker/config.json").write_text(json.dumps(known))
