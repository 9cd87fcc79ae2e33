"""Which image a signature is looked for, where a registry lists it, and which file is signed.

tests/integration/test_sign.py and test_signatures.py have more with real keys.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.artifacts.push import PushRequest
from ekiben.artifacts.push_file import push_file
from ekiben.cli.context import Context
from ekiben.cli.options import key_for_file
from ekiben.core.files import digest_of
from ekiben.core.pgp_key import Key
from ekiben.formats.sif import read_sif
from ekiben.registry.client import MEDIA_INDEX, Registry
from ekiben.registry.reference import Reference, is_reference
from ekiben.signing import gpg
from ekiben.signing.gpg import Keys, SignatureError
from ekiben.signing.registry import MEDIA_SIGNATURE
from ekiben.signing.sif import check_sif, is_signed
from ekiben.store import Store
from support.hostile import flip
from support.keyrings import keyring, used
from support.registries import Answer, bad_registry
from support.sample_recipe import quiet
from support.signed_sifs import ALICE, layers, make_signed
from support.small_sifs import make


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
        assert registry.referrers(digest) == []  # a web page is not a list
        kept["type"] = MEDIA_INDEX.encode()
        assert [item.artifact_type for item in registry.referrers(digest)] == ["application/spdx+json"]
        registry.attach(digest, MEDIA_SIGNATURE, b"signed", {})
        put = [path for method, path, _ in asked if method == "PUT" and "/manifests/" in path]
        assert len(put) == 1 and "/manifests/sha256:" in put[0]  # and no list of our own


# ---------------------------------------------------------------------------------------------------- files, real gpg


@pytest.fixture
def alice() -> Iterator[Key]:
    with keyring() as ring, used(ring):
        ring.make(ALICE)
        yield gpg.find_key(ALICE)


def test_file_that_was_changed_after_its_signature_is_not_signed_unasked(alice: Key, tmp_path: Path) -> None:
    (tmp_path / "ekiben").mkdir()
    (tmp_path / "ekiben/config.yaml").write_text(f"require_signature: [{alice.fingerprint}]\n")
    context = Context(environment={**os.environ, "XDG_CONFIG_HOME": str(tmp_path)}, store_option=tmp_path / "store")
    make(tmp_path / "unsigned.sif", *layers(tmp_path, "base"))
    assert key_for_file(context, tmp_path / "unsigned.sif", None) == alice
    sif = make_signed(tmp_path / "x.sif", layers(tmp_path, "base"), alice)
    assert key_for_file(context, sif, None) is None
    flip(sif, read_sif(sif).layers[0].offset)
    with pytest.raises(SignatureError, match="it was changed after Alice") as caught:
        key_for_file(context, sif, None)
    assert "--sign KEY" in (caught.value.hint or "")
    assert key_for_file(context, sif, alice.fingerprint) == alice


def test_file_is_pushed_with_the_signature_in_it(alice: Key, tmp_path: Path) -> None:
    """Pulled, it has no other."""
    make(tmp_path / "x.sif", *layers(tmp_path, "base"))
    sent, manifests = list[bytes](), dict[str, bytes]()

    def answer(method: str, path: str, headers: dict[str, str]) -> Answer:
        body = headers.get(":body", "").encode("latin-1")
        if method == "PUT" and "/manifests/" in path:
            manifests[digest_of(body)] = body
            return Answer(201, headers={"OCI-Subject": "sha256:" + "0" * 64})
        if method in ("POST", "PATCH", "PUT"):
            sent.append(body)
            end = {"Range": f"0-{len(body) - 1}"} if method == "PATCH" else {}
            return Answer(201 if method == "PUT" else 202, headers={"Location": "/v2/lab/x/blobs/uploads/1", **end})
        if "/referrers/" in path:
            return Answer(body=b'{"manifests": []}', headers={"Content-Type": MEDIA_INDEX})
        data = manifests.get(path.rpartition("/")[2])
        return Answer(body=data) if data and method == "GET" else Answer(404)

    store = Store(tmp_path / "store")
    with bad_registry(answer) as (host, _):
        pushed = push_file(
            tmp_path / "x.sif", store, PushRequest(Reference.parse(f"{host}/lab/x:1"), "sif", alice), quiet()
        )
    layer = json.loads(manifests[pushed.ref.rpartition("@")[2]])["layers"][0]
    assert layer["annotations"] == {"org.opencontainers.image.title": "x.sif"}
    (data,) = [item for item in sent if digest_of(item) == layer["digest"]]
    (tmp_path / "pulled.sif").write_bytes(data)
    assert check_sif(tmp_path / "pulled.sif", Keys()) == [alice]
    assert not is_signed(tmp_path / "x.sif")
