"""What is written of a download never has more bytes than its descriptor says, and a descriptor says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ekiben.core.errors import FetchError
from ekiben.core.files import digest_of
from ekiben.registry.client import Registry
from ekiben.registry.layers import image_layers
from ekiben.registry.manifest import Descriptor, Manifest, parse_index
from support.hostile_registry import described
from support.registries import MB, Answer, at, bad_registry, nothing

CONFIG, LAYER = b'{"config": {}}', b"layer" * 20
DIGEST = "sha256:" + "0" * 64
SIZES: list[object] = [None, "3", 3.5, True, -1, 2**63, [], {}]


pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("where", ["config", "first layer", "last layer", "index"])
def test_descriptor_without_a_size_is_refused(size: object, where: str) -> None:
    good, bad = described(b"good"), described(b"bad", size)
    layers = {"first layer": [bad, good], "last layer": [good, bad]}.get(where, [good])
    manifest = {"config": bad if where == "config" else good, "layers": layers}
    with pytest.raises(ValueError, match="size"):
        if where == "index":
            parse_index(json.dumps({"manifests": [good, bad]}).encode())
        else:
            Manifest.parse(json.dumps(manifest).encode())


Use = Callable[[Registry, Path], object]


def pull_base(registry: Registry, folder: Path) -> object:
    _, layers = image_layers(registry.reference, folder, "linux/amd64", nothing)
    return list(layers)


def read_config(registry: Registry, folder: Path) -> object:
    return registry.config(registry.manifest("linux/amd64"))


def read_attached(registry: Registry, folder: Path) -> object:
    return registry.attached(registry.fetch_manifest()[1])


@pytest.mark.parametrize(
    ("use", "field"),
    [
        (pull_base, "config"),
        (pull_base, "layer"),
        (pull_base, "index"),
        (read_config, "config"),
        (read_attached, "layer"),
    ],
)
@pytest.mark.parametrize("short", [0, 1, 3])
def test_download_ends_after_its_size(use: Use, field: str, short: int, tmp_path: Path) -> None:
    """Each is named with fewer bytes than it has; what comes is refused before it is written."""
    config = described(CONFIG, short if field == "config" else ...)
    manifest = json.dumps({"config": config, "layers": [described(LAYER, short if field == "layer" else ...)]}).encode()
    index = json.dumps(
        {"manifests": [{**described(manifest, short), "platform": {"os": "linux", "architecture": "amd64"}}]}
    ).encode()

    def script(method: str, path: str, headers: dict[str, str]) -> Answer:
        bodies = {digest_of(item): item for item in (CONFIG, LAYER, manifest)}
        digest = path.rpartition("/")[2]
        return Answer(200, bodies.get(digest, index if field == "index" else manifest))

    with (
        bad_registry(script) as (host, _),
        pytest.raises(FetchError, match=r"sends more than|does not match|not an image's manifest|arrived damaged"),
    ):
        use(at(host, tag="1"), tmp_path)
    assert all(path.stat().st_size <= short for path in tmp_path.glob("layer-*"))


@pytest.mark.parametrize("size", [0, 1, 100, 65_536, 65_537])
def test_endless_blob_is_not_read(size: int, tmp_path: Path) -> None:
    data = bytes(8 * MB)
    with (
        bad_registry(lambda *_: Answer(200, data)) as (host, _),
        pytest.raises(FetchError, match=f"sends more than the expected {size} bytes|arrived damaged"),
    ):
        at(host).blob(DIGEST, tmp_path / "out", nothing, size)
    assert not (tmp_path / "out").exists() or (tmp_path / "out").stat().st_size <= size


def test_body_of_an_error_or_a_token_server_has_a_limit() -> None:
    """They are read into memory."""

    def script(method: str, path: str, headers: dict[str, str]) -> Answer:
        if path.startswith("/token"):
            return Answer(200, bytes(64 * MB))
        if path.endswith("/error"):
            return Answer(500, b"<" * (64 * MB))
        return Answer(401, b"x" * (64 * MB), {"WWW-Authenticate": f'Bearer realm="http://{headers["host"]}/token"'})

    with bad_registry(script) as (host, _):
        for tag, message in (
            ("error", "500 Internal Server Error: <{200}$"),
            ("1", "sends more than the expected 4194304 bytes"),
        ):
            with pytest.raises(FetchError, match=message):
                at(host, tag=tag).fetch_manifest()


@pytest.mark.parametrize("size", [2**62, 2**63 - 1])
def test_size_that_no_disk_has_is_refused_before_the_download(size: int, tmp_path: Path) -> None:
    with bad_registry(lambda *_: Answer(200, b"x" * 100)) as (host, asked):
        with pytest.raises(FetchError, match=f"no space left for {DIGEST}: it needs "):
            at(host).blob(DIGEST, tmp_path / "out", nothing, size)
        with pytest.raises(FetchError, match="more than 4194304"):
            at(host).small_blob(DIGEST, size)
    assert asked == []


def test_descriptors_with_a_size_are_read() -> None:
    manifest = Manifest.parse(json.dumps({"config": described(CONFIG), "layers": [described(LAYER)]}).encode())
    assert (manifest.config.size, [layer.size for layer in manifest.layers]) == (len(CONFIG), [len(LAYER)])
    assert isinstance(manifest.config, Descriptor)
