"""Answers of hostile registries: what they say of sizes, where they lead a client, and what they make of its login."""

from __future__ import annotations

import base64
import functools
import gzip
import json
from collections.abc import Callable, Sequence

from ekiben.core.files import digest_of
from support.registries import MB, PASSWORD, USER, Answer, Script

DATA = b"data"
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
REFRESH, BEARER, NETRC, COOKIE = "REFRESH-TOKEN", "BEARER-TOKEN", "NETRC-PASSWORD", "COOKIE-VALUE"
SECRETS = (REFRESH, BEARER, NETRC, COOKIE, PASSWORD, base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode())
Reply = Callable[[str, dict[str, str]], Answer]


def described(data: bytes, size: object = ...) -> dict[str, object]:
    """Return a descriptor of ``data``, which says ``size``; None: no size."""
    fields: dict[str, object] = {
        "digest": digest_of(data),
        "mediaType": "x",
        "size": len(data) if size is ... else size,
    }
    return {name: value for name, value in fields.items() if value is not None}


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
    """The same answer to each request."""
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
    """A registry that answers after a login."""

    def reply(path: str, headers: dict[str, str]) -> Answer:
        if "authorization" not in headers:
            return Answer(401, headers={"WWW-Authenticate": 'Basic realm="x"'})
        return answer(path, headers)

    return reply


@functools.cache
def packed_zeros() -> bytes:
    return gzip.compress(bytes(64 * MB))


@functools.cache
def long_json() -> bytes:
    return b"[" + b"{}," * 1_300_000 + b"{}]"


def modes(other: str) -> dict[str, tuple[Reply, str]]:
    """Return each mode: what it answers, and what the error says. ``other``: a host that must not learn a secret."""
    zeros = bytes(16 * MB)
    elsewhere = always(307, Location=f"http://{other}/v2/lab/x/stolen")
    return {
        "no size": (image(None, body=zeros), r"it has no 'layers\[0\]\.size'"),
        "no size of a SIF": (image(None, TYPE_SIF, zeros), r"it has no 'layers\[0\]\.size'"),
        "huge size": (image(2**62, body=zeros), "no space left for "),
        "size beyond a file system": (image(2**63), "is not a size"),
        "more than its size": (image(body=zeros), "sends more than the expected 100 bytes"),
        "more than its size, a SIF": (image(100, TYPE_SIF, zeros), "sends more than the expected 100 bytes"),
        "size of a shorter one": (image(10), "sends more than the expected 10 bytes"),
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
            always(200, packed_zeros(), Content_Encoding="gzip"),
            "sends more than the expected 4194304 bytes",
        ),
        "packed rubbish": (always(200, b"\x1f\x8bxx", Content_Encoding="gzip"), "broke off: .*gzip"),
        "long JSON": (always(200, long_json()), "it is not an object"),
        "token with control characters": (
            token_server(always(200, b'{"token": "\\u001b[31mred"}')),
            "returned no token: 200",
        ),
        "token that is none": (token_server(always(200, b"[]")), "returned no token: 200"),
        "long token": (token_server(always(200, b'"' + b"t" * (5 * MB))), "sends more than the expected 4194304 bytes"),
        "token elsewhere": (token_server(elsewhere), "which does not get your login|returned no token: 307"),
        "everything elsewhere": (with_login(elsewhere), "something that is not an image's manifest|which answers"),
        "silent": (always(200, b"x", Content_Length="1000"), "broke off: "),
    }


def secrets_in(requests: Sequence[tuple[str, str, dict[str, str]]]) -> list[str]:
    """Return the secrets of the client that are in what a host was asked."""
    text = str(requests)
    return [secret for secret in SECRETS if secret in text]


def other_host(kind: str) -> Script:
    """A host that takes what it gets, or asks for a login in each way that there is."""

    def script(method: str, path: str, headers: dict[str, str]) -> Answer:
        here = f"http://{headers['host']}"
        cookie = {"Set-Cookie": "other=1; Path=/"}
        if kind == "takes":
            return Answer(202 if method in ("POST", "PATCH") else 200, DATA, {"Location": f"{here}/up", **cookie})
        if path.startswith("/token"):
            return Answer(200, b'{"token": "theirs"}', cookie)
        challenge = 'Basic realm="x"' if kind == "asks basic" else f'Bearer realm="{here}/token",service="x"'
        return Answer(401, b"", {"WWW-Authenticate": challenge, **cookie})

    return script


def leading(challenge: str, to: Callable[[str, str], str], code: Callable[[], int], step: str) -> Script:
    """A registry with a login that redirects elsewhere at ``step``: "data" the redirects of requests, "upload", or
    "token".
    """

    def script(method: str, path: str, headers: dict[str, str]) -> Answer:
        here = headers["host"]
        cookie = {"Set-Cookie": f"session={COOKIE}; Path=/"}
        if path.startswith("/token"):
            if step == "token":
                return Answer(code(), b"", {"Location": to(here, path), **cookie})
            return Answer(200, json.dumps({"token": BEARER}).encode(), cookie)
        if "authorization" not in headers:
            kinds = {"basic": 'Basic realm="x"', "bearer": f'Bearer realm="http://{here}/token",service="x"'}
            return Answer(401, b"", {"WWW-Authenticate": kinds[challenge], **cookie})
        if step == "upload" and method == "POST":
            return Answer(202, b"", {"Location": to(here, "/up"), **cookie})
        return Answer(code(), b"", {"Location": to(here, path), **cookie})

    return script
