"""Which image a signature is looked for, and where a registry lists it. tests/integration/test_sign.py has real
keys.
"""

from __future__ import annotations

import json

from ekiben.core.files import digest_of
from ekiben.registry.client import MEDIA_INDEX, Registry
from ekiben.registry.reference import Reference, is_reference
from ekiben.signing.registry import MEDIA_SIGNATURE
from support.registries import Answer, bad_registry


def test_references_are_told_from_paths() -> None:
    for name in (
        "127.0.0.1:5000/a/b:1",
        "registry.example.org/a",
        "localhost/a",
        "oras://a/b:1",
        "host:5000/a@sha256:0",
    ):
        assert is_reference(name), name
    for name in ("hello", "./x.sif", "../my-recipes/chatbot", "recipes/hello", "/a.b/c.sif", "x.sif"):
        assert not is_reference(name), name


def test_signatures_are_found_by_the_referrers_api() -> None:
    """As OCI 1.1 has it, which docker-registry does not know."""
    manifest = json.dumps({"mediaType": MEDIA_INDEX.replace("index", "manifest")}).encode()
    digest, kept = digest_of(manifest), dict[str, bytes]()

    def answer(method: str, path: str, headers: dict[str, str]) -> Answer:
        if f"/referrers/{digest}" in path:
            listed = [{"digest": "sha256:" + "1" * 64, "size": 2, "artifactType": "application/spdx+json"}]
            return Answer(
                body=json.dumps({"manifests": listed}).encode(),
                headers={"Content-Type": kept.get("type", b"").decode()},
            )
        if method == "PUT" and "/manifests/" in path:
            return Answer(201, headers={"OCI-Subject": digest} if "/manifests/sha256:" in path else {})
        return Answer(body=manifest if path.endswith(digest) else b"") if "sha256-" not in path else Answer(404)

    with bad_registry(answer) as (host, asked):
        registry = Registry(Reference.parse(f"{host}/lab/x:1"))
        assert registry.referrers(digest) == []  # a web page is no list
        kept["type"] = MEDIA_INDEX.encode()
        assert [item.artifact_type for item in registry.referrers(digest)] == ["application/spdx+json"]
        registry.attach(digest, MEDIA_SIGNATURE, b"signed", {})
        put = [path for method, path, _ in asked if method == "PUT" and "/manifests/" in path]
        assert len(put) == 1 and "/manifests/sha256:" in put[0]  # and no list of our own
