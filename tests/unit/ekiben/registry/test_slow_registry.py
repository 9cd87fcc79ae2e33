"""Servers that send, and take, so slowly that nobody would see the end."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ekiben.core.errors import FetchError
from ekiben.core.files import digest_of
from ekiben.registry import _pace, client, session
from ekiben.registry._pace import Pace
from ekiben.registry.client import Blob, Registry
from ekiben.registry.reference import Reference
from support.registries import Answer, at, bad_registry, nothing, trust_one_certificate

DIGEST = "sha256:" + "0" * 64
Talk = Callable[[socket.socket], None]
WINDOW = 0.3


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session, "PAUSES", (0.01, 0.02, 0.03))
    monkeypatch.setattr(_pace, "WINDOW", WINDOW)
    monkeypatch.setattr(_pace, "LONGEST_WAIT", WINDOW / 3)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    trust_one_certificate(monkeypatch, tmp_path)


@contextlib.contextmanager
def talking(talk: Talk, wrap: Callable[[socket.socket], socket.socket] = lambda plain: plain) -> Iterator[str]:
    """A server that reads the headers of each request and leaves the rest to ``talk``: its host and port."""
    end = threading.Event()

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), wrap(connection) as wrapped:
            head = b""
            while not end.is_set():
                while b"\r\n\r\n" not in head:
                    if not (piece := wrapped.recv(4096)):
                        return
                    head += piece
                if b" /v2/ HTTP" in head:
                    wrapped.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                else:
                    talk(wrapped)
                head = b""

    def accept() -> None:
        while not end.is_set():
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            end.set()
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def drip(start: bytes, drop: bytes = b"x", every: float = 0.01) -> Talk:
    """Send ``start``, then ``drop`` again and again, until the client goes."""

    def talk(connection: socket.socket) -> None:
        connection.sendall(start)
        while True:
            connection.sendall(drop)
            time.sleep(every)

    return talk


HEAD = b"HTTP/1.1 200 OK\r\n"
SLOW = {
    "body": drip(HEAD + b"Content-Length: 1000000\r\n\r\n"),
    "body without a length": drip(HEAD + b"\r\n"),
    "chunks": drip(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "length of a chunk": drip(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x"),
    "trailers": drip(HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"x"),
    "body of an error": drip(b"HTTP/1.1 404 Gone\r\nContent-Length: 1000000\r\n\r\n"),
    "body of a redirect": drip(b"HTTP/1.1 307 There\r\nLocation: /v2/x\r\nContent-Length: 1000000\r\n\r\n"),
    "packed body": drip(HEAD + b"Content-Encoding: gzip\r\n\r\n\x1f\x8b\x08\0\0\0\0\0\0\0", b"\0"),
    "status": drip(b"HTTP/1.1 200 ", b"O"),
    "headers": drip(HEAD, b"X: y\r\n", 0.02),
    "one header": drip(HEAD + b"X: ", b"y"),
    "interim answers": drip(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
}


@pytest.mark.parametrize("where", SLOW)
def test_slow_answer_is_not_waited_for(where: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with talking(SLOW[where]) as host:
        for use in (
            lambda: at(host, tag="1").fetch_manifest(),
            lambda: at(host).blob(DIGEST, tmp_path / "out", nothing, 1_000_000),
        ):
            if where == "body of a redirect":  # whose body is of no interest
                with pytest.raises(FetchError, match="redirects more than 10 times"):
                    use()
            else:
                with pytest.raises(FetchError, match=rf"^{host}/lab/x\S*: {host} is too slow: "):
                    use()
    assert time.monotonic() - began < 20 * WINDOW


def test_message_has_the_rate_and_the_window(tmp_path: Path) -> None:
    message = r"is too slow: \d+ B in 0 seconds; at least 30\.0 kB in 0 seconds, 100\.0 kB/s, are required"
    talk = drip(HEAD + b"Content-Length: 1000000\r\n\r\n" + bytes(200_000))
    with talking(talk) as host, pytest.raises(FetchError, match=message) as caught:
        at(host).blob(DIGEST, tmp_path / "out", nothing, 1_000_000)
    assert caught.value.hint and "resumes" in caught.value.hint
    assert (tmp_path / "out").stat().st_size > 100_000  # for the next time


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pace, "WINDOW", 30.0)
    monkeypatch.setattr(_pace, "LONGEST_WAIT", 10.0)


@pytest.mark.parametrize(
    ("each", "seconds", "count", "is_slow"),
    [
        (1, 1.0, 30, True),
        (1, 1.0, 29, False),
        (999, 1.0, 30, True),
        (1000, 1.0, 300, False),
        (1448, 1.0, 300, False),
        (1 << 20, 60.0, 100, False),
        (1000, 60.0, 3, True),
        (1, 0.001, 29_000, False),
        (0, 30.0, 2, False),
        (0, 30.0, 3, True),
    ],
)
@pytest.mark.usefixtures("usual")
def test_rates(each: int, seconds: float, count: int, is_slow: bool) -> None:
    slow: list[str] = []
    pace = Pace(slow.append)
    for _ in range(count):
        pace.add(each, seconds)
    assert bool(slow) == is_slow


@pytest.mark.usefixtures("usual")
def test_headers_have_one_window_after_their_first_byte() -> None:
    slow: list[str] = []
    pace = Pace(slow.append)
    pace.begin(headers=True)
    pace.add(10, 119.0)  # a server may think
    for _ in range(29):
        pace.add(10_000, 1.0)
    assert slow == []
    pace.add(10_000, 1.0)
    assert slow == ["is too slow: its headers are not complete 30 seconds after they began"]
    pace.begin()
    pace.add(100, 1.0)
    assert len(slow) == 1


def test_endless_headers_are_refused() -> None:
    """Each line is short, and http.client skips interim answers without counting them."""
    with (
        talking(drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, 0)) as host,
        pytest.raises(FetchError, match=r"sends headers of more than 1\.0 MB|is too slow"),
    ):
        at(host, tag="1").fetch_manifest()


def test_pause_is_not_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that was away for some time, and then is as fast as before."""
    data = bytes(200_000)

    def talk(connection: socket.socket) -> None:
        connection.sendall(HEAD + b"Content-Length: 200000\r\n\r\n")
        connection.sendall(data[:1000])
        time.sleep(2 * WINDOW)
        connection.sendall(data[1000:])

    with talking(talk) as host:
        at(host).blob(digest_of(data), tmp_path / "out", nothing, len(data))
    assert (tmp_path / "out").stat().st_size == len(data)


def test_slow_reader_of_the_answer_is_not_the_registry(tmp_path: Path) -> None:
    """Only what is waited for counts: a slow disk is not the network."""
    data = bytes(300_000)

    def slowly(size: int) -> None:
        time.sleep(0.2)

    with bad_registry(lambda *_: Answer(200, data)) as (host, _):
        at(host).blob(digest_of(data), tmp_path / "out", slowly, len(data))


def test_connections_that_end_after_a_few_bytes_have_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MINIMUM_BYTES", 1 << 20)
    count = 0

    def talk(connection: socket.socket) -> None:
        nonlocal count
        count += 1
        connection.sendall(b"HTTP/1.1 206 Partial\r\nContent-Length: 1000000\r\n\r\n" + bytes(70_000))
        connection.shutdown(socket.SHUT_RDWR)

    with talking(talk) as host, pytest.raises(FetchError, match=r"broke off at (262144|280000) bytes"):
        at(host).blob(DIGEST, tmp_path / "out", nothing, 1_000_000)
    assert count == 4


def test_uploads_that_are_received_slowly_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PIECE", 32 << 20)
    monkeypatch.setattr(_pace, "LONGEST_WAIT", 10.0)

    monkeypatch.setattr(_pace, "MINIMUM_BYTES", 100 << 20)
    count = 0

    def talk(connection: socket.socket) -> None:
        nonlocal count
        count += 1
        if count == 1:
            connection.sendall(b"HTTP/1.1 204 No Content\r\nRange: 0-0\r\n\r\n")
            return
        while connection.recv(1 << 16):
            time.sleep(0.02)

    sent = Blob(DIGEST, 32 << 20, lambda offset: [bytes(32 << 20)])
    with talking(talk) as host, pytest.raises(FetchError, match="is too slow: "):
        at(host).send_blob(sent, nothing, location=f"http://{host}/up")


@pytest.mark.parametrize("forgets", ["all", "piece"])
def test_upload_to_a_registry_that_forgets_ends(forgets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PIECE", 100)
    patches = 0

    def script(method: str, path: str, headers: dict[str, str]) -> Answer:
        nonlocal patches
        if method == "GET":
            return Answer(204, headers={"Range": "0-0" if forgets == "all" else "0-99"})
        patches += method == "PATCH"
        return Answer(502 if method == "PATCH" and patches % 3 == 0 else 202, headers={"Location": "/up"})

    sent = Blob(DIGEST, 1000, lambda offset: [bytes(100)] * ((1000 - offset) // 100))
    with bad_registry(script) as (host, _), pytest.raises(FetchError, match="broke off at"):
        at(host).send_blob(sent, nothing)
    assert patches < 30


@pytest.mark.parametrize("value", ["9" * 5000, "0-" + "9" * 40, "0-\xb2", "0--1", "", "x"])
def test_offsets_that_are_none_begin_anew(value: str) -> None:
    def script(method: str, path: str, headers: dict[str, str]) -> Answer:
        if method == "GET":
            return Answer(204, headers={"Range": value})
        return Answer(201 if method == "PUT" else 202, headers={"Location": "/up"})

    with bad_registry(script) as (host, asked):
        at(host).send_blob(Blob(DIGEST, 5, lambda offset: [bytes(5)[offset:]]), nothing, location=f"http://{host}/old")
    assert [headers["content-range"] for method, _, headers in asked if method == "PATCH"] == ["0-4"]


def test_tls_is_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ssl

    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=x",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        tmp_path / "key.pem",
        "-out",
        tmp_path / "cert.pem",
    ]
    subprocess.run(command, check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    for where in ("body", "headers", "length of a chunk"):
        with talking(SLOW[where], lambda plain: server.wrap_socket(plain, server_side=True)) as host:
            registry = Registry(Reference(host, "lab/x", tag="1", scheme="https"))
            with pytest.raises(FetchError, match="is too slow: "):
                registry.fetch_manifest()
