"""The registry client against servers that misbehave. tests/integration/test_registry_client.py has a real one."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ekiben.core.errors import FetchError, UsageError
from ekiben.core.files import digest_of
from ekiben.formats.oci import MEDIA_MANIFEST
from ekiben.registry import client, session
from ekiben.registry.client import Registry
from ekiben.registry.manifest import ImageConfig, Manifest
from ekiben.registry.reference import Reference
from support.registries import (
    MB,
    PASSWORD,
    USER,
    Answer,
    Script,
    at,
    bad_registry,
    blob,
    login,
    nothing,
    trust_one_certificate,
)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session, "PAUSES", (0.01, 0.02, 0.03))
    monkeypatch.setattr(client, "PIECE", MB)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    trust_one_certificate(monkeypatch, tmp_path)


# ----------------------------------------------------------------------------------------------------------- references


@pytest.mark.parametrize(
    ("text", "host", "repository", "wanted", "base"),
    [
        ("debian", "docker.io", "library/debian", "latest", "https://registry-1.docker.io/v2/library/debian/"),
        ("lab/x:1", "docker.io", "lab/x", "1", "https://registry-1.docker.io/v2/lab/x/"),
        ("oras://r.example.org/a/b:t", "r.example.org", "a/b", "t", "https://r.example.org/v2/a/b/"),
        ("docker://r:5000/a", "r:5000", "a", "latest", "https://r:5000/v2/a/"),
        ("http://r:5000/a:1", "r:5000", "a", "1", "http://r:5000/v2/a/"),
        ("https://localhost/a", "localhost", "a", "latest", "https://localhost/v2/a/"),
        (f"r.io/a:1@sha256:{'0' * 64}", "r.io", "a", f"sha256:{'0' * 64}", "https://r.io/v2/a/"),
    ],
)
def test_references_are_parsed(text: str, host: str, repository: str, wanted: str, base: str) -> None:
    reference = Reference.parse(text)
    assert (reference.host, reference.repository, reference.tag_or_digest) == (host, repository, wanted)
    assert Registry(reference).session.base == base


@pytest.mark.parametrize(
    "text", ["", "ftp://x/y", "r.io/A", "r.io/a:b:c", "r.io/a@sha256:12", "r.io/../x", "r.io/a b", "r.io/", "r.io/a:-"]
)
def test_invalid_references_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Reference.parse(text)


# ------------------------------------------------------------------------------------------------------- there and back


# --------------------------------------------------------------------------------------------------- broken connections


@pytest.mark.parametrize("kept", [0, 1, 2 * MB + 5, 3 * MB])
def test_upload_resumes_at_the_registrys_offset(kept: int) -> None:
    """The third piece breaks off; the registry says how much it has."""
    sent, _ = blob(5 * MB)
    pieces: list[tuple[str, int]] = []

    def script(method: str, path: str, headers: dict[str, str]) -> Answer:
        if method == "POST":
            return Answer(202, headers={"Location": "/up/0"})
        if method == "GET":
            return Answer(204, headers={"Location": "/up/again", "Range": f"0-{max(0, kept - 1)}"})
        if method == "PATCH":
            pieces.append((headers["content-range"], int(headers["content-length"])))
            return Answer(502) if len(pieces) == 3 else Answer(202, headers={"Location": f"/up/{len(pieces)}"})
        return Answer(201)

    with bad_registry(script) as (host, asked):
        out = at(host).send_blob(sent, nothing)
    again = 0 if kept == 1 else kept  # "0-0" is what a registry says that has nothing
    assert pieces[3][0].startswith(f"{again}-")
    assert sum(size for _, size in pieces[3:]) == sent.size - again
    assert asked[-1][:2] == ("PUT", f"/up/{len(pieces)}?digest=sha256%3A{sent.digest[7:]}")
    assert out == sum(size for _, size in pieces) - pieces[2][1]


def test_unreachable_registry_is_an_error() -> None:
    with pytest.raises(FetchError, match=r"127\.0\.0\.1:9 does not answer: .*refused"):
        at("127.0.0.1:9").has_blob(blob(1)[0].digest)


# ------------------------------------------------------------------------------------------------------- logins and TLS


def tokens(token_host: list[str], accept: Callable[[dict[str, str]], bool] = lambda headers: True) -> Script:
    def script(method: str, path: str, headers: dict[str, str]) -> Answer:
        if path.startswith("/token"):
            return Answer(200 if accept(headers) else 401, b'{"token": "good"}')
        if headers.get("authorization") == "Bearer good":
            return Answer(200, headers={"Docker-Content-Digest": "sha256:" + "1" * 64})
        return Answer(
            401,
            headers={"WWW-Authenticate": f'Bearer realm="http://{token_host[0]}/token",service="reg",scope="other"'},
        )

    return script


def test_token_is_fetched_for_the_requested_scope(tmp_path: Path) -> None:
    token_host: list[str] = []
    basic = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    with bad_registry(tokens(token_host, lambda headers: headers.get("authorization") == basic)) as (host, asked):
        token_host.append(host)
        login(tmp_path / "home", host)
        registry = at(host)
        assert registry.tag_digest("1") == "sha256:" + "1" * 64
        assert registry.tag_digest("2") == "sha256:" + "1" * 64
        (token,) = [path for _, path, _ in asked if path.startswith("/token")]  # once for both
        assert token == "/token?service=reg&scope=repository%3Alab%2Fx%3Apull"
        login(tmp_path / "home", host, "wrong")
        with pytest.raises(FetchError, match=r"the login from .* is refused"):
            at(host).tag_digest("1")


def test_expired_token_is_renewed() -> None:
    valid = ["t1"]
    token_host: list[str] = []

    def script(method: str, path: str, headers: dict[str, str]) -> Answer:
        if path.startswith("/token"):
            return Answer(200, json.dumps({"access_token": valid[-1]}).encode())
        if headers.get("authorization") == f"Bearer {valid[-1]}":
            return Answer(404)
        return Answer(401, headers={"WWW-Authenticate": f'Bearer realm="http://{token_host[0]}/token"'})

    with bad_registry(script) as (host, _):
        token_host.append(host)
        registry = at(host)
        assert not registry.has_blob("sha256:" + "0" * 64)
        valid.append("t2")
        assert not registry.has_blob("sha256:" + "0" * 64)


def test_credentials_are_not_sent_to_redirect_targets(tmp_path: Path) -> None:
    """A registry may send a client to another server for the data; that one is not told who we are."""
    data = b"data"
    with bad_registry(lambda method, path, headers: Answer(200, data)) as (storage, stored):

        def script(method: str, path: str, headers: dict[str, str]) -> Answer:
            if "authorization" not in headers:
                return Answer(401, headers={"WWW-Authenticate": 'Basic realm="x"'})
            return Answer(307, headers={"Location": f"http://localhost:{storage.partition(':')[2]}/data"})

        with bad_registry(script) as (host, _):
            login(tmp_path / "home", host)
            at(host).blob(digest_of(data), tmp_path / "out", nothing, 4)
    assert (tmp_path / "out").read_bytes() == data
    assert [headers.get("authorization") for _, _, headers in stored] == [None]


# ----------------------------------------------------------------------------------------------- registries gone astray


def always(code: int, body: bytes = b"", **headers: str) -> Script:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda method, path, asked: Answer(code, body, named)


PAGE = b"<html><body>Welcome to the lab's wiki</body></html>"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (always(401), "asks for an unsupported kind of login"),
        (always(401, WWW_Authenticate="Negotiate"), "asks for an unsupported kind of login: Negotiate"),
        (always(401, WWW_Authenticate='Bearer realm="http://127.0.0.1:9/t"'), "does not answer: .*refused"),
        (always(403), r"access refused \(403\): this login may not read there"),
        (always(404), "not there: manifests/1: 404"),
        (always(429, Retry_After="3600"), r"answered 429: too many requests from this address \(it asks for 3600 s\)"),
        (always(429), "answered 429: too many requests"),
        (always(500, b"oops"), "GET manifests/1: 500 Internal Server Error: oops"),
        (always(418), "418 I'm a Teapot"),
        (always(200, PAGE), "something that is not an image's manifest: it is not JSON: .*<html>"),
        (always(200, b"[]"), "something that is not an image's manifest"),
        (always(200, b"{}"), "something that is not an image's manifest"),
        (always(200, b'{"manifests": [7]}'), "something that is not an image's manifest"),
        (
            always(200, b'{"config": {}, "layers": [{"digest": "../../etc/passwd"}]}'),
            "something that is not an image's manifest",
        ),
        (always(200, b'{"manifests": []}'), "no image for linux/amd64"),
        (always(200, b"x" * (5 << 20)), "sends more than the expected 4194304 bytes"),
        (always(200, b"{", Content_Length="100"), "broke off"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_missing_manifest_is_an_error(script: Script, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "TIMEOUT", (1, 0.3))
    with bad_registry(script) as (host, _), pytest.raises(FetchError, match=f"^{host}/lab/x:1: .*{message}"):
        at(host, tag="1").manifest("linux/amd64")


@pytest.mark.parametrize("code", [429, 500, 503])
def test_busy_registry_is_retried(code: int) -> None:
    count = 0

    def script(method: str, path: str, headers: dict[str, str]) -> Answer:
        nonlocal count
        count += 1
        return Answer(code, headers={"Retry-After": "0"}) if count < 3 else Answer(404)

    with bad_registry(script) as (host, asked):
        assert not at(host).has_blob("sha256:" + "0" * 64)
        assert len(asked) == 3


@pytest.mark.parametrize(
    ("body", "size", "message"),
    [
        (b"other", 5, "arrived damaged"),
        (b"longer than declared", 5, "sends more than the expected 5 bytes"),
        (b"sho", 5, "broke off at"),
    ],
)
def test_blob_with_another_digest_is_refused(body: bytes, size: int, message: str, tmp_path: Path) -> None:
    digest = digest_of(b"right")
    with bad_registry(always(200, body)) as (host, _), pytest.raises(FetchError, match=message):
        at(host).blob(digest, tmp_path / "out", nothing, size)


def test_manifest_with_another_digest_is_refused() -> None:
    with (
        bad_registry(always(200, b"{}")) as (host, _),
        pytest.raises(FetchError, match="does not match the digest"),
    ):
        at(host, digest="sha256:" + "0" * 64).fetch_manifest()


@pytest.mark.parametrize("part", ["begin", "piece", "end"])
def test_refused_upload_is_an_error(part: str) -> None:
    def script(method: str, path: str, headers: dict[str, str]) -> Answer:
        if method == "POST" and part != "begin":
            return Answer(202, headers={"Location": "/up"})
        if method == "PATCH" and part != "piece":
            return Answer(202, headers={"Location": "/up2"})
        return Answer(403) if method != "GET" else Answer(404)

    with (
        bad_registry(script) as (host, asked),
        pytest.raises(FetchError, match=r"refused \(403\): this login may not write there"),
    ):
        at(host).send_blob(blob(1000)[0], nothing)
    assert {"begin": "POST", "piece": "PATCH", "end": "PUT"}[part] == asked[-1][0]


def test_download_restarts_on_a_server_without_ranges(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(3 * MB)
    (tmp_path / "out").write_bytes(data[:MB])
    with bad_registry(always(200, data)) as (host, asked):
        at(host).blob("sha256:" + hashlib.sha256(data).hexdigest(), tmp_path / "out", nothing, len(data))
    assert (tmp_path / "out").read_bytes() == data
    assert asked[0][2]["range"] == f"bytes={MB}-"


def test_registry_that_reports_another_digest_is_an_error() -> None:
    def script(method: str, path: str, headers: dict[str, Any]) -> Answer:
        return Answer(201, headers={"Docker-Content-Digest": "sha256:" + "9" * 64})

    with bad_registry(script) as (host, _), pytest.raises(FetchError, match="stored the manifest"):
        at(host).put_manifest(b"{}", MEDIA_MANIFEST, "1")


# ------------------------------------------------------------------------------------------- answers that are not right

DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"<html>",
        b"\xff",
        b"[]",
        b"3",
        b"[" * 100_000,
        b"{}",
        b'{"manifests": 3}',
        b'{"manifests": [{"digest": "sha256:../../x"}]}',
        b'{"config": {"digest": "../../x"}, "layers": []}',
        b'{"config": {"digest": "%s"}, "layers": [{"digest": "x"}]}' % DIGEST.encode(),
        b'{"config": {"digest": "%s"}, "layers": [{"digest": "%s", "size": -1}]}' % (DIGEST.encode(), DIGEST.encode()),
    ],
)
def test_invalid_manifest_is_refused(answer: bytes) -> None:
    with (
        bad_registry(lambda *_: Answer(200, answer)) as (host, _),
        pytest.raises(FetchError, match="not an image's manifest"),
    ):
        at(host, tag="1").manifest("linux/amd64")


def test_fields_of_a_later_specification_are_ignored() -> None:
    layer = {"digest": DIGEST, "size": 3, "mediaType": "x", "artifactType": "y", "later": {"a": [1]}}
    found = Manifest.parse(
        json.dumps({"config": {"digest": DIGEST, "size": 2, "later": 1}, "layers": [layer], "subject": {}}).encode()
    )
    assert (found.layers[0].size, found.layers[0].artifact_type, found.config.size) == (3, "y", 2)


@pytest.mark.parametrize(
    "config", [b"[]", b'{"config": 3}', b'{"config": {"Env": [1]}}', b'{"rootfs": {"diff_ids": 1}}']
)
def test_invalid_config_is_refused(config: bytes) -> None:
    with pytest.raises(ValueError, match=r"is not"):
        ImageConfig.parse(config)


def test_empty_config_is_accepted() -> None:
    empty = {"Env": None, "Labels": None}
    assert ImageConfig.parse(json.dumps({"config": empty}).encode()) == ImageConfig("", (), {}, {}, config=empty)


def test_a_pipe_among_the_certificates_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenSSL opens SSL_CERT_FILE by itself."""
    folder = tmp_path / ".docker/certs.d/registry.test"
    folder.mkdir(parents=True)
    for name in ("a.crt", "b.cert", "b.key", "ca.pem"):
        os.mkfifo(folder / name)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert session._trusted("registry.test", at_registry=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "ca.pem"))
    with pytest.raises(UsageError, match="is not a regular file"):
        session._trusted("registry.test", at_registry=True)
