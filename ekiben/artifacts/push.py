"""Push images to registries: as a Docker image, as a SIF, or layer by layer.

docker   An OCI image with uncompressed layers: what `docker pull` and `apptainer pull docker://` read. Uncompressed,
         because a layer's digest is then its diff_id: what a registry has already is known before a byte of a layer is
         read, equal layers are equal blobs whatever library compressed them when, and neither end spends a core on
         gzip. It takes some 1.7 times the bytes, once per layer and registry.
sif      The SIF as one artifact: what `apptainer pull oras://` reads. It is never made as a file.
layers   The store's own layers (squashfs) under their cache keys: a registry as the store behind the others. A build
         that finds EKIBEN_REGISTRY, or `registry:` in config.yaml, asks it before it builds a layer.

A blob that the registry has, in this or another repository we know of, is not sent. Which those are, and where an
upload was broken off, is kept in the store's checks/.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from typing import Any

from ekiben.core.checked import Fields
from ekiben.core.errors import UsageError
from ekiben.core.files import digest_of
from ekiben.core.pgp_key import Key
from ekiben.core.progress import Progress
from ekiben.formats import oci
from ekiben.formats.oci import MEDIA_CONFIG, MEDIA_LAYER, MEDIA_MANIFEST
from ekiben.formats.partition import read_partition
from ekiben.formats.sif import SifBytes, Signature
from ekiben.registry.client import Blob, Registry
from ekiben.registry.reference import Reference
from ekiben.signing.registry import sign_pushed
from ekiben.signing.sif import sign_image
from ekiben.store import Image, LayerHandle, Store, StoredLayer, keep_sif, known_sif

FORMATS = ("docker", "sif", "layers")
MEDIA_SIF = "application/vnd.sylabs.sif.layer.v1.sif"
MEDIA_SIF_CONFIG = "application/vnd.sylabs.sif.config.v1+json"
MEDIA_SBOM = "application/vnd.cyclonedx+json"
MEDIA_LAYER_CONFIG = "application/vnd.ekiben.layer.config.v1+json"
AT_ONCE = 3  # uploads and downloads


@dataclass(frozen=True, slots=True)
class Pushed:
    """``ref``: the reference by digest. Bytes ``sent``; blobs ``mounted`` from another repository, and ``existing`` in
    this one. ``sbom``: the SBOM attached to it, by digest."""

    ref: str
    sent: int
    mounted: int
    existing: int
    sbom: str = ""


@dataclass(frozen=True, slots=True)
class PushRequest:
    """A push of an image to ``reference`` in ``format``, one of FORMATS.

    ``key`` signs it: beside the image, and in the SIF. ``sbom`` attaches its SBOM.
    """

    reference: Reference
    format: str
    key: Key | None = None
    sbom: bool = False

    def check(self) -> None:
        """Raise UsageError when the fields contradict each other."""
        if self.reference.digest:
            raise UsageError(f"{self.reference}: a push determines the digest; name a tag instead")
        if self.format != "layers":
            return
        if self.reference.tag:
            raise UsageError(f"{self.reference}: layers are tagged with their keys; give a repository without a tag")
        if self.sbom:
            raise UsageError("--sbom: layers have no SBOM; push the image")
        if self.key:
            raise UsageError("--sign: layers are not signed, a build identifies them by their keys; sign the image")


def check_push(request: PushRequest) -> None:
    """Ask the registry whether it accepts an upload, before the image is built.

    Raises UsageError when the request contradicts itself, FetchError when the registry does not answer or refuses.
    """
    request.check()
    Registry(request.reference).check_push()


def push(image: Image, store: Store, request: PushRequest, progress: Progress) -> Pushed:
    """Send ``image`` to a registry.

    Raises FetchError, StoreError, EngineError; UsageError when the request contradicts itself; VerifyError when a
    package database of the image is broken, with ``sbom``.
    """
    request.check()
    reference, format, key = request.reference, request.format, request.key
    if format == "layers":
        return _push_layers(image, store, reference, progress)
    document = _make_sbom(image, store) if request.sbom else None  # before the upload: if it fails, nothing is sent
    sender = _Sender(store, reference, progress)
    config, layers, media_type = _docker(image, store) if format == "docker" else _sif(image, store, progress, key)
    config_blob = _bytes_blob(config)
    sender.send([config_blob, *(blob for blob, _ in layers)])
    manifest = {
        "schemaVersion": 2,
        "mediaType": MEDIA_MANIFEST,
        "config": {"mediaType": media_type, "digest": config_blob.digest, "size": config_blob.size},
        "layers": [descriptor for _, descriptor in layers],
        "annotations": {"org.opencontainers.image.title": image.name, "org.ekiben.image": image.image_id},
    }
    done = sender.put_manifest(manifest, reference.tag_or_digest)
    digest = done.ref.rpartition("@")[2]
    if key:
        sign_pushed(sender.registry, digest, key)
    if document:
        title = {"org.opencontainers.image.title": f"{image.name}.cdx.json"}
        attached = sender.registry.attach(digest, MEDIA_SBOM, document, title)
        done = replace(done, sbom=str(Reference(reference.host, reference.repository, attached)))
    return done


def _make_sbom(image: Image, store: Store) -> bytes:
    from ekiben.inspect.sbom import sbom_of_image  # imported here: its library takes a third of a second

    return sbom_of_image(image, store).encode()


def _docker(image: Image, store: Store) -> tuple[bytes, list[tuple[Blob, dict[str, Any]]], str]:
    layers = [
        (
            Blob(layer.diff_id, layer.tar_size, _tar_from(LayerHandle(store, layer))),
            {"mediaType": oci.MEDIA_TAR, "digest": layer.diff_id, "size": layer.tar_size},
        )
        for layer in image.layers
    ]
    return image.config, layers, MEDIA_CONFIG


def _tar_from(layer: LayerHandle) -> Callable[[int], Iterator[bytes]]:
    def read(offset: int) -> Iterator[bytes]:
        for chunk in oci.layer_tar(layer):
            if offset < len(chunk):
                yield chunk[offset:]
            offset = max(0, offset - len(chunk))

    return read


def _sif(
    image: Image, store: Store, progress: Progress, key: Key | None
) -> tuple[bytes, list[tuple[Blob, dict[str, Any]]], str]:
    for layer in image.layers:
        store.check_blob(layer.digest)
    signature = sign_image(image, store, key) if key else None
    sif, signed = sif_bytes(image, store, signature), signature.data if signature else b""
    if (known := known_sif(store, sif.id, signed)) is None:
        sha = hashlib.sha256()
        with progress.step("digest of the SIF", total=sif.size):
            for chunk in sif.read(0):
                sha.update(chunk)
                progress.count(len(chunk))
        known = keep_sif(store, sif.id, sha, signed)
    blob = Blob(f"sha256:{known}", sif.size, sif.read)
    descriptor = {
        "mediaType": MEDIA_SIF,
        "digest": blob.digest,
        "size": blob.size,
        "annotations": {"org.opencontainers.image.title": f"{image.name}.sif"},
    }
    return b"{}", [(blob, descriptor)], MEDIA_SIF_CONFIG


def sif_bytes(image: Image, store: Store, signature: Signature | None = None) -> SifBytes:
    """Return the bytes of the SIF that make_sif() would write."""
    partitions = [store.partition(layer) for layer in image.layers]
    return SifBytes(partitions, image.sif_header(store), signature)


def _push_layers(image: Image, store: Store, reference: Reference, progress: Progress) -> Pushed:
    sender = _Sender(store, reference, progress)
    missing = [layer for layer in image.layers if sender.registry.tag_digest(layer.cache_key) is None]
    sender.existing += len(image.layers) - len(missing)
    configs = {layer.cache_key: _bytes_blob(json.dumps(asdict(layer), sort_keys=True).encode()) for layer in missing}
    sender.send([*configs.values(), *(_file_blob(store, layer) for layer in missing)])
    for layer in missing:  # tagged only when their blobs are complete
        config = configs[layer.cache_key]
        manifest = {
            "schemaVersion": 2,
            "mediaType": MEDIA_MANIFEST,
            "config": {"mediaType": MEDIA_LAYER_CONFIG, "digest": config.digest, "size": config.size},
            "layers": [{"mediaType": MEDIA_LAYER, "digest": layer.digest, "size": layer.size}],
            "annotations": {"org.ekiben.layer": layer.name},
        }
        sender.put_manifest(manifest, layer.cache_key)
    return Pushed(str(reference), sender.sent, sender.mounted, sender.existing)


def _file_blob(store: Store, layer: StoredLayer) -> Blob:
    partition = store.partition(layer)
    return Blob(layer.digest, layer.size, lambda offset: read_partition(partition, offset))


def _bytes_blob(data: bytes) -> Blob:
    return Blob(digest_of(data), len(data), lambda offset: [data[offset:]])


def _known_repositories(store: Store, name: str) -> dict[str, list[str]]:
    """Return blob → the repositories that have it, as earlier pushes recorded; nothing when the record is damaged."""
    with contextlib.suppress(ValueError):
        blobs = Fields.of(store.check(name)).object("blobs")
        return {digest: blobs.strings(digest) for digest in blobs.data}
    return {}


class _Sender:
    """Sends blobs to one repository, several in parallel, each once."""

    def __init__(self, store: Store, reference: Reference, progress: Progress) -> None:
        store.open_for_writing()  # checks/ records which repository has which blob
        self.registry, self.store, self.reference, self.progress = Registry(reference), store, reference, progress
        self.sent = self.mounted = self.existing = 0
        self._host = hashlib.sha256(reference.host.encode()).hexdigest()[:16]
        self._known = _known_repositories(store, f"pushed-{self._host}")

    def send(self, blobs: Sequence[Blob]) -> None:
        """Send the missing blobs. Raises FetchError, StoreError."""
        unique = list({blob.digest: blob for blob in blobs}.values())
        total = sum(blob.size for blob in unique)
        with self.progress.step(f"push to {self.reference}", total=total), ThreadPoolExecutor(AT_ONCE) as pool:
            futures = [pool.submit(self._send, blob) for blob in unique]
            try:
                for done in as_completed(futures):
                    counter, amount = done.result()
                    setattr(self, counter, getattr(self, counter) + amount)
            finally:
                for item in futures:
                    item.cancel()
                self._remember(
                    [
                        blob.digest
                        for blob, item in zip(unique, futures, strict=True)
                        if item.done() and not item.cancelled() and item.exception() is None
                    ]
                )

    def _send(self, blob: Blob) -> tuple[str, int]:
        """Send one blob, on a thread of the pool. Returns the counter to advance, and by how much."""
        if self.registry.has_blob(blob.digest):
            self.progress.count(blob.size)
            return "existing", 1
        for other in self._known.get(blob.digest, []):
            if other != self.reference.repository and self.registry.mount_blob(blob.digest, other):
                self.progress.count(blob.size)
                return "mounted", 1
        target = f"{self.reference.host}/{self.reference.repository}@{blob.digest}"
        name = f"upload-{hashlib.sha256(target.encode()).hexdigest()[:32]}"
        known = self.store.check(name) or {}
        out = self.registry.send_blob(
            blob,
            self.progress.count,
            location=str(known.get("location") or ""),
            on_location=lambda location: self.store.put_check(name, {"location": location}),
        )
        self.store.drop_check(name)
        return "sent", out

    def _remember(self, digests: Sequence[str]) -> None:
        name = f"pushed-{self._host}"
        known = _known_repositories(self.store, name)
        for digest in digests:
            known[digest] = sorted({*known.get(digest, []), self.reference.repository})
        self.store.put_check(name, {"host": self.reference.host, "blobs": known})

    def put_manifest(self, manifest: dict[str, Any], tag: str) -> Pushed:
        """Put the manifest under ``tag``. Raises FetchError."""
        data = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
        digest = self.registry.put_manifest(data, MEDIA_MANIFEST, tag)
        ref = Reference(self.reference.host, self.reference.repository, digest)
        return Pushed(str(ref), self.sent, self.mounted, self.existing)
