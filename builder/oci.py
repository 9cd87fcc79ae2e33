"""Images in their OCI and Docker forms, made from the store's layers: https://github.com/opencontainers/image-spec

The store keeps a layer as squashfs; its tar form is regenerated here, always with the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from builder.errors import StoreError
from builder.store import MEDIA_CONFIG, MEDIA_INDEX, MEDIA_LAYER, MEDIA_MANIFEST, CorruptBlob, Store, StoredLayer

MEDIA_TAR = "application/vnd.oci.image.layer.v1.tar"


def image_config(
    layers: Sequence[StoredLayer],
    *,
    environment: Mapping[str, str],
    labels: Mapping[str, str],
    epoch: int,
    platform: str,
) -> bytes:
    """The image's config; its sha256 is the image id in a Docker daemon."""
    system, architecture = platform.split("/")
    created = datetime.fromtimestamp(epoch, UTC).isoformat().replace("+00:00", "Z")
    config = {
        "created": created,
        "architecture": architecture,
        "os": system,
        "config": {
            "Env": [f"{name}={value}" for name, value in sorted(environment.items())],
            "Cmd": ["/bin/sh", "/.singularity.d/runscript"],
            "Labels": dict(sorted(labels.items())),
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [{"created": created, "created_by": f"ekiben layer {layer.name}"} for layer in layers],
    }
    return json.dumps(config, sort_keys=True, separators=(",", ":")).encode()


def store_manifest(config: bytes, layers: Sequence[StoredLayer]) -> dict[str, Any]:
    """The manifest as the store keeps it: over squashfs layers."""
    descriptors = [{"mediaType": MEDIA_LAYER, "digest": layer.digest, "size": layer.size,
                    "annotations": {"org.ekiben.layer": layer.name, "org.ekiben.cache-key": layer.cache_key}}
                   for layer in layers]  # fmt: skip
    return _manifest(config, descriptors)


def _manifest(config: bytes, layers: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "schemaVersion": 2,
        "mediaType": MEDIA_MANIFEST,
        "config": _descriptor(MEDIA_CONFIG, config),
        "layers": layers,
    }


def _descriptor(media_type: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def layer_tar(store: Store, layer: StoredLayer) -> Iterator[bytes]:
    """The layer's tar, checked against its diff_id while it passes. Errors: CorruptBlob."""
    from builder.layer import tar_stream

    path, sha = store.partition(layer).path, hashlib.sha256()
    try:
        with store.reader(layer.digest) as reader:
            for chunk in tar_stream(reader.members()):
                sha.update(chunk)
                yield chunk
    except StoreError as error:
        raise CorruptBlob(layer.digest, path) from error
    except OSError as error:
        raise StoreError(f"blob {layer.digest} cannot be read: {path}: {error.strerror}") from error
    if "sha256:" + sha.hexdigest() != layer.diff_id:
        raise CorruptBlob(layer.digest, path)


def _parts(
    store: Store, config: bytes, layers: Sequence[StoredLayer], name: str, leave_out: Collection[str]
) -> Iterator[tuple[str, int, Iterable[bytes]]]:
    """Path, size and data of everything in an OCI layout that `docker load` reads, too."""
    descriptors = [{"mediaType": MEDIA_TAR, "digest": layer.diff_id, "size": layer.tar_size} for layer in layers]
    manifest = json.dumps(_manifest(config, descriptors), sort_keys=True, separators=(",", ":")).encode()
    names = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name.rpartition(":")[2]}
    index = {
        "schemaVersion": 2,
        "mediaType": MEDIA_INDEX,
        "manifests": [{**_descriptor(MEDIA_MANIFEST, manifest), "annotations": names}],
    }
    docker = [
        {"Config": _blob(digest_of(config)), "RepoTags": [name], "Layers": [_blob(layer.diff_id) for layer in layers]}
    ]
    small = {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        "index.json": json.dumps(index).encode(),
        "manifest.json": json.dumps(docker).encode(),
        _blob(digest_of(config)): config,
        _blob(digest_of(manifest)): manifest,
    }
    for path, data in small.items():
        yield path, len(data), [data]
    for layer in layers:
        if layer.diff_id not in leave_out:
            yield _blob(layer.diff_id), layer.tar_size, layer_tar(store, layer)


def archive(
    store: Store, config: bytes, layers: Sequence[StoredLayer], name: str, *,
    leave_out: Collection[str] = (), on_bytes: Callable[[int], None] = lambda count: None,
) -> Iterator[bytes]:  # fmt: skip
    """One tar that is an OCI archive and a `docker load` archive at once, as a stream.

    ``leave_out``: diff_ids whose data the reader has already (a Docker daemon doesn't open what it knows).
    """
    import tarfile

    for path, size, chunks in _parts(store, config, layers, name, leave_out):
        info = tarfile.TarInfo(path)
        info.size = size
        yield info.tobuf(tarfile.GNU_FORMAT)  # GNU: a layer may pass 8 GiB
        for chunk in chunks:
            on_bytes(len(chunk))
            yield chunk
        yield bytes(-size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def write_layout(
    store: Store,
    folder: Path,
    config: bytes,
    layers: Sequence[StoredLayer],
    name: str,
    *,
    leave_out: Collection[str] = (),
) -> None:
    """The same as a folder: an OCI image layout with uncompressed layers."""
    for path, _, chunks in _parts(store, config, layers, name, leave_out):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with (folder / path).open("wb") as stream:
            for chunk in chunks:
                stream.write(chunk)


class ChunkReader(io.RawIOBase):
    """A generator of bytes as something to read from."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks, self._rest = iter(chunks), memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        parts, wanted = [], size if size >= 0 else 1 << 62
        while wanted:
            if not self._rest:
                self._rest = memoryview(next(self._chunks, b""))
                if not self._rest:
                    break
            parts.append(self._rest[:wanted])
            wanted -= len(parts[-1])
            self._rest = self._rest[len(parts[-1]) :]
        return b"".join(parts)


def _blob(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")
