"""Where a registry may lead a client, and what goes there with it: data, never a secret."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ekiben.core.errors import EkibenError, FetchError, UsageError
from ekiben.core.files import digest_of
from ekiben.formats.oci import MEDIA_MANIFEST
from ekiben.registry import client, session
from ekiben.registry._addresses import is_private, names_private, origin
from ekiben.registry.client import Registry
from ekiben.registry.reference import Reference
from support.hostile_registry import BEARER, DATA, NETRC, REFRESH, SECRETS, leading, other_host
from support.registries import MB, Answer, Script, at, bad_registry, blob, login, nothing

CODES = (301, 302, 303, 307, 308)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    monkeypatch.setattr(client, "PIECE", MB)
    for name in ("SSL_CERT_FILE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def uses(registry: Registry, out: Path) -> list[Callable[[], object]]:
    """Return one call for each kind of request."""
    sent, _ = blob(100)
    return [
        registry.fetch_manifest,
        lambda: registry.tag_digest("1"),
        lambda: registry.put_manifest(b"{}", MEDIA_MANIFEST, "1"),
        lambda: registry.small_blob(digest_of(DATA), len(DATA)),
        lambda: registry.blob(digest_of(DATA), out, nothing, len(DATA)),
        lambda: registry.referrers(digest_of(DATA)),
        lambda: registry.has_blob(sent.digest),
        lambda: registry.mount_blob(sent.digest, "lab/y"),
        lambda: registry.send_blob(sent, nothing),
        lambda: registry.send_blob(sent, nothing, location=registry.session.base + "blobs/uploads/1"),
    ]


LOGINS = {"basic": ("basic", ""), "bearer": ("bearer", ""), "refresh": ("bearer", REFRESH)}


@pytest.mark.parametrize(
    ("kind", "elsewhere"),
    [
        ("takes", "port"),
        ("asks basic", "port"),
        ("asks bearer", "port"),
        ("takes", "name"),
        ("takes", "user"),
        ("takes", "backslash"),
    ],
)
@pytest.mark.parametrize(
    ("login_kind", "step"),
    [(kind, step) for kind in LOGINS for step in ("data", "upload", "token") if (kind, step) != ("basic", "token")],
)
def test_no_secret_reaches_another_origin(
    login_kind: str, step: str, kind: str, elsewhere: str, tmp_path: Path
) -> None:
    (challenge, token), home, codes = LOGINS[login_kind], tmp_path / "home", [200]
    with bad_registry(other_host(kind)) as (other, stolen):
        port = other.partition(":")[2]

        def to(here: str, path: str) -> str:
            hosts = {
                "port": other,
                "name": f"localhost:{port}",
                "user": f"{here}@{other}",
                "backslash": f"{other}\\@{here}",
            }
            return f"http://{hosts[elsewhere]}{path}"

        with bad_registry(leading(challenge, to, lambda: codes[0], step)) as (host, asked):
            login(home, host, identity_token=token)
            (home / ".netrc").write_text(
                "".join(f"machine {name} login u password {NETRC}\n" for name in ("127.0.0.1", "localhost"))
            )
            calls = uses(at(host, tag="1"), tmp_path / "out")
            for codes[0] in CODES if step == "data" else (302, 307):
                for use in calls:
                    with contextlib.suppress(EkibenError):
                        use()
    sent = "\n".join(f"{method} {path} {headers}" for method, path, headers in stolen)
    assert [secret for secret in SECRETS if secret in sent] == []
    assert NETRC not in str(asked) and "cookie" not in str([headers.keys() for _, _, headers in asked])
    assert any(secret in str(asked) for secret in SECRETS)  # the registry itself got what it asked for
    if elsewhere in ("port", "name") and not (step == "token" or kind == "asks bearer"):
        assert stolen  # it was led there


def test_blobs_may_lie_on_another_host(tmp_path: Path) -> None:
    """As Docker Hub's do: its token server is another host, and its blobs are behind a redirect to a third."""
    with (
        bad_registry(lambda *_: Answer(200, DATA)) as (storage, stored),
        bad_registry(lambda *_: Answer(200, json.dumps({"token": BEARER}).encode())) as (realm, asked_realm),
    ):

        def script(method: str, path: str, headers: dict[str, str]) -> Answer:
            if headers.get("authorization") != f"Bearer {BEARER}":
                challenge = f'Bearer realm="http://{realm}/token",service="hub"'
                return Answer(401, headers={"WWW-Authenticate": challenge})
            return Answer(307, headers={"Location": f"http://{storage}/signed?X-Signature=a%2Fb"})

        with bad_registry(script) as (host, _):
            login(tmp_path / "home", host)
            at(host).blob(digest_of(DATA), tmp_path / "out", nothing, len(DATA))
    assert (tmp_path / "out").read_bytes() == DATA
    assert [path for _, path, _ in stored] == ["/signed?X-Signature=a%2Fb"]
    assert "authorization" not in stored[0][2]
    assert asked_realm[0][2]["authorization"].startswith("Basic ")  # the token server gets the login


@pytest.mark.parametrize("code", CODES)
def test_redirects_within_the_registry_keep_the_login(code: int, tmp_path: Path) -> None:
    def script(method: str, path: str, headers: dict[str, str]) -> Answer:
        if "authorization" not in headers:
            return Answer(401, headers={"WWW-Authenticate": 'Basic realm="x"'})
        return Answer(200, DATA) if path == "/there" else Answer(code, headers={"Location": "/there"})

    with bad_registry(script) as (host, asked):
        login(tmp_path / "home", host)
        assert at(host).small_blob(digest_of(DATA), len(DATA)) == DATA
    assert [(path, "authorization" in headers) for _, path, headers in asked][-1] == ("/there", True)


def test_uploads_may_go_to_another_host(tmp_path: Path) -> None:
    sent, data = blob(1000)
    bodies: list[str] = []

    def storage_script(method: str, path: str, headers: dict[str, str]) -> Answer:
        bodies.append(headers.get(":body", ""))
        return Answer(202 if method == "PATCH" else 201, headers={"Location": path})

    with bad_registry(storage_script) as (storage, stored):

        def script(method: str, path: str, headers: dict[str, str]) -> Answer:
            if "authorization" not in headers:
                return Answer(401, headers={"WWW-Authenticate": 'Basic realm="x"'})
            return Answer(202, headers={"Location": f"http://{storage}/up?signed=1"})

        with bad_registry(script) as (host, _):
            login(tmp_path / "home", host)
            assert at(host).send_blob(sent, nothing) == 1000
    assert "".join(bodies).encode("latin-1") == data
    assert all("authorization" not in headers for _, _, headers in stored)


@pytest.mark.parametrize("token", ["", REFRESH])
def test_token_server_that_leads_elsewhere_is_named(token: str, tmp_path: Path) -> None:
    with bad_registry(lambda *_: Answer(200, b'{"token": "x"}')) as (other, stolen):

        def script(method: str, path: str, headers: dict[str, str]) -> Answer:
            if path.startswith("/token"):
                return Answer(307, headers={"Location": f"http://{other}/token"})
            return Answer(401, headers={"WWW-Authenticate": f'Bearer realm="http://{headers["host"]}/token"'})

        with bad_registry(script) as (host, _):
            login(tmp_path / "home", host, identity_token=token)
            with pytest.raises(
                FetchError,
                match=(
                    r"redirects to another host, 127\.0\.0\.1:\d+, which does not get your login"
                    if not token
                    else "returned no token: 307"
                ),
            ):
                at(host).tag_digest("1")
    assert stolen == []


def test_endless_redirects_end() -> None:
    with (
        bad_registry(lambda method, path, headers: Answer(302, headers={"Location": path})) as (host, asked),
        pytest.raises(FetchError, match="redirects more than 10 times"),
    ):
        at(host).tag_digest("1")
    assert len(asked) == 11


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x/",
        "file:///etc/passwd",
        "http://",
        "http:///x",
        "http://[::1",
        "http://a:b/",
        "http://u:p@x/",
        "http://x\\@y/",
        "//u@y/",
        "http://\x00/",
        "javascript:alert(1)",
        "http://a:99999999/",
    ],
)
@pytest.mark.parametrize("step", ["redirect", "realm", "location"])
def test_what_is_no_url_of_a_host_is_refused(url: str, step: str) -> None:
    def script(method: str, path: str, headers: dict[str, str]) -> Answer:
        if step == "realm":
            return Answer(401, headers={"WWW-Authenticate": f'Bearer realm="{url}"'})
        return Answer(202 if step == "location" else 307, headers={"Location": url})

    with bad_registry(script) as (host, _), pytest.raises(FetchError):
        if step == "location":
            at(host).send_blob(blob(10)[0], nothing)
        else:
            at(host).tag_digest("1")


@pytest.mark.parametrize("host", ["a:b", "[::1", "x.y:99999999", "..", "a.b:-1"])
def test_host_that_is_none_is_refused(host: str) -> None:
    with pytest.raises((UsageError, FetchError)):
        Registry(Reference(host, "lab/x", scheme="http")).tag_digest("1")


# ------------------------------------------------------------------------------------------------------------ addresses

PRIVATE = (
    "127.0.0.1",
    "127.9.9.9",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "169.254.169.254",
    "0.0.0.0",
    "100.64.0.1",
    "224.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd12:3456::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::",
    "2002:a00:1::",
)
PUBLIC = (
    "1.1.1.1",
    "8.8.8.8",
    "172.32.0.1",
    "100.128.0.1",
    "2606:4700::1111",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
    "2002:808:808::",
)
FORMS = (
    "localhost",
    "LocalHost",
    "localhost.",
    "a.localhost",
    "127.1",
    "127.0.1",
    "2130706433",
    "0x7f000001",
    "0x7f.1",
    "017700000001",
    "0177.0.0.1",
    "[::1]",
    "[::ffff:127.0.0.1]",
    "0",
    "10.1",
    "2852039166",
    "[fe80::1%25eth0]",
    "127.0.0.1.",
)
NAMES = (
    "example.org",
    "1.1.1.1",
    "8.8",
    "134744072",
    "notlocalhost",
    "localhost.example.org",
    "127.0.0.1.example.org",
    "",
)


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_of_the_internet(address: str) -> None:
    assert is_private(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_of_the_internet(address: str) -> None:
    assert not is_private(address)


@pytest.mark.parametrize("host", [*FORMS, *(f"[{item}]" if ":" in item else item for item in PRIVATE)])
def test_hosts_that_name_a_private_address(host: str) -> None:
    assert names_private(host)


@pytest.mark.parametrize("host", NAMES)
def test_hosts_that_name_none(host: str) -> None:
    assert not names_private(host)


def test_origins_have_their_ports() -> None:
    assert origin("https://Example.org/x") == origin("HTTPS://example.org:443/y?z") == ("https", "example.org", 443)
    assert origin("http://example.org/") != origin("https://example.org/")


@pytest.fixture
def public_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.1 counts as an address of the internet; all others are what they are."""
    monkeypatch.setattr(session, "is_private", lambda address: address != "127.0.0.1" and is_private(address))
    monkeypatch.setattr(session, "names_private", lambda host: host != "127.0.0.1" and names_private(host))


@contextlib.contextmanager
def listening(address: str) -> Iterator[tuple[int, list[bytes]]]:
    """A port of another loopback address, and what came in there: nothing but connections are expected."""
    received: list[bytes] = []
    with socket.create_server((address, 0)) as server:
        server.settimeout(0.1)
        yield server.getsockname()[1], received
        with contextlib.suppress(TimeoutError):
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(0.1)
                    received.append(connection.recv(10_000))


def steps(url: str) -> dict[str, Script]:
    """Every way in which a registry names another URL."""

    def upload(method: str, path: str, headers: dict[str, str]) -> Answer:
        return Answer(202 if method == "POST" else 404, headers={"Location": url})

    def piece(method: str, path: str, headers: dict[str, str]) -> Answer:
        return Answer(202, headers={"Location": "/up" if method == "POST" else url})

    def token(method: str, path: str, headers: dict[str, str]) -> Answer:
        if path.startswith("/token"):
            return Answer(302, headers={"Location": url})
        return Answer(401, headers={"WWW-Authenticate": f'Bearer realm="http://{headers["host"]}/token"'})

    return {
        "redirect": lambda *_: Answer(307, headers={"Location": url}),
        "upload": upload,
        "piece": piece,
        "token": token,
        "realm": lambda *_: Answer(401, headers={"WWW-Authenticate": f'Bearer realm="{url}"'}),
    }


@pytest.mark.parametrize("step", list(steps("")))
@pytest.mark.parametrize(
    "target", ["127.0.0.2", "127.2", "2130706434", "0x7f000002", "[::ffff:127.0.0.2]", "rebound.example.org"]
)
@pytest.mark.usefixtures("public_registry")
def test_registry_of_the_internet_leads_to_no_private_address(
    target: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whatever name: a host's address is looked at when the connection is there, so no second look-up can differ."""
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda name, *rest: look_up("127.0.0.2" if "example" in str(name) else name, *rest)
    )
    with (
        listening("127.0.0.2") as (port, received),
        bad_registry(steps(f"http://{target}:{port}/x")[step]) as (host, _),
        pytest.raises(FetchError, match=r"is on the internet, and redirects to .* an address of this machine or of"),
    ):
        registry = at(host, tag="1")
        if step in ("upload", "piece"):
            registry.send_blob(blob(10)[0], nothing)
        registry.tag_digest("1")
    assert all(data == b"" for data in received)


@pytest.mark.parametrize("step", ["redirect", "realm"])
@pytest.mark.usefixtures("public_registry")
def test_proxy_is_not_asked_for_a_private_address(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own address is none of the registry's."""
    monkeypatch.setattr(session, "_LOCAL", session.re.compile("never"))
    scripts = steps("http://169.254.169.254/latest/meta-data")
    with bad_registry(lambda *request: Answer(200) if "169.254" in request[1] else scripts[step](*request)) as (
        proxy,
        asked,
    ):
        monkeypatch.setenv("http_proxy", f"http://{proxy}")
        monkeypatch.setenv("no_proxy", "")
        registry = Registry(Reference("registry.example.org", "lab/x", tag="1", scheme="http"))
        with pytest.raises(FetchError, match=r"redirects to 169\.254\.169\.254, an address of this machine or"):
            registry.tag_digest("1")
    assert [path for _, path, _ in asked] == ["http://registry.example.org/v2/lab/x/manifests/1"]


def test_registry_of_a_private_network_may_lead_into_it(tmp_path: Path) -> None:
    with (
        bad_registry(lambda *_: Answer(200, DATA)) as (storage, _),
        bad_registry(steps(f"http://localhost:{storage.partition(':')[2]}/x")["redirect"]) as (host, _),
    ):
        assert at(host).small_blob(digest_of(DATA), len(DATA)) == DATA


def test_secure_registry_does_not_lead_to_clear_text(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(Reference("registry.example.org", "lab/x", tag="1"))
    with pytest.raises(FetchError, match=r"redirects to 'http://example.org/x', in clear text"):
        registry.session._check_url("http://example.org/x?signature=1")
    registry.session._check_url("https://example.org/x")
