"""The registry client against a real registry, over connections that break."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.core.errors import FetchError
from ekiben.core.files import digest_of
from ekiben.formats.oci import MEDIA_MANIFEST
from ekiben.registry import client, session
from ekiben.registry.client import Blob, Registry
from ekiben.registry.reference import Reference
from support.registries import MB, Cutter, at, blob, login, nothing, real_registry

pytestmark = pytest.mark.covers("ekiben/registry")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session, "PAUSES", (0.01, 0.02, 0.03))
    monkeypatch.setattr(client, "PIECE", MB)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)


def test_blob_and_manifest_round_trip(host: str, tmp_path: Path) -> None:
    sent, data = blob(2 * MB + 7)
    registry, counted = at(host), []
    assert not registry.has_blob(sent.digest)
    assert registry.send_blob(sent, counted.append) == sent.size
    assert registry.has_blob(sent.digest)
    assert sum(counted) == sent.size
    registry.blob(sent.digest, tmp_path / "out", nothing, sent.size)
    assert (tmp_path / "out").read_bytes() == data
    manifest = json.dumps({"config": {"digest": sent.digest}, "layers": [{"digest": sent.digest}]}).encode()
    assert registry.tag_digest("1") is None
    digest = registry.put_manifest(
        json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MEDIA_MANIFEST,
                "layers": [],
                "config": {
                    "mediaType": "application/vnd.oci.image.config.v1+json",
                    "digest": sent.digest,
                    "size": sent.size,
                },
            }
        ).encode(),
        MEDIA_MANIFEST,
        "1",
    )
    assert registry.tag_digest("1") == digest
    assert at(host, tag="1").fetch_manifest()[1] == digest
    assert digest != digest_of(manifest)


def test_an_empty_blob(host: str, tmp_path: Path) -> None:
    sent, _ = blob(0)
    at(host).send_blob(sent, nothing)
    at(host).blob(sent.digest, tmp_path / "out", nothing, 0)
    assert (tmp_path / "out").read_bytes() == b""


def test_a_blob_is_mounted_from_another_repository(host: str) -> None:
    sent, _ = blob(MB + 1)
    at(host).send_blob(sent, nothing)
    other = at(host, "lab/other")
    assert not other.has_blob(sent.digest)
    assert other.mount_blob(sent.digest, "lab/x")
    assert other.has_blob(sent.digest)
    assert not other.mount_blob(blob(99)[0].digest, "lab/x")


def test_upload_with_another_digest_is_refused(host: str) -> None:
    wrong = Blob(blob(77)[0].digest, 10, lambda offset: [bytes(10)[offset:]])
    with pytest.raises(FetchError, match=r"400 Bad Request.*DIGEST_INVALID"):
        at(host).send_blob(wrong, nothing)
    short = Blob(blob(77)[0].digest, 20, lambda offset: [bytes(10)[offset:]])
    with pytest.raises(FetchError, match="has 10 bytes, not 20"):
        at(host).send_blob(short, nothing)


def test_upload_survives_a_broken_connection(host: str) -> None:
    sent, _ = blob(12 * MB)
    with Cutter(host, up=4 * MB, times=3) as wire:
        at(wire.host).send_blob(sent, nothing)
        assert wire.cuts == 3
    assert at(host).has_blob(sent.digest)


def test_upload_resumes_in_another_process(host: str) -> None:
    sent, _ = blob(9 * MB)
    locations: list[str] = []

    def killed(size: int) -> None:
        if len(locations) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        at(host).send_blob(sent, killed, on_location=locations.append)
    offsets: list[int] = []
    again = Blob(sent.digest, sent.size, lambda offset: [offsets.append(offset) or b"", *sent.read(offset)])  # type: ignore[func-returns-value]
    assert at(host).send_blob(again, nothing, location=locations[-1]) < 6 * MB
    assert offsets[0] >= 4 * MB
    assert at(host).has_blob(sent.digest)


def test_expired_upload_session_starts_anew(host: str) -> None:
    sent, _ = blob(3 * MB + 5)
    gone = at(host).session.base + "blobs/uploads/00000000-0000-0000-0000-000000000000"
    assert at(host).send_blob(sent, nothing, location=gone) == sent.size


def test_download_resumes_where_it_broke(host: str, tmp_path: Path) -> None:
    sent, data = blob(11 * MB)
    at(host).send_blob(sent, nothing)
    with Cutter(host, down=4 * MB, times=2) as wire:
        at(wire.host).blob(sent.digest, tmp_path / "out", nothing, sent.size)
        assert wire.cuts == 2
        assert wire.passed_down < sent.size + 4 * MB  # what was on the way is lost
    assert (tmp_path / "out").read_bytes() == data


def test_download_resumes_in_another_process(host: str, tmp_path: Path) -> None:
    sent, data = blob(5 * MB)
    at(host).send_blob(sent, nothing)
    (tmp_path / "out").write_bytes(data[: 3 * MB])
    with Cutter(host) as wire:
        at(wire.host).blob(sent.digest, tmp_path / "out", nothing, sent.size)
        assert wire.passed_down < 2 * MB + 100_000
    assert (tmp_path / "out").read_bytes() == data
    (tmp_path / "out").write_bytes(b"x" * MB)  # what is there is something else
    with pytest.raises(FetchError, match="arrived damaged"):
        at(host).blob(sent.digest, tmp_path / "out", nothing, sent.size)
    assert not (tmp_path / "out").exists()


def test_retries_end_when_the_connection_always_breaks(host: str) -> None:
    sent, _ = blob(3 * MB)
    with Cutter(host, up=300_000, times=99) as wire, pytest.raises(FetchError, match="broke off at 0 bytes") as caught:
        at(wire.host).send_blob(sent, nothing)
    assert caught.value.hint == "the same command resumes it"


def test_basic_authentication(tmp_path: Path) -> None:
    sent, _ = blob(1000)
    with real_registry(tmp_path, password=True) as host:
        with pytest.raises(FetchError, match=r"401.*requires a login, and you have none") as caught:
            at(host).send_blob(sent, nothing)
        assert caught.value.hint and f"docker login {host}" in caught.value.hint
        login(tmp_path / "home", host, "wrong")
        with pytest.raises(FetchError, match=r"401.*the login from .*config\.json is refused"):
            at(host).send_blob(sent, nothing)
        login(tmp_path / "home", host)
        at(host).send_blob(sent, nothing)
        assert at(host).has_blob(sent.digest)


def test_custom_ca_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, _ = blob(1000)
    with real_registry(tmp_path, tls=True) as host:
        with pytest.raises(FetchError, match=f"the certificate of {host} is not trusted") as caught:
            at(host).has_blob(sent.digest)
        assert caught.value.hint and f"/etc/docker/certs.d/{host}/ca.crt" in caught.value.hint
        assert at(host).session.base.startswith("https://")  # found out: it is this machine's
        trusted = tmp_path / "home/.config/containers/certs.d" / host
        trusted.mkdir(parents=True)
        (trusted / "ca.crt").write_text((tmp_path / "cert.pem").read_text())
        at(host).send_blob(sent, nothing)
        (trusted / "ca.crt").unlink()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        assert at(host).has_blob(sent.digest)


def test_http_registry_over_https_is_an_error_with_a_hint(host: str) -> None:
    with pytest.raises(FetchError, match="does not speak https") as caught:
        Registry(Reference.parse(f"https://{host}/lab/x:1")).has_blob(blob(1)[0].digest)
    assert caught.value.hint == f"to use its plain http: http://{host}/lab/x:1"
