"""Answers that a hostile registry gives to pull and push: each ends soon in one sentence, and no file is left."""

from __future__ import annotations

import base64
import gzip
import json
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ekiben.artifacts.pull import pull
from ekiben.core.errors import FetchError
from ekiben.core.files import digest_of
from ekiben.core.printable import printable
from ekiben.registry import session
from ekiben.registry.reference import Reference
from ekiben.store import Store
from support.registries import MB, PASSWORD, USER, Answer, at, bad_registry, blob, login, nothing
from support.sample_recipe import quiet

LAYER = b"x" * 100
CONFIG = json.dumps(
    {
        "created": "2026-01-01T00:00:00Z",
        "architecture": "amd64",
        "rootfs": {"diff_ids": ["sha256:" + "0" * 64]},
        "config": {"Labels": {"org.ekiben.stack": "cu130"}},
    }
).encode()
TYPE_LAYER, TYPE_SIF = "application/vnd.oci.image.layer.v1.tar", "application/vnd.sylabs.sif.layer.v1.sif"
REFRESH = "REFRESH-TOKEN"
Reply = Callable[[str, dict[str, str]], Answer]


@pytest.fixture(scope="module")
def context() -> ssl.SSLContext:
    return ssl.create_default_context()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, context: ssl.SSLContext) -> None:
    monkeypatch.setattr(session, "PAUSES", (0.001, 0.001))
    monkeypatch.setattr(session, "TIMEOUT", (1, 0.5))
    monkeypatch.setattr(session, "_trusted", lambda host, *, at_registry: context)  # which takes 30 ms to read
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def image(size: object = len(LAYER), media_type: str = TYPE_LAYER, body: bytes = LAYER) -> Reply:
    """An image of one layer whose descriptor says ``size``, and whose blob is ``body``."""
    layer = {"mediaType": media_type, "digest": digest_of(LAYER), "size": size}
    config = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest_of(CONFIG), "size": len(CONFIG)}
    layers = [{key: value for key, value in layer.items() if value is not None}]
    manifest = json.dumps({"schemaVersion": 2, "config": config, "layers": layers}).encode()

    def reply(path: str, headers: dict[str, str]) -> Answer:
        return Answer(200, manifest if "/manifests/" in path else CONFIG if digest_of(CONFIG) in path else body)

    return reply


def always(code: int, body: bytes = b"", **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda path, request: Answer(code, body, named)


def token_server(answer: Reply) -> Reply:
    """A registry whose token server gives ``answer``."""

    def reply(path: str, headers: dict[str, str]) -> Answer:
        if path.startswith("/token"):
            return answer(path, headers)
        return Answer(401, headers={"WWW-Authenticate": f'Bearer realm="http://{headers["host"]}/token",service="x"'})

    return reply


def with_login(answer: Reply) -> Reply:
    def reply(path: str, headers: dict[str, str]) -> Answer:
        if "authorization" not in headers:
            return Answer(401, headers={"WWW-Authenticate": 'Basic realm="x"'})
        return answer(path, headers)

    return reply


def modes(other: str) -> dict[str, tuple[Reply, str]]:
    """Return each mode: what it answers, and what the error says. ``other``: a host that must not learn a secret."""
    zeros = bytes(16 * MB)
    elsewhere = always(307, Location=f"http://{other}/v2/lab/x/stolen")
    return {
        "no size": (image(None, body=zeros), r"it has no 'layers\[0\]\.size'"),
        "no size of a SIF": (image(None, TYPE_SIF, zeros), r"it has no 'layers\[0\]\.size'"),
        "huge size": (image(2**62, body=zeros), "no space left for "),
        "size beyond a file system": (image(2**63), "is not a size"),
        "more than its size": (image(body=zeros), "sends more than the 100 bytes"),
        "more than its size, a SIF": (image(100, TYPE_SIF, zeros), "sends more than the 100 bytes"),
        "size of a shorter one": (image(10), "sends more than the 10 bytes"),
        "other bytes": (image(body=b"y" * 100), "arrived damaged"),
        "control characters": (always(500, b"\x1b]0;title\x07\x1b[31mred\x1b[2J"), "500 Internal Server Error: "),
        "loop": (lambda path, headers: Answer(302, headers={"Location": path}), "redirects more than 10 times"),
        "long header": (always(200, b"{}", X="y" * 100_000), "does not answer: got more than 65536 bytes"),
        "many headers": (
            always(200, b"{}", **{f"X{number}": "y" for number in range(200)}),
            "got more than 100 headers",
        ),
        "deep": (always(200, b"[" * 100_000), "nested more than 32 levels deep"),
        "packed zeros": (
            always(200, gzip.compress(bytes(64 * MB)), Content_Encoding="gzip"),
            "sends more than the 4194304 bytes",
        ),
        "packed rubbish": (always(200, b"\x1f\x8bxx", Content_Encoding="gzip"), "broke off: .*gzip"),
        "long JSON": (always(200, b"[" + b"{}," * 1_300_000 + b"{}]"), "it is not an object"),
        "token with control characters": (
            token_server(always(200, b'{"token": "\\u001b[31mred"}')),
            "gives no token: 200",
        ),
        "token that is none": (token_server(always(200, b"[]")), "gives no token: 200"),
        "long token": (token_server(always(200, b'"' + b"t" * (5 * MB))), "sends more than the 4194304 bytes"),
        "token elsewhere": (token_server(elsewhere), "which does not get your login|gives no token: 307"),
        "everything elsewhere": (with_login(elsewhere), "something that is no image's manifest|which answers"),
        "silent": (always(200, b"x", Content_Length="1000"), "broke off: "),
    }


def secrets_in(requests: list[tuple[str, str, dict[str, str]]]) -> list[str]:
    text = str(requests)
    secrets = (PASSWORD, base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode(), REFRESH, "NETRC-PASSWORD")
    return [secret for secret in secrets if secret in text]


@pytest.mark.parametrize("identity_token", ["", REFRESH])
@pytest.mark.parametrize("mode", list(modes("")))
def test_hostile_answer_ends_in_one_sentence(mode: str, identity_token: str, tmp_path: Path) -> None:
    store, out = Store(tmp_path / "store"), tmp_path / "out"
    out.mkdir()
    with bad_registry(lambda method, path, headers: Answer(200, b'{"token": "theirs"}')) as (other, stolen):
        reply, message = modes(other)[mode]
        with bad_registry(lambda method, path, headers: reply(path, headers)) as (host, _):
            login(tmp_path / "home", host, identity_token=identity_token)
            (tmp_path / "home/.netrc").write_text("machine 127.0.0.1 login u password NETRC-PASSWORD\n")
            began = time.monotonic()
            with pytest.raises(FetchError, match=message) as caught:
                pull(Reference.parse(f"{host}/lab/x:1"), store, out / "x.sif", quiet())
            assert time.monotonic() - began < 10
    assert str(caught.value).startswith(f"{host}/lab/x:1")
    assert "\x1b" not in printable(str(caught.value)) and len(str(caught.value)) < 1000
    assert secrets_in(stolen) == []
    assert list(out.iterdir()) == []
    assert not (store.root / "staging").exists() or list((store.root / "staging").iterdir()) == []


@pytest.mark.parametrize("code", [200, 201, 202, 204, 301, 307, 401, 404, 500])
@pytest.mark.parametrize("method", ["POST", "PATCH", "PUT", "GET"])
def test_upload_that_is_led_elsewhere_gives_nothing_away(method: str, code: int, tmp_path: Path) -> None:
    sent, _ = blob(1000)

    def theirs(asked: str, path: str, headers: dict[str, str]) -> Answer:
        realm = f'Bearer realm="http://{headers["host"]}/token"'
        return Answer(code, b"{}", {"Location": "/again", "WWW-Authenticate": realm})

    with bad_registry(theirs) as (other, stolen):

        def script(asked: str, path: str, headers: dict[str, str]) -> Answer:
            if "authorization" not in headers:
                return Answer(401, headers={"WWW-Authenticate": 'Basic realm="x"'})
            elsewhere = {"Location": f"http://{other}/up/1"}
            if asked == method:
                return Answer(
                    {"POST": 202, "PATCH": 202, "GET": 204}.get(method, 307), headers={**elsewhere, "Range": "0-0"}
                )
            return Answer(201 if asked == "PUT" else 202, headers={"Location": "/up/1"})

        with bad_registry(script) as (host, _):
            login(tmp_path / "home", host)
            location = f"http://{host}/up/0" if method == "GET" else ""
            try:
                at(host).send_blob(sent, nothing, location=location)
            except FetchError as error:
                assert str(error).startswith(f"{host}/lab/x: ")
    assert secrets_in(stolen) == []
