"""Images of registries, pulled once. tests/integration/test_pulled.py has a real registry."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from ekiben.artifacts.pulled import prune_pulled, pull_once
from ekiben.artifacts.push import MEDIA_SIF, MEDIA_SIF_CONFIG
from ekiben.core.files import digest_of
from ekiben.registry.client import MEDIA_INDEX
from ekiben.registry.reference import Reference
from ekiben.store import Store
from support.hostile_registry import image
from support.registries import Answer, Script, bad_registry
from support.sample_recipe import RunCli, quiet
from support.small_sifs import make, squashfs


@pytest.fixture
def user(tmp_path: Path) -> Store:
    return Store(tmp_path / "user/store")


def _serve(tag: bytes, *items: bytes) -> Script:
    """A registry that leaves out the digest's header, which OCI allows."""
    blobs = {digest_of(item): item for item in (tag, *items)}

    def answer(method: str, path: str, headers: dict[str, str]) -> Answer:
        data = tag if path.endswith("/manifests/1") else blobs.get(path.rpartition("/")[2])
        return Answer(404) if data is None else Answer(body=data)

    return answer


def _described(data: bytes, media_type: str) -> dict[str, object]:
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}


def test_machines_of_two_architectures_pull_into_one_home(
    user: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sifs, manifests, entries = [], [], []
    for arch in ("amd64", "arm64"):
        make(tmp_path / f"{arch}.sif", squashfs(tmp_path / arch, arch), arch=arch)
        sifs.append((tmp_path / f"{arch}.sif").read_bytes())
        layers = [_described(sifs[-1], MEDIA_SIF)]
        manifest = {"schemaVersion": 2, "config": _described(b"{}", MEDIA_SIF_CONFIG), "layers": layers}
        manifests.append(json.dumps(manifest).encode())
        entries.append(
            _described(manifests[-1], "application/vnd.oci.image.manifest.v1+json")
            | {"platform": {"os": "linux", "architecture": arch}}
        )
    index = json.dumps({"schemaVersion": 2, "mediaType": MEDIA_INDEX, "manifests": entries}).encode()
    with bad_registry(_serve(index, *manifests, *sifs)) as (host, _):
        for arch, sif in zip(("amd64", "arm64"), sifs, strict=True):
            monkeypatch.setattr("ekiben.core.environment.host_arch", lambda arch=arch: arch)
            pulled = pull_once(Reference.parse(f"{host}/lab/x:1"), user, quiet())
            assert pulled.sif.read_bytes() == sif
            assert pull_once(Reference.parse(f"{host}/lab/x:1"), user, quiet()) == pulled


@pytest.mark.parametrize("programs", [[], ["apptainer", "docker"]])
def test_file_without_its_record_is_gone_where_an_engine_runs_the_image(
    user: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: list[str]
) -> None:
    (tmp_path / "bin").mkdir()
    for name in programs:
        (tmp_path / "bin" / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    reply = image()
    with bad_registry(lambda method, path, headers: reply(path, headers)) as (host, _):
        reference = Reference.parse(f"{host}/lab/x:1")
        first = pull_once(reference, user, quiet())
        first.sif.write_bytes(b"whatever is there")
        again = pull_once(reference, user, quiet())
    assert (again, again.engine.startswith(f"{host}/lab/x@sha256:")) == (first, True)
    assert not again.sif.exists()


def test_prune_removes_what_was_not_used_lately(user: Store, tmp_path: Path, run_cli: RunCli) -> None:
    make(tmp_path / "x.sif", squashfs(tmp_path / "x", "x"))
    sif = (tmp_path / "x.sif").read_bytes()
    manifest = json.dumps(
        {"schemaVersion": 2, "config": _described(b"{}", MEDIA_SIF_CONFIG), "layers": [_described(sif, MEDIA_SIF)]}
    ).encode()
    with bad_registry(_serve(manifest, sif)) as (host, _):
        reference = Reference.parse(f"{host}/lab/x:1")
        pulled = pull_once(reference, user, quiet()).sif
        record, left = pulled.with_suffix(".json"), pulled.with_name("left.sif")
        left.write_bytes(b"of a killed pull")
        old = time.time() - 40 * 86400
        for path in (pulled, record, left):
            os.utime(path, (old, old))
        pull_once(reference, user, quiet())  # a use
        assert prune_pulled(user, 30, dry_run=True) == [("left.sif", 16)]
        assert prune_pulled(user, 30) == [("left.sif", 16)]
        assert (pulled.is_file(), left.exists()) == (True, False)
        os.utime(record, (old, old))
        user.open_for_writing()
        printed = run_cli("--store", user.root, "prune").stdout
        assert f"removed {host}/lab/x:1, pulled from its registry" in printed
        assert not pulled.exists() and not record.exists()
        assert pull_once(reference, user, quiet()).sif.read_bytes() == sif
    assert prune_pulled(Store(tmp_path / "nobody/store"), 0) == []


def test_offline_sends_no_request(user: Store, tmp_path: Path, run_cli: RunCli) -> None:
    make(tmp_path / "x.sif", squashfs(tmp_path / "x", "x"))
    sif = (tmp_path / "x.sif").read_bytes()
    manifest = json.dumps(
        {"schemaVersion": 2, "config": _described(b"{}", MEDIA_SIF_CONFIG), "layers": [_described(sif, MEDIA_SIF)]}
    ).encode()
    with bad_registry(_serve(manifest, sif)) as (host, asked):
        reference = Reference.parse(f"{host}/lab/x:1")
        pulled = pull_once(reference, user, quiet())
        before = len(asked)
        again = pull_once(reference, user, quiet(), offline=True)
        assert again.sif == pulled.sif and again.note.startswith(f"--offline: {host}/lab/x:1 is what it was on 20")
        refused = run_cli("--store", user.root, "run", "--offline", f"{host}/lab/x:2", code=6).stderr
        assert f"error: --offline: {host}/lab/x:2 was not pulled before" in refused
        assert len(asked) == before
