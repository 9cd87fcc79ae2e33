"""Images in registries: sent as a Docker image, as a SIF, or layer by layer; and taken from there.

docker   An OCI image with uncompressed layers: what `docker pull` and `apptainer pull docker://` read. Uncompressed, because a
         layer's digest is then its diff_id: what a registry has already is known before a byte of a layer is read, equal
         layers are equal blobs whatever library compressed them when, and neither end spends a core on gzip. It takes some
         1.7 times the bytes, once per layer and registry.
sif      The SIF as one artifact: what `apptainer pull oras://` reads. It is never made as a file.
layers   The store's own layers (squashfs) under their cache keys: a registry as the store behind the others. A build that
         finds EKIBEN_REGISTRY, or `registry:` in config.yaml, asks it before it builds a layer.

A blob that the registry has, in this or another repository we know of, is not sent. Which those are, and where an upload was
broken off, is kept in the store's checks/.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from typing import Any

from builder import oci
from builder.assemble import keep_sif, known_sif
from builder.chain import platform
from builder.errors import UsageError
from builder.gpg import Key
from builder.pipeline import Image
from builder.progress import Progress
from builder.registry import Blob, Reference, Registry, digest_of
from builder.sif import SifBytes, Signature, read_partition, sif_id
from builder.sign import sign_image, sign_pushed
from builder.store import MEDIA_CONFIG, MEDIA_LAYER, MEDIA_MANIFEST, Store, StoredLayer

FORMATS = ("docker", "sif", "layers")
MEDIA_SIF = "application/vnd.sylabs.sif.layer.v1.sif"
MEDIA_SIF_CONFIG = "application/vnd.sylabs.sif.config.v1+json"
MEDIA_BILL = "application/vnd.cyclonedx+json"
MEDIA_LAYER_CONFIG = "application/vnd.ekiben.layer.config.v1+json"
AT_ONCE = 3  # uploads and downloads


@dataclass(frozen=True, slots=True)
class Pushed:
    """``place``: the reference by digest. Bytes ``sent``; blobs ``mounted`` from another repository, and ``there`` already.
    ``bill``: the bill of materials attached to it, by digest."""

    place: str
    sent: int
    mounted: int
    there: int
    bill: str = ""


def push(
    image: Image,
    store: Store,
    reference: Reference,
    format: str,
    progress: Progress,
    *,
    key: Key | None = None,
    sbom: bool = False,
) -> Pushed:
    """Signed with ``key``: beside the image, and in the SIF. ``sbom``: with its bill of materials attached.
    Errors: FetchError, StoreError, UsageError, EngineError; VerifyError for the bill."""
    if reference.digest:
        raise UsageError(f"{reference}: a digest is what comes of pushing; give a tag")
    if format == "layers":
        if sbom:
            raise UsageError("--sbom: a bill of materials is of an image, not of its layers")
        if key:
            raise UsageError(
                "layers are not signed: a build knows them by their keys; sign the image that is made of them"
            )
        if reference.tag:
            raise UsageError(f"{reference}: layers are tagged with their keys; give a repository without a tag")
        return _push_layers(image, store, reference, progress)
    bill = _bill(image, store) if sbom else None  # what is wrong with it is said before anything is sent
    sender = _Sender(store, reference, progress)
    config, layers, note = _docker(image, store) if format == "docker" else _sif(image, store, progress, key)
    config_blob = _bytes_blob(config)
    sender.send([config_blob, *(blob for blob, _ in layers)])
    manifest = {
        "schemaVersion": 2, "mediaType": MEDIA_MANIFEST,
        "config": {"mediaType": note["config"], "digest": config_blob.digest, "size": config_blob.size},
        "layers": [described for _, described in layers],
        "annotations": {"org.opencontainers.image.title": image.name, "org.ekiben.image": image.image_id},
    }  # fmt: skip
    done = sender.named(manifest, reference.wanted)
    digest = done.place.rpartition("@")[2]
    if key:
        sign_pushed(sender.registry, digest, key)
    if bill:
        title = {"org.opencontainers.image.title": f"{image.name}.cdx.json"}
        attached = sender.registry.attach(digest, MEDIA_BILL, bill, title)
        done = replace(done, bill=str(Reference(reference.host, reference.repository, attached)))
    return done


def _bill(image: Image, store: Store) -> bytes:
    from builder.sbom import bill_of_image  # late: its library takes a third of a second

    return bill_of_image(image, store).encode()


def _docker(image: Image, store: Store) -> tuple[bytes, list[tuple[Blob, dict[str, Any]]], dict[str, str]]:
    layers = [(Blob(layer.diff_id, layer.tar_size, _tar_from(store, layer)),
               {"mediaType": oci.MEDIA_TAR, "digest": layer.diff_id, "size": layer.tar_size}) for layer in image.layers]  # fmt: skip
    return image.config, layers, {"config": MEDIA_CONFIG}


def _tar_from(store: Store, layer: StoredLayer) -> Callable[[int], Iterator[bytes]]:
    def read(offset: int) -> Iterator[bytes]:
        for chunk in oci.layer_tar(store, layer):
            if offset < len(chunk):
                yield chunk[offset:]
            offset = max(0, offset - len(chunk))

    return read


def _sif(
    image: Image, store: Store, progress: Progress, key: Key | None
) -> tuple[bytes, list[tuple[Blob, dict[str, Any]]], dict[str, str]]:
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
    described = {"mediaType": MEDIA_SIF, "digest": blob.digest, "size": blob.size,
                 "annotations": {"org.opencontainers.image.title": f"{image.name}.sif"}}  # fmt: skip
    return b"{}", [(blob, described)], {"config": MEDIA_SIF_CONFIG}


def sif_bytes(image: Image, store: Store, signature: Signature | None = None) -> SifBytes:
    """The SIF that make_sif() would write."""
    partitions = [store.partition(layer) for layer in image.layers]
    id = sif_id([layer.digest for layer in image.layers], image.chain.deffile)
    return SifBytes(partitions, id=id, deffile=image.chain.deffile, arch=platform().split("/")[1],
                    epoch=image.chain.stack.file.epoch, signature=signature)  # fmt: skip


def _push_layers(image: Image, store: Store, reference: Reference, progress: Progress) -> Pushed:
    sender, place = _Sender(store, reference, progress), str(reference)
    wanted = [layer for layer in image.layers if sender.registry.tag_digest(layer.cache_key) is None]
    sender.there += len(image.layers) - len(wanted)
    configs = {layer.cache_key: _bytes_blob(json.dumps(asdict(layer), sort_keys=True).encode()) for layer in wanted}
    sender.send([*configs.values(), *(_file_blob(store, layer) for layer in wanted)])
    for layer in wanted:  # named when all is there
        config = configs[layer.cache_key]
        manifest = {
            "schemaVersion": 2, "mediaType": MEDIA_MANIFEST,
            "config": {"mediaType": MEDIA_LAYER_CONFIG, "digest": config.digest, "size": config.size},
            "layers": [{"mediaType": MEDIA_LAYER, "digest": layer.digest, "size": layer.size}],
            "annotations": {"org.ekiben.layer": layer.name},
        }  # fmt: skip
        sender.named(manifest, layer.cache_key)
    return Pushed(place, sender.sent, sender.mounted, sender.there)


def _file_blob(store: Store, layer: StoredLayer) -> Blob:
    part = store.partition(layer)
    return Blob(layer.digest, layer.size, lambda offset: read_partition(part, offset))


def _bytes_blob(data: bytes) -> Blob:
    return Blob(digest_of(data), len(data), lambda offset: [data[offset:]])


class _Sender:
    """Sends blobs to one repository, several at once, each once."""

    def __init__(self, store: Store, reference: Reference, progress: Progress) -> None:
        store.open_for_writing()  # its checks/ remember what is where
        self.registry, self.store, self.reference, self.progress = Registry(reference), store, reference, progress
        self.sent = self.mounted = self.there = 0
        self._host = hashlib.sha256(reference.host.encode()).hexdigest()[:16]
        self._known: dict[str, list[str]] = (store.check(f"pushed-{self._host}") or {}).get("blobs", {})

    def send(self, blobs: Sequence[Blob]) -> None:
        unique = list({blob.digest: blob for blob in blobs}.values())
        total = sum(blob.size for blob in unique)
        with self.progress.step(f"push to {self.reference}", total=total), ThreadPoolExecutor(AT_ONCE) as pool:
            waiting = [pool.submit(self._send, blob) for blob in unique]
            try:
                for done in as_completed(waiting):
                    how, size = done.result()
                    setattr(self, how, getattr(self, how) + size)
            finally:
                for item in waiting:
                    item.cancel()
                self._remember([blob.digest for blob, item in zip(unique, waiting, strict=True)
                                if item.done() and not item.cancelled() and item.exception() is None])  # fmt: skip

    def _send(self, blob: Blob) -> tuple[str, int]:
        """In a thread of its own: what became of it, and what that counts."""
        if self.registry.has_blob(blob.digest):
            self.progress.count(blob.size)
            return "there", 1
        for other in self._known.get(blob.digest, []):
            if other != self.reference.repository and self.registry.mount_blob(blob.digest, other):
                self.progress.count(blob.size)
                return "mounted", 1
        target = f"{self.reference.host}/{self.reference.repository}@{blob.digest}"
        name = f"upload-{hashlib.sha256(target.encode()).hexdigest()[:32]}"
        begun = (self.store.check(name) or {}).get("place", "")
        out = self.registry.send_blob(
            blob, self.progress.count, begun=begun, remember=lambda place: self.store.put_check(name, {"place": place})
        )
        self.store.drop_check(name)
        return "sent", out

    def _remember(self, digests: Sequence[str]) -> None:
        name = f"pushed-{self._host}"
        known = (self.store.check(name) or {}).get("blobs", {})
        for digest in digests:
            known[digest] = sorted({*known.get(digest, []), self.reference.repository})
        self.store.put_check(name, {"host": self.reference.host, "blobs": known})

    def named(self, manifest: dict[str, Any], tag: str) -> Pushed:
        data = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
        digest = self.registry.put_manifest(data, MEDIA_MANIFEST, tag)
        place = Reference(self.reference.host, self.reference.repository, digest)
        return Pushed(str(place), self.sent, self.mounted, self.there)
